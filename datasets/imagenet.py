"""Data sets and loaders of the image jobs: photographs in class folders or packs, or synthetic images."""

import argparse
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Optional, Union

import numpy as np
import torch

from common import arguments, devices, moments, progress
from common.address import is_address
from common.checkpoints import restore
from common.errors import UserError, one_line, require_folder
from common.ranks import collectives
from common.ranks.barrier import on_every_rank
from datasets import crops, recipe
from datasets.loader import DeviceLoader, Loader, more_workers, torch_batches
from datasets.photos import decode, splits, tree
from datasets.photos import files as photo_files
from datasets.photos.labelled import Photos
from datasets.sampler import Sampler

if TYPE_CHECKING:
    from datasets.synthetic import ColouredNoise

BACKENDS = [
    "pytorch",
    "dali",
    "dali-cpu",
    "dali-gpu",
    "kspeed",
    "dali-kspeed",
    "packed",
    "packed-remote",
    "dpex",
]
NO_INPUT = ["synthetic", "syntetic"]  # Alibaba's document has the second spelling
DATA = (
    "folder or bucket (s3://, obs://, oss://) with train/CLASS/*.JPEG and val/CLASS/*.JPEG, or with "
    "CLASS/*.JPEG, of which a fifth is held out; a .zip or .tar of these; the .manifest of a labelling "
    "platform; or what launch pack made of one of them"
)
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
SYNTHETIC = {"train": 1280, "val": 256}
IMAGENET = {"train": 1_281_167, "val": 50_000}
COLOURS = 10

DataSet = Union[Photos, "ColouredNoise"]


def add_options(parser: arguments.Parser) -> None:
    """Add the options of the image jobs' data: where the pictures come from, and how they are prepared."""
    data = arguments.group(parser, "data")
    data.add_argument(
        "--data_backend",
        choices=[*BACKENDS, *NO_INPUT],
        default="pytorch",
        help="where the pictures come from and what decodes them; all but synthetic give the same pictures "
        "in the same order. "
        "pytorch: files, decoded on the CPU by nvImageCodec; "
        "dali-cpu (or dali), dali-gpu: files, decoded by DALI with --workers threads (0: one for each "
        "core); "
        "packed: the shards that launch pack makes; "
        "packed-remote: the same, each sample read from the bucket when it is needed; "
        "kspeed, dali-kspeed: files, through a memcached cache that jobs and nodes share; "
        "dpex: files, decoded by --workers processes of each rank (0: 2) on the Ray cluster "
        "RAY_ADDRESS; "
        "synthetic (or syntetic): one batch of noise that stays on the device, to measure the speed of "
        "everything else",
    )
    iplist_help = "memcached servers for kspeed, host:port,host:port,...; unset: the variable KSPEED_IPLIST"
    data.add_argument("--kspeed_iplist", help=iplist_help)
    data.add_argument(
        "--kspeed_user",
        help="user of the memcached servers, if they need one; the password is the variable KSPEED_PASSWORD",
    )
    fetch_first_help = (
        "with packed and a bucket: train when the whole pack is on the disk; false: while it arrives"
    )
    data.add_argument("--fetch_first", type=arguments.boolean, default=False, help=fetch_first_help)
    photo_files.add_max_megapixels(data)
    data.add_argument(
        "--image_size", type=arguments.number(int, at_least=8), default=224, help="height and width in pixels"
    )
    data.add_argument(
        "--interpolation",
        choices=["bilinear", "bicubic", "triangular"],
        default="bilinear",
        help="of the resize, which is antialiased; so bilinear is what others call triangular",
    )
    crop_scale_help = (
        "the smallest fraction of a training picture that a random crop takes; 1: no crops, but the whole "
        "picture, squeezed"
    )
    data.add_argument(
        "--crop_scale",
        type=arguments.number(float, above=0, at_most=1),
        default=crops.AREA[0],
        help=crop_scale_help,
    )
    resize_help = (
        "the evaluation; short: the short side becomes 8/7 of image_size, and the middle is cut out; "
        "whole: nothing is"
    )
    data.add_argument(
        "--resize", choices=["short", "whole"], default="short", help=f"of a picture for {resize_help}"
    )
    data.add_argument(
        "--augmentation",
        choices=["none", "autoaugment", "randaugment", "trivialaugment"],
        default="none",
        help="of the training pictures, beside the random crop and flip",
    )
    erasing_help = (
        "fraction of the training pictures in which a random rectangle is erased; 0.1 to 0.25 are usual"
    )
    data.add_argument(
        "--random_erasing", type=arguments.number(float, at_least=0, at_most=1), default=0, help=erasing_help
    )
    data.add_argument(
        "--prefetch",
        type=arguments.number(int, at_least=1, below=257),
        default=2,
        help="batches that each loader process has ready",
    )
    parser.set_defaults(mean=MEAN, std=STD, crop_pct=None, best_by="accuracy")  # pixels go from 0 to 1
    parser.reads = reads


