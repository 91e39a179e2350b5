"""The workers of one iterator, as the bridge process sees them: Ray actors, and the batches that were requested from them."""

import contextlib
import itertools
import threading
from collections.abc import Iterable
from multiprocessing.connection import Connection
from typing import Any, Optional

from common.errors import one_line
from datasets.dpex.child import START_SECONDS
from datasets.dpex.cluster import Cluster
from datasets.dpex.near import Batch, Missing, Near
from datasets.dpex.wire import Place, lay_out, map_buffers, map_with_mmap, receive_descriptors, send_descriptors

WAIT_SECONDS = 0.2  # until requests that came in meanwhile are waited for, too
LOSSES = 5  # of one worker in a row, without a batch between them
OTHER_SEEDS = 2**32  # added to a seed of torch's: a replacement's draws differ from those that were made


class RemoteWorker:
    """A worker: its actor, the node it is on, and what it has done since the epoch began."""

    def __init__(self, number: int):
        self.number, self.delivered, self.losses = number, 0, 0
        self.actor: Any = None
        self.node: Optional[str] = None
        self.begun: Any = None  # Ray's reference to the result of `begin`


class Request:
    """A batch that was requested. `actor`, `ref` and `key`: of the last attempt."""

    def __init__(self, worker: RemoteWorker, index: list):
        self.worker, self.index, self.key = worker, index, 0
        self.actor: Any = None
        self.ref: Any = None


