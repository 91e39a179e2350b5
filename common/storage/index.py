"""The records of a fetch in the subfolder .fetching: which object each file is,
and which parts of large objects are there.

No object and no address can have a name in .fetching, so data and records are never confused.
"""

import contextlib
import hashlib
import json
import os
import stat
import threading
from collections.abc import Iterator
from typing import NamedTuple, Optional, Union

from common.address import FETCHING, is_fetchable_name
from common.errors import raising_path_conflict
from common.files import create, refuse_link, write_at
from common.storage.item import Item

INDEX = "index.jsonl"


def make_records_folder(folder: str) -> str:
    """Return the subfolder .fetching for the records of a fetch; it is made if it is missing."""
    path = os.path.join(folder, FETCHING)
    refuse_link(path)
    with raising_path_conflict(path):
        os.makedirs(path, exist_ok=True)
    return path


def hashed_name(name: str) -> str:
    """Return a file name for an object whose own name may be too long or have characters that a file name
    cannot have."""
    return hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()


def has_size(path: str, size: int) -> bool:
    """Whether `path` is a regular file of this size."""
    with contextlib.suppress(OSError):
        status = os.lstat(path)
        return stat.S_ISREG(status.st_mode) and status.st_size == size
    return False


def unfinished_path(folder: str, name: str) -> str:
    """Return PATH for an object that is being fetched: it grows in PATH.part,
    and PATH.part.json records its parts."""
    return os.path.join(folder, FETCHING, hashed_name(name))


class Entry(NamedTuple):
    """What the index records of a file."""

    size: int
    etag: str
    mtime_ns: int


class Index:
    """The record of which object each file of a folder is: lines of JSON,
    of which the last one for a name counts."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        path = os.path.join(make_records_folder(folder), INDEX)
        refuse_link(path)
        with raising_path_conflict(path):
            self._entries = _read_index(path)
            self._file = open(path, "a", buffering=1, encoding="utf-8")  # noqa: SIM115
        self._file.write("\n")
        self._lock = threading.Lock()

    def names(self) -> set[str]:
        """Return the names of all files in the index."""
        return set(self._entries)

    def has(self, name: str, item: Optional[Item] = None) -> bool:
        """Return whether the file is recorded and unchanged since, and, if `item` is given,
        is that version of the object."""
        entry = self._entries.get(name)
        if entry is None:
            return False
        if item is not None and (entry.size, entry.etag) != (item.size, item.etag):
            return False
        with contextlib.suppress(OSError):
            status = os.lstat(os.path.join(self._folder, name))
            return (entry.size, entry.mtime_ns) == (status.st_size, status.st_mtime_ns)
        return False

    def add(self, name: str, item: Item) -> None:
        """Record that the file, as it is on the disk, has the bytes of `item`."""
        mtime = os.stat(os.path.join(self._folder, name)).st_mtime_ns
        line = json.dumps({"name": name, "size": item.size, "etag": item.etag, "mtime": mtime})
        with self._lock:
            self._entries[name] = Entry(item.size, item.etag, mtime)
            self._file.write(line + "\n")

    def remove(self, name: str) -> None:
        """Delete the file of an object that the bucket no longer has, if possible,
        and record in the index that it is gone."""
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(self._folder, name))
        line = json.dumps({"name": name, "size": None, "etag": None, "mtime": None})
        with self._lock:
            self._entries.pop(name, None)
            self._file.write(line + "\n")

    def close(self) -> None:
        with contextlib.suppress(OSError):  # a full disk has been reported already
            self._file.close()


def fetched_names(folder: str) -> set[str]:
    """Return the names of the files that the index of `folder` records as fetched;
    empty if there is no index."""
    return set(_read_index(os.path.join(folder, FETCHING, INDEX)))


def _read_index(path: str) -> dict[str, Entry]:
    """Return {name: Entry} of an index; empty if it is missing. Invalid lines and names are left out."""
    entries = {}
    with contextlib.suppress(FileNotFoundError), open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            # a line that was cut off or damaged
            with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
                entry = json.loads(line)
                if is_fetchable_name(entry["name"]):
                    entries[entry["name"]] = Entry(entry["size"], entry["etag"], entry["mtime"])
                    if entry["size"] is None:  # removed later
                        del entries[entry["name"]]
    return entries


class Parts:
    """An unfinished object in PATH.part.

    PATH.part.json states which object it is, and then each part that is there.
    """

    def __init__(self, path: str, item: Item, part_bytes: int) -> None:
        self._part_bytes = part_bytes
        self._path = f"{path}.part"
        self._journal_path = f"{path}.part.json"
        self._size = item.size
        self.count = -(-item.size // part_bytes)
        identity = {"etag": item.etag, "size": item.size, "part": part_bytes}
        self.fetched = self._read_fetched(identity)
        if not self.fetched:
            with create(self._path) as file:
                file.truncate(item.size)
            with create(self._journal_path) as file:
                file.write(json.dumps(identity).encode() + b"\n")
        self._file = os.open(self._path, os.O_RDWR | os.O_NOFOLLOW)
        self._journal = os.open(self._journal_path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW)

    def _read_fetched(self, identity: dict) -> set[int]:
        """Return the numbers of the recorded parts; empty if the files are not of this object."""
        with contextlib.suppress(OSError, ValueError, RecursionError):
            # lstat does not follow links
            statuses = [os.lstat(path) for path in (self._path, self._journal_path)]
            if (
                all(stat.S_ISREG(file_status.st_mode) for file_status in statuses)
                and statuses[0].st_size == self._size
            ):
                with open(self._journal_path) as file:
                    lines = file.read().split("\n")
                if json.loads(lines[0]) == identity:
                    return {int(line) for line in lines[1:-1]}
        return set()

    def length(self, number: int) -> int:
        """Return the size of a part in bytes; the last one may be shorter than the others."""
        return min(self._part_bytes, self._size - number * self._part_bytes)

    def chunks(self, number: int, largest: int) -> Iterator[memoryview]:
        """Yield the bytes of a part that is there, in chunks of at most `largest` bytes;
        each is valid until the next."""
        buffer = memoryview(bytearray(largest))
        begin = number * self._part_bytes
        end = number * self._part_bytes + self.length(number)
        while begin < end and (size := os.preadv(self._file, [buffer[: min(largest, end - begin)]], begin)):
            begin += size
            yield buffer[:size]

    def write(self, offset: int, content: Union[bytes, memoryview]) -> None:
        """Write bytes of the object at this offset; record() must follow once the part is complete."""
        write_at(self._file, content, offset)

    def record(self, number: int) -> None:
        """Record that all bytes of a part were written."""
        os.write(self._journal, b"%d\n" % number)

    def close(self) -> None:
        os.close(self._file)
        os.close(self._journal)

    def forget(self) -> None:
        """Delete the unfinished object and its record."""
        os.unlink(self._journal_path)
        os.unlink(self._path)
