"""The numbered starts of a run whose results are in a bucket.

On a disk, a new start takes the folder of an earlier one away (common/files.py). A bucket has no such folder,
so an earlier start whose machine was frozen may still send data later. With its number, no start can damage a
later one:

    .starts/2-3f9a01bc             the second start; -afresh at its end discards what earlier starts left
    checkpoints/000000012800-2.pt  a checkpoint of it; those of the first start have no number
    .starts/2/metrics.jsonl        a file that all starts write under one name, as the second has left it

The newest number counts, then the samples seen. A start that finds a later start restores the later start's
version of the files with shared names, and ends.
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
UNSHARED_FILE = re.compile(r"checkpoints/.*|tensorboard/.*")  # names that no other start writes


def parse(name: str) -> Optional[names.Name]:
    """Return the parts of the name of a checkpoint's file in a bucket; None for any other object."""
    return names.parse(name, names.FOLDER)


def first_valid_start(object_names: Iterable[str]) -> int:
    """Return the number of the last start that discarded all earlier ones, or 1 if none did."""
    return max(
        (int(match[1]) for match in map(MARKER.fullmatch, object_names) if match and match[3]), default=1
    )


def checkpoints(object_names: Iterable[str]) -> list[tuple[int, int]]:
    """Return [(start, samples seen)] of the checkpoints with a manifest, oldest first,
    unless discarded or written late."""
    object_names = list(object_names)
    first_start = first_valid_start(object_names)
    candidates = [
        (parsed.start, parsed.samples)
        for parsed in map(parse, object_names)
        if parsed and parsed.ending == "json"
    ]
    start, last_samples = max(
        candidates, default=(1, 0)
    )  # one of an earlier start with more samples came late and does not count
    return sorted(
        pair
        for pair in candidates
        if pair[0] >= first_start and (pair[0] == start or pair[1] <= last_samples)
    )


def copies(object_names: Iterable[str]) -> dict[str, str]:
    """Return {name: copy by the latest start that has one},
    without the copies of starts that a later start discarded."""
    object_names = list(object_names)
    first_start = first_valid_start(object_names)
    candidates = sorted(
        (int(match[1]), match[2], match[0]) for match in map(COPY.fullmatch, object_names) if match
    )
    return {name: copy for number, name, copy in candidates if number >= first_start}


class Starts:
    """This start, with its number, among all starts of the run in the bucket."""

    def __init__(self, bucket: Bucket):
        self.bucket = bucket
        self.number = 1  # until take(); right where no other start can write
        self._older: dict[str, list[str]] = {}  # {name: the copies of earlier starts}

    def take(self, starts_anew: bool) -> None:
        """Register a number that no other start has in the bucket; `starts_anew`: discard earlier files."""
        token = secrets.token_hex(4)
        while True:
            object_names = self._names()
            tokens = [
                match[2]
                for match in map(MARKER.fullmatch, object_names)
                if match and int(match[1]) == self.number
            ]
            if tokens == [token]:
                break
            numbers = [
                int(match[1])
                for match in (MARKER.fullmatch(name) or COPY.fullmatch(name) for name in object_names)
                if match
            ]
            numbers += [parsed.start for parsed in map(parse, self._names(names.FOLDER)) if parsed]
            self.number = max(numbers, default=0) + 1
            marker = f"{FOLDER}{self.number}-{token}"
            if starts_anew and self.number > 1:
                marker += "-afresh"
            self.bucket.ask("put_object", self.bucket.key_prefix() + marker, Body=b"")
        for match in filter(None, map(COPY.fullmatch, object_names)):
            self._older.setdefault(match[2], []).append(match[0])

    def _names(self, prefix: str = FOLDER, patience: Optional[Patience] = None) -> list[str]:
        return [
            self.bucket.relative(item.key)
            for item in self.bucket.items(self.bucket.key_prefix() + prefix, patience)
        ]

    def checkpoints(self) -> list[tuple[int, int]]:
        """Return [(start, samples seen)] of the valid checkpoints in the bucket, oldest first."""
        return checkpoints([*self._names(), *self._names(names.FOLDER)])

    def bucket_name(self, name: str) -> str:
        """Return the name in the bucket of a file in the folder;
        a checkpoint's gets the number of this start if above 1."""
        parsed = parse(name)
        return (
            names.FOLDER + names.of_checkpoint(parsed.samples, parsed.ending, self.number) if parsed else name
        )

    def local_name(self, name: str) -> Optional[str]:
        """Return the name in the folder of an object in the bucket;
        None for a checkpoint of another start."""
        parsed = parse(name)
        if not parsed:
            return name
        return (
            names.FOLDER + names.of_checkpoint(parsed.samples, parsed.ending)
            if parsed.start == self.number
            else None
        )

    def copy_of(self, name: str) -> Optional[str]:
        """Return the name under which a copy of a file is uploaded first;
        None if no earlier start writes this file."""
        return None if self.number == 1 or UNSHARED_FILE.fullmatch(name) else f"{FOLDER}{self.number}/{name}"

    def pop_outdated(self, name: str) -> list[str]:
        """Return the copies of this file that earlier starts left, to be deleted;
        a second call returns none."""
        return self._older.pop(name, [])

    def has_later(self, patience: Patience) -> bool:
        """Return whether a later start has registered its number in the bucket."""
        return any(
            int(match[1]) > self.number
            for match in map(MARKER.fullmatch, self._names(patience=patience))
            if match
        )

    def copies(self, patience: Patience) -> dict[str, str]:
        """Return {name: copy by the latest start that has one} of the files with names that starts share."""
        return copies(self._names(patience=patience))

    def surplus(self, object_names: Iterable[str], choose: Callable[[list[str]], list[str]]) -> list[str]:
        """Return objects to delete: those that `choose` picks by their names in the folder,
        and duplicates by older starts."""
        bucket_names: dict[str, str] = {}  # {name in the folder: name in the bucket}
        by_samples: dict[int, dict[int, dict[str, str]]] = {}
        for name in object_names:
            parsed = parse(name)
            if not parsed:
                bucket_names[name] = name
            elif parsed.start <= self.number:
                by_samples.setdefault(parsed.samples, {}).setdefault(parsed.start, {})[parsed.ending] = name
        duplicates = []
        for samples, starts in by_samples.items():
            valid_start = max((number for number in starts if "json" in starts[number]), default=max(starts))
            bucket_names.update(
                {
                    names.FOLDER + names.of_checkpoint(samples, ending): name
                    for ending, name in starts[valid_start].items()
                }
            )
            duplicates += [
                name
                for number in starts
                if number < valid_start
                for _, name in sorted(starts[number].items())
            ]
        return [*duplicates, *(bucket_names[name] for name in choose(list(bucket_names)))]
