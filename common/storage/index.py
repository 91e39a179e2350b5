"""What a folder remembers of a download: which object each file is, and which parts of a large one are there already."""

import contextlib
import json
import os
import threading
from collections.abc import Iterator

from common.storage.bucket import Item

INDEX = ".fetched.jsonl"


class Index:
    """Which object each file of the folder is: lines of JSON, of which the last one for a name counts."""

    def __init__(self, folder: str) -> None:
        self._folder, self._path, self._known = folder, os.path.join(folder, INDEX), {}
        with contextlib.suppress(FileNotFoundError), open(self._path, encoding="utf-8") as file:
            for line in file:
                with contextlib.suppress(ValueError, KeyError, TypeError):  # a line that a kill cut off
                    entry = json.loads(line)
                    self._known[entry["name"]] = (entry["size"], entry["etag"], entry["mtime"])
                    if entry["size"] is None:  # removed later
                        del self._known[entry["name"]]
        self._file = open(self._path, "a", buffering=1, encoding="utf-8")  # noqa: SIM115
        self._file.write("\n")
        self._lock = threading.Lock()

    def names(self) -> set[str]:
        return set(self._known)

    def has(self, name: str, item: Item) -> bool:
        """Whether the file is this object, and as it was written."""
        if known := self._known.get(name):
            with contextlib.suppress(OSError):
                status = os.stat(os.path.join(self._folder, name))
                return status.st_size == item.size and known == (item.size, item.etag, status.st_mtime_ns)
        return False

    def add(self, name: str, item: Item) -> None:
        mtime = os.stat(os.path.join(self._folder, name)).st_mtime_ns
        line = json.dumps({"name": name, "size": item.size, "etag": item.etag, "mtime": mtime})
        with self._lock:
            self._file.write(line + "\n")

    def remove(self, name: str) -> None:
        """Delete the file of an object that is no longer there."""
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(self._folder, name))
        self._file.write(json.dumps({"name": name, "size": None, "etag": None, "mtime": None}) + "\n")

    def close(self) -> None:
        with contextlib.suppress(OSError):  # a full disk has been reported already
            self._file.close()


class Parts:
    """NAME.part, and NAME.part.json: which object it is, then a line for each part that is in it."""

    def __init__(self, path: str, item: Item, part_bytes: int) -> None:
        self._part_bytes = part_bytes
        self._path, self._notes, self._size = f"{path}.part", f"{path}.part.json", item.size
        self.count, self.there = -(-item.size // part_bytes), set()
        identity = {"etag": item.etag, "size": item.size, "part": part_bytes}
        with contextlib.suppress(OSError, ValueError, IndexError), open(self._notes) as file:
            lines = file.read().split("\n")
            if json.loads(lines[0]) == identity and os.path.getsize(self._path) == item.size:
                self.there = {int(line) for line in lines[1:-1]}
        if not self.there:
            with open(self._path, "wb") as file:
                file.truncate(item.size)
            with open(self._notes, "w") as file:
                file.write(json.dumps(identity) + "\n")
        self._file, self._journal = os.open(self._path, os.O_RDWR), os.open(self._notes, os.O_WRONLY | os.O_APPEND)

    def length(self, number: int) -> int:
        return min(self._part_bytes, self._size - number * self._part_bytes)

    def chunks(self, number: int, largest: int) -> Iterator[memoryview]:
        """The bytes of a part that is there, a chunk at a time; each is valid until the next."""
        buffer = memoryview(bytearray(largest))
        begin, end = number * self._part_bytes, number * self._part_bytes + self.length(number)
        while begin < end:
            chunk = buffer[: min(largest, end - begin)]
            begin += os.preadv(self._file, [chunk], begin)
            yield chunk

    def write(self, place: int, content: bytes) -> None:
        rest = memoryview(content)
        while rest:
            written = os.pwrite(self._file, rest, place)
            rest, place = rest[written:], place + written

    def have(self, number: int) -> None:
        os.write(self._journal, b"%d\n" % number)

    def close(self) -> None:
        os.close(self._file)
        os.close(self._journal)

    def forget(self) -> None:
        os.unlink(self._notes)
        os.unlink(self._path)
