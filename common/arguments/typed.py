"""Convert a command line to the form that argparse reads, and ignore or refuse words that no option declares.

Consoles pass every value as a string, and append options that no job declares. So booleans can be spelled out
or stand alone, and options that platforms are known to append, or that --ignore names, are ignored.
"""

import argparse
import difflib
import os
import re
import sys
from collections.abc import Collection, Iterable
from typing import Optional

from common.arguments import declared
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
    "gpus": "nproc_per_node", "num_gpu": "nproc_per_node", "nprocs": "nproc_per_node", "model": "arch",
    "network": "arch", "backbone": "arch", "num_epochs": "epochs", "max_epochs": "epochs",
    "num_workers": "workers", "data": "data_url", "data_dir": "data_url", "data_path": "data_url",
    "dataset": "data_url", "output": "output_dir", "save_dir": "output_dir", "scheduler": "schedule",
    "lr_scheduler": "schedule", "amp": "amp_dtype", "fp16": "amp_dtype", "precision": "amp_dtype",
    "checkpoint": "resume", "random_seed": "seed", "img_size": "image_size", "size": "image_size",
    "pretrained": "weights",
}  # fmt: skip

MULTI_DEVICE_OPTIONS = {"nproc_per_node", "join_seconds", "max_restarts"}
YES_OR_NO = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def boolean(text: str) -> bool:
    """Convert an option's text, as a `type` for argparse: consoles send 'true', 'True' or '1';
    other words are refused."""
    value = YES_OR_NO.get(text.strip().lower())
    if value is None:
        raise argparse.ArgumentTypeError(f"{one_line(text)[:80]!r} is neither true nor false")
    return value


def normalize(parser: argparse.ArgumentParser, argv: list[str], from_a_console: bool = True) -> list[str]:
    """Return the words in the form that argparse reads: underscores in names, `=` before values,
    a bare boolean as true.

    `from_a_console`: remove blanks that were typed around a value. An option with an empty value is dropped.
    """
    normalized = []
    words = list(reversed(argv))
    trim = str.strip if from_a_console else str
    while words:
        word = words.pop()
        name, separator, value = word.partition("=")
        name = _canonical_name(parser, name)
        action = declared.option(parser, name)
        if action is None or action.nargs == 0 or not name.startswith("--"):
            normalized.append(word)
        elif separator:
            normalized += _with_value(name, trim(value))
        elif action.type is boolean and not (words and _may_be_value(parser, words[-1])):
            normalized.append(f"{name}=true")
        elif not words or words[-1].startswith("--"):
            normalized.append(name)  # argparse reports the missing value
        else:
            normalized += _with_value(name, trim(words.pop()))
    return normalized


def _may_be_value(parser: argparse.ArgumentParser, word: str) -> bool:
    """Whether the word after a boolean option was meant as its value, right or wrong."""
    if word.strip().lower() in YES_OR_NO:
        return True
    # An option, a path, or any word where there are arguments without a name is left to argparse.
    takes_arguments = any(not action.option_strings for action in declared.actions(parser))
    looks_like_path = os.sep in word or os.path.exists(word)
    return not (takes_arguments or word.startswith("-") or looks_like_path)


def _canonical_name(parser: argparse.ArgumentParser, name: str) -> str:
    """Return --batch_size for --batch-size if there is such an option; any other name unchanged."""
    canonical = "--" + name[2:].replace("-", "_")
    return canonical if name.startswith("--") and declared.option(parser, canonical) else name


def _with_value(name: str, value: str) -> list[str]:
    if not value:
        return []
    if value == "--":  # it would be taken for the end of the options
        return [name]
    return [f"{name}={value}"]


def option_names(parser: argparse.ArgumentParser) -> list[str]:
    """Return the names of all options, without dashes before them."""
    return [option.lstrip("-") for action in declared.actions(parser) for option in action.option_strings]


def unknown_options(
    parser: argparse.ArgumentParser, unknown: list[str], ignore: Iterable[str]
) -> dict[str, str]:
    """Return {name: value} of the unknown options, without those of platforms and --ignore;
    refuse a word that is no option."""
    ignored = {*PLATFORM_OPTIONS, *(normal_name(name) for names in ignore for name in names.split(","))}
    options = {}
    words = list(reversed(unknown))
    while words:
        name, separator, value = words.pop().partition("=")
        if not name.startswith("--") or name == "--":
            parser.error(_stray_word_error(name + separator + value, option_names(parser)))
        if not separator and words and not words[-1].startswith("-"):
            value = words.pop()
        if normal_name(name) not in ignored:
            options[name.lstrip("-")] = value
    return options


def refuse_unknown(parser: argparse.ArgumentParser, unknown: Iterable[str]) -> None:
    """End with an error for the first of these unknown options, if any, with what to do."""
    for name in unknown:
        suggestion = nearest(name, option_names(parser))
        shown_name = one_line(name)[:80]
        if normal_name(name) in MULTI_DEVICE_OPTIONS:
            job = os.path.splitext(os.path.basename(sys.argv[0]))[0]
            parser.error(
                f"--{shown_name} is for jobs of several devices, and {job}.py trains on one: "
                f"{advice_for_several_devices(job)}"
            )
        advice = (
            f"did you mean --{suggestion}?"
            if suggestion
            else f"where the platform adds it, give --ignore {shown_name}"
        )
        parser.error(f"unknown option --{shown_name}: {advice}")


def normal_name(name: str) -> str:
    """Return the name of an option without dashes before it, and with underscores in it."""
    return name.strip().lstrip("-").replace("-", "_")


def nearest(name: str, options: Collection[str]) -> Optional[str]:
    """Return the known option that is probably meant by a name that is mistyped,
    shortened or of another program; else None."""
    normalized = normal_name(name)[:64]
    if MEANINGS.get(normalized) in options:
        return MEANINGS[normalized]
    with_prefix = [option for option in options if len(normalized) > 2 and option.startswith(normalized)]
    return next(iter(with_prefix or difflib.get_close_matches(normalized, options, n=1, cutoff=0.75)), None)


def _stray_word_error(word: str, options: Collection[str]) -> str:
    """Return the error text for a short option such as -b, or for a word that belongs to no option."""
    shown_word = one_line(word)[:80]
    if re.fullmatch(r"-[A-Za-z].*", word):
        same_letter = [option for option in options if option.startswith(word[1])]
        suggestion = nearest(word, options) or min(same_letter, default=None)
        advice = f"did you mean --{suggestion}?" if suggestion else "options begin with two dashes"
        return f"unknown option {shown_word}: {advice}"
    if os.sep in word or os.path.exists(word):  # it looks like data
        return f"{shown_word!r} belongs to no option: did you mean --data_url {shown_word}?"
    return f"{shown_word!r} belongs to no option"
