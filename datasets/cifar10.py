"""CIFAR-10 in memory; a batch is taken by indexing once, not sample by sample."""

import argparse
import functools
import hashlib
import os
from glob import escape, glob
from typing import Any, Callable, Optional

import numpy as np
import torch

from common import arguments, moments, storage
from common.errors import UserError, one_line, require_folder
from common.files import sha256
from common.progress import warn
from common.ranks.barrier import on_every_rank
from common.storage import https, index
from common.storage.once import once_per_node
from common.world.folders import INPUT_DIR, can_be_made, is_address
from datasets import crops, synthetic, untrusted
from datasets.loader import DeviceLoader, more_workers, torch_batches

CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)

URL = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
SHA256 = "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce"
ARCHIVE, FOLDER = "cifar-10-python.tar.gz", "cifar-10-batches-py"
TRAIN_FILES, TEST_FILES = [f"data_batch_{i}" for i in range(1, 6)], ["test_batch"]
MAX_UNPACKED = 256 * 2**20
# The settings of the sample script in ModelArts' documentation.
MODELARTS = {
    "epochs": 100, "lr": 0.01, "optimizer": "adam", "schedule": "constant", "weight_decay": 0.0, "label_smoothing": 0.0,
    "augment": False,
}  # fmt: skip
DATA = (
    "folder or bucket (s3://, obs://, oss://) with cifar-10-batches-py or cifar-10-python.tar.gz, or the archive's "
    "https:// address; unset: downloaded to input_dir"
)


def parser(doc: Optional[str]) -> arguments.Parser:
    """Return a parser with the options of every CIFAR job; `doc`: the job's docstring."""
    made = arguments.general_parser(doc, data=DATA, workers=0)
    training = arguments.group(made, "training")
    training.add_argument("--optimizer", choices=["sgd", "adam"], default="sgd", help="sgd has Nesterov momentum 0.9")
    training.add_argument("--schedule", choices=["one_cycle", "constant"], default="one_cycle", help="learning rate; "
                          "one_cycle: up to --lr in the first fifth of the run, then down to zero")  # fmt: skip
    arguments.add_label_smoothing(training)
    arguments.add_compile(training)
    training.add_argument("--augment", type=arguments.boolean, default=True, help="random crop and flip of the training images")
    sets = " ".join(f"--{name} {str(value).lower()}" for name, value in MODELARTS.items())
    training.add_argument("--recipe", choices=["modelarts"], help=f"other defaults: modelarts has {sets}")
    made.recipes = {"modelarts": MODELARTS}
    width = arguments.number(int, at_least=1, below=1025)
    arguments.group(made, "short runs").add_argument("--width", type=width, default=64, help="channels of the network's first "
                                                     "stage")  # fmt: skip
    made.reads = reads
    return made


def reads(args: argparse.Namespace, needs: tuple[str, ...] = ()) -> arguments.Input:
    """Describe the input that the arguments name, without opening it. `needs`: features that the loader needs of the device."""
    return arguments.Input(
        address=args.data_url if is_address(args.data_url) and not args.custom_data else None,
        synthetic=args.custom_data,
        remedies=tuple(more_workers(args)),
        needs=needs,
    )


class ImageArrays:
    """Images and labels as tensors, indexed a batch at a time."""

    def __init__(self, images: np.ndarray, labels: np.ndarray, classes: list[str], limit: Optional[int] = None):
        self.classes = classes
        self.images = torch.from_numpy(np.ascontiguousarray(images[:limit])).contiguous(memory_format=torch.channels_last)
        self.labels = torch.from_numpy(labels[:limit])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, epoch_and_ids: tuple[int, np.ndarray]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ids = torch.from_numpy(epoch_and_ids[1])
        return self.images[ids], self.labels[ids], ids


