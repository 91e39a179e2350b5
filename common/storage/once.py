"""Do work such as fetching data once per node: one process does it, and the other processes of the node wait.

The lease is a lock on a file, which the kernel releases when its owner dies. A later call does the work
again.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import random
import tempfile
import time
from collections.abc import Iterator
from typing import Any, Callable

from common.alive import heartbeat
from common.errors import TrainingFailed, UserError, one_line, raising_path_conflict
from common.files import refuse_link
from common.progress import TELL_SECONDS, Waiting
from common.secrets import mask

POLL_SECONDS = 0.1
CHECK_SECONDS = 10  # the longest wait for processes that only check a lock, and release it at once
RETRY_SECONDS = 0.05  # the longest pause between two attempts to take it
RANDOM = random.SystemRandom()  # not the generator from which a training draws


class Lease:
    """The note of the lease's owner to the processes that wait: a line of JSON in the lock file."""

    def __init__(self, file: int) -> None:
        self._file = file
        self.pulse = heartbeat.of_this_process()
        self._reported_at = 0.0

    def tell(self, text: str, progress: int = 0) -> None:
        """Report how far the work is, at most once a second;
        `progress` must change as long as the work goes on."""
        now = time.monotonic()
        if now - self._reported_at > TELL_SECONDS:
            self._reported_at = now
            self.pulse.set("fetch", progress)
            self.write(state="working", text=text)

    def write(self, **fields: object) -> None:
        """Write the note: `fields` as JSON, with the time and the boot of the machine."""
        content = json.dumps({**fields, "at": time.monotonic(), "boot": boot_id()}).encode().ljust(512)
        os.pwrite(self._file, content, 0)
        os.ftruncate(self._file, len(content))


def once_per_node(path: str, work: Callable[[Lease], object], request: str = "") -> None:
    """Call `work(lease)` in the process of a node that locks PATH.lock; others wait and raise its error,
    or work if it dies.

    `request`: an id of the work; a process whose id differs does its own work afterwards, under the same
    lock.
    """
    began = time.monotonic()
    folder = os.path.dirname(os.path.abspath(path))
    with raising_path_conflict(folder):
        os.makedirs(folder, exist_ok=True)
    file = _open_lock_file(path)
    lease = Lease(file)
    try:
        note = _wait(lease, file, path, began)
        is_of_this_work = note.get("what", "") == request
        if is_of_this_work and note.get("state") == "failed":
            kind = UserError if note.get("code") == UserError.exit_code else TrainingFailed
            raise kind(note["text"])
        if is_of_this_work and note.get("state") == "done":
            return
        lease.tell(f"preparing {os.path.dirname(path)}")
        try:
            work(lease)
        except (UserError, TrainingFailed) as error:
            lease.write(state="failed", what=request, text=mask(error)[:2000], code=error.exit_code)
            raise
        lease.write(state="done", what=request)
    finally:
        lease.pulse.set("start", 0)  # the work, or the wait for it, is over
        os.close(file)


@contextlib.contextmanager
def locked(path: str, refusal: str) -> Iterator[None]:
    """Hold the lock of `path` during the block; raise a UserError with the text `refusal` if another process
    holds it."""
    with if_free(path) as is_held:
        if not is_held:
            raise UserError(refusal)
        yield


@contextlib.contextmanager
def if_free(path: str) -> Iterator[bool]:
    """Hold the lock of `path` during the block, which is given True; or False,
    if another process holds it."""
    file = _open_lock_file(path)
    try:
        yield _try_lock(file)
    finally:
        os.close(file)


@contextlib.contextmanager
def when_free(path: str, goes_on: Callable[[], bool]) -> Iterator[bool]:
    """Hold the lock of `path` during the block, which is given True; or False,
    if goes_on() ended before the lock was free."""
    file = _open_lock_file(path)
    try:
        while goes_on():
            if _lock(file, fcntl.LOCK_EX):
                yield True
                return
            time.sleep(POLL_SECONDS * RANDOM.random())  # not in step with those that look at it
        yield False
    finally:
        os.close(file)


def is_free(path: str) -> bool:
    """Whether no process holds the lock of `path`.

    Others may ask at the same time, and do not take each other for holders.
    """
    file = _open_lock_file(path)
    try:
        was_free = _lock(file, fcntl.LOCK_SH)
        # at once, also if a process that was forked meanwhile has the file open
        fcntl.flock(file, fcntl.LOCK_UN)
        return was_free
    finally:
        os.close(file)


def _open_lock_file(path: str) -> int:
    """Open the file to lock: PATH.lock, or a file in this machine's temporary folder if the disk of PATH has
    no locks."""
    refuse_link(f"{path}.lock")
    with raising_path_conflict(f"{path}.lock"):
        file = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    try:
        if _lock(file, fcntl.LOCK_SH):
            fcntl.flock(file, fcntl.LOCK_UN)
        return file
    except OSError:
        os.close(file)
        name = hashlib.sha256(os.fsencode(os.path.abspath(path))).hexdigest()[:16]
        fallback_path = os.path.join(tempfile.gettempdir(), f"anyrank-{os.getuid()}-{name}.lock")
        return os.open(fallback_path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)


def _wait(lease: Lease, file: int, path: str, began: float) -> dict[str, Any]:
    """Wait for the lease and take it.

    Return the last owner's note if it is newer than `began` (time.monotonic), else {}.
    """
    waiting = Waiting()
    while not _lock(file, fcntl.LOCK_EX):
        note = _read_note(file)
        # so this process counts as stuck only if the owner is
        lease.pulse.set("fetch", int(note.get("at", 0)))
        if waiting.claim_line():
            print(f"waiting for another process of this node: {one_line(note.get('text', path))}", flush=True)
        time.sleep(POLL_SECONDS)
    note = _read_note(file)
    return note if note.get("boot") == boot_id() and note.get("at", 0) > began else {}


def boot_id() -> str:
    """Return an id of this boot of the machine, from which time.monotonic() counts;
    empty if the system gives none."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()
    return ""


def _try_lock(file: int) -> bool:
    """Take the lock unless another process holds it; wait for processes that only check it (is_free)."""
    deadline = time.monotonic() + CHECK_SECONDS
    while not _lock(file, fcntl.LOCK_EX):
        is_held = not _lock(file, fcntl.LOCK_SH)
        if is_held or time.monotonic() > deadline:
            return False
        fcntl.flock(file, fcntl.LOCK_UN)
        time.sleep(RETRY_SECONDS * RANDOM.random())
    return True


def _lock(file: int, kind: int) -> bool:
    """Take the lock (fcntl.LOCK_EX or LOCK_SH) without waiting; return whether that worked."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read_note(file: int) -> dict[str, Any]:
    """Return the note in the lock file; {} if there is none or it is damaged."""
    # the file may hold anything
    with contextlib.suppress(ValueError, OSError, TypeError, KeyError, RecursionError):
        note = json.loads(os.pread(file, 8192, 0))
        return note if 0 <= note["at"] < 1e15 else {}
    return {}
