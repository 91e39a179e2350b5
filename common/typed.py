"""From the words of a command line to those that argparse reads, and what becomes of words that no option declares.

Consoles pass every value as a string, as `--x v` or `--x=v`, and append options that no job declared. So booleans can be
spelled out (`--custom_data true`) or stand alone, and options that platforms are known to append are ignored. What looks like
a mistyped option of ours is refused with the right name, as is a word that belongs to no option; all others are listed in one
warning.
"""

import argparse
import difflib
import os
import re
import sys
from collections.abc import Iterable
from typing import Optional

from common.errors import one_line

# Options that platforms are known to append and that no job needs: ignored without a warning.
PLATFORM_OPTIONS = {
    "task_index", "num_gpus", "job_name", "ps_hosts", "worker_hosts", "cluster_spec", "model_dir", "log_dir",
    "num_workers_per_node", "local_data_root", "sagemaker_program", "sagemaker_region",
}  # fmt: skip

YES_OR_NO = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def boolean(text: str) -> bool:
    """A type for argparse: consoles send 'true', 'True' or '1'; anything that is neither true nor false is refused."""
    value = YES_OR_NO.get(text.strip().lower())
    if value is None:
        raise argparse.ArgumentTypeError(f"{one_line(text)[:80]!r} is neither true nor false")
    return value


def as_meant(parser: argparse.ArgumentParser, argv: list[str]) -> list[str]:
    """The words in the form that argparse reads: underscores in names, `=` before values, a bare boolean as true.

    Without the blanks that are typed around a value in a console; an option whose field was left empty is not given.
    """
    given, words = [], list(reversed(argv))
    while words:
        word = words.pop()
        name, equals, value = word.partition("=")
        name = _our_name(parser, name)
        action = parser._option_string_actions.get(name)
        if action is None or action.nargs == 0 or not name.startswith("--"):
            given.append(word)
        elif equals:
            given += _with_value(name, value)
        elif action.type is boolean and (not words or words[-1].strip().lower() not in YES_OR_NO):
            given.append(f"{name}=true")
        elif not words or words[-1].startswith("--"):
            given.append(name)  # without the value that it needs
        else:
            given += _with_value(name, words.pop())
    return given


def _our_name(parser, name):
    """--batch-size is --batch_size."""
    ours = "--" + name[2:].replace("-", "_")
    return ours if name.startswith("--") and ours in parser._option_string_actions else name


def _with_value(name, value):
    value = value.strip()
    if not value:
        return []
    return [name if value == "--" else f"{name}={value}"]  # `--` would be taken for the end of the options


def judge_unknown(parser: argparse.ArgumentParser, unknown: list[str]) -> dict[str, str]:
    """{name: value} of the options that are ignored; what looks like one of ours, or belongs to none, is refused."""
    known = [option.lstrip("-") for action in parser._actions for option in action.option_strings]
    ignored, words = {}, list(reversed(unknown))
    while words:
        name, equals, value = words.pop().partition("=")
        if not name.startswith("--") or name == "--":
            parser.error(_stands_alone(name + equals + value, known))
        if not equals and words and not words[-1].startswith("-"):
            value = words.pop()
        if name.lstrip("-") in PLATFORM_OPTIONS:
            continue
        if meant := nearest(name, known):
            parser.error(f"unknown option {one_line(name)[:80]}: did you mean --{meant}?")
        ignored[name.lstrip("-")] = value
    if ignored:
        listed = " ".join(f"--{one_line(name)[:80]}" for name in ignored)[:500]
        print(f"warning: ignored options that this job does not have: {listed}", file=sys.stderr, flush=True)
    return ignored


def nearest(name: str, known: Iterable[str]) -> Optional[str]:
    """The option that a mistyped or shortened name may stand for, or None."""
    meant = name.lstrip("-").replace("-", "_")[:64]
    begins = [option for option in known if len(meant) > 2 and option.startswith(meant)]
    return next(iter(begins or difflib.get_close_matches(meant, known, n=1, cutoff=0.75)), None)


def _stands_alone(word, known):
    """What to say of a short option, or of a word that belongs to no option."""
    shown = one_line(word)[:80]
    if re.fullmatch(r"-[A-Za-z].*", word):
        first = sorted(option for option in known if option.startswith(word[1]))
        near = nearest(word, known) or next(iter(first), None)
        return f"unknown option {shown}: " + (f"did you mean --{near}?" if near else "options begin with two dashes")
    looks_like_data = os.sep in word or os.path.exists(word)
    return f"{shown!r} belongs to no option" + (f": did you mean --data_url {shown}?" if looks_like_data else "")
