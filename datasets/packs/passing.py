"""What the disk has no room for: samples whose shards are not kept,
each a file of its own until it was read."""

import collections
import contextlib
import os
import shutil
import time
from collections.abc import Sequence
from typing import Union

from common.errors import UserError, one_line
from common.files import MIB, create
from common.storage import listing
from datasets.packs.shards import ShardFile
from datasets.packs.state import IN_ITS_FILE, PASSING, WAITING, State, passing_folder, request_cutoff

SHARE = 20  # once samples that pass through have 1/SHARE of the disk,
MOST_BYTES = 1 << 30  # or so much, only those for which a reader waits are asked for
DROP_SECONDS = 0.05  # between two looks at what was read


class Passing:
    """Owns the files of samples that pass through, and says in the State whether each is there.

    While they have more than `most_bytes`, only samples for which a reader waits are asked for, and drop()
    deletes old ones. write() is for any thread, the rest for the fetcher's own.
    """

    def __init__(self, path: str, state: State) -> None:
        """`path`: of the State's file. The samples that passed through for an earlier start are deleted."""
        self.most_bytes = 0  # set by Fetcher.run()
        self._folder = passing_folder(path)
        self._state = state
        self._oldest_first: collections.deque[tuple[int, int]] = collections.deque()  # (number, bytes)
        self._bytes = 0
        self._last_check = 0.0  # when drop() last looked
        shutil.rmtree(self._folder, ignore_errors=True)

    def write(self, number: int, content: Union[bytes, memoryview]) -> None:
        """Write a sample to a file of its own, and say that it is there. count() follows,
        in the fetcher's own thread."""
        os.makedirs(self._folder, exist_ok=True)
        path = self._path(number)
        with create(f"{path}.new") as file:
            file.write(content)
        os.replace(f"{path}.new", path)
        self._state.place[number] = IN_ITS_FILE

    def count(self, number: int, size: int) -> None:
        """Count the file of a sample that write() has written, as the newest."""
        self._oldest_first.append((number, size))
        self._bytes += size

    def has_room(self) -> bool:
        """Return whether samples may be asked for that no reader waits for."""
        return self._bytes <= self.most_bytes

    def drop(self) -> list[int]:
        """While the files have too many bytes, delete the oldest ones that nobody wants,
        and return their numbers.

        A sample that was wanted too long ago no longer is. Called again within DROP_SECONDS, it does nothing.
        """
        if time.monotonic() - self._last_check < DROP_SECONDS:
            return []
        self._last_check = time.monotonic()
        cutoff = request_cutoff()
        dropped = []
        kept = []
        while self._oldest_first and not self.has_room():
            number, size = self._oldest_first.popleft()
            requested_at = int(self._state.requested_at[number])
            # 0: not wanted; soon after a boot, the cutoff is below it.
            is_recent = requested_at != 0 and requested_at > cutoff
            if requested_at == WAITING or is_recent:
                kept.append((number, size))
                continue
            self._state.place[number] = PASSING
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path(number))
            self._bytes -= size
            dropped.append(number)
        self._oldest_first.extendleft(reversed(kept))  # in front again, in their order
        return dropped

    def _path(self, number: int) -> str:
        return os.path.join(self._folder, str(number))


def choose_passing_shards(
    missing: Sequence[ShardFile], folder: str, pack_bytes: int, keeps_shards: bool
) -> int:
    """Set `is_passing` of the shards that are not kept: the last, for which the disk of `folder` has no room.

    Return how many bytes of samples may pass through before only those are fetched for which a reader waits.
    Warn if some pass for want of room; UserError if the disk is full.
    `missing`: the shards that are not whole; `pack_bytes`: of all shards; without `keeps_shards` none is
    kept.
    """
    disk = os.statvfs(folder)
    room = disk.f_bavail * disk.f_frsize - listing.SPARE
    needed = {shard: shard.bytes_to_come() for shard in missing}
    if sum(needed.values()) <= (max(0, room) if keeps_shards else 0):
        return 0
    if room <= 0:
        shortage = f"{one_line(folder)} has {max(0, room + listing.SPARE) // MIB} MiB free"
        raise UserError(
            f"{shortage}, too few for a pack that passes through: give --input_dir on a larger disk"
        )
    share = disk.f_blocks * disk.f_frsize // SHARE
    sample_bytes = min(share, MOST_BYTES, room // 2)
    reserved_bytes = share  # what others write, as checkpoints
    room_left = room - sample_bytes - reserved_bytes if keeps_shards else 0
    for shard, size in needed.items():
        room_left -= size
        shard.is_passing = room_left < 0
    if keeps_shards:
        passing_bytes = sum(shard.size for shard in missing if shard.is_passing)
        passing_text = f"{passing_bytes // MIB} of {pack_bytes // MIB} MiB, which come again in every epoch"
        print(
            (
                f"warning: {one_line(folder)} has no room for {passing_text}: --input_dir on a larger disk "
                "keeps all"
            ),
            flush=True,
        )
    return sample_bytes