def reads(args: argparse.Namespace) -> arguments.Input:
    """Describe the input that the arguments name, without opening it."""
    backend = args.data_backend
    synthetic = args.custom_data or backend in NO_INPUT
    return arguments.Input(
        address=args.data_url if is_address(args.data_url) and not synthetic else None,
        fetched={"packed": "before" if args.fetch_first else "during", "packed-remote": ""}.get(
            backend, "before"
        ),
        synthetic=synthetic,
        remedies=() if backend in NO_INPUT else tuple(_remedies(args)),
        needs=(devices.DALI,) if backend.startswith("dali") else (),
    )


def _remedies(args: argparse.Namespace) -> Iterator[str]:
    """Yield what may help if the training waits for batches."""
    yield from more_workers(args)
    if not args.data_backend.startswith("packed"):
        yield "photographs packed into a few large files (python -m launch pack, then --data_backend packed)"
    if not args.data_backend.startswith("dali"):
        yield "--data_backend dali-gpu where there is a GPU"


def load(args: argparse.Namespace) -> tuple[argparse.Namespace, DataSet, DataSet]:
    """Return (arguments, training set, validation set).

    Options that were not given may change to suit the data.
    """
    synthetic = args.custom_data or args.data_backend in NO_INPUT
    previous = {} if synthetic else _previous_settings(args)
    lines = []
    if args.arch.startswith("timm/"):
        from common.models import of_timm

        values, line = of_timm.image_options(args, previous)
        args = arguments.replaced(args, **values)
        lines.append(line)
    size = args.image_size
    limit = args.max_samples
    if synthetic:
        counts, num_classes = (SYNTHETIC, COLOURS) if args.custom_data else (IMAGENET, 1000)
        from datasets.synthetic import ColouredNoise

        counts = {split: min(count, limit or count) for split, count in counts.items()}
        train, val = (
            ColouredNoise(counts[split], size, num_classes, seed)
            for seed, split in enumerate(("train", "val"))
        )
        return args, train, val
    if not args.data_url:
        raise UserError(f"there are no images: give --data_url, a {DATA}; or --custom_data true")

    moments.announce("data", args)
    trees, is_unsplit = on_every_rank("data", lambda: _find(args))
    if collectives.rank_and_size()[1] > 1 and (
        packs := [files.identity for files in trees if hasattr(files, "identity")]
    ):
        # it may be published again while the ranks read it
        collectives.require_equal({"the pack in --data_url": packs})
    trees = [files.without_larger(args.max_megapixels) for files in trees]
    lines += [files.describe() for files in trees]
    if is_unsplit:
        # another seed would hold out training pictures
        seed = previous.get("seed", args.seed) if args.evaluate else args.seed
        trees = splits.hold_out(trees[0], seed)
        if args.evaluate and args.weights and "seed" not in args.given:
            lines.append(
                f"warning: nothing says what {args.weights} were trained on: some of these pictures, "
                "perhaps (--seed)"
            )
        lines.append(
            f"{one_line(trees[0].folder)} has no train and val: {len(trees[1])} of its images, a fifth of "
            f"each class, are held out for the validation, in every start with --seed {seed} the same"
        )
    _compare_classes(trees[0], trees[-1])
    args, recipe_line = _apply_recipe(args, trees, previous)
    if previous and (criterion := previous.get("best_by", "accuracy")) != args.best_by:
        if "best_by" in args.given:
            lines.append(
                f"warning: this run chooses its best epoch by {criterion}, and --best_by {args.best_by} "
                "has no effect on it"
            )
        args = arguments.replaced(args, best_by=criterion)
    if collectives.rank_and_size()[0] == 0:
        for line in [*lines, *_remarks(args, trees, recipe_line)]:
            progress.say(line)
    train, val = (spread(files, limit) for files in (trees[0], trees[-1]))
    if args.data_backend.endswith("kspeed"):
        from datasets import kspeed

        train, val = (
            kspeed.through_cache(files, args.kspeed_iplist, args.kspeed_user) for files in (train, val)
        )
    options = {
        "mode": "bicubic" if args.interpolation == "bicubic" else "bilinear",
        "augmentation": args.augmentation,
    }
    short = decode.WHOLE if args.resize == "whole" else decode.short_side(size, args.crop_pct)
    train_set = Photos(train, size, True, args.seed, area=(args.crop_scale, 1.0), **options)
    args = arguments.replaced(args, data=_class_counts(trees))
    return args, train_set, Photos(val, size, False, args.seed, short=short, **options)


