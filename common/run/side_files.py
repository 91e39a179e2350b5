"""The log lines and the optional files of a run. If a file cannot be written, there is a warning, and the run goes on."""

import errno
import os
import threading
from typing import Callable, Union

from common import progress
from common.files import TakenOver, append, drop_half_a_line, is_taken_over, own_copy, write_atomically


class SideFiles:
    """Content that could not be written is kept, and tried again with the next file and at the end. Any thread may write."""

    def __init__(self, folder: str, shows: bool = True, writes: bool = True):
        """`shows`: this rank shows the log; `writes`: it writes files. Both may change in an elastic job."""
        self.shows = shows
        self.writes = writes
        self._folder = folder
        self._grow: dict[str, int] = {}  # {file that is appended to: inode of this start's copy}
        self._begin(progress.say)

    def _begin(self, say: Callable[[str], None]):
        self._say = say
        self._process = os.getpid()
        self._warned = set()
        self._lock = threading.RLock()
        self._owed: dict[str, tuple[Union[bytes, memoryview], bool]] = {}  # {path: (content, whether it is appended)}

    def say(self, text: str) -> None:
        if self.shows:
            self._say(text)

    def write(self, name: str, content: bytes) -> None:
        self._owe(name, content, appended=False)

    def append(self, name: str, content: bytes) -> None:
        self._owe(name, content, appended=True)

    def _owe(self, name: str, content: Union[bytes, memoryview], appended: bool) -> None:
        if not self.writes:
            return
        if os.getpid() != self._process:  # a loader process, forked from ours in the midst of anything
            self._begin(print)
        path = os.path.join(self._folder, name)
        with self._lock:
            before = bytes(self._owed.get(path, (b"", True))[0]) if appended else b""
            self._owed[path] = before + content, appended
        self.retry()

    def retry(self) -> None:
        with self._lock:
            told = list(self._write_all())
        for text in told:  # after _write_all, because an observer that gets the line may write a file
            self.say(text)

    def _write_all(self):
        if is_taken_over():  # by a later start; the next save reports it
            self._owed.clear()
        for path, (content, appended) in list(self._owed.items()):
            try:
                os.makedirs(os.path.dirname(path), exist_ok=True)
                if appended:
                    self._append(path, content)
                else:
                    write_atomically(path, content)
            except TakenOver:
                pass
            except OSError as error:
                if path not in self._warned:
                    yield f"warning: {path} cannot be written: {error.strerror or error}; the run goes on and tries it again"
                self._warned.add(path)
                continue
            self._owed.pop(path, None)
            if path in self._warned:
                self._warned.remove(path)
                yield f"{path} is written again"

    def _append(self, path: str, content: Union[bytes, memoryview]) -> None:
        """Append to a file, after replacing it by a copy that is this start's own; append nothing to a later start's copy."""
        if path not in self._grow:
            if os.path.lexists(path) and not os.path.isfile(path):
                raise OSError(errno.EINVAL, "it is not a regular file")
            with own_copy(path, os.O_APPEND) as own:
                drop_half_a_line(own)
                self._grow[path] = os.fstat(own.fileno()).st_ino
        with open(path, "ab", buffering=0) as file:
            if os.fstat(file.fileno()).st_ino == self._grow[path] or not is_taken_over():
                append(file, content)
