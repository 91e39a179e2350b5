"""What one process of a node does for all of them, such as fetching the data.

The lease is a lock on a file: the kernel takes it back from an owner that dies, so it is never stale. Nothing here needs a
process group, and while data are copied no collective is open: who waits looks at the lease.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Iterator

from common import heartbeat
from common.errors import TrainingFailed, UserError, one_line

POLL_SECONDS, LINE_SECONDS = 0.1, 10


class Lease:
    """What the owner tells those who wait: a line of JSON in the lock file."""

    def __init__(self, file):
        self._file = file
        self._pulse = heartbeat.of_this_process()
        self._told = 0.0

    def tell(self, text, progress=0):
        """Where the work stands; `progress` changes as long as it moves."""
        now = time.monotonic()
        if now - self._told > 1:
            self._told = now
            self._pulse.set("fetch", progress)
            self.write(state="working", text=text)

    def write(self, **words):
        content = json.dumps({**words, "at": time.monotonic(), "boot": _boot()}).encode()
        os.pwrite(self._file, content.ljust(512)[: max(512, len(content))], 0)
        os.ftruncate(self._file, max(512, len(content)))

    def ended(self):
        self._pulse.set("start", 0)


def once_per_node(path, work):
    """Have `work(lease)` done by one process of this node; those who came meanwhile share its end, good or bad."""
    began = time.monotonic()
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    file = _lockable(path)
    lease = Lease(file)
    try:
        said = _wait(file, path, began)
        if said.get("state") == "failed":
            raise UserError(said["text"]) if said.get("code") == 2 else TrainingFailed(said["text"])
        if said.get("state") == "done":
            return
        lease.tell(f"preparing {os.path.dirname(path)}")
        try:
            work(lease)
        except (UserError, TrainingFailed) as error:
            lease.write(state="failed", text=str(error)[:2000], code=error.exit_code)
            raise
        lease.write(state="done")
    finally:
        lease.ended()
        os.close(file)


@contextlib.contextmanager
def alone(path: str, refusal: str) -> Iterator[None]:
    """Nobody else of this node is in such a block of the same path; UserError with `refusal` where somebody is."""
    file = _lockable(path)
    try:
        if not _take(file):
            raise UserError(refusal)
        yield
    finally:
        os.close(file)


def _lockable(path):
    """The file whose lock is the lease: beside the path, or, on a store that knows no locks, among this machine's own."""
    file = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        if _take(file):
            fcntl.flock(file, fcntl.LOCK_UN)
        return file
    except OSError:
        os.close(file)
        name = hashlib.sha256(os.path.abspath(path).encode()).hexdigest()[:16]
        own = os.path.join(tempfile.gettempdir(), f"anyrank-{os.getuid()}-{name}.lock")
        return os.open(own, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)


def _wait(file, path, began):
    """Take the lease; what its last owner said of its end, if that was after `began`. The clock is this machine's."""
    told = time.monotonic()
    shown = heartbeat.of_this_process()
    while not _take(file):
        said = _read(file)
        shown.set("fetch", int(said.get("at", 0)))  # alive as long as the owner is
        if time.monotonic() - told > LINE_SECONDS:
            told = time.monotonic()
            print(f"waiting for another process of this node: {one_line(said.get('text', path))}", flush=True)
        time.sleep(POLL_SECONDS)
    said = _read(file)
    return said if said.get("boot") == _boot() and said.get("at", 0) > began else {}


def _boot():
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()
    return ""


def _take(file):
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read(file):
    with contextlib.suppress(ValueError, OSError):
        said = json.loads(os.pread(file, 8192, 0))
        return said if isinstance(said, dict) else {}
    return {}
