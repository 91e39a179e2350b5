"""A unit of samples comes from the bucket to its place, and counts as there once it was compared:
what a thread does."""

import dataclasses

from common.errors import UserError, one_line
from common.storage.bucket import ObjectChanged
from common.storage.download import MAX_ATTEMPTS, Damaged
from common.storage.ranges import Ranges
from datasets.crc import crc32
from datasets.packs.passing import Passing
from datasets.packs.plan import UNIT_BYTES, Samples
from datasets.packs.shards import ShardFile
from datasets.packs.state import IN_ITS_SHARD, SignsOfLife, State


@dataclasses.dataclass(frozen=True)
class Arrived:
    """A thread has brought a unit to its place."""

    unit: slice
    shard: ShardFile
    size: int  # bytes
    was_on_disk: bool
    turn: int  # AHEAD or IN_TURN, as it was asked for


class UnitFetcher:
    """Fetches units, in any number of threads at a time."""

    def __init__(
        self, url: str, ranges: Ranges, samples: Samples, state: State, passing: Passing, life: SignsOfLife
    ) -> None:
        self._url = url  # for messages
        self._ranges = ranges
        self._samples = samples
        self._state = state
        self._passing = passing
        self._life = life

    def fetch(self, shard: ShardFile, unit: slice, turn: int) -> Arrived:
        """Bring the bytes of a unit to their place, and then say that its samples are there."""
        was_on_disk = False
        if shard.is_passing:
            size = self._fetch_to_pass(shard, unit)
        else:
            was_on_disk = self._fetch_to_keep(shard, unit)
            size = int(self._samples.end[unit.stop - 1] - self._samples.begin[unit.start])
        self._life.note_progress()
        return Arrived(unit, shard, size, was_on_disk, turn)

    def _fetch_to_pass(self, shard: ShardFile, unit: slice) -> int:
        """Write each sample to a file of its own. Return how many bytes came."""
        begin, end = self._bounds_of_samples(unit)
        content = memoryview(self._read_verified(shard, unit, begin, end))
        for number, offset, length, _ in self._samples.rows(unit):
            self._passing.write(number, content[offset - begin :][:length])
        return end - begin

    def _fetch_to_keep(self, shard: ShardFile, unit: slice) -> bool:
        """Bring the unit into its shard, and say that its samples are there.

        Return whether an earlier start had left them.

        If so, nothing is fetched: the SHA-256 of the shard verifies what lies around them. Else one request
        brings the samples and up to UNIT_BYTES before and after them. The rest of longer gaps, as in shards
        that other programs have made, comes when the samples can be read already.
        """
        samples = self._samples
        unit_begin = int(samples.begin[unit.start])
        unit_end = int(samples.end[unit.stop - 1])
        samples_begin, samples_end = self._bounds_of_samples(unit)
        request_begin = max(unit_begin, samples_begin - UNIT_BYTES)
        request_end = min(unit_end, samples_end + UNIT_BYTES)
        if shard.may_have_bytes:
            on_disk = shard.read(request_end - request_begin, request_begin)
            if self._has_checksums(unit, on_disk, request_begin):
                self._state.place[samples.number[unit]] = IN_ITS_SHARD
                return True
        shard.write(self._read_verified(shard, unit, request_begin, request_end), request_begin)
        self._state.place[samples.number[unit]] = IN_ITS_SHARD
        self._fetch_between(shard, unit_begin, request_begin)
        self._fetch_between(shard, request_end, unit_end)
        return False

    def _fetch_between(self, shard: ShardFile, begin: int, end: int) -> None:
        """Bring bytes that belong to no sample."""
        for offset in range(begin, end, UNIT_BYTES):
            length = min(UNIT_BYTES, end - offset)
            shard.write(self._read_range(shard, offset, length), offset)
            self._life.note_progress()

    def _read_verified(self, shard: ShardFile, unit: slice, begin: int, end: int) -> bytes:
        """Return these bytes of the object, in which the unit's samples have the checksums of the index."""
        for _ in range(MAX_ATTEMPTS):
            content = self._read_range(shard, begin, end - begin)
            if self._has_checksums(unit, content, begin):
                return content
        range_text = f"{one_line(self._url)}/{shard.name}, {end - begin} bytes from {begin} on"
        raise Damaged(f"{range_text}, arrived {MAX_ATTEMPTS} times with others than its index says")

    def _read_range(self, shard: ShardFile, begin: int, length: int) -> bytes:
        try:
            return self._ranges.read(shard.item, begin, length)
        except ObjectChanged:
            raise UserError(
                f"{one_line(self._url)}/{shard.name} has changed since this run began: start again"
            ) from None

    def _has_checksums(self, unit: slice, content: bytes, begin: int) -> bool:
        """Return whether the unit's samples in these bytes, from `begin` of the shard on,
        have their checksums."""
        view = memoryview(content)
        return all(
            crc32(view[offset - begin :][:length]) == checksum
            for _, offset, length, checksum in self._samples.rows(unit)
        )

    def _bounds_of_samples(self, unit: slice) -> tuple[int, int]:
        """Return where the first sample of a unit begins in its shard, and where the last one ends."""
        samples = self._samples
        last = unit.stop - 1
        return int(samples.offset[unit.start]), int(samples.offset[last] + samples.length[last])
