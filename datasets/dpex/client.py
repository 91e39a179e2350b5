"""The training process's side of the bridge: it starts the bridge process,
and reaches the workers of each iterator."""

import contextlib
import hashlib
import os
import pickle
import socket
import subprocess
import threading
import warnings
import weakref
from collections.abc import Iterator, Sequence
from multiprocessing.connection import wait
from typing import Any, Optional

from common.errors import UserError, one_line
from common.machine.child import START_SECONDS, Child, repository
from datasets.dpex import bridge as bridge_process
from datasets.dpex.wire import copy_parts, open_memory, pack, receive, send, source_packages, unpack

STOP_SECONDS = 20

_BRIDGES: Any = weakref.WeakValueDictionary()  # {(process id, head_address): Bridge}


class ClusterLost(Exception):
    """The cluster no longer answers."""


def get_bridge(head_address: str) -> "Bridge":
    """Return this process's Bridge to this cluster.

    Start one if there is none, or if Ray failed to start in it.
    """
    try:
        import ray  # noqa: F401
    except ImportError:
        raise UserError(
            "Ray is missing: pip install .[ray], or choose a job or --data_backend without Ray, or "
            "distribute_mode=False"
        ) from None
    key = os.getpid(), head_address
    current = _BRIDGES.get(key)
    if current is None or current.has_failed:
        current = _BRIDGES[key] = Bridge(head_address)
    return current


class Bridge:
    """The process through which this one uses a Ray cluster, and whether that cluster is lost."""

    def __init__(self, head_address: str):
        self.process = Child(bridge_process.__name__, head_address or "local")
        self.address = "the Ray cluster"
        self._socket = None
        self.loss_reason: Optional[str] = None  # why the cluster is lost, once it is
        self.has_failed = self._has_warned = False  # failed: it did not start
        weakref.finalize(self, _end, self.process, os.getpid())

    def connect(self) -> socket.socket:
        """Wait for Ray and return a connection for one iterator.

        UserError if Ray does not start, ClusterLost after a loss.
        """
        if self.loss_reason:
            raise ClusterLost(self.loss_reason)
        if self._socket is None:
            self._socket = self._wait_until_ready()
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(self._socket)
        except OSError:
            raise self.note_loss() from None
        return connection

    def _wait_until_ready(self) -> str:
        """Return the path of the bridge's socket once Ray has started; UserError if it does not start."""
        kill_timer = threading.Timer(2 * START_SECONDS, self.process.kill)
        kill_timer.start()
        try:
            status, _, details = self.process.stdout.readline().rstrip("\n").partition(" ")
        finally:
            kill_timer.cancel()
        if status != "ready":
            self.has_failed = True
            raise UserError(details or "Ray did not start; the lines above say why")
        path, self.address = details.rsplit(" ", 1)
        return path

    def shows_memory(self) -> bool:
        """Return whether this process may read the memory of the bridge,
        and so that of the workers of a cluster of our own."""
        try:
            open_memory(self.process.pid).close()
            # If not, /proc has the process ids of another container.
            return os.readlink("/proc/self") == str(os.getpid())
        except OSError:
            return False

    def note_loss(self) -> ClusterLost:
        """Record that a connection broke, and return the exception to raise."""
        self.loss_reason = self.loss_reason or f"{self.address} does not answer"
        return ClusterLost(self.loss_reason)

    def warn_once(self) -> None:
        """Warn, once for this cluster, that it is lost and batches are made on this machine."""
        if not self._has_warned:
            self._has_warned = True
            reason = one_line(self.loss_reason)
            warnings.warn(
                f"the Ray cluster is lost: {reason}; batches are made on this machine from here on",
                stacklevel=2,
            )


def _end(process: Child, owner_pid: int) -> None:
    """End the bridge, unless this is a fork of its owner, the training process."""
    if os.getpid() != owner_pid:
        return
    process.write_line("end")
    process.end_input()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()


