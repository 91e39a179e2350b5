"""The split of a folder: ROOT/train and ROOT/val, or a fifth held out of each ROOT/CLASS; and warnings about a bad split."""

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
MOST_COMPARED = 20_000  # most pictures among which copies are searched: each start looks up all of their sizes
NAMED = 5  # classes or copies that a warning names


def needed(evaluates: bool, training: str) -> tuple[str, ...]:
    """Return the splits to read: val alone for an evaluation in a folder that lacks the path `training`; else both."""
    return ("val",) if evaluates and not os.path.exists(training) else SPLITS


def is_unsplit(root: str) -> bool:
    """Whether the folder holds classes in place of train and val; UserError for fewer than two, or a class in OTHER_NAMES."""
    if any(os.path.exists(os.path.join(root, split)) for split in SPLITS) or not os.path.isdir(root):
        return False
    classes = list(files.classes(root))
    other = [name for name in classes if name.lower() in OTHER_NAMES]
    if other:
        raise UserError(
            f"{one_line(root)} has a folder {other[0]} and no train and val: give those names to the two that have the "
            "classes, or, if it is a class, another name to this one"
        )
    if len(classes) == 1:
        raise UserError(
            f"{one_line(root)} has one folder, {one_line(classes[0])}, and so one class: give the folder that has one for each"
        )
    return True


def hold_out(whole: tree.Tree, seed: int) -> tuple[tree.Tree, tree.Tree]:
    """Return (training, validation), with about a fifth, but at least one picture, of each class of two or more held out."""
    draws = [hashlib.sha256(f"{seed}/{name}".encode("utf-8", "surrogateescape")).digest() for name in whole.names]
    order = np.array(sorted(range(len(whole)), key=lambda number: (whole.labels[number], draws[number])))
    labels = whole.labels[order]
    counts = np.bincount(whole.labels, minlength=len(whole.classes))
    place = np.arange(len(whole)) - (np.cumsum(counts) - counts)[labels]  # within its class
    most = np.maximum(np.rint(counts / SHARE), counts > 1)
    held = np.zeros(len(whole), bool)
    held[order] = place < most[labels]
    if not held.any():
        raise UserError(f"{one_line(whole.folder)} has one picture of each class, so there is none to validate with: add some")
    training = whole.pick(np.flatnonzero(~held))  # it alone keeps left_out, which would be logged twice
    return training, dataclasses.replace(whole, left_out={}).pick(np.flatnonzero(held))


def warnings_about(train: tree.Tree, val: tree.Tree) -> Iterator[str]:
    """Yield a warning if classes have few pictures, and one if copies() finds equal pictures in training and validation."""
    trained, held = (np.bincount(part.labels, minlength=len(train.classes)) for part in (train, val))
    counts = trained + held
    few = [f"{one_line(train.classes[label])} ({counts[label]})" for label in np.flatnonzero(counts <= FEW)]
    if few:
        yield f"warning: {count(len(few), 'class has', 'classes have')} {FEW} pictures or fewer: {_some(few)}"
    pairs = copies(train, val)
    if pairs:
        shown = _some([f"{one_line(held)} is {one_line(used)}" for held, used in pairs])
        yield (
            f"warning: {count(len(pairs), 'picture')} of the validation, byte for byte, {'are' if len(pairs) > 1 else 'is'} in "
            f"the training, too, so the accuracy says too much: {shown}"
        )


def _some(texts: Sequence[str]) -> str:
    return ", ".join(texts[:NAMED]) + (f", and {len(texts) - NAMED} more" if len(texts) > NAMED else "")


def copies(train: tree.Tree, val: tree.Tree) -> list[tuple[str, str]]:
    """Return pairs (file of val, file of train) with equal bytes; [] if samples are no files, or more than MOST_COMPARED."""
    if not (train.in_files and val.in_files) or len(train) + len(val) > MOST_COMPARED:
        return []
    with ThreadPoolExecutor(tree.THREADS) as pool:
        by_size = [_found(pool, part, range(len(part)), lambda path: os.stat(path).st_size) for part in (train, val)]
        alike = by_size[0].keys() & by_size[1].keys()
        rest = [sorted(number for size in alike for number in sizes[size]) for sizes in by_size]
        by_content = [_found(pool, part, numbers, sha256) for part, numbers in zip((train, val), rest)]
    there = by_content[0]
    pairs = [(number, there[digest][0]) for digest, numbers in by_content[1].items() if digest in there for number in numbers]
    return [(val.path(held), train.path(used)) for held, used in sorted(pairs)]


def _found(pool: Executor, part: Any, numbers: Iterable[int], of_a_file: Callable[[str], Any]) -> dict[Any, list[int]]:
    """Return {result of `of_a_file(path)`: samples that have it}, without files that can no longer be read."""

    def asked(number: int) -> Any:
        with contextlib.suppress(OSError):
            return of_a_file(part.path(number))

    found = {}
    for number, what in zip(numbers, pool.map(asked, numbers)):
        if what is not None:
            found.setdefault(what, []).append(number)
    return found
