"""The files of CIFAR-10: found, or fetched and unpacked, and read."""

import argparse
import hashlib
import os
from glob import escape, glob
from typing import Any

import numpy as np

from common import storage
from common.address import INPUT_DIR, is_address
from common.errors import UserError, one_line, require_folder
from common.files import sha256
from common.progress import warn
from common.storage import https, index
from common.storage.once import once_per_node
from common.world.folders import can_be_made
from datasets import untrusted

URL = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
SHA256 = "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce"
ARCHIVE = "cifar-10-python.tar.gz"
FOLDER = "cifar-10-batches-py"
TRAIN_FILES = [f"data_batch_{i}" for i in range(1, 6)]
TEST_FILES = ["test_batch"]
MAX_UNPACKED = 256 * 2**20

Images = tuple[np.ndarray, np.ndarray]  # uint8 (N, 3, 32, 32), and their labels


def find(args: argparse.Namespace) -> str:
    """Return the folder of the batch files.

    If necessary, the archive is unpacked, and downloaded if no --data_url is given.
    """
    root = storage.fetch(args.data_url, inputs=args.input_dir) if args.data_url else args.input_dir
    if args.data_url:
        require_folder("--data_url", root, "give a folder with CIFAR-10 in it, or --custom_data true")
    archive = os.path.join(root, ARCHIVE)
    folder = os.path.join(root, FOLDER)
    if os.path.isdir(folder) and not (os.path.exists(archive) and _may_be_unpacked_again(folder, root, args)):
        return folder
    if os.path.basename(root) == FOLDER or os.path.exists(os.path.join(root, "data_batch_1")):
        return root
    if args.data_url and not os.path.exists(archive):
        has_pictures = glob(os.path.join(escape(root), "*", "*.[jp][pn]*g")) or os.path.isdir(
            os.path.join(root, "train")
        )
        advice = (
            "for pictures in folders by class take jobs/train_imagenet.py"
            if has_pictures
            else "or --custom_data true"
        )
        raise UserError(
            f"--data_url {args.data_url} has neither {FOLDER} nor {ARCHIVE}: "
            f"give the folder that holds one of them ({URL}), {advice}"
        )
    if not os.access(root, os.W_OK) and args.data_url:  # a read-only mount: unpack where we may write
        root = args.input_dir if can_be_made(args.input_dir) else os.path.join(args.output_dir, INPUT_DIR)
        archive_key = hashlib.sha256(os.fsencode(os.path.realpath(archive))).hexdigest()[:16]
        folder = os.path.join(root, "unpacked", archive_key, FOLDER)

    def prepare(lease: Any) -> None:
        if untrusted.is_unpacked(archive, folder):
            return
        if not os.path.exists(archive):
            https.download(URL, archive, SHA256, lease.tell)
        untrusted.unpack(archive, folder, place_of, MAX_UNPACKED, needed=[*TRAIN_FILES, *TEST_FILES])
        if sha256(archive) != SHA256:
            warn(f"{one_line(archive)} is not the published archive: only its own checksum was verified")

    once_per_node(folder, prepare)
    return folder


def place_of(name: str) -> str:
    """Return where a file of the archive belongs; ValueError for one that is not of the data set."""
    path, file_name = os.path.split(name)
    if file_name not in (*TRAIN_FILES, *TEST_FILES, "batches.meta", "readme.html") or "/" in path:
        raise ValueError(f"{one_line(name)[:80]!r} in it does not belong to the data set")
    return file_name


def _may_be_unpacked_again(folder: str, root: str, args: argparse.Namespace) -> bool:
    """Return whether a job may replace the folder if its archive has changed."""
    if os.path.exists(os.path.join(folder, untrusted.NOTE)) or not args.data_url:
        return os.access(root, os.W_OK)  # a read-only one was prepared by a user
    return is_address(args.data_url) and not any(
        name.startswith(f"{FOLDER}/") for name in index.fetched_names(root)
    )


def read(folder: str) -> tuple[Images, Images]:
    """Return (images, labels) of the training and of the test files."""
    return read_files(folder, TRAIN_FILES), read_files(folder, TEST_FILES)


def read_files(folder: str, names: list[str]) -> Images:
    """Return (images, labels) of these batch files of the folder; UserError if one is missing."""
    missing = [name for name in names if not os.path.isfile(os.path.join(folder, name))]
    if missing:
        raise UserError(f"{folder} lacks {', '.join(missing)}: fetch the data set again")
    images, labels = zip(*(untrusted.read_batch(os.path.join(folder, name)) for name in names))
    return np.concatenate(images), np.concatenate(labels)
