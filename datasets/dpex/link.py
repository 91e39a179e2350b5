"""The training process's end of datasets.dpex: its porter, which talks to Ray for it, and a link to that for each iterator."""

import atexit
import contextlib
import hashlib
import os
import subprocess
import threading
import time
import warnings
import weakref
from multiprocessing.connection import Client

from common.errors import UserError, one_line
from datasets.dpex import porter as porter_process
from datasets.dpex.cluster import START_SECONDS, repository, start_python
from datasets.dpex.wire import pack, packages, receive_buffers, send_buffers, unpack

STOP_SECONDS = 20

_PORTERS = {}  # of this process, by the address of the cluster


class ClusterGone(Exception):
    """Nothing comes from the cluster any more."""


def porter(head_address):
    """The one of this process; started at the first call, in the background."""
    try:
        import ray  # noqa: F401
    except ImportError:
        raise UserError("Ray is missing: pip install .[ray], or take a job, backend or distribute_mode without") from None
    key = os.getpid(), head_address
    if key not in _PORTERS or _PORTERS[key].ended:
        _PORTERS[key] = Porter(head_address)
    return _PORTERS[key]


class Porter:
    def __init__(self, head_address):
        leader = os.getppid() if int(os.environ.get("LOCAL_WORLD_SIZE", 1)) > 1 else os.getpid()
        words = [porter_process.__name__, head_address or "local", str(leader)]
        self._process = start_python(*words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._owner, self._users, self._lock = os.getpid(), 0, threading.RLock()  # the collector may come while it is held
        self._socket, self.lost, self.ended, self._said = None, None, False, False
        atexit.register(self._stop)

    def used_by(self, user):
        """It stays as long as any of its users."""
        with self._lock:
            self._users += 1
        weakref.finalize(user, self._leave)

    def _leave(self):
        with self._lock:
            self._users -= 1
        if not self._users:
            self._stop()

    def _stop(self):
        if self.ended or os.getpid() != self._owner:
            return
        self.ended = True
        atexit.unregister(self._stop)
        with contextlib.suppress(OSError):
            self._process.stdin.write("end\n")
            self._process.stdin.close()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def connect(self):
        if self.lost:
            raise ClusterGone(self.lost)
        if self._socket is None:
            self._wait_until_ready()
        try:
            return Client(self._socket, "AF_UNIX")
        except OSError:
            raise self.gone() from None

    def _wait_until_ready(self):
        overdue = threading.Timer(2 * START_SECONDS, self._process.kill)
        overdue.start()
        word, _, rest = self._process.stdout.readline().rstrip("\n").partition(" ")
        overdue.cancel()
        if word != "ready":
            self._stop()
            raise UserError(rest or "Ray did not start; its reasons are above")
        self._socket, self.address = rest.rsplit(" ", 1)

    def gone(self):
        self.lost = self.lost or f"{getattr(self, 'address', 'it')} does not answer"
        return ClusterGone(self.lost)

    def say_once(self):
        if not self._said:
            self._said = True
            warnings.warn(
                f"the Ray cluster is gone: {one_line(self.lost)}; batches are made on this machine from here on", stacklevel=2
            )


class Link:
    """The workers of one iterator: asked for batches by number, each of one worker."""

    def __init__(self, process):
        self._porter, self._connection = process, process.connect()
        self._epoch, self._digest, self._owner = 0, None, os.getpid()
        process.used_by(self)

    def begin(self, task, count, base_seed, replay, wait):
        """An epoch from the data set on; it travels only where it has changed since the last one."""
        header, buffers, modules = pack(task)
        digest = hashlib.blake2b(header)
        for buffer in buffers:
            digest.update(buffer)
        if digest.digest() != self._digest:
            self._digest = digest.digest()
            self._send("data", header, [len(buffer) for buffer in buffers])
            with self._watched():
                send_buffers(self._connection, buffers)
        self._epoch += 1
        ours = (os.path.join(repository(), name) for name in ("common", "datasets"))  # workers may be where nobody has them
        self._send("begin", self._epoch, count, base_seed, replay, {*ours, *packages(modules)})
        if wait:
            self._send("wait", self._epoch)
            self.receive()

    def resume(self):
        self._epoch += 1
        self._send("resume", self._epoch)

    def fetch(self, number, worker, index):
        header, buffers, _ = pack(index)
        self._send("fetch", number, worker, [header, *map(bytearray, buffers)])

    def receive(self, timeout=0):
        """The next ("batch", number, batch, bytes), ("lost", worker, why), ("failed", why) of this epoch; None: too late."""
        deadline = time.monotonic() + timeout if timeout else None
        while True:
            with self._watched():
                if deadline and not self._connection.poll(max(0, deadline - time.monotonic())):
                    return None
                verb, epoch, *words = self._connection.recv()
                if verb == "batch":
                    number, header, sizes = words
                    buffers = receive_buffers(self._connection, sizes)
            if epoch == self._epoch:
                break
        return (verb, number, unpack(header, buffers), sum(sizes)) if verb == "batch" else (verb, *words)

    def _send(self, *message):
        with self._watched():
            self._connection.send(message)

    @contextlib.contextmanager
    def _watched(self):
        try:
            yield
        except (EOFError, OSError):
            raise self._porter.gone() from None

    def close(self):
        with contextlib.suppress(OSError):
            if os.getpid() == self._owner:  # a forked worker of another loader has all this, too, and throws it away
                self._connection.send(("close",))
        self._connection.close()


class Links:
    """Those of a loader that wait for its next epoch, as long as there is the loader."""

    def __init__(self):
        self._waiting, self._open = [], True

    def take(self, process):
        return self._waiting.pop() if self._waiting else Link(process)

    def give_back(self, link):
        if self._open:
            self._waiting.append(link)
        else:
            link.close()

    def close(self):
        self._open = False
        while self._waiting:
            self._waiting.pop().close()
