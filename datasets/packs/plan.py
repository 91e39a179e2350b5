"""Which bytes of a pack are fetched next: samples that are wanted, the longest wanted first,
and otherwise all in their order.

A unit is a slice of Samples: neighbours in one shard, which one request brings.
"""

import dataclasses
import io
import json
from collections.abc import Iterable, Iterator
from typing import Any, Optional

import numpy as np

from datasets.packs.state import ABSENT, PASSING, WAITING, State, request_cutoff

UNIT_BYTES = 4 << 20  # most bytes of a unit, unless it is one longer sample
HEADER_BYTES = 512  # of a header in a tar file


class BadIndex(ValueError):
    """Indexes contradict each other."""


@dataclasses.dataclass(frozen=True)
class Samples:
    """The samples of all splits, sorted by their places in the shards.

    From `begin` to `end` are a sample's bytes, its header, and what lies between it and the next one:
    together, all of a shard.
    """

    number: np.ndarray  # of each sample, in the State
    position: np.ndarray  # of each number in the State, its position here
    shard: np.ndarray
    offset: np.ndarray  # of the sample's own bytes in the shard
    length: np.ndarray
    checksum: np.ndarray
    begin: np.ndarray
    end: np.ndarray

    @staticmethod
    def of(splits: list[dict[str, np.ndarray]], shard_sizes: np.ndarray) -> "Samples":
        """Sort the samples of all splits. BadIndex if samples overlap or a shard has none.

        `splits`: for each, the arrays "shard", "offset", "length" and "checksum"; in this order the State
        numbers the samples.
        `shard_sizes`: bytes of each shard.
        """
        columns = {name: np.concatenate([split[name] for split in splits]) for name in splits[0]}
        order = np.lexsort((columns["offset"], columns["shard"]))
        sorted_columns = {name: values[order] for name, values in columns.items()}
        offset = sorted_columns["offset"]
        sample_end = offset + sorted_columns["length"]
        first_of_shard = np.flatnonzero(np.diff(sorted_columns["shard"], prepend=-1))
        previous_end = np.concatenate([[0], sample_end[:-1]])
        overlaps = offset < previous_end
        overlaps[first_of_shard] = False
        if overlaps.any() or len(first_of_shard) != len(shard_sizes):
            raise BadIndex("samples overlap, or a shard has none")
        # A header goes with its sample, the rest before it with the previous one.
        begin = np.maximum(offset - HEADER_BYTES, previous_end)
        begin[first_of_shard] = 0
        last_of_shard = np.append(first_of_shard[1:], len(order)) - 1
        end = np.append(begin[1:], 0)
        end[last_of_shard] = shard_sizes
        return Samples(number=order, position=np.argsort(order), **sorted_columns, begin=begin, end=end)

    def rows(self, unit: slice) -> Iterator[tuple[int, int, int, int]]:
        """Return an iterator over (number, offset, length, checksum) of each sample of a unit."""
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
    # readers check what they use of a sample, by its checksum or those of its tiles; not raw pixels
    is_checked_when_read: bool

    @staticmethod
    def of(indexes: Iterable[bytes]) -> "Content":
        """Read the indexes of the splits, in the order in which the State numbers their samples;
        a reader has checked each.

        BadIndex if two describe a shard differently, samples overlap, or a shard has none.
        """
        shards: dict[str, dict[str, Any]] = {}  # by name: one may have samples of several splits
        splits = []
        forms = set()
        for index in indexes:
            with np.load(io.BytesIO(index), allow_pickle=False) as stored:
                metadata = json.loads(bytes(stored["about"]))
                split = {name: stored[name] for name in ("shard", "offset", "length", "checksum")}
            for shard in metadata["shards"]:
                if shards.setdefault(shard["name"], shard) != shard:
                    raise BadIndex(f"{shard['name']} has two descriptions")
            number_of = {name: number for number, name in enumerate(shards)}
            # of this index's shards, among all
            numbers = np.array([number_of[shard["name"]] for shard in metadata["shards"]])
            split["shard"] = numbers[split["shard"]]
            splits.append(split)
            forms.add(metadata["form"])
        samples = Samples.of(splits, np.array([shard["size"] for shard in shards.values()]))
        return Content(list(shards.values()), samples, "raw" not in forms)


class FetchPlan:
    """Knows which samples are asked for, as they are on the disk or on their way here,
    and gives out units of the others."""

    def __init__(self, samples: Samples, state: State) -> None:
        self._samples = samples
        self._state = state
        self._is_requested = np.zeros(len(samples.number), bool)  # by number in the State
        self._cursor = 0  # all samples before it are asked for, or pass through

    def take_wanted(self, has_room_to_pass: bool) -> Iterator[slice]:
        """Yield units of wanted samples: first those for which a reader waits, then the longest wanted.

        Each counts as asked for once it is yielded. What was wanted long ago no longer is. Without
        `has_room_to_pass`, of the samples that pass through only those are yielded for which a reader waits.
        """
        requested_at = self._state.requested_at
        is_waited_for = requested_at == WAITING
        chosen = (requested_at != 0) & ~self._is_requested
        if not has_room_to_pass:
            chosen &= is_waited_for | (self._state.place == ABSENT)
        chosen &= is_waited_for | (requested_at > request_cutoff())
        numbers = np.flatnonzero(chosen)
        longest_first = numbers[np.argsort(requested_at[numbers], kind="stable")]
        for number in longest_first.tolist():
            if not self._is_requested[number]:
                yield self._take(int(self._samples.position[number]), chosen)

    def next_in_turn(self) -> Optional[slice]:
        """Return the next unit in the order of the shards, which then counts as asked for.

        None once all samples of the shards that are kept on the disk are asked for.
        """
        numbers = self._samples.number
        while self._cursor < len(numbers):
            number = numbers[self._cursor]
            if not self._is_requested[number] and self._state.place[number] != PASSING:
                return self._take(self._cursor, None)
            self._cursor += 1
        return None

    def set_on_disk(self, samples: slice) -> None:
        """Let these samples not be asked for, as they are on the disk."""
        self._is_requested[self._samples.number[samples]] = True

    def set_missing(self, samples: slice) -> None:
        """Let these samples be asked for once more."""
        self._is_requested[self._samples.number[samples]] = False
        self._cursor = min(self._cursor, samples.start)

    def set_dropped(self, numbers: list[int]) -> None:
        """Let samples that passed through, by their numbers in the State,
        be asked for when they are wanted again."""
        self._is_requested[numbers] = False

    def _take(self, first: int, chosen: Optional[np.ndarray]) -> slice:
        """Mark the samples from position `first` on as asked for, and return them as a unit: neighbours in
        one shard, up to UNIT_BYTES, but at least one. `chosen`, by number: those that may be in it; None:
        all."""
        samples = self._samples
        end = first
        while end < len(samples.number):
            number = samples.number[end]
            is_another_shard = samples.shard[end] != samples.shard[first]
            is_too_long = end > first and samples.end[end] - samples.begin[first] > UNIT_BYTES
            if (
                self._is_requested[number]
                or is_another_shard
                or is_too_long
                or not (chosen is None or chosen[number])
            ):
                break
            self._is_requested[number] = True
            end += 1
        return slice(first, end)
