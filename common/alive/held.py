"""Detect that the kernel blocks a rank until a disk or a mount answers,
such as a hard NFS mount whose server is down."""

import contextlib
import os
import time
from collections.abc import Iterator
from typing import Optional

from common.alive import patience

DISK = "a disk or a mount"
# Without a look; shorter pauses are those of a busy machine.
ASLEEP_SECONDS = 6.0
# the kernel function that waits for the daemon of a FUSE mount: in state S, not D
FUSE = "request_wait_answer"


class BlockedThreads:
    """The threads of a rank and its child processes that the kernel blocks, and since when each is."""

    def __init__(self) -> None:
        # {a wait, as waits_of() yields it: when it was first seen}
        self._since: dict[tuple[int, str], float] = {}
        self._last_look = 0.0

    def blocked_since(self, pid: int) -> Optional[float]:
        """Return the time.monotonic() at which the longest wait of a thread began; None if no thread has been
        blocked for least_seconds(). It sees only what lasts from one call to the next, so call it again and
        again."""
        now = time.monotonic()
        if now - self._last_look > ASLEEP_SECONDS:
            self._since = {}  # this process was suspended, and the rank, too: count from now on
        if now - self._last_look >= least_seconds() / 5:
            # not at every call: there may be hundreds of threads
            self._since = {wait: self._since.get(wait, now) for wait in waits_of(pid)}
            self._last_look = now
        since = min(self._since.values(), default=now)
        return since if now - since > least_seconds() else None


def least_seconds() -> float:
    """Return how many seconds a thread must be blocked before it is reported;
    a disk that is only busy answers sooner."""
    return min(3.0, patience.limit() / 100)


def waits_of(pid: int) -> Iterator[tuple[int, str]]:
    """Yield (thread, number of its waits so far) for each blocked thread of `pid` or a child;
    a new wait has a new number."""
    for process in [pid, *children(pid)]:
        for thread in threads(process):
            with contextlib.suppress(OSError, IndexError):  # the thread has ended
                folder = f"/proc/{process}/task/{thread}"
                if state(folder) == "D" or _read(f"{folder}/wchan") == FUSE:
                    yield (
                        thread,
                        _read(f"{folder}/status").partition("\nvoluntary_ctxt_switches:")[2].split()[0],
                    )


def children(pid: int) -> Iterator[int]:
    """Yield the child processes of `pid` in its session; training does not wait for those in another one."""
    for thread in threads(pid):
        with contextlib.suppress(OSError):
            child_pids = map(int, _read(f"/proc/{pid}/task/{thread}/children").split())
            yield from (child for child in child_pids if _session(child) == os.getsid(pid))


def _session(pid: int) -> Optional[int]:
    with contextlib.suppress(OSError):  # it has ended
        return os.getsid(pid)
    return None


def threads(pid: int) -> list[int]:
    """Return the ids of the threads of a process; [] if it has ended."""
    with contextlib.suppress(OSError):
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    return []


def state(folder: str) -> str:
    """Return the letter of the state of a process or thread, such as D or T.

    `folder`: its folder below /proc.
    """
    return _read(f"{folder}/stat").rpartition(")")[2].split()[0]


def _read(path: str) -> str:
    with open(path) as file:
        return file.read()
