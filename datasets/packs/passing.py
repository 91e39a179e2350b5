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
    """Owns the files of samples that pass through, and says in the State that they are there. `most_bytes`: see choose()."""

    def __init__(self, path: str, state: State) -> None:
        """`path`: of the State. What an earlier start has left is deleted."""
        self.most_bytes = 0  # until choose() has said
        self._folder = passing_folder(path)
        self._state = state
        self._oldest_first: collections.deque[tuple[int, int]] = collections.deque()  # (number, bytes)
        self._bytes = 0
        self._looked = 0.0  # when drop() last looked
        shutil.rmtree(self._folder, ignore_errors=True)  # of an earlier start

    def write(self, number: int, content: Union[bytes, memoryview]) -> None:
        """Write a sample, and say that it is there. From any thread; count() follows in the fetcher's own."""
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
        """If they have too many bytes, delete the oldest but those that are wanted. Return the numbers of the deleted.

        Between two looks are DROP_SECONDS, in which it does nothing.
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
            if since == NOW or (since and since > too_old):  # soon after a boot, too_old is below 0
                kept.append((number, size))
                continue
            self._state.place[number] = PASSES
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path(number))
            self._bytes -= size
            dropped.append(number)
        self._oldest_first.extendleft(reversed(kept))
        return dropped

    def _path(self, number: int) -> str:
        return os.path.join(self._folder, str(number))


def choose(missing: Sequence[ShardFile], folder: str, whole_pack: int, keeps: bool) -> int:
    """Set `passes` of the last shards, for which the disk of `folder` has no room; of all unless `keeps`.

    Return above how many bytes of samples that pass through no more are asked for. `whole_pack`: bytes of all shards.
    """
    disk = os.statvfs(folder)
    room = disk.f_bavail * disk.f_frsize - listing.SPARE
    needed = {shard: shard.bytes_to_come() for shard in missing}
    if keeps and sum(needed.values()) <= room:
        return 0
    if room <= 0:
        free = f"{one_line(folder)} has {max(0, room + listing.SPARE) // MIB} MiB free"
        raise UserError(f"{free}, too few for a pack that passes through: give --input_dir on a larger disk")
    share = disk.f_blocks * disk.f_frsize // SHARE
    most_bytes = min(share, MOST_BYTES)
    for_shards = room - most_bytes - share if keeps else 0  # another share is for what others write, as checkpoints
    for shard, size in needed.items():
        for_shards -= size
        shard.passes = for_shards < 0
    if keeps:
        passing_bytes = sum(shard.size for shard in missing if shard.passes)
        without_room = f"{passing_bytes // MIB} of {whole_pack // MIB} MiB, which come again in every epoch"
        print(f"warning: {one_line(folder)} has no room for {without_room}: --input_dir on a larger disk keeps all", flush=True)
    return most_bytes