def load(args: argparse.Namespace) -> tuple[ImageArrays, ImageArrays]:
    """Return (training set, test set). Real data are fetched first if necessary; the ranks wait for each other meanwhile."""
    if args.custom_data:
        limit = args.max_samples or 5000
        train, test = synthetic.cifar_like(min(5000, limit), "train"), synthetic.cifar_like(min(1000, limit), "test")
        classes = [f"pattern {number}" for number in range(10)]
    else:
        moments.announce("data", args)
        folder = on_every_rank("data", lambda: _find(args))
        train, test = _read(folder, TRAIN_FILES), _read(folder, TEST_FILES)
        classes = CLASSES
    train_set, test_set = (ImageArrays(*split, classes, args.max_samples) for split in (train, test))
    return train_set, test_set


def _find(args):
    """Return the folder of the batch files. If necessary, the archive is unpacked, and downloaded if no --data_url is given."""
    root = storage.fetch(args.data_url, inputs=args.input_dir) if args.data_url else args.input_dir
    if args.data_url:
        require_folder("--data_url", root, "give a folder with CIFAR-10 in it, or --custom_data true")
    archive, folder = os.path.join(root, ARCHIVE), os.path.join(root, FOLDER)
    if os.path.isdir(folder) and not (os.path.exists(archive) and _may_be_unpacked_again(folder, root, args)):
        return folder
    if os.path.basename(root) == FOLDER or os.path.exists(os.path.join(root, "data_batch_1")):
        return root
    if args.data_url and not os.path.exists(archive):
        pictures = glob(os.path.join(escape(root), "*", "*.[jp][pn]*g")) or os.path.isdir(os.path.join(root, "train"))
        instead = "for pictures in folders by class take jobs/train_imagenet.py" if pictures else "or --custom_data true"
        raise UserError(
            f"--data_url {args.data_url} has neither {FOLDER} nor {ARCHIVE}: "
            f"give the folder that holds one of them ({URL}), {instead}"
        )
    if not os.access(root, os.W_OK) and args.data_url:  # a read-only mount: unpack where we may write
        root = args.input_dir if can_be_made(args.input_dir) else os.path.join(args.output_dir, INPUT_DIR)
        its_own = hashlib.sha256(os.fsencode(os.path.realpath(archive))).hexdigest()[:16]
        folder = os.path.join(root, "unpacked", its_own, FOLDER)

    def prepare(held):
        if untrusted.is_unpacked(archive, folder):
            return
        if not os.path.exists(archive):
            https.download(URL, archive, SHA256, held.tell)
        untrusted.unpack(archive, folder, [*TRAIN_FILES, *TEST_FILES], MAX_UNPACKED, may_have=["batches.meta", "readme.html"])
        if sha256(archive) != SHA256:
            warn(f"{one_line(archive)} is not the published archive: only its own checksum was verified")

    once_per_node(folder, prepare)
    return folder


def _may_be_unpacked_again(folder, root, args):
    """Whether a job may replace the folder if its archive has changed."""
    if os.path.exists(os.path.join(folder, untrusted.NOTE)) or not args.data_url:
        return os.access(root, os.W_OK)  # a read-only one was prepared by a user
    return is_address(args.data_url) and not any(name.startswith(f"{FOLDER}/") for name in index.fetched(root))


def _read(folder, names):
    missing = [name for name in names if not os.path.isfile(os.path.join(folder, name))]
    if missing:
        raise UserError(f"{folder} lacks {', '.join(missing)}: fetch the data set again")
    images, labels = zip(*(untrusted.read_batch(os.path.join(folder, name)) for name in names))
    return np.concatenate(images), np.concatenate(labels)


def loader(
    data_set: ImageArrays, sampler: Any, device: torch.device, augment: bool = False, seed: int = 0, workers: int = 0,
    batches: Callable[..., Any] = torch_batches,
) -> DeviceLoader:  # fmt: skip
    crop_and_flip = functools.partial(crops.crop_and_flip, seed=seed) if augment else None
    return DeviceLoader(batches(data_set, sampler, workers), sampler, device, MEAN, STD, crop_and_flip)
