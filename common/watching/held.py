"""Detect that the kernel blocks a rank until a disk or a mount answers, such as a hard NFS mount whose server is down."""

import contextlib
import os
import time
from collections.abc import Iterator
from typing import Optional

from common import patience

DISK = "a disk or a mount"
FUSE = "request_wait_answer"  # where the kernel waits for the program behind a mount; that counts as sleep, not as state D


class Held:
    """The threads of a rank and of its loader processes that the kernel blocks, and since when."""

    def __init__(self) -> None:
        self._since: dict[tuple[int, str], float] = {}  # {a wait of a thread: when it was found}
        self._looked = 0.0

    def look(self, pid: int) -> Optional[float]:
        """Since when one of them has been held, if that is long enough to count."""
        now = time.monotonic()
        if now - self._looked > 2 * least_seconds():  # nobody has asked meanwhile
            self._since = {}
        if now - self._looked >= least_seconds() / 5:  # there may be hundreds of threads
            self._since = {wait: self._since.get(wait, now) for wait in waits_of(pid)}
            self._looked = now
        since = min(self._since.values(), default=now)
        return since if now - since > least_seconds() else None


def least_seconds() -> float:
    """A busy disk answers sooner."""
    return min(3.0, patience.limit() / 100)


def waits_of(pid: int) -> Iterator[tuple[int, str]]:
    """Yield each thread that is held, and how often it has waited for anything: of a slow disk it waits again and again."""
    for process in [pid, *children(pid)]:
        for thread in threads(process):
            with contextlib.suppress(OSError, IndexError):  # it has ended
                place = f"/proc/{process}/task/{thread}"
                if state(place) == "D" or _read(f"{place}/wchan") == FUSE:
                    yield thread, _read(f"{place}/status").partition("\nvoluntary_ctxt_switches:")[2].split()[0]


def children(pid: int) -> Iterator[int]:
    for thread in threads(pid):
        with contextlib.suppress(OSError):
            yield from map(int, _read(f"/proc/{pid}/task/{thread}/children").split())


def threads(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    return []


def state(place: str) -> str:
    """Return the letter that the kernel has for it."""
    return _read(f"{place}/stat").rpartition(")")[2].split()[0]


def _read(path):
    with open(path) as file:
        return file.read()
