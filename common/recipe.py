"""The defaults of train_imagenet.py for options that are not given: of ImageNet, of NVIDIA's script, or of a small folder.

A folder of a few hundred pictures needs other settings than a million pictures: smaller batches, because an epoch would have
one step; Adam, because there are few steps; larger crops and an uncropped evaluation, so that the subject stays visible.
"""

import argparse
import math
from collections.abc import Mapping
from typing import Any, Optional

from common import arguments

NAMES = ["imagenet", "small", "nvidia"]
SMALL_SET = 5000  # pictures, with those of the validation

# What NVIDIA's ResNet-50 script does unless it is told otherwise.
NVIDIA = {
    "lr_batch": 0, "schedule": "step", "warmup": 0, "weight_decay": 1e-4, "label_smoothing": 0.0, "nesterov": False,
    "amp_dtype": "float32",
}  # fmt: skip

# Of a small folder. Chosen on the pictures that tests/pictures.py draws (tests/benchmarks/RESULTS.md).
SMALL = {"optimizer": "adamw", "label_smoothing": 0.1, "crop_scale": 0.7, "resize": "whole"}
BATCH, STEPS = 32, 8  # the largest total batch, and how many of them an epoch has at least
WARMUP = 0.3  # of the epochs
# {optimizer: (lr for a total batch of BATCH, by which power of the batch it grows, weight decay)}
RATES = {"adamw": (2e-3, 0.5, 0.05), "sgd": (0.1, 1, 5e-4)}
WITH_WEIGHTS = 0.1  # of that lr, so that what they have learnt is not lost: usual, and not chosen on those pictures


def settled(
    args: argparse.Namespace, pictures: int, trained_on: int, ranks: int, before: Mapping[str, Any]
) -> tuple[argparse.Namespace, Optional[str]]:
    """Return the arguments with a recipe that suits so many pictures, and what it sets and nobody gave; and what to say of it.

    `trained_on`: how many of them are for the training; `before`: the arguments of the run that goes on, whose recipe and
    settings stay.
    """
    if "recipe" not in args.given:
        recipe = (before.get("recipe") or "imagenet") if before else "small" if pictures <= SMALL_SET else "imagenet"
        args = arguments.replaced(args, recipe=recipe)
    if args.recipe != "small":
        return args, None
    values = _of_a_small_folder(args, trained_on, ranks)
    if before.get("recipe") == "small":
        own = [] if args.exact else ["batch_size"]  # the ranks may be others, which have the same total together
        values = {name: value if name in own else before.get(name, value) for name, value in values.items()}
    values = {name: value for name, value in values.items() if name not in args.given}
    changed = {name: vars(args)[name] for name, value in values.items() if value != vars(args)[name]}
    args = arguments.replaced(args, **values, changed={**args.changed, **changed})
    shown = " ".join(f"--{name} {f'{value:g}' if isinstance(value, float) else value}" for name, value in values.items())
    why = f"{pictures} pictures are few, so this run has" if "recipe" not in args.given else "--recipe small has"
    return args, f"{why} {shown} (--recipe imagenet: the settings of ImageNet)"


def _of_a_small_folder(args, trained_on, ranks) -> dict[str, Any]:
    # Where the batch is computed in shares, their number counts; in an elastic job, all that there may be.
    parts = args.shares or (args.world.world_size if args.min_nodes else ranks)
    batch = min(BATCH, 2 ** int(math.log2(max(1, trained_on / STEPS))))
    size = args.batch_size if "batch_size" in args.given else max(1, batch // parts)
    optimizer = args.optimizer if "optimizer" in args.given else SMALL["optimizer"]
    values = {**SMALL, "batch_size": size, "warmup": WARMUP * args.epochs}
    if optimizer in RATES:
        lr, power, decay = RATES[optimizer]
        lr *= ((args.total_batch or size * parts) / BATCH) ** power * (WITH_WEIGHTS if args.weights else 1)
        values.update(lr=lr, lr_batch=0, weight_decay=decay)
    return values
