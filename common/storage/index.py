"""What a folder remembers of a download: which object each file is, and which parts of a large one are there already."""

import contextlib
import json
import os
import threading

INDEX = ".fetched.jsonl"


class Index:
    """Which object each file of the folder is: a line of JSON for each, the last one counts."""

    def __init__(self, folder):
        self._folder, self._path, self._known = folder, os.path.join(folder, INDEX), {}
        with contextlib.suppress(FileNotFoundError), open(self._path, encoding="utf-8") as file:
            for line in file:
                with contextlib.suppress(ValueError, KeyError, TypeError):  # the line that a kill broke off
                    entry = json.loads(line)
                    self._known[entry["name"]] = (entry["size"], entry["etag"], entry["mtime"])
                    if entry["size"] is None:  # removed since
                        del self._known[entry["name"]]
        self._file = open(self._path, "a", buffering=1, encoding="utf-8")  # noqa: SIM115
        self._file.write("\n")
        self._lock = threading.Lock()

    def names(self):
        return set(self._known)

    def has(self, name, item):
        known = self._known.get(name)
        if known is None or known[:2] != (item.size, item.etag):
            return False
        try:
            status = os.stat(os.path.join(self._folder, name))
        except OSError:
            return False
        return (status.st_size, status.st_mtime_ns) == (item.size, known[2])

    def add(self, name, item):
        mtime = os.stat(os.path.join(self._folder, name)).st_mtime_ns
        line = json.dumps({"name": name, "size": item.size, "etag": item.etag, "mtime": mtime})
        with self._lock:
            self._file.write(line + "\n")

    def remove(self, name):
        """The object is no more, so the file goes too."""
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(self._folder, name))
        self._file.write(json.dumps({"name": name, "size": None, "etag": None, "mtime": None}) + "\n")

    def close(self):
        with contextlib.suppress(OSError):  # a full disk, which has been said already
            self._file.close()


class Parts:
    """NAME.part, and NAME.part.json: which object it is, then a line for each part that is in it."""

    def __init__(self, path, item, part):
        self._part_bytes = part
        self._path, self._notes, self._size = f"{path}.part", f"{path}.part.json", item.size
        self.count, self.there = -(-item.size // part), set()
        identity = {"etag": item.etag, "size": item.size, "part": part}
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

    def length(self, number):
        return min(self._part_bytes, self._size - number * self._part_bytes)

    def chunks(self, number, largest):
        """The bytes of a part that is there, in one buffer after the other; each is valid until the next."""
        buffer = memoryview(bytearray(largest))
        begin, end = number * self._part_bytes, number * self._part_bytes + self.length(number)
        while begin < end:
            chunk = buffer[: min(largest, end - begin)]
            begin += os.preadv(self._file, [chunk], begin)
            yield chunk

    def write(self, place, content):
        rest = memoryview(content)
        while rest:
            written = os.pwrite(self._file, rest, place)
            rest, place = rest[written:], place + written

    def have(self, number):
        os.write(self._journal, b"%d\n" % number)

    def close(self):
        os.close(self._file)
        os.close(self._journal)

    def forget(self):
        os.unlink(self._notes)
        os.unlink(self._path)
