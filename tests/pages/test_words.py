"""Every error message is a sentence that names the option, file or platform concerned: as far as a program can tell."""

import ast
import re
from pathlib import Path

import pytest

from tests.tools.jobs import ROOT

FILES = sorted(
    path.relative_to(ROOT) for name in ("common", "datasets", "launch", "jobs") for path in (ROOT / name).rglob("*.py")
)
ERRORS = {"UserError", "TrainingFailed"}
VALUE = "{}"  # stands for an interpolated value

# Words that only the authors understood, or that need a second reading.
PRIVATE = [
    "as thin as", "knew of no", "knows of", "own words", "our language", "sent away", "goes back", "behind", "beside", "nobody",
    "wants",
]  # fmt: skip

NAMES_SOMETHING = [
    r"--\w",  # an option
    re.escape(VALUE),
    r"'[^']+'|\"[^\"]+\"|`[^`]+`",  # a quoted name
    r"\b[A-Z][A-Z0-9]*_[A-Z0-9_]+\b|\b[A-Z]{3,}\b",  # an environment variable or a word that stands for a value, as in DDP
    r"\b[\w-]+\.(py|pt|json|pth|txt|toml|gz|bin)\b",  # a file
    r"\b[A-Z]\w*[a-z]\w*[A-Z]\w*\b",  # a class, as KSpeedFolder
    r"pip install \.\[\w+\]",  # an optional part of this project
]


def texts(node):
    """The texts that an expression can have, with VALUE for what is not constant; none where it is a variable alone."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    if isinstance(node, ast.JoinedStr):
        return ["".join(part.value if isinstance(part, ast.Constant) else VALUE for part in node.values)]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = texts(node.left) or [VALUE], texts(node.right) or [VALUE]
        return [one + other for one in left for other in right if one + other != VALUE * 2]
    if isinstance(node, ast.IfExp):
        return texts(node.body) + texts(node.orelse)
    return []


def messages(source):
    """(line, text) of every message that is given to UserError, TrainingFailed or parser.error."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and node.args:
            called = node.func
            ours = isinstance(called, ast.Name) and called.id in ERRORS
            parsers = isinstance(called, ast.Attribute) and called.attr == "error" and "parser" in ast.unparse(called.value)
            if ours or parsers:
                yield from ((node.lineno, text) for text in texts(node.args[0]))


def complaints(text):
    passes_on = text.endswith(f": {VALUE}")  # the value is an error that is a sentence itself
    if len(text.split()) < 4 and not passes_on:
        yield "has fewer than four words"
    if not any(re.search(pattern, text) for pattern in NAMES_SOMETHING):
        yield "names no option, value, variable or file"
    if re.search(r"(?<!\.)\.$|!$", text.rstrip()):  # three dots may stand for words that are left out
        yield "ends with a period or an exclamation mark"
    if "  " in text:
        yield "has two spaces in a row"
    if text != text.strip():
        yield "begins or ends with a space"
    for word in PRIVATE:
        if re.search(rf"\b{re.escape(word)}\b", text):
            yield f"says {word!r}"


def test_every_error_is_a_sentence_that_names_what_is_concerned():
    wrong = [
        f"{path}:{line}: {text!r} {complaint}"
        for path in FILES
        for line, text in messages((ROOT / path).read_text())
        for complaint in complaints(text)
    ]
    assert not wrong, "\n".join(wrong)


def test_the_messages_are_found():
    source = 'raise UserError(f"no {1 + 1} " "here")\nparser.error("a" if x else b"")\nraise TrainingFailed(str(error))'
    assert list(messages(source)) == [(1, "no {} here"), (2, "a")]
    assert len(list(messages(Path(ROOT, "common/world/rules.py").read_text()))) > 10


@pytest.mark.parametrize(
    "text, complaint",
    [
        ("it is wrong", "fewer"),
        ("the thing cannot be done", "names no"),
        ("--epochs 0 is not allowed.", "period"),
        ("--epochs  0 is not allowed", "two spaces"),
        (f"{VALUE} is as thin as a thread", "as thin as"),
    ],
)
def test_a_message_that_is_no_such_sentence_is_refused(text, complaint):
    assert complaint in "; ".join(complaints(text))


def test_a_good_message_passes():
    assert not list(complaints(f"--save_steps {VALUE} is not a whole number at least 1"))
