"""CIFAR-10 in memory; a batch is taken by indexing once, not sample by sample.

Its files: cifar10_files.py.
"""

import argparse
import functools
from typing import Any, Callable, Optional

import numpy as np
import torch

from common import arguments, devices, moments
from common.address import is_address
from common.ranks.barrier import on_every_rank
from datasets import crops, digests
from datasets.loader import DeviceLoader, more_workers, torch_batches

# bytes of images that lie on a GPU, with their borders 1.6 times as many; CIFAR-10 has 146 MiB
MAX_RESIDENT_BYTES = 2**28
CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.2470, 0.2435, 0.2616)

# The settings of the sample script in ModelArts' documentation. Its rate grows with the cards of a node,
# which has 8, and not with the nodes: 16 times the rate learns worse (tests/benchmarks/results/steps.md).
CARDS = 8
MODELARTS = {
    "epochs": 100, "lr": 0.01, "optimizer": "adam", "schedule": "constant", "weight_decay": 0.0,
    "label_smoothing": 0.0, "augment": False,
}  # fmt: skip
DATA = (
    "folder or bucket (s3://, obs://, oss://) with cifar-10-batches-py or cifar-10-python.tar.gz, or the "
    "archive's https:// address; unset: downloaded to input_dir"
)


def parser(doc: Optional[str]) -> arguments.Parser:
    """Return a parser with the options of every CIFAR job; `doc`: the job's docstring."""
    job_parser = arguments.general_parser(doc, data=DATA, workers=0)
    training = arguments.group(job_parser, "training")
    training.add_argument(
        "--optimizer", choices=["sgd", "adam"], default="sgd", help="sgd has Nesterov momentum 0.9"
    )
    training.add_argument(
        "--schedule",
        choices=["one_cycle", "constant"],
        default="one_cycle",
        help="learning rate; one_cycle: up to --lr in the first fifth of the run, then down to zero",
    )
    arguments.add_label_smoothing(training)
    arguments.add_compile(training)
    training.add_argument(
        "--augment", type=arguments.boolean, default=True, help="random crop and flip of the training images"
    )
    defaults = " ".join(f"--{name} {str(value).lower()}" for name, value in MODELARTS.items())
    training.add_argument(
        "--recipe",
        choices=["modelarts"],
        help=f"other defaults: modelarts has {defaults}, and its rate grows with the processes up to {CARDS}",
    )
    job_parser.recipes = {"modelarts": {**MODELARTS, "largest_growth": CARDS}}
    width = arguments.number(int, at_least=1, below=1025)
    arguments.group(job_parser, "short runs").add_argument(
        "--width", type=width, default=64, help="channels of the network's first stage"
    )
    job_parser.reads = reads
    return job_parser


def reads(args: argparse.Namespace, needs: tuple[str, ...] = ()) -> arguments.Input:
    """Describe the input that the arguments name, without opening it.

    `needs`: features that the loader needs of the device.
    """
    return arguments.Input(
        address=args.data_url if is_address(args.data_url) and not args.custom_data else None,
        synthetic=args.custom_data,
        remedies=tuple(more_workers(args)),
        needs=needs,
    )


class ImageArrays:
    """Images and labels as tensors, indexed a batch at a time."""

    def __init__(
        self, images: np.ndarray, labels: np.ndarray, classes: list[str], limit: Optional[int] = None
    ):
        self.classes = classes
        self.images = torch.from_numpy(np.ascontiguousarray(images[:limit])).contiguous(
            memory_format=torch.channels_last
        )
        self.labels = torch.from_numpy(labels[:limit])

    def __len__(self) -> int:
        return len(self.labels)

    def digest(self) -> dict[str, str]:
        """Return digests of the labels ("list") and of the images ("bytes"),
        by which a later start recognises the data set."""
        return {
            "list": digests.digest_of(self.labels.numpy()),
            "bytes": digests.digest_of(self.images.permute(0, 2, 3, 1).numpy()),
        }

    def __getitem__(
        self, epoch_and_ids: tuple[int, np.ndarray]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return (images, labels, ids) of a batch; the epoch, which other data sets need, is not used."""
        ids = torch.from_numpy(epoch_and_ids[1])
        return self.images[ids], self.labels[ids], ids


def load(args: argparse.Namespace) -> tuple[ImageArrays, ImageArrays]:
    """Return (training set, test set).

    Real data are fetched first if necessary; the ranks wait for each other meanwhile.
    """
    if args.custom_data:
        from datasets import synthetic

        limit = args.max_samples or 5000
        train = synthetic.cifar_like(min(5000, limit), "train")
        test = synthetic.cifar_like(min(1000, limit), "test")
        classes = [f"pattern {number}" for number in range(10)]
    else:
        from datasets import cifar10_files

        moments.announce("data", args)
        train, test = cifar10_files.read(on_every_rank("data", lambda: cifar10_files.find(args)))
        classes = CLASSES
    train_set, test_set = (ImageArrays(*split, classes, args.max_samples) for split in (train, test))
    return train_set, test_set


def loader(
    data_set: ImageArrays, sampler: Any, device: torch.device, augment: bool = False, seed: int = 0,
    workers: int = 0, batches: Callable[..., Any] = torch_batches,
) -> DeviceLoader:  # fmt: skip
    """Return a loader of normalised batches.

    Without `workers`, small sets of images are copied to an NVIDIA GPU.
    """
    if batches is torch_batches and not workers and _fits_on_gpu(device, data_set):
        from datasets.resident import ResidentCrops, ResidentLoader

        loader_args = (data_set.images, data_set.labels, sampler, device, MEAN, STD)
        if not augment:
            return ResidentLoader(*loader_args)
        crops_loader = ResidentCrops(*loader_args)
        crops_loader.seed = seed
        return crops_loader
    crop_and_flip = functools.partial(crops.crop_and_flip, seed=seed) if augment else None
    return DeviceLoader(batches(data_set, sampler, workers), sampler, device, MEAN, STD, crop_and_flip)


def _fits_on_gpu(device: torch.device, data_set: ImageArrays) -> bool:
    # A subclass may make its samples in another way.
    return (
        devices.is_nvidia(device)
        and type(data_set) is ImageArrays
        and data_set.images.numel() <= MAX_RESIDENT_BYTES
    )
