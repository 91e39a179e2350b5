"""Translate the options of NVIDIA's ResNet-50 script and of the DALI article to those of
jobs/train_imagenet.py.

Both take the folder of the data as a word without an option. Such a command also gets the defaults of
--recipe nvidia.
"""

import argparse
import re
from collections.abc import Sequence
from typing import Optional

from common.arguments import YES_OR_NO, boolean, declared

FOLDER_OPTION = "--data_url"
RECIPE = "--recipe=nvidia"

# {their option: ours}. Each has a value. Dashes in the names count as underscores, except at the beginning.
NAMES = {
    "-a": "--arch", "-b": "--batch_size", "-j": "--workers", "-p": "--print_freq", "-v": "--val_batch_size",
    "--learning_rate": "--lr", "--wd": "--weight_decay", "--optimizer_batch_size": "--total_batch",
    "--lr_schedule": "--schedule", "--use_ema": "--ema", "--workspace": "--output_dir",
}  # fmt: skip

# {their flag: our option with its value}
FLAGS = {
    "--amp": "--amp_dtype=float16", "--fp16": "--amp_dtype=float16",
    "--dynamic_loss_scale": "--growth_interval=100", "--no_checkpoints": "--checkpoints=false",
    "--save_checkpoints": "--checkpoints=true", "-e": "--evaluate=true",
    "--gather_checkpoints": "--keep=1000000", "--use_dali": "--data_backend=dali-gpu",
    "--dali_cpu": "--data_backend=dali-cpu",
}  # fmt: skip

# {their option: the remark that explains why it has no effect}. Options of the first table have a value.
NO_EFFECT_WITH_VALUE = {
    "--jit": "TorchScript is not used here: --compile true makes the network faster",
    "--checkpoint_filename": (
        "checkpoints have the number of their samples as names, and an epoch's weights are epoch_N.pth"
    ),
    "--topk": "the accuracy of the first five classes is always measured as well",
    "--rmsprop_alpha": "RMSprop's alpha is 0.9 here, which is its default there",
    "--rmsprop_eps": "RMSprop's epsilon is 1e-3 here, which is its default there",
    "--model_config": "the only kind of ResNet here is torchvision's, which is ResNet v1.5",
    "--raport_file": "metrics.jsonl, speed.jsonl and TensorBoard's events have the numbers",
    "--gpu_affinity": "what starts the ranks can bind them to cores, as srun --cpu-bind does",
    "-c": "the only kind of ResNet here is torchvision's, which is ResNet v1.5",
}
NO_EFFECT = {
    "--pretrained": "give --weights pretrained, or --weights FILE",
    "--test": "for a run of few steps give --max_steps 10",
}
UNSET = "-1"  # value with which NVIDIA's script takes an option of MAY_BE_UNSET as not given
MAY_BE_UNSET = {"--optimizer_batch_size", "--run_epochs", "--early_stopping_patience", "--prof"}
WEAKER = {"--use_dali": "--dali_cpu"}  # {their flag: the flag that overrides it}
BARE_VALUES = {"--prof": "100"}  # the article's --prof has no number


def respell(parser: argparse.ArgumentParser, argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Translate NVIDIA's and the article's options: return (words for `parser`, remarks on options that have
    no effect)."""
    translated = []
    remarks = []
    words = list(reversed(argv))
    names = {_split(word)[0] for word in argv}
    needs_folder = FOLDER_OPTION not in names
    while words:
        word = words.pop()
        name, value = _split(word)
        next_word = words[-1] if words else None
        if name in MAY_BE_UNSET and (value or next_word) == UNSET:
            _take_value(value, words)
        elif name in NAMES:
            value = _take_value(value, words)
            translated.append(NAMES[name] if value is None else f"{NAMES[name]}={value}")
        elif name in FLAGS:
            is_set = _take_flag(value, words)
            if is_set is None:
                translated.append(word)  # argparse will refuse it
            elif is_set and WEAKER.get(name) not in names:
                translated.append(FLAGS[name])
        elif name in NO_EFFECT or name in NO_EFFECT_WITH_VALUE:
            if name in NO_EFFECT_WITH_VALUE:
                _take_value(value, words)
            else:
                _take_flag(value, words)
            remarks.append(
                f"{word.partition('=')[0]} has no effect: {(NO_EFFECT | NO_EFFECT_WITH_VALUE)[name]}"
            )
        elif name in BARE_VALUES and value is None and (not words or words[-1].startswith("--")):
            translated.append(f"{name}={BARE_VALUES[name]}")
        elif word.startswith("-"):
            translated.append(word)
            if value is None and _takes_next(parser, name, words):
                translated.append(words.pop())
        elif needs_folder:
            needs_folder = False
            translated.append(f"{FOLDER_OPTION}={word}")
            if "--recipe" not in names:
                translated.append(RECIPE)
        else:
            translated.append(word)
    return translated, remarks


def _split(word: str) -> tuple[str, Optional[str]]:
    """Split --name=value, or -jVALUE if NAMES has -j, into (name, value or None).

    Dashes in long names become underscores.
    """
    if match := re.fullmatch(r"(-[A-Za-z])=?(.+)", word, re.S):
        return (match[1], match[2]) if match[1] in NAMES else (word, None)
    name, equals, value = word.partition("=")
    return ("--" + name[2:].replace("-", "_") if name.startswith("--") else name), value if equals else None


def _take_value(value: Optional[str], words: list[str]) -> Optional[str]:
    """Return `value` if given, else the next word, taken off `words`;
    None if there is no next word or it begins with --."""
    if value is None and words and not words[-1].startswith("--"):
        return words.pop()
    return value


def _take_flag(value: Optional[str], words: list[str]) -> Optional[bool]:
    """Return whether a flag is set: by `value`, else by a yes or no taken off `words`, else True.

    None for another `value`.
    """
    if value is None and words and words[-1].strip().lower() in YES_OR_NO:
        value = words.pop()
    return YES_OR_NO.get((value or "true").strip().lower())


def _takes_next(parser: argparse.ArgumentParser, name: str, words: list[str]) -> bool:
    """Return whether the next word is the option's value: a flag has none, a boolean only yes or no;
    none begins with --."""
    if not words or words[-1].startswith("--"):
        return False
    action = declared.option(parser, name)
    if action is not None and action.type is boolean:
        return words[-1].strip().lower() in YES_OR_NO
    return action is None or action.nargs != 0
