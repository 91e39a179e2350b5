"""The defaults of train_imagenet.py for options that are not given: ImageNet's, NVIDIA's, torchvision's,
a small folder's.

A folder of a few hundred pictures needs other settings than a million pictures: smaller batches, because an
epoch would have one step; Adam, because there are few steps; larger crops and an uncropped evaluation, so
that the subject stays visible.
"""

import argparse
import math
from collections.abc import Mapping
from typing import Any, Optional

from common import arguments

NAMES = ["imagenet", "small", "nvidia", "torchvision"]
SMALL_SET = 5000  # pictures, including those of the validation

# The defaults of NVIDIA's ResNet-50 script.
NVIDIA = {
    "lr_batch": 0, "schedule": "step", "warmup": 0, "weight_decay": 1e-4, "label_smoothing": 0.0,
    "nesterov": False, "amp_dtype": "float32",
}  # fmt: skip

# torchvision's for ResNet-50 with an accuracy of 80.9 %, on 8 GPUs with 128 pictures each, but without its
# averaged weights, its smaller pictures in training and its sampler that repeats pictures.
TORCHVISION = {
    "epochs": 600, "lr": 0.5, "lr_batch": 1024, "weight_decay": 2e-5, "augmentation": "trivialaugment",
    "random_erasing": 0.1, "mixup": 0.2, "cutmix": 1.0, "nesterov": False,
}  # fmt: skip

RECIPES = {"nvidia": NVIDIA, "torchvision": TORCHVISION}

# The settings for a small folder, chosen on the pictures that tests/tools/pictures.py draws
# (tests/benchmarks/results/pictures.md).
SMALL = {"optimizer": "adamw", "label_smoothing": 0.1, "crop_scale": 0.7, "resize": "whole"}
BATCH = 32  # the largest total batch
STEPS = 8  # the fewest steps of an epoch, for which the batch is made smaller
WARMUP = 0.3  # fraction of the epochs
# {optimizer: (lr for a total batch of BATCH, power of the batch with which the lr grows, weight decay)}
RATES = {"adamw": (2e-3, 0.5, 0.05), "sgd": (0.1, 1, 5e-4)}
# factor of the lr with --weights, which keeps what they have learnt; usual, not chosen on those pictures
WITH_WEIGHTS = 0.1


def spelled(values: Mapping[str, Any]) -> str:
    """Return the values as options of a command line."""
    return " ".join(f"--{name} {str(value).lower()}" for name, value in values.items())


def with_recipe(
    args: argparse.Namespace, pictures: int, trained_on: int, ranks: int, previous: Mapping[str, Any]
) -> tuple[argparse.Namespace, Optional[str]]:
    """Return the arguments with a recipe and the options that it sets, and a line for the log or None.

    Options that are given stay.

    `pictures`: of the training and the validation, `trained_on`: those of the training. `previous`: the
    arguments of the run that goes on, or {}; it keeps its recipe and the settings of that, but for
    batch_size, which is a rank's part of the total.
    """
    is_given = "recipe" in args.given
    if not is_given:
        args = arguments.replaced(args, recipe=_recipe_of(pictures, previous))
    if args.recipe == "small":
        values = _small_settings(args, trained_on, ranks)
        if previous.get("recipe") == "small":
            recomputed = set() if args.exact else {"batch_size"}
            values.update((name, previous[name]) for name in values.keys() & previous.keys() - recomputed)
        reason = "--recipe small has" if is_given else f"{pictures} pictures are few, so this run has"
    elif args.recipe in RECIPES and not is_given:  # the parser has set them where it is given
        values = {name: previous.get(name, value) for name, value in RECIPES[args.recipe].items()}
        reason = f"this run goes on with --recipe {args.recipe}, which has"
    else:
        return args, None
    values = {name: value for name, value in values.items() if name not in args.given}
    changed = {name: vars(args)[name] for name, value in values.items() if value != vars(args)[name]}
    args = arguments.replaced(args, **values, changed={**args.changed, **changed})
    texts = {name: f"{value:g}" if isinstance(value, float) else value for name, value in values.items()}
    settings = " ".join(f"--{name} {text}" for name, text in texts.items())
    return args, f"{reason} {settings} (--recipe imagenet: the settings of ImageNet)"


def _recipe_of(pictures: int, previous: Mapping[str, Any]) -> str:
    """Return the recipe of a run for which none is given: that of the run that goes on,
    else by its pictures."""
    if previous:
        return previous.get("recipe") or "imagenet"
    return "small" if pictures <= SMALL_SET else "imagenet"


def _small_settings(args: argparse.Namespace, trained_on: float, ranks: int) -> dict[str, Any]:
    """Return the settings of --recipe small for so many training pictures, which may be estimated,
    and ranks."""
    # The parts of a total batch: the shares if it has any; in an elastic job, all ranks that there may be;
    # else the ranks.
    parts = args.shares or (args.world.world_size if args.min_nodes else ranks)
    batch = min(BATCH, 2 ** int(math.log2(max(1, trained_on / STEPS))))
    min_size = 2 if trained_on >= 2 * parts else 1  # norms of a last layer have no statistic of one sample
    size = args.batch_size if "batch_size" in args.given else max(min_size, batch // parts)
    optimizer = args.optimizer if "optimizer" in args.given else SMALL["optimizer"]
    values = {**SMALL, "batch_size": size, "warmup": WARMUP * args.epochs}
    if optimizer in RATES:
        lr, power, decay = RATES[optimizer]
        factor = ((args.total_batch or size * parts) / BATCH) ** power
        if args.weights:
            factor *= WITH_WEIGHTS
        lr *= factor
        values.update(lr=lr, lr_batch=0, weight_decay=decay)
    return values
