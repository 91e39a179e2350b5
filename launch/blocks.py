"""The marked blocks that make a feature job out of jobs/train.py: show them, remove them,
put two features together.

    python -m launch blocks list                      every job, its blocks, the lines they add and replace
    python -m launch blocks show jobs/train_ddp.py    what DDP changes
    python -m launch blocks revert jobs/train_ddp.py  the single-card job that it came from
    python -m launch blocks compose DDP AMP           a job with both features
    python -m launch blocks rebase                    put every job's blocks into a changed jobs/train.py

A block begins with `### TAG: why ###` and ends with `### end TAG ###` at the same indentation. Directly after
its first line, `# was: <line>` names each line of the base that it replaces; without such a line it only
adds. Blocks do not nest.

list, show and revert also take a script in the form of ModelArts' sample, by its path. There a line that
reads `### 分布式改造,... ###` opens a block, and the same line closes it. list and show take the Template's
scripts as well, whose blocks begin with `# new #` and end before an empty line between two statements, or
with their indentation.
"""

import argparse
import ast
import dataclasses
import difflib
import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Optional, Union

from common.errors import UserError
from launch.options import missing_job, new_parser, run_for_exit_code

JOBS = Path(__file__).resolve().parent.parent / "jobs"
BASE = JOBS / "train.py"

# The order of blocks that are at the same place of the base.
ORDER = ["DP", "DDP", "DALI", "DPEX", "AMP", "EXACT"]
EXCLUSIVE = {
    ("DP", "DDP"): "DDP already uses every GPU, one process each",
    ("DP", "EXACT"): "DataParallel splits each share over the GPUs; take DDP",
    ("DALI", "DPEX"): "each has a loader of its own",
}

OPEN = re.compile(r"( *)### ([A-Z0-9]+): (\S.*) ###")
CLOSE = re.compile(r"( *)### end ([A-Z0-9]+) ###")
WAS = re.compile(r"( *)# was:(?: (.*))?")
FULLWIDTH_COMMA = "\uff0c"
SAMPLE = re.compile(rf"\s*### *(分布式改造) *[,{FULLWIDTH_COMMA}].*###\s*")
TEMPLATE = re.compile(r"( *)# new # *", re.IGNORECASE)


class BlockError(UserError):
    """A job, its blocks or the file to write is wrong; the text says which rule is broken, and where."""


@dataclasses.dataclass(frozen=True)
class Block:
    tag: str
    position: int  # index of the base line before which the block is
    replaced: tuple[str, ...]  # the base lines that it replaces; empty if it only adds
    text: tuple[str, ...]  # all of its lines, with the markers

    @property
    def code(self) -> list[str]:
        """The lines of code that the block adds, without comments and empty lines; empty if it sets __doc__,
        the job's help."""
        if self.text[1].startswith("__doc__ = "):
            return []
        end = None if TEMPLATE.fullmatch(self.text[0]) else -1  # that form has no closing line
        return [
            line
            for line in self.text[1 + len(self.replaced) : end]
            if line.strip() and not line.lstrip().startswith("#")
        ]


def parse(lines: list[str], name: str) -> tuple[list[str], list[Block]]:
    """Return (base lines, blocks); the base is the job without its blocks. BlockError if a rule is broken."""
    base: list[str] = []
    blocks: list[Block] = []
    opened: Optional[tuple[str, str, int]] = None  # indentation, tag and line number of a block
    for number, line in enumerate(lines, start=1):
        place = f"{name}:{number}"
        opening = OPEN.fullmatch(line)
        closing = CLOSE.fullmatch(line)
        original = WAS.fullmatch(line)
        if closing:
            if not opened:
                raise BlockError(f"{place}: ### end {closing[2]} ### closes a block that was never opened")
            indent, tag, first_line = opened
            if closing[2] != tag:
                raise BlockError(
                    f"{place}: ### end {closing[2]} ### does not match {tag}, opened in line {first_line}"
                )
            if closing[1] != indent:
                raise BlockError(
                    f"{place}: ### end {tag} ### is not indented as its first line, line {first_line}"
                )
            text = lines[first_line - 1 : number]
            replaced = itertools.takewhile(bool, map(WAS.fullmatch, text[1:]))
            originals = tuple(f"{indent}{match[2]}" if match and match[2] else "" for match in replaced)
            if len(text) == 2 + len(originals):
                raise BlockError(
                    f"{place}: the {tag} block opened in line {first_line} has no line of its own"
                )
            blocks.append(Block(tag, len(base), originals, tuple(text)))
            base += originals
            opened = None
        elif opening:
            if opened:
                raise BlockError(
                    f"{place}: {opening[2]} opens inside the {opened[1]} block of line {opened[2]}: "
                    "blocks do not nest"
                )
            opened = opening[1], opening[2], number
        elif opened and original:
            previous = lines[number - 2]
            if not (OPEN.fullmatch(previous) or WAS.fullmatch(previous)):
                raise BlockError(f"{place}: # was: belongs directly below the first line of a block")
            if original[1] != opened[0]:
                raise BlockError(f"{place}: # was: is not indented as its block")
        elif original:
            raise BlockError(f"{place}: # was: is outside of a block")
        elif line.lstrip().startswith("###"):
            raise BlockError(
                f"{place}: a line that begins with ### has the form `### TAG: why ###` or `### end TAG ###`"
            )
        elif not opened:
            base.append(line)
    if opened:
        raise BlockError(f"{name}:{opened[2]}: the {opened[1]} block is never closed")
    return base, blocks


