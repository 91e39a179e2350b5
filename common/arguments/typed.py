"""Convert a command line to the form that argparse reads, and ignore or refuse words that no option declares.

Consoles pass every value as a string, and append options that no job declares. So booleans can be spelled out or stand alone,
and options that platforms are known to append, or that --ignore names, are ignored.
"""

import argparse
import difflib
import os
import re
import sys
from collections.abc import Collection, Iterable
from typing import Optional

from common.errors import one_line
from common.world import advice_for_several_devices

# Options that platforms are known to append and that no job needs.
PLATFORM_OPTIONS = {
    "task_index", "num_gpus", "job_name", "ps_hosts", "worker_hosts", "cluster_spec", "model_dir", "log_dir",
    "num_workers_per_node", "local_data_root", "sagemaker_program", "sagemaker_region",
}  # fmt: skip

# {a name that other programs use: our option}, for suggestions
MEANINGS = {
    "learning_rate": "lr", "base_lr": "lr", "wd": "weight_decay", "batch": "batch_size", "bs": "batch_size",
    "gpus": "nproc_per_node", "num_gpu": "nproc_per_node", "nprocs": "nproc_per_node", "model": "arch", "network": "arch",
    "backbone": "arch", "num_epochs": "epochs", "max_epochs": "epochs", "num_workers": "workers", "data": "data_url",
    "data_dir": "data_url", "data_path": "data_url", "dataset": "data_url", "output": "output_dir", "save_dir": "output_dir",
    "scheduler": "schedule", "lr_scheduler": "schedule", "amp": "amp_dtype", "fp16": "amp_dtype", "precision": "amp_dtype",
    "checkpoint": "resume", "random_seed": "seed", "img_size": "image_size", "size": "image_size", "pretrained": "weights",
}  # fmt: skip

OF_SEVERAL_DEVICES = {"nproc_per_node", "join_seconds", "max_restarts"}
YES_OR_NO = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def boolean(text: str) -> bool:
    """Convert an option's text, as a `type` for argparse: consoles send 'true', 'True' or '1'; other words are refused."""
    value = YES_OR_NO.get(text.strip().lower())
    if value is None:
        raise argparse.ArgumentTypeError(f"{one_line(text)[:80]!r} is neither true nor false")
    return value


def as_meant(parser: argparse.ArgumentParser, argv: list[str], from_a_console: bool = True) -> list[str]:
    """Return the words in the form that argparse reads: underscores in names, `=` before values, a bare boolean as true.

    `from_a_console`: remove blanks that were typed around a value. An option with an empty value is dropped.
    """
    given = []
    words = list(reversed(argv))
    trimmed = str.strip if from_a_console else str
    while words:
        word = words.pop()
        name, equals, value = word.partition("=")
        name = _our_name(parser, name)
        action = parser._option_string_actions.get(name)
        if action is None or action.nargs == 0 or not name.startswith("--"):
            given.append(word)
        elif equals:
            given += _with_value(name, trimmed(value))
        elif action.type is boolean and not (words and _may_be_its_value(parser, words[-1])):
            given.append(f"{name}=true")
        elif not words or words[-1].startswith("--"):
            given.append(name)  # argparse reports the missing value
        else:
            given += _with_value(name, trimmed(words.pop()))
    return given


def _may_be_its_value(parser: argparse.ArgumentParser, word: str) -> bool:
    """Whether the word after a boolean option was meant as its value, right or wrong."""
    if word.strip().lower() in YES_OR_NO:
        return True
    takes_arguments = any(not action.option_strings for action in parser._actions)
    return not (takes_arguments or word.startswith("-") or os.sep in word or os.path.exists(word))


def _our_name(parser: argparse.ArgumentParser, name: str) -> str:
    """Return --batch_size for --batch-size if there is such an option; any other name unchanged."""
    ours = "--" + name[2:].replace("-", "_")
    return ours if name.startswith("--") and ours in parser._option_string_actions else name


def _with_value(name: str, value: str) -> list[str]:
    if not value:
        return []
    return [name if value == "--" else f"{name}={value}"]  # `--` would be taken for the end of the options


def names_of(parser: argparse.ArgumentParser) -> list[str]:
    return [option.lstrip("-") for action in parser._actions for option in action.option_strings]


def unknown_options(parser: argparse.ArgumentParser, unknown: list[str], ignore: Iterable[str]) -> dict[str, str]:
    """Return {name: value} of the unknown options, without those of platforms and --ignore; refuse a word that is no option."""
    passed = {*PLATFORM_OPTIONS, *(normal_name(name) for names in ignore for name in names.split(","))}
    found = {}
    words = list(reversed(unknown))
    while words:
        name, equals, value = words.pop().partition("=")
        if not name.startswith("--") or name == "--":
            parser.error(_stands_alone(name + equals + value, names_of(parser)))
        if not equals and words and not words[-1].startswith("-"):
            value = words.pop()
        if normal_name(name) not in passed:
            found[name.lstrip("-")] = value
    return found


def refuse_unknown(parser: argparse.ArgumentParser, unknown: Iterable[str]) -> None:
    for name in unknown:
        meant = nearest(name, names_of(parser))
        shown = one_line(name)[:80]
        if normal_name(name) in OF_SEVERAL_DEVICES:
            job = os.path.splitext(os.path.basename(sys.argv[0]))[0]
            parser.error(
                f"--{shown} is for jobs of several devices, and {job}.py trains on one: {advice_for_several_devices(job)}"
            )
        or_else = f"did you mean --{meant}?" if meant else f"where the platform adds it, give --ignore {shown}"
        parser.error(f"unknown option --{shown}: {or_else}")


def normal_name(name: str) -> str:
    return name.strip().lstrip("-").replace("-", "_")


def nearest(name: str, known: Collection[str]) -> Optional[str]:
    """Return the known option that is probably meant by a name that is mistyped, shortened or of another program; else None."""
    meant = normal_name(name)[:64]
    if MEANINGS.get(meant) in known:
        return MEANINGS[meant]
    begins = [option for option in known if len(meant) > 2 and option.startswith(meant)]
    return next(iter(begins or difflib.get_close_matches(meant, known, n=1, cutoff=0.75)), None)


def _stands_alone(word: str, known: Collection[str]) -> str:
    """Return the error text for a short option such as -b, or for a word that belongs to no option."""
    shown = one_line(word)[:80]
    if re.fullmatch(r"-[A-Za-z].*", word):
        first = sorted(option for option in known if option.startswith(word[1]))
        near = nearest(word, known) or next(iter(first), None)
        return f"unknown option {shown}: " + (f"did you mean --{near}?" if near else "options begin with two dashes")
    looks_like_data = os.sep in word or os.path.exists(word)
    return f"{shown!r} belongs to no option" + (f": did you mean --data_url {shown}?" if looks_like_data else "")
