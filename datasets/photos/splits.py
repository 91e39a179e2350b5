"""The split of a folder: ROOT/train and ROOT/val, or a fifth held out of each ROOT/CLASS;
and warnings about a bad split."""

import contextlib
import dataclasses
import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any, Callable

import numpy as np

from common.errors import UserError, count, one_line
from common.files import sha256
from datasets.photos import files, tree

SPLITS = ("train", "val")
# A folder with one of these names, in upper or lower case, is not a class.
OTHER_NAMES = (*SPLITS, "eval", "test", "testing", "training", "valid", "validation")
SHARE = 5  # one of so many pictures of a class is held out
FEW = 2  # a class with so many pictures, or fewer, cannot be learnt
# most pictures among which copies are searched: each start looks up all of their sizes
MOST_COMPARED = 20_000
NAMED = 5  # classes or copies that a warning names


def needed_splits(is_evaluation: bool, training_path: str) -> tuple[str, ...]:
    """Return the splits to read: val alone for an evaluation without `training_path`, else both."""
    return ("val",) if is_evaluation and not os.path.exists(training_path) else SPLITS


def is_unsplit(root: str) -> bool:
    """Return whether the folder holds classes in place of train and val.

    UserError for fewer than two of them, or one that is named like a split.
    """
    if any(os.path.exists(os.path.join(root, split)) for split in SPLITS) or not os.path.isdir(root):
        return False
    classes = list(files.classes(root))
    split_names = [name for name in classes if name.lower() in OTHER_NAMES]
    if split_names:
        raise UserError(
            f"{one_line(root)} has a folder {split_names[0]} and no train and val: give those names to the "
            "two that have the classes, or, if it is a class, another name to this one"
        )
    if len(classes) == 1:
        raise UserError(
            f"{one_line(root)} has one folder, {one_line(classes[0])}, and so one class: give the "
            "folder that has one for each"
        )
    return True


def hold_out(full_tree: tree.Tree, seed: int) -> tuple[tree.Tree, tree.Tree]:
    """Return (training, validation), with about a fifth, but at least one picture,
    of each class of two or more held out."""
    draws = [
        hashlib.sha256(f"{seed}/{name}".encode("utf-8", "surrogateescape")).digest()
        for name in full_tree.names
    ]
    order = np.array(
        sorted(range(len(full_tree)), key=lambda number: (full_tree.labels[number], draws[number]))
    )
    labels = full_tree.labels[order]
    counts = np.bincount(full_tree.labels, minlength=len(full_tree.classes))
    position = np.arange(len(full_tree)) - (np.cumsum(counts) - counts)[labels]  # within its class
    held_out_counts = np.maximum(np.rint(counts / SHARE), counts > 1)
    is_held_out = np.zeros(len(full_tree), bool)
    is_held_out[order] = position < held_out_counts[labels]
    if not is_held_out.any():
        raise UserError(
            f"{one_line(full_tree.folder)} has one picture of each class, so there is none to validate "
            "with: add some"
        )
    # it alone keeps left_out, which would be logged twice
    training = full_tree.pick(np.flatnonzero(~is_held_out))
    return training, dataclasses.replace(full_tree, left_out={}).pick(np.flatnonzero(is_held_out))


def warnings_about(train: tree.Tree, val: tree.Tree) -> Iterator[str]:
    """Yield a warning if classes have few pictures, and one if copies() finds equal pictures in training and
    validation."""
    labels = np.concatenate([train.labels, val.labels])
    counts = np.bincount(labels, minlength=len(train.classes))
    few = [f"{one_line(train.classes[label])} ({counts[label]})" for label in np.flatnonzero(counts <= FEW)]
    if few:
        yield f"warning: {count(len(few), 'class has', 'classes have')} {FEW} pictures or fewer: {_some(few)}"
    pairs = copies(train, val)
    if pairs:
        verb = "is"
        if len(pairs) > 1:
            verb = "are"
        examples = _some([f"{one_line(copy)} is {one_line(original)}" for copy, original in pairs])
        yield (
            f"warning: {count(len(pairs), 'picture')} of the validation, byte for byte, {verb} in the "
            f"training, too, so the accuracy says too much: {examples}"
        )


def _some(texts: Sequence[str]) -> str:
    """Return the first texts, and how many more there are."""
    text = ", ".join(texts[:NAMED])
    if len(texts) > NAMED:
        text += f", and {len(texts) - NAMED} more"
    return text


def copies(train: tree.Tree, val: tree.Tree) -> list[tuple[str, str]]:
    """Return pairs (file of val, file of train) with equal bytes; [] if samples are no files,
    or more than MOST_COMPARED."""
    if not (train.has_sample_files and val.has_sample_files) or len(train) + len(val) > MOST_COMPARED:
        return []
    with ThreadPoolExecutor(tree.THREADS) as pool:
        by_size = [
            _samples_by(pool, part, range(len(part)), lambda path: os.stat(path).st_size)
            for part in (train, val)
        ]
        common_sizes = by_size[0].keys() & by_size[1].keys()
        candidates = [sorted(number for size in common_sizes for number in sizes[size]) for sizes in by_size]
        by_content = [
            _samples_by(pool, part, numbers, sha256) for part, numbers in zip((train, val), candidates)
        ]
    train_by_digest, val_by_digest = by_content
    pairs = []
    for digest in train_by_digest.keys() & val_by_digest.keys():
        pairs += [(number, train_by_digest[digest][0]) for number in val_by_digest[digest]]
    return [(val.path(val_number), train.path(train_number)) for val_number, train_number in sorted(pairs)]


def _samples_by(
    pool: Executor, part: tree.Tree, numbers: Iterable[int], of_a_file: Callable[[str], Any]
) -> dict[Any, list[int]]:
    """Return {result of `of_a_file(path)`: samples that have it},
    without files that can no longer be read."""

    def result_or_none(number: int) -> Any:
        with contextlib.suppress(OSError):
            return of_a_file(part.path(number))

    groups = {}
    for number, result in zip(numbers, pool.map(result_or_none, numbers)):
        if result is not None:
            groups.setdefault(result, []).append(number)
    return groups