class Workers:
    """The workers of one iterator at a time, which end with this object.

    Each batch is requested by number from one of them.
    """

    def __init__(self, bridge: Bridge):
        self._owner_pid = os.getpid()
        self._epoch = 0
        self._digest = None
        self._bridge = bridge
        self._connection = bridge.connect()

    def begin(self, task: dict[str, Any], count: int, base_seed: int) -> None:
        """Begin an epoch with new copies of `task` (data set, ...) in `count` workers.

        Send `task` if the bridge lacks it.
        """
        try:
            packed = pack(task)
        except (RuntimeError, TypeError, ValueError, pickle.PicklingError) as error:
            raise UserError(
                "the data set, or a function given with it, cannot be sent to the Ray cluster: "
                f"{one_line(error)[:200]}; leave out what lives in one process or on one machine, such as a "
                "lock or a multiprocessing.Value, or give distribute_mode=False"
            ) from error
        digest = hashlib.blake2b()
        for part in packed.parts:
            digest.update(part)
        self._epoch += 1
        if digest.digest() != self._digest:
            self._digest = digest.digest()
            self._send("task", self._epoch, parts=packed.parts)
        project_packages = (
            os.path.join(repository(), name) for name in ("common", "datasets")
        )  # other machines may not have them
        packages = {*project_packages, *source_packages(packed.modules)}
        self._send("begin", self._epoch, count, base_seed, packages, self._bridge.shows_memory())

    def resume(self) -> None:
        """Begin another epoch with the copies of the data set that the workers have."""
        self._epoch += 1
        self._send("resume", self._epoch)

    def fetch(self, number: int, worker: int, index: object) -> None:
        """Request batch `number`, made of the samples `index`, from this worker. receive() returns it."""
        self._send("fetch", number, worker, parts=pack(index).parts)

    def is_usable(self) -> bool:
        """Return whether the connection is open, and was opened by this process and not by a parent that
        forked."""
        return self._owner_pid == os.getpid() and self._connection.fileno() >= 0

    def _send(self, *message: object, parts: Sequence[Any] = ()) -> None:
        with self._guard_connection():
            send(self._connection, message, parts)

    @contextlib.contextmanager
    def _guard_connection(self) -> Iterator[None]:
        """Raise ClusterLost if the connection breaks.

        Close it after any other error, as half a message may be left in it.
        """
        try:
            yield
        except (EOFError, OSError):
            raise self._bridge.note_loss() from None
        except BaseException:
            self.close()
            raise

    def receive(self, timeout: Optional[float] = None) -> Optional[tuple]:
        """Return the next ("batch", number, batch), ("lost", worker, why) or ("failed", why) of this epoch;
        None if no message comes within `timeout` seconds."""
        while True:
            if not wait([self._connection], timeout):
                return None
            with self._guard_connection():
                (verb, epoch, *fields), parts = receive(self._connection)
                if verb == "left":
                    worker = fields.pop()
                    handle = fields.pop()
                    verb = "batch"
                    parts = self._copy_batch(epoch, handle)
                    send(self._connection, ("received", worker, parts is not None))
                    if parts is None:
                        continue
            if verb == "failed":
                self._digest = None  # the data set may not have arrived
            if epoch == self._epoch:
                if parts:
                    fields.append(unpack(parts))
                return (verb, *fields)

    def _copy_batch(self, epoch: int, handle: Any) -> Optional[list]:
        """Return the parts of a batch.

        None: its worker has ended, and the bridge has it made again; or it comes too late.
        """
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, EOFError):
            return copy_parts(handle) if epoch == self._epoch else None

    def close(self) -> None:
        """Close the connection. In the process that opened it, this also ends the workers."""
        with contextlib.suppress(OSError):
            if os.getpid() == self._owner_pid:
                # a forked worker of another loader has a copy of the connection
                self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def __del__(self) -> None:
        if hasattr(self, "_connection"):  # else __init__ has failed
            self.close()