def parse_sample(lines: list[str], name: str) -> tuple[list[str], list[Block]]:
    """Return (lines outside blocks, blocks) of a script whose blocks begin and end with equal lines,
    like ModelArts' sample."""
    base: list[str] = []
    blocks: list[Block] = []
    opened: Optional[int] = None  # index of the line that opened a block
    for index, line in enumerate(lines):
        marker = SAMPLE.fullmatch(line)
        if opened is None and marker:
            opened = index
        elif opened is None:
            base.append(line)
        elif marker:
            if _plain(line) != _plain(lines[opened]):
                raise BlockError(
                    f"{name}:{index + 1}: the block of line {opened + 1} ends with another line than it "
                    "began with"
                )
            blocks.append(Block(marker[1], len(base), (), tuple(lines[opened : index + 1])))
            opened = None
    if opened is not None:
        raise BlockError(
            f"{name}:{opened + 1}: the block is never closed: the same line has to stand below it once more"
        )
    return base, blocks


def parse_template(lines: list[str], name: str) -> tuple[list[str], list[Block]]:
    """Return (lines outside blocks, blocks) of a script whose blocks begin with `# new #`,
    as in the Template repository.

    A block has the statements below its first line, up to an empty line or the end of its indentation.
    """
    last_lines = _last_lines(lines, name)
    base: list[str] = []
    blocks: list[Block] = []
    index = 0
    while index < len(lines):
        opening = TEMPLATE.fullmatch(lines[index])
        if not opening:
            base.append(lines[index])
            index += 1
            continue
        end = index + 1  # the index of the line behind the block
        while end < len(lines) and lines[end].strip() and lines[end].startswith(opening[1]):
            line_number = end + 1
            # The number of the statement's last line is the index of the line behind it.
            end = last_lines.get(line_number, line_number)
        if end == index + 1:
            raise BlockError(f"{name}:{index + 1}: below # new # is no line of its block")
        blocks.append(Block("NEW", len(base), (), tuple(lines[index:end])))
        index = end
    return base, blocks


def _last_lines(lines: list[str], name: str) -> dict[int, int]:
    """Return {number of the first line of a statement: number of its last line}."""
    try:
        tree = ast.parse("\n".join(lines))
    except SyntaxError as error:
        raise BlockError(f"{name}:{error.lineno}: this is no line of Python: {error.msg}") from None
    last_lines: dict[int, int] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt):
            decorators = getattr(node, "decorator_list", [])
            first_line = min([node.lineno, *(decorator.lineno for decorator in decorators)])
            last_lines[first_line] = max(last_lines.get(first_line, 0), node.end_lineno or node.lineno)
    return last_lines


def _plain(marker: str) -> str:
    """Return a line that opens or closes a block, without white space and with an ASCII comma,
    for comparisons."""
    return re.sub(r"\s", "", marker).replace(FULLWIDTH_COMMA, ",")


def read(path: Union[str, Path]) -> tuple[list[str], list[Block]]:
    """Return (base lines, blocks) of a job, or of a script in the form of ModelArts' sample or of the
    Template.

    The base is the script without its blocks, with the lines that `# was:` names.
    """
    if message := missing_job(path):
        raise BlockError(message)
    lines = Path(path).read_text(encoding="utf-8").split("\n")
    if any(map(SAMPLE.fullmatch, lines)):
        return parse_sample(lines, str(path))
    if any(map(TEMPLATE.fullmatch, lines)):
        return parse_template(lines, str(path))
    return parse(lines, str(path))


