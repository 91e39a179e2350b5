"""The workers of one iterator in the bridge process: Ray actors,
and the batches that were requested from each."""

import contextlib
import dataclasses
import queue
import socket
import threading
from collections.abc import Iterable, Sequence
from typing import Any, Optional

from common.errors import one_line
from datasets.dpex.cluster import Cluster
from datasets.dpex.wire import MemoryHandle, memory_handle, receive, send

LOSSES = 5  # failures of one worker in a row that are tolerated


@dataclasses.dataclass
class RemoteWorker:
    number: int
    actor: Any = None
    node: Optional[str] = None  # where the actor runs
    # (epoch, number, actor, reference, arguments)
    requests: Any = dataclasses.field(default_factory=queue.SimpleQueue)
    receipts: Any = dataclasses.field(default_factory=queue.SimpleQueue)  # whether a batch could be copied
    # (epoch, number) of the batch that is sent now: earlier ones have been received
    oldest_needed: tuple[int, int] = (0, 0)


class Pool:
    """One thread receives the requests of the training process.

    One thread per worker waits for its batches and sends them.
    """

    def __init__(self, connection: socket.socket, cluster: Cluster):
        self._connection = connection
        self._cluster = cluster
        self._send_lock = threading.Lock()
        self._lock = threading.RLock()  # guards the attributes below
        self._workers: list[RemoteWorker] = []
        self._epoch = 0
        self._task = None

    def serve(self) -> None:
        """Handle the requests of the training process until it closes the connection;
        then end the workers."""
        handlers = {
            "task": self._put_task, "begin": self._begin, "resume": self._resume, "fetch": self._fetch,
            "received": self._note_receipt,
        }  # fmt: skip
        try:
            while True:
                (verb, *fields), packed = receive(self._connection)
                if packed:
                    fields.append(packed)
                try:
                    with self._lock:
                        handlers[verb](*fields)
                except Exception as error:  # otherwise the training process would wait for ever
                    self._fail(self._epoch, error)
        except (EOFError, OSError):
            pass
        finally:
            self._close()

    def _send(self, message: tuple, packed: Sequence[Any] = ()) -> None:
        with self._send_lock, contextlib.suppress(OSError):  # if the connection is closed, serve() ends
            send(self._connection, message, packed)

    def _fail(self, epoch: Optional[int], error: BaseException) -> None:
        self._send(("failed", epoch, _describe(error)))

    def _close(self):
        with self._lock:
            self._epoch = None
            for worker in self._workers:
                self._end(worker)
                worker.requests.put(None)
                worker.receipts.put(False)
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)  # a thread may be sending
        self._connection.close()

    def _end(self, worker: Any) -> None:
        import ray

        with contextlib.suppress(Exception):
            ray.kill(worker.actor)
        worker.actor = worker.node = None

    def _put_task(self, epoch: int, packed: list):
        """Put the task (data set, collate_fn and so on) into Ray's object store,
        from which Ray copies it to each node once."""
        import numpy
        import ray

        self._epoch = epoch
        self._task = None
        self._task = ray.put([numpy.frombuffer(part, numpy.uint8) for part in packed])

    def _begin(self, epoch: int, count: int, base_seed: int, packages: Iterable[str], copies_memory: bool):
        """Begin an epoch: `count` workers copy the data set anew.

        Actors whose nodes are chosen again stay; others end.

        `copies_memory`: the training process copies batches out of this process, or out of the workers of a
        cluster of our own.
        """
        self._epoch = self._first_epoch = epoch
        self._base_seed = base_seed
        self._packages = packages
        self._copies_memory = copies_memory
        self._earlier_counts = [()] * count
        self._positions = [0] * count
        while len(self._workers) < count:
            self._workers.append(RemoteWorker(len(self._workers)))
            threading.Thread(target=self._deliver, args=(self._workers[-1],), daemon=True).start()
        nodes = self._cluster.choose_nodes(count)
        for worker in self._workers:
            if worker.node in nodes:
                nodes.remove(worker.node)
            else:
                self._end(worker)
        for worker in self._workers[:count]:
            if not worker.actor:
                self._start(worker, nodes.pop())

    def _start(self, worker: Any, node: Any, is_replacement: bool = False) -> None:
        worker.actor = self._cluster.start_worker(node, self._packages, is_replacement)
        worker.node = node

    def _resume(self, epoch: int):
        self._earlier_counts = [
            (*earlier, place) for earlier, place in zip(self._earlier_counts, self._positions)
        ]
        self._epoch = epoch
        self._positions = [0] * len(self._positions)

    def _fetch(self, number: int, worker: int, packed: list):
        arguments = (
            worker,
            self._base_seed + worker,
            self._first_epoch,
            self._earlier_counts[worker],
            self._positions[worker],
        )
        self._positions[worker] += 1
        remote_worker = self._workers[worker]
        keys = None
        if self._copies_memory and self._cluster.is_own:
            keys = (self._epoch, number), remote_worker.oldest_needed
        request = list(map(bytes, packed)), self._task, *arguments, keys
        remote_worker.requests.put(
            (self._epoch, number, remote_worker.actor, remote_worker.actor.fetch.remote(request), request)
        )

    def _note_receipt(self, worker: int, received: bool):
        self._workers[worker].receipts.put(received)

    def _deliver(self, worker: Any) -> None:
        """Send a worker's batches in the order in which they were requested.

        Runs in a thread for each worker.
        """
        import ray
        from ray.exceptions import ActorDiedError

        losses = 0
        for epoch, number, actor, reference, request in iter(worker.requests.get, None):
            worker.oldest_needed = epoch, number
            while epoch == self._epoch:
                try:
                    packed = ray.get(reference)
                    if self._copies_memory:
                        handle = packed if isinstance(packed, MemoryHandle) else memory_handle(packed)
                        self._send(("left", epoch, number, handle, worker.number))
                        if not worker.receipts.get():
                            raise ActorDiedError
                    else:
                        self._send(("batch", epoch, number), packed)
                    losses = 0
                    break
                except Exception as error:
                    try:
                        with self._lock:
                            if epoch != self._epoch:
                                break
                            losses += 1
                            actor, is_new = self._actor_for_retry(worker, actor, error, losses)
                            reference = actor.fetch.remote(request)
                    except Exception as final_error:
                        losses = 0
                        self._fail(epoch, final_error)
                        break
                    if is_new:
                        self._send(("lost", epoch, worker.number, _describe(error)))
            packed = reference = request = None  # else the object store would keep them until the next batch

    def _actor_for_retry(self, worker: Any, actor: Any, error: Exception, losses: int) -> tuple[Any, bool]:
        """Return (the actor that makes the batch again, whether it is new).

        A lost worker is replaced, on another node if possible; if the object store lost the batch or is full,
        the worker stays. Else, or after LOSSES, raise the error."""
        from ray import exceptions

        batch_errors = (
            exceptions.ObjectLostError,
            exceptions.ObjectStoreFullError,
            exceptions.OutOfDiskError,
            exceptions.ObjectFetchTimedOutError,
        )
        cause = error.cause if isinstance(error, exceptions.RayTaskError) else error
        if (
            losses > LOSSES
            or not isinstance(cause, exceptions.RayError)
            or isinstance(cause, exceptions.RuntimeEnvSetupError)
        ):
            if worker.actor is actor:
                self._end(worker)  # the next epoch starts another one
            raise error
        is_lost = not isinstance(cause, batch_errors) and worker.actor is actor
        if is_lost:
            node = worker.node
            self._end(worker)
            nodes = self._cluster.choose_nodes(len(self._workers), avoid=node)
            self._start(worker, nodes[worker.number], is_replacement=True)
        return worker.actor, is_lost


def _describe(error: BaseException) -> str:
    first_line = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {one_line(first_line)[:300]}"
