"""What the disk has no room for: samples whose shards are not kept, each a file of its own until it was read."""

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
from datasets.packs.state import IN_ITS_FILE, NOW, PASSES, State, long_ago, passing_folder

SHARE = 20  # once samples that pass through have 1/SHARE of the disk,
MOST_BYTES = 1 << 30  # or so much, only those for which a reader waits are asked for
DROP_SECONDS = 0.05  # between two looks at what was read


class Passing:
    """Owns the files of samples that pass through, and says in the State whether each is there.

    While they have more than `most_bytes`, only samples for which a reader waits are asked for, and drop() deletes old ones.
    write() is for any thread, the rest for the fetcher's own.
    """

    def __init__(self, path: str, state: State) -> None:
        """`path`: of the State's file. The samples that passed through for an earlier start are deleted."""
        self.most_bytes = 0  # set by Fetcher.run()
        self._folder = passing_folder(path)
        self._state = state
        self._oldest_first: collections.deque[tuple[int, int]] = collections.deque()  # (number, bytes)
        self._bytes = 0
        self._looked = 0.0  # when drop() last looked
        shutil.rmtree(self._folder, ignore_errors=True)

    def write(self, number: int, content: Union[bytes, memoryview]) -> None:
        """Write a sample to a file of its own, and say that it is there. count() follows, in the fetcher's own thread."""
        os.makedirs(self._folder, exist_ok=True)
        path = self._path(number)
        with create(f"{path}.new") as file:
            file.write(content)
        os.replace(f"{path}.new", path)
        self._state.place[number] = IN_ITS_FILE

    def count(self, number: int, size: int) -> None:
        self._oldest_first.append((number, size))
        self._bytes += size

    def has_room(self) -> bool:
        return self._bytes <= self.most_bytes

    def drop(self) -> list[int]:
        """While the files have too many bytes, delete the oldest ones that nobody wants, and return their numbers.

        A sample that was wanted too long ago no longer is. Called again within DROP_SECONDS, it does nothing.
        """
        if time.monotonic() - self._looked < DROP_SECONDS:
            return []
        self._looked = time.monotonic()
        too_old = long_ago()
        dropped = []
        kept = []
        while self._oldest_first and not self.has_room():
            number, size = self._oldest_first.popleft()
            since = int(self._state.wanted[number])
            is_wanted = since == NOW or (
                since != 0 and since > too_old
            )  # 0: not wanted; soon after a boot, too_old is below it
            if is_wanted:
                kept.append((number, size))
                continue
            self._state.place[number] = PASSES
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path(number))
            self._bytes -= size
            dropped.append(number)
        self._oldest_first.extendleft(reversed(kept))  # in front again, in their order
        return dropped

    def _path(self, number: int) -> str:
        return os.path.join(self._folder, str(number))


def choose_what_passes(missing: Sequence[ShardFile], folder: str, pack_bytes: int, keeps: bool) -> int:
    """Set `passes` of the shards that are not kept: the last, for which the disk of `folder` has no room; all unless `keeps`.

    Return how many bytes of samples may pass through before only those are fetched for which a reader waits. Warn if some pass
    for want of room; UserError if the disk is full. `missing`: the shards that are not whole; `pack_bytes`: of all shards.
    """
    disk = os.statvfs(folder)
    room = disk.f_bavail * disk.f_frsize - listing.SPARE
    needed = {shard: shard.bytes_to_come() for shard in missing}
    if sum(needed.values()) <= (max(0, room) if keeps else 0):
        return 0
    if room <= 0:
        free = f"{one_line(folder)} has {max(0, room + listing.SPARE) // MIB} MiB free"
        raise UserError(f"{free}, too few for a pack that passes through: give --input_dir on a larger disk")
    share = disk.f_blocks * disk.f_frsize // SHARE
    for_samples = min(share, MOST_BYTES, room // 2)
    for_others = share  # what others write, as checkpoints
    room_left = room - for_samples - for_others if keeps else 0
    for shard, size in needed.items():
        room_left -= size
        shard.passes = room_left < 0
    if keeps:
        passing_bytes = sum(shard.size for shard in missing if shard.passes)
        without_room = f"{passing_bytes // MIB} of {pack_bytes // MIB} MiB, which come again in every epoch"
        print(f"warning: {one_line(folder)} has no room for {without_room}: --input_dir on a larger disk keeps all", flush=True)
    return for_samples
