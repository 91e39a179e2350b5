"""Pairs of pictures, a blurry one and its sharp partner, as batches for the restoration job."""

import argparse
import os
from collections.abc import Iterator

import torch

from common import arguments, devices, moments, storage
from common.address import is_address
from common.errors import UserError, require_folder
from common.ranks.barrier import on_every_rank
from datasets.dali import PairBatches
from datasets.loader import DeviceLoader, more_workers, torch_batches
from datasets.photos import files
from datasets.photos.pairs import LAYOUT, SYNTHETIC_SIZE, Pairs, SyntheticPairs
from datasets.sampler import Sampler

DATA = f"folder or bucket (s3://, obs://, oss://) with {LAYOUT}"
RESIZE = 256
CROP = 224
SYNTHETIC_CROP = 48
# {the repository's name: ours}
TEMPLATE = {"data_source": "data_url", "num_workers": "workers", "result_dir": "output_dir"}


def add_options(parser: arguments.Parser) -> None:
    """Add the options of the pairs, and accept the Template repository's names for some options."""
    data = arguments.group(parser, "data")
    data.add_argument(
        "--data_backend",
        choices=["pytorch", "dali-cpu", "dali-gpu"],
        default="pytorch",
        help="what decodes the pictures; all give the same ones",
    )
    data.add_argument(
        "--resize",
        type=arguments.number(int, at_least=0),
        help="height that the pictures are resized to; 0: as "
        f"they are; unset: {RESIZE}; --custom_data pictures are not resized",
    )
    data.add_argument(
        "--crop",
        type=arguments.number(int, at_least=11),
        help="height and width in pixels that the network "
        f"sees; unset: {CROP}, with --custom_data {SYNTHETIC_CROP}",
    )
    files.add_max_megapixels(data)
    arguments.add_aliases(parser, TEMPLATE)
    parser.reads = reads


def reads(args: argparse.Namespace) -> arguments.Input:
    """Return the input that the arguments name, before anything is opened."""
    remedies = [*more_workers(args)]
    if not args.data_backend.startswith("dali"):
        remedies.append("--data_backend dali-gpu where there is a GPU")
    return arguments.Input(
        address=args.data_url if is_address(args.data_url) and not args.custom_data else None,
        synthetic=args.custom_data,
        remedies=tuple(remedies),
        needs=(devices.DALI,) if args.data_backend.startswith("dali") else (),
    )


def load(args: argparse.Namespace) -> tuple[Pairs, Pairs]:
    """Return (training pairs, test pairs), at most --max_samples of each.

    Real data are fetched first if necessary.
    """
    if args.custom_data:
        crop = args.crop or SYNTHETIC_CROP
        if crop > SYNTHETIC_SIZE:
            raise UserError(
                f"--crop {crop} is too large: the synthetic pictures have {SYNTHETIC_SIZE} pixels a side"
            )
        train, test = (
            SyntheticPairs(split, args.max_samples, crop, args.seed) for split in ("train", "test")
        )
        return train, test
    if not args.data_url:
        raise UserError(f"there are no pairs: give --data_url, a {DATA}; or --custom_data true")
    moments.announce("data", args)
    root = on_every_rank("data", lambda: _folder(args))
    options = {
        "resize": RESIZE if args.resize is None else args.resize,
        "crop": args.crop or CROP,
        "seed": args.seed,
        "megapixels": args.max_megapixels,
    }
    train, test = (
        Pairs(os.path.join(root, split), train=split == "train", **options) for split in ("train", "test")
    )
    for pairs in (train, test):
        pairs.keep_first(args.max_samples)
    return train, test


def _folder(args: argparse.Namespace) -> str:
    root = storage.fetch(args.data_url, inputs=args.input_dir)
    require_folder("--data_url", root, f"give a {DATA}")
    return root


class PairLoader(DeviceLoader):
    """Batches of (blurry, sharp), float32 in [-1, 1]."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for images, _ in super().__iter__():
            blurry, sharp = images.chunk(2)
            yield blurry, sharp


def loader(
    pairs: Pairs, sampler: Sampler, device: torch.device, workers: int = 0, backend: str = "pytorch"
) -> PairLoader:
    """Return a loader of the pairs. `backend`: pytorch, dali-cpu or dali-gpu."""
    if backend == "pytorch":
        batches = torch_batches(pairs, sampler, workers)
    else:
        batches = PairBatches(pairs, sampler, device, workers, decode_on_gpu=backend == "dali-gpu")
    return PairLoader(batches, sampler, device, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
