"""The training process's side: the bridge process that it starts, and the workers of each iterator, reached through that."""

import atexit
import contextlib
import hashlib
import os
import subprocess
import threading
import time
import warnings
import weakref
from collections.abc import Iterator
from multiprocessing.connection import Client
from typing import Any, Optional

from common.errors import UserError, one_line
from datasets.dpex import bridge as bridge_process
from datasets.dpex.child import START_SECONDS, repository, start_python
from datasets.dpex.wire import lay_out, map_buffers, pack, receive_descriptors, send_descriptors, source_packages, unpack

STOP_SECONDS = 20

_BRIDGES: "dict[tuple[int, str], Bridge]" = {}  # by process id and head_address


class ClusterLost(Exception):
    """The cluster no longer answers."""


def bridge(head_address: str) -> "Bridge":
    """This process's bridge to that cluster; the first call starts it in the background."""
    try:
        import ray  # noqa: F401
    except ImportError:
        raise UserError(
            "Ray is missing: pip install .[ray], or choose a job or --data_backend without Ray, or distribute_mode=False"
        ) from None
    key = os.getpid(), head_address
    if key not in _BRIDGES or _BRIDGES[key].ended:
        _BRIDGES[key] = Bridge(head_address)
    return _BRIDGES[key]


class Bridge:
    def __init__(self, head_address: str):
        leader = os.getppid() if int(os.environ.get("LOCAL_WORLD_SIZE", 1)) > 1 else os.getpid()
        words = [bridge_process.__name__, head_address or "local", str(leader)]
        self.process = start_python(*words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._stdin: Any = self.process.stdin
        self._stdout: Any = self.process.stdout
        self._owner, self._users, self._lock = os.getpid(), 0, threading.RLock()  # garbage collection may run while it is held
        self.address, self._socket = "the Ray cluster", None
        self.lost: Optional[str] = None  # why
        self.ended = self._warned = False
        atexit.register(self._stop)

    def add_user(self, user: object) -> None:
        """The process ends with the last of its users."""
        with self._lock:
            self._users += 1
        weakref.finalize(user, self._remove_user)

    def _remove_user(self):
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
            self._stdin.write("end\n")
            self._stdin.close()
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._stdout.close()

    def connect(self) -> Any:
        """A connection for one iterator."""
        if self.lost:
            raise ClusterLost(self.lost)
        if self._socket is None:
            self._socket = self._wait_until_ready()
        try:
            return Client(self._socket, "AF_UNIX")
        except OSError:
            raise self.gone() from None

    def _wait_until_ready(self):
        overdue = threading.Timer(2 * START_SECONDS, self.process.kill)
        overdue.start()
        word, _, rest = self._stdout.readline().rstrip("\n").partition(" ")
        overdue.cancel()
        if word != "ready":
            self._stop()
            raise UserError(rest or "Ray did not start; the lines above say why")
        socket, self.address = rest.rsplit(" ", 1)
        return socket

    def gone(self) -> ClusterLost:
        """The exception to raise when a connection breaks."""
        self.lost = self.lost or f"{self.address} does not answer"
        return ClusterLost(self.lost)

    def warn_once(self) -> None:
        if not self._warned:
            self._warned = True
            reason = one_line(self.lost)
            warnings.warn(f"the Ray cluster is gone: {reason}; batches are made on this machine from here on", stacklevel=2)


class Workers:
    """The workers of one iterator. A batch is requested by its number, from one worker."""

    def __init__(self, bridge: Bridge):
        self._bridge, self._connection = bridge, bridge.connect()
        self._epoch, self._digest, self._owner = 0, None, os.getpid()
        bridge.add_user(self)

    def begin(self, task: dict[str, Any], count: int, base_seed: int, replay: bool, wait: bool) -> None:
        """An epoch with a new copy of the data set, which is sent only where it has changed since the last one."""
        packed = pack(task)
        digest = hashlib.blake2b(packed.header)
        for buffer in packed.buffers:
            digest.update(buffer)
        if digest.digest() != self._digest:
            self._digest = digest.digest()
            descriptors, places = lay_out(packed.buffers)
            with self._watched():
                send_descriptors(self._connection, ("task", packed.header, places, len(descriptors)), descriptors)
        self._epoch += 1
        ours = (os.path.join(repository(), name) for name in ("common", "datasets"))  # other machines may not have them
        self._send("begin", self._epoch, count, base_seed, replay, {*ours, *source_packages(packed.modules)})
        if wait:
            self._send("wait", self._epoch)
            self.receive()

    def resume(self) -> None:
        """Another epoch with the same copy."""
        self._epoch += 1
        self._send("resume", self._epoch)

    def fetch(self, number: int, worker: int, index: object) -> None:
        packed = pack(index)
        self._send("fetch", number, worker, [packed.header, *map(bytearray, packed.buffers)])

    def receive(self, timeout: float = 0) -> Optional[tuple]:
        """The next ("batch", number, batch, bytes), ("lost", worker, why) or ("failed", why) of this epoch. None: there was
        nothing within `timeout` seconds (0: no limit)."""
        deadline = time.monotonic() + timeout if timeout else None
        while True:
            with self._watched():
                if deadline and not self._connection.poll(max(0, deadline - time.monotonic())):
                    return None
                verb, epoch, *words = self._connection.recv()
                descriptors = receive_descriptors(self._connection, words[3]) if verb == "batch" else []
            if epoch == self._epoch:
                break
            for descriptor in descriptors:
                os.close(descriptor)
        if verb != "batch":
            return (verb, *words)
        number, header, places, _ = words
        return verb, number, unpack(header, map_buffers(descriptors, places)), sum(length for _, _, length in places)

    def _send(self, *message):
        with self._watched():
            self._connection.send(message)

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, OSError):
            raise self._bridge.gone() from None

    def close(self) -> None:
        with contextlib.suppress(OSError):
            if os.getpid() == self._owner:  # a forked worker of another loader inherits this, and must only close its copy
                self._connection.send(("close",))
        self._connection.close()


class IdleWorkers:
    """The workers of a loader that wait for its next epoch; they are ended with the loader."""

    def __init__(self):
        self._waiting: list[Workers] = []
        self._open = True

    def take(self, bridge: Bridge) -> Workers:
        return self._waiting.pop() if self._waiting else Workers(bridge)

    def give_back(self, workers: Workers) -> None:
        if self._open:
            self._waiting.append(workers)
        else:
            workers.close()

    def close(self) -> None:
        self._open = False
        while self._waiting:
            self._waiting.pop().close()