def reverted(path: Union[str, Path]) -> str:
    """Return the text of a job without its blocks; BlockError if they do not say what they replaced."""
    base, blocks = read(path)
    if any(TEMPLATE.fullmatch(block.text[0]) for block in blocks):
        raise BlockError(
            f"{path}: a block below # new # does not say which lines it replaced: take the script that it "
            "was made from, or jobs/train_ddp.py, jobs/train_dp.py or jobs/train_amp.py, which can be "
            "reverted"
        )
    return "\n".join(base)


def apply(base: list[str], blocks: list[Block]) -> list[str]:
    """Return the lines of `base` with the blocks put in; those at one place are in the order of ORDER."""
    lines = []
    position = 0
    for block in sorted(
        blocks, key=lambda block: (block.position, bool(block.replaced), ORDER.index(block.tag))
    ):
        lines += base[position : block.position]
        lines += block.text
        position = block.position + len(block.replaced)
    return lines + base[position:]


def job_of(tag: str) -> Path:
    """Return the job of a feature: jobs/train_ddp.py for DDP."""
    path = JOBS / f"train_{tag.lower()}.py"
    if tag not in ORDER or not path.exists():
        features = [name for name in ORDER if (JOBS / f"train_{name.lower()}.py").exists()]
        raise BlockError(f"there is no feature {tag}; there are {', '.join(features)}")
    return path


def compose(tags: Sequence[str]) -> list[str]:
    """Return the lines of a job with all these features; BlockError if they do not go together."""
    for pair, reason in EXCLUSIVE.items():
        if set(pair) <= set(tags):
            raise BlockError(f"{pair[0]} and {pair[1]} do not go together: {reason}")
    base = BASE.read_text().split("\n")
    chosen: list[Block] = []
    owner: dict[int, str] = {}  # {index of a base line that is replaced: the feature}
    for tag in tags:
        job_base, blocks = read(job_of(tag))
        if not blocks:
            raise BlockError(
                f"{job_of(tag)} has no blocks any more, and {tag} is read from there: git checkout "
                f"{job_of(tag)}"
            )
        if job_base != base:
            raise BlockError(
                f"{job_of(tag)}: without its blocks it is not {BASE.name}; run python -m launch blocks rebase"
            )
        for block in blocks:
            for number in range(block.position, block.position + len(block.replaced)):
                if owner.setdefault(number, tag) != tag:
                    raise BlockError(
                        f"{owner[number]} and {tag} both replace line {number + 1} of {BASE.name}: "
                        f"{base[number].strip()}"
                    )
        chosen += blocks
    return apply(base, chosen)


def feature_jobs() -> list[Path]:
    """Return the paths of the jobs that have blocks, sorted."""
    return [path for path in sorted(JOBS.glob("train_*.py")) if read(path)[1]]


def rebase(path: Path, base: list[str]) -> list[str]:
    """Return the job with its blocks put into a changed `base`;
    BlockError if the lines that place a block are gone."""
    old, blocks = read(path)
    moved: dict[int, int] = {}  # {line of the old base: line of the new one}
    for match in difflib.SequenceMatcher(None, old, base, autojunk=False).get_matching_blocks():
        moved.update({match.a + offset: match.b + offset for offset in range(match.size)})
    placed = []
    for block in blocks:
        above = moved.get(block.position - 1)
        below = moved.get(block.position)
        if block.replaced:
            if below is None or any(
                moved.get(block.position + offset) != below + offset for offset in range(len(block.replaced))
            ):
                raise BlockError(
                    f"{path}: the {block.tag} block `{block.text[0].strip()}` replaces a line that has "
                    "changed"
                )
            position = below
        elif above is not None and (old[block.position - 1].strip() or below is None):
            position = above + 1
        elif below is not None:
            position = below
        else:
            raise BlockError(
                f"{path}: the lines around the {block.tag} block `{block.text[0].strip()}` have changed"
            )
        placed.append(dataclasses.replace(block, position=position))
    return apply(base, placed)


def _refuse_other_bases(paths: list[Path]) -> None:
    """Raise BlockError if jobs differ outside their blocks: rebase would lose the difference,
    which belongs in train.py."""
    reference, *rest = paths
    lines = read(reference)[0]
    for path in rest:
        for number, (expected, actual) in enumerate(itertools.zip_longest(lines, read(path)[0]), 1):
            if expected != actual:
                raise BlockError(
                    f"{path.name} and {reference.name} differ outside their blocks, in line {number} of the "
                    f"base: {(actual or '').strip()!r} and {(expected or '').strip()!r}; make the change in "
                    f"{BASE.name}"
                )


