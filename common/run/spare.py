"""Files that a run can do without: where one cannot be written, a warning says so, it is tried again, and the run goes on."""

import os
import threading
from typing import Callable, Union

from common.files import append, write_atomically


class Spare:
    """What could not be written is kept, and tried again with the next file and at the end. Any thread may write."""

    def __init__(self, say: Callable[[str], None]):
        self._say, self._warned = say, set()
        self._lock = threading.RLock()  # a signal's handler may come in the midst of a write
        self._owed: dict[str, tuple[Union[bytes, memoryview], bool]] = {}  # {path: (content, whether it is appended)}

    def write(self, path: str, content: bytes) -> None:
        with self._lock:
            self._owed[path] = content, False
        self.retry()

    def append(self, path: str, content: bytes) -> None:
        with self._lock:
            self._owed[path] = bytes(self._owed.get(path, (b"", True))[0]) + content, True
        self.retry()

    def retry(self) -> None:
        with self._lock:
            told = list(self._write_all())
        for text in told:  # who hears it may write a line of its own
            self._say(text)

    def _write_all(self):
        for path, (content, appended) in list(self._owed.items()):
            try:
                os.makedirs(os.path.dirname(path), exist_ok=True)
                if appended:
                    with open(path, "ab", buffering=0) as file:
                        append(file, content)
                else:
                    write_atomically(path, content)
            except OSError as error:
                if path not in self._warned:
                    yield f"warning: {path} cannot be written: {error.strerror or error}; the run goes on and tries it again"
                self._warned.add(path)
                continue
            self._owed.pop(path, None)
            if path in self._warned:
                self._warned.remove(path)
                yield f"{path} is written again"
