"""The log lines and the optional files of a run.

If a file cannot be written, there is a warning, and the run goes on.
"""

import errno
import os
import threading
from collections.abc import Iterator
from typing import Callable, NamedTuple, Union

from common import progress
from common.files import (
    TakenOver,
    append,
    drop_partial_line,
    is_taken_over,
    replace_with_copy,
    write_atomically,
)


class _Pending(NamedTuple):
    """Content that was not written yet."""

    content: Union[bytes, memoryview]
    is_appended: bool  # else it replaces the file


class SideFiles:
    """The lines of a run's log, and the files in its folder that it can do without.

    Content that cannot be written is kept, and tried again with the next file and at the end. Any thread may
    write."""

    def __init__(self, folder: str, shows: bool = True, writes: bool = True):
        """`shows`: this rank shows the log; `writes`: it writes files. Both may change in an elastic job."""
        self.shows = shows
        self.writes = writes
        self._folder = folder
        self._inodes: dict[str, int] = {}  # {file that is appended to: inode of this start's copy}
        self._begin_in_process(progress.say)

    def _begin_in_process(self, say: Callable[[str], None]) -> None:
        """Set what a process has of its own.

        Called again in a forked loader process, where another thread may have the lock and what is pending is
        for the run's own process to write."""
        self._say = say
        self._pid = os.getpid()
        self._warned: set[str] = set()  # paths that could not be written
        self._lock = threading.RLock()
        self._pending: dict[str, _Pending] = {}  # {path: what is to be written}

    def say(self, text: str) -> None:
        """Print a line of the log, if this rank shows it."""
        if self.shows:
            self._say(text)

    def write(self, name: str, content: bytes) -> None:
        """Replace a file of the folder, if this rank writes; `name` may contain folders."""
        self._enqueue(name, _Pending(content, is_appended=False))

    def append(self, name: str, content: bytes) -> None:
        """Append to a file of the folder, if this rank writes."""
        self._enqueue(name, _Pending(content, is_appended=True))

    def _enqueue(self, name: str, addition: _Pending) -> None:
        """Add content to what is pending, and try to write all of it."""
        if not self.writes:
            return
        if os.getpid() != self._pid:
            # a loader process, which was forked while any thread of the run may have had the lock
            self._begin_in_process(print)
        path = os.path.join(self._folder, name)
        with self._lock:
            previous = self._pending.get(path)
            if previous and addition.is_appended:
                addition = _Pending(bytes(previous.content) + addition.content, previous.is_appended)
            self._pending[path] = addition
        self.retry()

    def retry(self) -> None:
        """Write what is pending. A file that fails is kept for the next call, with one warning."""
        with self._lock:
            lines = list(self._write_all())
        for line in lines:  # after _write_all, because an observer that gets the line may write a file
            self.say(line)

    def _write_all(self) -> Iterator[str]:
        """Write what is pending; yield a line for each file that begins to fail or is written again."""
        if is_taken_over():  # by a later start; the next save reports it
            self._pending.clear()
        for path, pending in list(self._pending.items()):
            try:
                os.makedirs(os.path.dirname(path), exist_ok=True)
                if pending.is_appended:
                    self._append(path, pending.content)
                else:
                    write_atomically(path, pending.content)
            except TakenOver:  # in this moment: what is pending is no longer wanted
                self._pending.clear()
                return
            except OSError as error:
                if path not in self._warned:
                    yield (
                        f"warning: {path} cannot be written: {error.strerror or error}; the run goes on and "
                        "tries it again"
                    )
                self._warned.add(path)
                continue
            self._pending.pop(path, None)
            if path in self._warned:
                self._warned.remove(path)
                yield f"{path} is written again"

    def _append(self, path: str, content: Union[bytes, memoryview]) -> None:
        """Append to a file, after replacing it by a copy that is this start's own;
        append nothing to a later start's copy."""
        if path not in self._inodes:
            if os.path.lexists(path) and not os.path.isfile(path):
                raise OSError(errno.EINVAL, "it is not a regular file")
            with replace_with_copy(path, os.O_APPEND) as replacement:
                drop_partial_line(replacement)
                self._inodes[path] = os.fstat(replacement.fileno()).st_ino
        with open(path, "ab", buffering=0) as file:
            if os.fstat(file.fileno()).st_ino == self._inodes[path] or not is_taken_over():
                append(file, content)
