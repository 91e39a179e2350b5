"""The files of a pack's shards: each grows in .fetching,
and gets its name once it is whole and its SHA-256 is right."""

import contextlib
import dataclasses
import glob
import json
import os
import threading
from typing import Callable, Optional, Union

from common.files import read_json_dict, sha256, write_at, write_atomically
from common.storage import index, once
from common.storage.bucket import Item
from common.storage.index import Index
from common.storage.listing import DISK_BLOCK
from datasets.packs.state import all_states, lease


@dataclasses.dataclass(eq=False)
class ShardFile:
    """A shard of the pack, and how much of it this process has fetched.

    Only the fetcher's main thread changes it, until all samples have come; then the thread that finishes it
    does.
    """

    name: str
    size: int
    sha256: str
    item: Item  # the object in the bucket
    samples: slice  # the positions of its samples in Samples
    growing_path: str  # of its file until it is whole
    file: int = -1  # the descriptor of that file
    is_whole: bool = False
    is_passing: bool = False  # it is not kept on the disk: its samples are fetched again in each epoch
    missing: int = 0  # samples that have not come
    may_have_bytes: bool = False  # an earlier start has left the growing file, which may have right bytes

    def bytes_to_come(self) -> int:
        """Return how many bytes of the disk an unfinished shard still needs."""
        if not os.path.exists(self.growing_path):
            return self.size
        on_disk = os.stat(self.growing_path).st_blocks * DISK_BLOCK  # in whole blocks, so it may be more
        return max(0, self.size - on_disk)

    def read(self, length: int, offset: int) -> bytes:
        return os.pread(self.file, length, offset)

    def write(self, content: Union[bytes, memoryview], offset: int) -> None:
        write_at(self.file, content, offset)


class ShardFolder:
    """Owns the files of the shards in a folder, and the records of what was verified there."""

    def __init__(self, folder: str, trusts_digests: bool, on_progress: Callable[[], None]) -> None:
        """`trusts_digests`: whether a file whose bytes had the digest of their object when they came is not
        hashed again; samples are checked at each read. `on_progress`: called after each file that was
        hashed."""
        self._folder = folder
        self._trusts_digests = trusts_digests
        self._on_progress = on_progress
        self.fetched = Index(folder)  # which object each file is
        self._verified = Verified(folder)

    def path(self, shard: ShardFile) -> str:
        return os.path.join(self._folder, shard.name)

    def verify(self, shard: ShardFile) -> bool:
        """Return whether the shard's file is there and right. It is read whole if that is not known yet."""
        was_fetched = self._trusts_digests and shard.item.digest and self.fetched.has(shard.name, shard.item)
        if was_fetched or self._verified.has(shard):
            return True
        path = self.path(shard)
        is_right = index.has_size(path, shard.size) and self._sha256(path) == shard.sha256
        if is_right:
            self._verified.add(shard)
        return is_right

    def verify_or_delete(self, shard: ShardFile) -> bool:
        """Return whether the shard's file is there and right, before any fetch; delete it if it is wrong."""
        path = self.path(shard)
        status = None
        with contextlib.suppress(OSError):
            status = os.stat(path)
        is_right = self.verify(shard)
        with contextlib.suppress(OSError):
            # Not one that came meanwhile, from another node.
            if status and not is_right and os.path.samestat(status, os.stat(path)):
                os.unlink(path)
        return is_right

    def _sha256(self, path: str) -> str:
        digest = sha256(path)
        self._on_progress()
        return digest

    def begin(self, shard: ShardFile) -> None:
        """Open the file in which an unfinished shard grows, and set `file`, `missing` and `may_have_bytes`.

        It gets its full size, as a hole, unless an earlier start has left it so.
        """
        shard.may_have_bytes = index.has_size(shard.growing_path, shard.size)
        shard.missing = shard.samples.stop - shard.samples.start
        shard.file = os.open(shard.growing_path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        os.ftruncate(shard.file, shard.size)

    def finish(self, shard: ShardFile) -> bool:
        """Once all samples of a shard have come: give it its name, and return True.

        False if it is not what the index says.

        What is wrong then lies between the samples, which were compared already.
        """
        try:
            self._give_name(shard)
        except FileNotFoundError:  # another node has just given it its name
            self._give_name(shard)
        return shard.is_whole

    def _give_name(self, shard: ShardFile) -> None:
        """Give the growing file the shard's name if its SHA-256 is right,
        or delete it if the right file is there already.

        `is_whole` says whether one of them was so. FileNotFoundError if another node has renamed it.
        """
        path = self.path(shard)
        if index.has_size(path, shard.size) and self.verify(shard):  # another process has fetched it, too
            with contextlib.suppress(FileNotFoundError):
                os.unlink(shard.growing_path)
            shard.is_whole = True
        elif self._sha256(shard.growing_path) == shard.sha256:
            os.fsync(shard.file)
            os.replace(shard.growing_path, path)
            self._verified.add(shard)
            shard.is_whole = True

    def record(self, shard: ShardFile) -> None:
        """Record which object a whole shard is, for other ways of fetching."""
        if not self.fetched.has(shard.name, shard.item):
            self.fetched.add(shard.name, shard.item)

    def delete_growing_except(self, current_paths: set[str]) -> None:
        """Delete all growing files but these: they are of an earlier version, which nobody fetches."""
        for path in growing_files(self._folder):
            if path not in current_paths:
                delete_growing(path)


class Verified:
    """The record, in the folder, of files that had the SHA-256 that the pack's index has for them:
    it holds until they change.

    The index of what was fetched does not replace it: that says which object a file is, and not that the
    object is the shard.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._path = os.path.join(index.make_records_folder(folder), "arrived.json")
        self._identities = read_json_dict(self._path)
        self._lock = threading.Lock()

    def has(self, shard: ShardFile) -> bool:
        identity = self._identity(shard)
        return identity is not None and self._identities.get(shard.name) == identity

    def add(self, shard: ShardFile) -> None:
        with self._lock:
            self._identities[shard.name] = self._identity(shard)
            # another node writes it, too; without it, the next start reads the file again
            with contextlib.suppress(OSError):
                write_atomically(self._path, json.dumps(self._identities).encode())

    def _identity(self, shard: ShardFile) -> Optional[list]:
        """Return what changes when the file does; None if there is no file."""
        with contextlib.suppress(OSError):
            status = os.lstat(os.path.join(self._folder, shard.name))
            return [shard.sha256, status.st_size, status.st_mtime_ns]
        return None


def growing_path(folder: str, shard: str, sha256: str) -> str:
    """Return the path of a shard's file until it is whole."""
    return f"{index.unfinished_path(folder, f'{shard} {sha256}')}.arriving"


def growing_files(folder: str) -> list[str]:
    """Return the paths of all growing files of a folder, of any version of a pack."""
    return glob.glob(f"{glob.escape(index.make_records_folder(folder))}/*.arriving")


def drop_unfinished(folder: str) -> None:
    """Delete the growing files of unfinished shards, of which the fetch of whole objects has no use.

    Nothing is deleted while a process fetches any version of the pack to this folder.
    """
    if all(once.is_free(lease(path)) for path in all_states(folder)):
        for path in growing_files(folder):
            delete_growing(path)


def delete_growing(path: str) -> None:
    """Delete a growing file, if it is still there."""
    with contextlib.suppress(FileNotFoundError):  # another rank or node deletes it, too
        os.unlink(path)