def _remarks(
    args: argparse.Namespace, trees: Sequence[tree.Tree], recipe_line: Optional[str]
) -> Iterator[str]:
    """Yield lines for the log: doubtful classes or pictures, a slow decoder, and the recipe,
    if there is one."""
    if len(trees) > 1:
        yield from splits.warnings_about(*trees)
    if args.data_backend in ("pytorch", "kspeed", "dpex"):
        yield from decode.slow_decoder_hints()
    if recipe_line:
        yield recipe_line


def mix(images: Any, labels: Any, mixup: float, cutmix: float) -> tuple[Any, Any, Any, float]:
    """Return (images, labels, other labels, weight of labels); with neither mixup nor CutMix unchanged,
    and a weight of 1."""
    if not (mixup or cutmix):
        return images, labels, labels, 1.0
    from datasets import mixing

    return mixing.mix(images, labels, mixup, cutmix)


def loss_fn(args: argparse.Namespace, train_set: DataSet, device: torch.device) -> torch.nn.Module:
    """Return the cross-entropy with --label_smoothing and --class_weights.

    The evaluation has its own, without them.
    """
    if args.class_weights == "none":
        return torch.nn.CrossEntropyLoss(label_smoothing=args.label_smoothing)
    from datasets import mixing

    weights = mixing.balanced_weights(train_set.labels, len(train_set.classes))
    if collectives.rank_and_size()[0] == 0:
        progress.say(one_line(mixing.describe_weights(weights, train_set.classes)))
    return mixing.WeightedLoss(devices.to_device(weights, device), args.label_smoothing)


def _class_counts(trees: Sequence[Any]) -> dict[str, Any]:
    """Return the numbers of training and validation pictures per class, and what was left out,
    for the report."""
    counts = [
        np.bincount(files.labels, minlength=len(files.classes)).tolist() for files in (trees[0], trees[-1])
    ]
    left_out = [
        [reason, len(names), names[0]] for files in trees for reason, names in sorted(files.left_out.items())
    ]
    return {"classes": list(zip(trees[0].classes, *counts)), "left_out": left_out}


def _find(args: argparse.Namespace) -> tuple[list[Any], bool]:
    """Return ([photographs of each needed split], False),
    or ([all photographs], True) if there is neither train nor val."""
    if args.data_backend.startswith("packed"):
        from datasets.packs import arrival

        return arrival.find(args), False
    labels = photo_files.manifest_of(args.data_url)
    from datasets.photos import archive, manifest

    root = args.data_url if labels else archive.root(args.data_url, args.input_dir)
    if labels := labels or photo_files.manifest_of(root):
        return manifest.load(labels, args.input_dir)
    require_folder("--data_url", root, "give the folder that holds one with pictures for each class")
    if not os.path.isdir(os.path.join(root, "train")):
        from datasets.packs import packed

        if os.path.isfile(packed.index_path(root, "train")):
            raise UserError(
                f"--data_url {one_line(root)} holds a pack and no folder train: give --data_backend "
                "packed as well"
            )
    if splits.is_unsplit(root):
        return [tree.load(root, args.input_dir)], True
    needed = splits.needed_splits(args.evaluate, os.path.join(root, "train"))
    return [tree.load(os.path.join(root, split), args.input_dir) for split in needed], False