class Pool:
    """Receives messages of the training process in one thread, and sends it the batches from another."""

    def __init__(self, connection: Connection, cluster: Cluster, near: Near):
        self._connection, self._cluster, self._near = connection, cluster, near
        self._workers: list[RemoteWorker] = []
        self._requests: dict[int, Request] = {}  # by the number of the batch
        self._epoch, self._replacements, self._keys = 0, itertools.count(1), itertools.count(1)
        self._changed, self._closed = threading.Condition(threading.RLock()), False
        self._sending, self._task = threading.Lock(), None
        self._handlers = {"begin": self._begin, "wait": self._wait, "resume": self._resume, "fetch": self._fetch}

    def serve(self) -> None:
        """Do what the training process asks, until it closes the connection."""
        threading.Thread(target=self._deliver, daemon=True).start()
        try:
            while True:
                verb, *words = self._connection.recv()
                if verb == "close":
                    break
                if verb == "task":
                    self._receive_task(*words)
                else:
                    self._handle(self._handlers[verb], words)
        except (EOFError, OSError, TypeError):  # TypeError: _deliver has closed the connection meanwhile
            pass
        finally:
            self._close()

    def _handle(self, handler, words):
        with self._changed:
            try:
                handler(*words)
            except Exception as error:
                self._fail(error)
            self._changed.notify_all()

    def _fail(self, error):
        """An unexpected error ends the epoch with a message; otherwise the reader would wait for ever."""
        self._requests = {}
        self._send("failed", self._epoch, f"{type(error).__name__}: {one_line(error)[:300]}")

    def _close(self):
        import ray

        with self._changed:
            self._closed, self._task = True, None
            for worker in self._workers:
                with contextlib.suppress(Exception):
                    ray.kill(worker.actor)
            self._workers, self._requests = [], {}
            self._changed.notify_all()
            self._connection.close()
            self._near.close()

    def _send(self, *message):
        with self._sending:
            self._connection.send(message)

    # --- What the training process asks for ------------------------------------------------------------------------------

    def _receive_task(self, header: bytes, places: list[Place], count: int):
        """Data set and collate_fn go into the object store once; from there Ray copies them to each node once."""
        import numpy
        import ray

        buffers = map_buffers(receive_descriptors(self._connection, count), places, map_with_mmap)
        self._task = ray.put([header, *(numpy.frombuffer(buffer, numpy.uint8) for buffer in buffers)])

    def _begin(self, epoch: int, count: int, base_seed: int, replay: bool, packages: Iterable[str]):
        """A new epoch with a new copy of the data set. `replay`: an IterableDataset, whose batches follow from the seeds."""
        self._forget(epoch)
        self._base_seed, self._replay, self._packages, self._passes = base_seed, replay, packages, 0
        workers, self._workers = self._workers or [RemoteWorker(number) for number in range(count)], []
        nodes = self._cluster.choose_nodes([], count)
        for worker in workers:  # those of the last epoch stay, except where nodes were added or lost
            if worker.node in nodes:
                nodes.remove(worker.node)
            elif worker.actor:
                self._end(worker)
        for worker in workers:
            worker.delivered = worker.losses = 0
            if not worker.actor:
                worker.node = nodes.pop(0)
                worker.actor = self._cluster.start_worker(worker.node, packages)
            self._start(worker, base_seed + worker.number)
        self._workers = workers

    def _start(self, worker, seed, passes=0, skip=0):
        near = self._near.path if worker.node == self._cluster.node else None
        worker.begun = worker.actor.begin.remote([self._task], worker.number, near, seed, passes, skip)

    def _resume(self, epoch: int):
        self._forget(epoch)
        self._passes += 1
        for worker in self._workers:
            worker.delivered = 0
            worker.actor.resume.remote()

    def _wait(self, epoch: int):
        """Tell when every worker has begun: a timeout applies to batches, not to the start of workers."""
        import ray

        ray.wait([worker.begun for worker in self._workers], num_returns=len(self._workers), timeout=START_SECONDS)
        self._send("begun", epoch)

    def _fetch(self, number: int, worker: int, index: list):
        self._requests[number] = request = Request(self._workers[worker], index)
        self._submit(request)

    def _submit(self, request):
        request.actor, request.key = request.worker.actor, next(self._keys)
        self._near.expect(request.key)
        request.ref = request.actor.fetch.remote(request.index, request.key)

    def _forget(self, epoch):
        self._requests, self._epoch = {}, epoch  # not cancelled: an actor may hang after a cancelled task
        self._near.forget()

    # --- Batches ---------------------------------------------------------------------------------------------------------

    def _deliver(self):
        """Pass on every batch as it is ready, in a thread of its own."""
        import ray

        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._requests or self._closed)
                    if self._closed:
                        return
                    made = {request.ref: (number, request.key) for number, request in sorted(self._requests.items())}
                for ref in ray.wait(list(made), num_returns=1, timeout=WAIT_SECONDS)[0]:
                    self._pass_on(ref, *made[ref])
        except (OSError, EOFError):  # the training process has closed the connection
            self._close()
        except Exception as error:
            with contextlib.suppress(OSError):
                self._fail(error)
            self._close()

    def _pass_on(self, ref, number, key):
        import ray
        from ray.exceptions import RayError

        try:
            answer = ray.get(ref) or self._near.take(key)
        except (RayError, Missing) as error:
            answer = error
        with self._changed:
            request = self._requests.get(number)
            if request is None or request.ref != ref:  # of a former epoch, or submitted again meanwhile
                if isinstance(answer, Batch):
                    answer.close()
                return
            if isinstance(answer, Exception):
                self._recover(request, answer)
                return
            del self._requests[number]
            request.worker.delivered, request.worker.losses, epoch = request.worker.delivered + 1, 0, self._epoch
        if not isinstance(answer, Batch):
            header, *buffers = answer
            descriptors, places = lay_out(buffers)
            answer = Batch(header, places, descriptors)
        with self._sending:  # without the other lock: messages have to be received while this one waits to be read
            message = ("batch", epoch, number, answer.header, answer.places, len(answer.descriptors))
            send_descriptors(self._connection, message, answer.descriptors)

    # --- Losses ----------------------------------------------------------------------------------------------------------

    def _recover(self, request, error):
        """Try again, LOSSES times: the worker is lost, or the batch in its node's object store, or the store is full."""
        import ray.exceptions as known

        worker, cause = request.worker, getattr(error, "cause", None)
        gone = (
            known.ObjectLostError,
            known.ObjectStoreFullError,
            known.OutOfDiskError,
            known.ObjectFetchTimedOutError,
            Missing,
        )
        reason = f"{type(error).__name__}: {one_line((str(error).strip().splitlines() or [''])[0])[:200]}"
        worker.losses += 1
        hopeless = isinstance(error, (known.RayTaskError, known.RuntimeEnvSetupError)) and not isinstance(cause, gone)
        if hopeless or worker.losses > LOSSES:
            often = "" if hopeless else f", {LOSSES} times in a row"
            self._send("failed", self._epoch, f"worker {worker.number}: {reason}{often}")
            self._requests = {}
        elif isinstance(error, gone) or isinstance(cause, gone) or request.actor is not worker.actor:
            self._submit(request)
        else:
            self._send("lost", self._epoch, worker.number, reason)
            self._replace(worker)

    def _replace(self, worker):
        """A new actor for the worker, on another node if there is one; it makes what the lost one had not delivered."""
        lost_node = worker.node
        self._end(worker)
        taken = [other.node for other in self._workers if other.actor and other.node]
        worker.node = self._cluster.choose_nodes(taken, 1, avoid=lost_node)[0]
        worker.actor = self._cluster.start_worker(worker.node, self._packages)
        seed = self._base_seed + worker.number
        if self._replay:
            self._start(worker, seed, self._passes, worker.delivered)
        else:
            self._start(worker, seed + next(self._replacements) * OTHER_SEEDS)
        for _, request in sorted(self._requests.items()):
            if request.worker is worker:
                self._submit(request)

    def _end(self, worker):
        import ray

        with contextlib.suppress(Exception):
            ray.kill(worker.actor)
        worker.actor = None