def table(paths: Sequence[str] = ()) -> str:
    """Return a Markdown table with a row for each of `paths` or, if there are none,
    for each job that has blocks."""
    rows = ["| job | blocks | lines added | base lines replaced |", "|---|---|---|---|"]
    for name, path in [(path, path) for path in paths] or [
        (f"jobs/{path.name}", path) for path in feature_jobs()
    ]:
        code = [block for block in read(path)[1] if block.code]
        added = sum(len(block.code) for block in code)
        replaced = sum(len(block.replaced) for block in code)
        rows.append(f"| `{name}` | {len(code)} | {added} | {replaced} |")
    return "\n".join(rows)


def show(path: Union[str, Path]) -> str:
    """Return the text of all blocks, each below a comment with the last line before it,
    or a line that says there are none."""
    base, blocks = read(path)
    parts = []
    for block in blocks:
        above = [
            f"{number}: {line.strip()}"
            for number, line in enumerate(base[: block.position], 1)
            if line.strip()
        ]
        heading = f"# after line {above[-1]}" if above else "# at the top"
        parts.append("\n".join([heading, *block.text]))
    return "\n\n".join(parts) or (
        f"{path} has no blocks: they begin with `### TAG: why ###`, with `### 分布式改造,... ###` as in "
        "ModelArts' sample, or with `# new #` as in the Template"
    )


def main(argv: list[str]) -> int:
    parser = new_parser("blocks", __doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("list", help="every job and its blocks").add_argument(
        "jobs", nargs="*", metavar="JOB", help="these alone"
    )
    for verb, help_text in (
        ("show", "what the blocks of a job change"),
        ("revert", "the job without its blocks"),
    ):
        verbs.add_parser(verb, help=help_text).add_argument(
            "job", help="the job's file, such as jobs/train_ddp.py"
        )
    verbs.add_parser("compose", help="a job with several features").add_argument(
        "tags", nargs="+", type=str.upper, metavar="TAG", help=f"of {', '.join(ORDER)}"
    )
    verbs.add_parser("rebase", help="put every job's blocks into a changed base")
    for name in ("revert", "compose"):
        verbs.choices[name].add_argument("-o", "--output", help="the file to write; unset: print it")
    options = parser.parse_args(argv)
    return run_for_exit_code(lambda: _show_or_write(run(options), getattr(options, "output", None)))


def _show_or_write(text: str, output: Optional[str]) -> None:
    """Print or write the text; BlockError if `output` exists and its base is not train.py,
    or jobs/ would lose blocks."""
    if not output:
        print(text, end="" if text.endswith("\n") else "\n")
        return
    path = Path(output)
    if path.resolve() == BASE.resolve():
        raise BlockError(f"{path} is what every job is made from: give another name")
    base, blocks = read(path) if path.exists() else (None, [])
    if base not in (None, BASE.read_text().split("\n")):
        raise BlockError(
            f"{path} exists and is not {BASE.name} with blocks: give another name, or remove it first"
        )
    if path.resolve().parent == JOBS and _lacks_blocks(blocks, text):
        raise BlockError(
            f"{path} would lose blocks that compose and rebase read from there: give another name"
        )
    path.write_text(text)
    print(f"wrote {path}")


def _lacks_blocks(blocks: list[Block], text: str) -> bool:
    """Return whether `text` lacks a block of a job of one feature,
    or a feature of a job that combines several."""
    if len({block.tag for block in blocks}) > 1:
        return any(f"### {block.tag}: " not in text for block in blocks)
    return any("\n".join(block.text) not in text for block in blocks)


def run(options: argparse.Namespace) -> str:
    """Return the text that the verb prints or writes; rebase also writes the jobs that change."""
    if options.verb == "list":
        return table(options.jobs)
    if options.verb == "show":
        return show(options.job)
    if options.verb == "revert":
        return reverted(options.job)
    if options.verb == "compose":
        return "\n".join(compose(options.tags))
    base = BASE.read_text().split("\n")
    _refuse_other_bases(feature_jobs())
    # all before any is written: an error changes no file
    rebased = {path: rebase(path, base) for path in feature_jobs()}
    changed = [path for path, lines in rebased.items() if path.read_text() != "\n".join(lines)]
    for path in changed:
        path.write_text("\n".join(rebased[path]))
    return (
        f"{len(rebased)} jobs follow {BASE.name}; changed: "
        f"{', '.join(path.name for path in changed) or 'none'}"
    )