def _previous_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of the run that is resumed or evaluated; {} if there is none, in a trial,
    and with --min_nodes."""
    is_independent = args.prof or args.find_max_batch or args.min_nodes or (args.evaluate and args.weights)
    return {} if is_independent else restore.previous_arguments(args, progress.say)


def _apply_recipe(
    args: argparse.Namespace, trees: Sequence[Any], previous: dict[str, Any]
) -> tuple[argparse.Namespace, Optional[str]]:
    """Apply a recipe, except where --weights are evaluated without --recipe;
    return (arguments, line for the log or None).

    `trees`: the photographs of the training and of the validation, or of the one that is read; `previous`:
    the arguments of the run that goes on, or {}."""
    if args.evaluate and args.weights and "recipe" not in args.given:
        return args, None  # how they were trained cannot be known
    all_pictures = sum(map(len, trees))
    if len(trees) == 1:  # a validation set alone, taken to be the share that is held out where there is none
        all_pictures = splits.SHARE * len(trees[0])
    training_pictures = min(len(trees[0]), args.max_samples or all_pictures)
    num_ranks = collectives.rank_and_size()[1]
    return recipe.with_recipe(args, all_pictures, training_pictures, num_ranks, previous)


def _compare_classes(train: Any, val: Any) -> None:
    """Raise a UserError unless the classes are equal: a label would mean one class in training and another in
    validation."""
    if train.classes != val.classes:
        name = sorted(set(train.classes) ^ set(val.classes))[0]
        has, lacks = (train, val) if name in train.classes else (val, train)
        raise UserError(
            f"--data_url needs the same classes in train and val: {one_line(has.folder)} has "
            f"{len(has.classes)} and {one_line(lacks.folder)} {len(lacks.classes)}, and {one_line(name)} is "
            "only in the first"
        )


def spread(files: tree.Tree, limit: Optional[int]) -> tree.Tree:
    """Return a tree of at most `limit` samples (None: all), at equal distances in the list,
    which is sorted by class."""
    if limit is None or limit >= len(files):
        return files
    return files.pick(np.arange(limit) * len(files) // limit)


def loader(
    data_set: DataSet, sampler: Sampler, device: torch.device, workers: int = 0, backend: str = "pytorch",
    mean: Sequence[float] = MEAN, std: Sequence[float] = STD, prefetch: int = 2, erasing: float = 0,
    decode_on_gpu: Optional[bool] = None, **options: Any,
) -> Loader:  # fmt: skip
    """Return a loader of the data set.

    `backend`: one of BACKENDS or NO_INPUT; `erasing`: --random_erasing; `decode_on_gpu`: where DALI decodes;
    unset, it does so with dali-gpu alone; `options`: more of DeviceLoader."""
    if backend in NO_INPUT:
        from datasets.synthetic import Resident

        return Resident(data_set, sampler, device, options.get("layout") or devices.layout(device))
    if backend.startswith("dali") and isinstance(data_set, Photos):
        on_gpu = backend == "dali-gpu" if decode_on_gpu is None else decode_on_gpu
        if on_gpu and (data_set.augmentation != "none" or data_set.mode == "bicubic"):
            raise UserError(
                f"--data_backend {backend} makes the pictures on a GPU, without --augmentation and only with "
                "a bilinear resize: take dali-cpu, or --augmentation none and --interpolation bilinear"
            )
        from datasets.dali import DaliBatches

        batches = DaliBatches(data_set, sampler, device, workers, decode_on_gpu=on_gpu)
    elif backend == "dpex":
        from datasets import dpex

        batches = dpex.batches(data_set, sampler, workers)
    else:
        batches = torch_batches(data_set, sampler, workers, prefetch)
    if erasing:
        from datasets.mixing import ErasingLoader

        device_loader = ErasingLoader(batches, sampler, device, mean, std, **options)
        device_loader.seed = data_set.seed
        device_loader.share = erasing
    else:
        device_loader = DeviceLoader(batches, sampler, device, mean, std, **options)
    device_loader.file_of = getattr(data_set, "file_of", None)
    in_this_process = backend.startswith("dali") or (workers == 0 and backend != "dpex")
    if in_this_process and isinstance(data_set, Photos) and data_set.augmentation != "none":
        # it draws from torch's generator, which the training step in another thread uses, too
        device_loader.beside = False
    return device_loader
