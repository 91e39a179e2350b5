"""What one process of a node does for all of them, and what every node must have done before any may go on.

The lease is a lock on a file: the kernel takes it back from an owner that dies, so it is never stale. Nothing here needs a
process group, and while data are copied no collective is open: who waits looks at the lease and at the job's store.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import tempfile
import threading
import time

from common import group, pulse
from common.errors import TrainingFailed, UserError, one_line

POLL_SECONDS, LINE_SECONDS = 0.1, 10
BEAT_SECONDS, SILENCE_SECONDS = 1.0, 15.0  # a rank that has not beaten for so long while the others wait for it is dead


class Lease:
    """What the owner tells those who wait: a line of JSON in the lock file."""

    def __init__(self, file):
        self._file = file
        self._pulse = pulse.of_this_process()
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
    shown = pulse.of_this_process()
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


# --- All nodes ---------------------------------------------------------------------------------------------------------


def on_every_rank(what, work):
    """The result of `work()`, once every rank of the job has its own; the first failure is everyone's."""
    store, rank, world_size = group.store()
    if world_size == 1:
        return work()
    board = Board(store, what, rank)
    try:
        result = work()
    except Exception as error:
        board.post_failure(error)
        raise
    finally:
        board.stop_beating()
    board.wait(world_size)
    return result


class Board:
    """A few keys in the job's store: who is ready, who is alive, and what the first failure was."""

    def __init__(self, store, what, rank):
        self._store, self._what, self._rank = store, what, rank
        self._over = threading.Event()
        self._beater = threading.Thread(target=self._beat, name=f"beat while waiting for {what}", daemon=True)
        self._beater.start()

    def _key(self, *words):
        return "/".join(["anyrank", self._what, *map(str, words)])

    def _beat(self):
        count = 0
        while not self._over.wait(BEAT_SECONDS if count else 0):
            count += 1
            self._store.set(self._key("alive", self._rank), str(count))

    def stop_beating(self):
        self._over.set()
        self._beater.join()

    def post_failure(self, error):
        words = {"code": getattr(error, "exit_code", 1), "text": f"rank {self._rank}: {one_line(error)[:1000]}"}
        self._store.set(self._key("failed"), json.dumps(words))

    def wait(self, world_size):
        """Until all are ready; says for whom it waits."""
        self._store.set(self._key("ready", self._rank), "1")
        told, shown = time.monotonic(), pulse.of_this_process()
        for rank in range(world_size):
            beat, heard = None, time.monotonic()
            while not self._store.check([self._key("ready", rank)]):
                if self._store.check([self._key("failed")]):
                    failure = json.loads(self._store.get(self._key("failed")))
                    kind = UserError if failure["code"] == 2 else TrainingFailed
                    raise kind(f"no {self._what}: {failure['text']}")
                now, alive = time.monotonic(), self._key("alive", rank)
                if self._store.check([alive]) and self._store.get(alive) != beat:
                    beat, heard = self._store.get(alive), now
                    shown.set("fetch", int(beat))  # nothing is stuck as long as the one waited for beats
                if now - heard > SILENCE_SECONDS:
                    raise TrainingFailed(f"no {self._what}: rank {rank} has been silent for {now - heard:.0f} s, it has died")
                if now - told > LINE_SECONDS and self._rank == 0:
                    told = now
                    print(f"waiting for rank {rank} to have its {self._what}", flush=True)
                time.sleep(POLL_SECONDS)
        shown.set("start", 0)
