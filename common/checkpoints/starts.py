"""The numbered starts of a run whose results are in a bucket.

On a disk, a new start takes the folder of an earlier one away (common/files.py). A bucket has no such folder, so an earlier
start whose machine was frozen may still send data later. With its number, no start can damage a later one:

    .starts/2-3f9a01bc                  the second start; -afresh at its end discards what earlier starts have left
    checkpoints/000000012800-2.pt       a checkpoint of it; those of the first start have no number
    .starts/2/metrics.jsonl             a file that all starts write under one name, as the second has left it

The newest number counts, then the samples seen. A start that finds a later start restores the later start's version of the
files with shared names, and ends.
"""

import re
import secrets
from collections.abc import Iterable
from typing import Callable, Optional

from common.alive.patience import Patience
from common.checkpoints import names
from common.storage.bucket import Bucket

FOLDER = ".starts/"
MARKER = re.compile(r"\.starts/(\d+)-([0-9a-f]{8})(-afresh)?")
COPY = re.compile(r"\.starts/(\d+)/(.+)")
ITS_OWN = re.compile(r"checkpoints/.*|tensorboard/.*")  # names that no other start writes


def parse(name: str) -> Optional[names.Name]:
    """Return the parts of the name of a checkpoint's file in a bucket; None for any other object."""
    return names.parse(name, names.FOLDER)


def first_that_counts(there: Iterable[str]) -> int:
    """Return the number of the last start that discarded all earlier ones, or 1. `there`: names of objects in the bucket."""
    return max((int(match[1]) for match in map(MARKER.fullmatch, there) if match and match[3]), default=1)


def checkpoints(there: Iterable[str]) -> list[tuple[int, int]]:
    """Return [(start, samples seen)] of the checkpoints with a manifest, oldest first, unless discarded or written late."""
    there = list(there)
    first = first_that_counts(there)
    found = [(its.start, its.samples) for its in map(parse, there) if its and its.ending == "json"]
    start, last = max(found, default=(1, 0))  # one of an earlier start with more samples came late and does not count
    return sorted(pair for pair in found if pair[0] >= first and (pair[0] == start or pair[1] <= last))


def copies(there: Iterable[str]) -> dict[str, str]:
    """Return {name: copy by the latest start that has one}, without the copies of starts that a later start discarded."""
    there = list(there)
    first = first_that_counts(there)
    found = sorted((int(match[1]), match[2], match[0]) for match in map(COPY.fullmatch, there) if match)
    return {name: copy for number, name, copy in found if number >= first}


class Starts:
    """This start, with its number, among all starts of the run in the bucket."""

    def __init__(self, bucket: Bucket):
        self.bucket = bucket
        self.number = 1  # until take(); right where no other start can write
        self._older: dict[str, list[str]] = {}  # {name: the copies of earlier starts}

    def take(self, afresh: bool) -> None:
        """Register the next start number in the bucket; repeat if another start has it, too. `afresh`: discard older files."""
        own = secrets.token_hex(4)
        while True:
            there = self._names()
            alike = [match[2] for match in map(MARKER.fullmatch, there) if match and int(match[1]) == self.number]
            if alike == [own]:
                break
            numbers = [int(match[1]) for match in (MARKER.fullmatch(name) or COPY.fullmatch(name) for name in there) if match]
            numbers += [its.start for its in map(parse, self._names(names.FOLDER)) if its]
            self.number = max(numbers, default=0) + 1
            marker = f"{FOLDER}{self.number}-{own}{'-afresh' if afresh and self.number > 1 else ''}"
            self.bucket.ask("put_object", self.bucket.below() + marker, Body=b"")
        for match in filter(None, map(COPY.fullmatch, there)):
            self._older.setdefault(match[2], []).append(match[0])

    def _names(self, below: str = FOLDER, patience: Optional[Patience] = None) -> list[str]:
        return [self.bucket.relative(item.key) for item in self.bucket.items(self.bucket.below() + below, patience)]

    def checkpoints(self) -> list[tuple[int, int]]:
        return checkpoints([*self._names(), *self._names(names.FOLDER)])

    def named(self, name: str) -> str:
        """Return the name in the bucket of a file in the folder; a checkpoint's gets the number of this start if above 1."""
        its = parse(name)
        return names.FOLDER + names.of_checkpoint(its.samples, its.ending, self.number) if its else name

    def here(self, name: str) -> Optional[str]:
        """Return the name in the folder of an object in the bucket; None for a checkpoint of another start."""
        its = parse(name)
        if not its:
            return name
        return names.FOLDER + names.of_checkpoint(its.samples, its.ending) if its.start == self.number else None

    def copy_of(self, name: str) -> Optional[str]:
        """Return the name under which a copy of a file is uploaded first; None if no earlier start writes this file."""
        return None if self.number == 1 or ITS_OWN.fullmatch(name) else f"{FOLDER}{self.number}/{name}"

    def pop_outdated(self, name: str) -> list[str]:
        """Return the copies of this file that earlier starts left, to be deleted; a second call returns none."""
        return self._older.pop(name, [])

    def later(self, patience: Patience) -> bool:
        return any(int(match[1]) > self.number for match in map(MARKER.fullmatch, self._names(patience=patience)) if match)

    def copies(self, patience: Patience) -> dict[str, str]:
        return copies(self._names(patience=patience))

    def surplus(self, there: Iterable[str], choose: Callable[[list[str]], list[str]]) -> list[str]:
        """Return objects to delete: those that `choose` picks by their names in the folder, and duplicates by older starts."""
        known: dict[str, str] = {}  # {name in the folder: name in the bucket}
        of_samples: dict[int, dict[int, dict[str, str]]] = {}
        for name in there:
            its = parse(name)
            if not its:
                known[name] = name
            elif its.start <= self.number:
                of_samples.setdefault(its.samples, {}).setdefault(its.start, {})[its.ending] = name
        twice = []
        for samples, starts in of_samples.items():
            counts = max((number for number in starts if "json" in starts[number]), default=max(starts))
            known.update({names.FOLDER + names.of_checkpoint(samples, ending): name for ending, name in starts[counts].items()})
            twice += [name for number in starts if number < counts for _, name in sorted(starts[number].items())]
        return [*twice, *(known[name] for name in choose(list(known)))]
