"""Which bytes of a pack are fetched next: samples that are wanted, the longest wanted first, and otherwise all in their order.

A unit is a slice of Samples: neighbours in one shard, which one request brings.
"""

import dataclasses
import io
import json
from collections.abc import Iterable, Iterator
from typing import Any, Optional

import numpy as np

from datasets.packs.state import ABSENT, NOW, PASSES, State, long_ago

UNIT_BYTES = 4 << 20  # most bytes of a unit, unless it is one longer sample
HEADER_BYTES = 512  # of a header in a tar file


class BadIndex(ValueError):
    """Indexes contradict each other."""


@dataclasses.dataclass(frozen=True)
class Samples:
    """The samples of all splits, sorted by their places in the shards.

    From `begin` to `end` are a sample's bytes, its header, and what lies between it and the next one: together, all of a shard.
    """

    number: np.ndarray  # of each sample, in the State
    at: np.ndarray  # of each number in the State, its position here
    shard: np.ndarray
    offset: np.ndarray  # of the sample's own bytes in the shard
    length: np.ndarray
    checksum: np.ndarray
    begin: np.ndarray
    end: np.ndarray

    @staticmethod
    def of(splits: list[dict[str, np.ndarray]], shard_sizes: np.ndarray) -> "Samples":
        """Sort the samples of all splits. BadIndex if samples overlap or a shard has none.

        `splits`: for each, the arrays "shard", "offset", "length" and "checksum"; in this order the State numbers the samples.
        `shard_sizes`: bytes of each shard.
        """
        together = {name: np.concatenate([split[name] for split in splits]) for name in splits[0]}
        order = np.lexsort((together["offset"], together["shard"]))
        ordered = {name: values[order] for name, values in together.items()}
        offset = ordered["offset"]
        sample_end = offset + ordered["length"]
        first_of_shard = np.flatnonzero(np.diff(ordered["shard"], prepend=-1))
        end_before = np.concatenate([[0], sample_end[:-1]])
        overlaps = offset < end_before
        overlaps[first_of_shard] = False
        if overlaps.any() or len(first_of_shard) != len(shard_sizes):
            raise BadIndex("samples overlap, or a shard has none")
        begin = np.maximum(
            offset - HEADER_BYTES, end_before
        )  # a header goes with its sample, the rest before it with the last one
        begin[first_of_shard] = 0
        last_of_shard = np.append(first_of_shard[1:], len(order)) - 1
        end = np.append(begin[1:], 0)
        end[last_of_shard] = shard_sizes
        return Samples(number=order, at=np.argsort(order), **ordered, begin=begin, end=end)

    def rows(self, unit: slice) -> Iterator[tuple[int, int, int, int]]:
        """Return the number, offset, length and checksum of each sample of a unit."""
        columns = (self.number, self.offset, self.length, self.checksum)
        return zip(*(column[unit].tolist() for column in columns))

    def in_shards(self, count: int) -> list[slice]:
        """Return the unit of all samples of each of `count` shards."""
        bounds = np.searchsorted(self.shard, range(count + 1)).tolist()
        return [slice(first, end) for first, end in zip(bounds, bounds[1:])]


@dataclasses.dataclass(frozen=True)
class Content:
    """What the indexes of a pack say: its shards ("name", "size", "sha256"), and the samples in them."""

    shards: list[dict[str, Any]]
    samples: Samples
    is_checked_when_read: bool  # readers check what they use of a sample, by its checksum or those of its tiles; not raw pixels

    @staticmethod
    def of(indexes: Iterable[bytes]) -> "Content":
        """Read the indexes of the splits, in the order in which the State numbers their samples; a reader has checked each.

        BadIndex if two describe a shard differently, samples overlap, or a shard has none.
        """
        shards: dict[str, dict[str, Any]] = {}  # by name: one may have samples of several splits
        splits = []
        forms = set()
        for index in indexes:
            with np.load(io.BytesIO(index), allow_pickle=False) as stored:
                about = json.loads(bytes(stored["about"]))
                split = {name: stored[name] for name in ("shard", "offset", "length", "checksum")}
            for shard in about["shards"]:
                if shards.setdefault(shard["name"], shard) != shard:
                    raise BadIndex(f"{shard['name']} has two descriptions")
            number_of = {name: number for number, name in enumerate(shards)}
            numbers = np.array([number_of[shard["name"]] for shard in about["shards"]])  # of this index's shards, among all
            split["shard"] = numbers[split["shard"]]
            splits.append(split)
            forms.add(about["form"])
        samples = Samples.of(splits, np.array([shard["size"] for shard in shards.values()]))
        return Content(list(shards.values()), samples, "raw" not in forms)


class FetchPlan:
    """Knows which samples are asked for, as they are on the disk or on their way here, and gives out units of the others."""

    def __init__(self, samples: Samples, state: State) -> None:
        self._samples = samples
        self._state = state
        self._is_asked = np.zeros(len(samples.number), bool)  # by number in the State
        self._cursor = 0  # all samples before it are asked for, or pass through

    def wanted(self, has_room_to_pass: bool) -> Iterator[slice]:
        """Yield units of wanted samples: first those for which a reader waits, then the longest wanted.

        Each counts as asked for once it is yielded. What was wanted long ago no longer is. Without `has_room_to_pass`, samples
        that pass through are left out, but for those for which a reader waits.
        """
        since = self._state.wanted
        is_waited_for = since == NOW
        chosen = (since != 0) & ~self._is_asked
        if not has_room_to_pass:
            chosen &= is_waited_for | (self._state.place == ABSENT)
        chosen &= is_waited_for | (since > long_ago())
        numbers = np.flatnonzero(chosen)
        longest_first = numbers[np.argsort(since[numbers], kind="stable")]
        for number in longest_first.tolist():
            if not self._is_asked[number]:
                yield self._take(int(self._samples.at[number]), chosen)

    def next_in_turn(self) -> Optional[slice]:
        """Return the next unit in the order of the shards, which then counts as asked for.

        None once all samples of the shards that are kept on the disk are asked for.
        """
        numbers = self._samples.number
        while self._cursor < len(numbers):
            number = numbers[self._cursor]
            if not self._is_asked[number] and self._state.place[number] != PASSES:
                return self._take(self._cursor, None)
            self._cursor += 1
        return None

    def set_here(self, samples: slice) -> None:
        self._is_asked[self._samples.number[samples]] = True

    def set_missing(self, samples: slice) -> None:
        """Let these samples be asked for once more."""
        self._is_asked[self._samples.number[samples]] = False
        self._cursor = min(self._cursor, samples.start)

    def set_gone(self, numbers: list[int]) -> None:
        """Let samples that passed through, by their numbers in the State, be asked for when they are wanted again."""
        self._is_asked[numbers] = False

    def _take(self, first: int, chosen: Optional[np.ndarray]) -> slice:
        """Mark the samples from position `first` on as asked for, and return them as a unit: neighbours in one shard, up to
        UNIT_BYTES, but at least one. `chosen`, by number: those that may be in it; None: all."""
        samples = self._samples
        end = first
        while end < len(samples.number):
            number = samples.number[end]
            is_another_shard = samples.shard[end] != samples.shard[first]
            is_too_long = end > first and samples.end[end] - samples.begin[first] > UNIT_BYTES
            if self._is_asked[number] or is_another_shard or is_too_long or not (chosen is None or chosen[number]):
                break
            self._is_asked[number] = True
            end += 1
        return slice(first, end)
