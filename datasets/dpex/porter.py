"""The process beside a training process that talks to Ray for it, and carries the batches over.

A program in which Ray runs dies with its node: when the Ray node of this machine is lost, Ray ends every process that uses it,
at once, and a minute after the head is lost. So that is this process, which nobody misses. It also keeps Ray's threads, signal
handlers and environment out of the training process. Each iterator of the training process is one connection to it.
"""

import contextlib
import itertools
import os
import sys
import tempfile
import threading
import time
from multiprocessing.connection import Listener

from common.errors import one_line
from datasets.dpex.cluster import START_SECONDS, Cluster, connect, raylet, reachable
from datasets.dpex.wire import map_here, receive_buffers, send_buffers

PROBE_SECONDS, PROBES = 1.0, 3  # the head is gone when so many in a row failed
LISTEN_SECONDS = 0.2  # until tasks that came meanwhile are waited for, too
LOSSES = 5  # of one worker in a row, without a batch between them
OTHER_SEEDS = 2**32  # far from those that torch gives: what is drawn again is not what was drawn


def main(head_address, leader):
    """Says on stdout where it listens, or what is wrong; lives until its stdin is closed."""
    say = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # from here on, stdout is what the workers print
    joined, left = threading.Event(), threading.Event()
    threading.Thread(target=wait_for_the_end, args=(joined, left), daemon=True).start()
    try:
        address, own, lock = connect(head_address, leader)
    except Exception as error:
        print("error", error, file=say, flush=True)
        os._exit(2)
    with tempfile.TemporaryDirectory(prefix="anyrank-porter-") as folder, Listener(os.path.join(folder, "socket")) as listener:
        cluster = Cluster(address, own, lock)
        threading.Thread(target=serve, args=(listener, cluster), daemon=True).start()
        threading.Thread(target=watch, args=(cluster,), daemon=True).start()
        print("ready", listener.address, address, file=say, flush=True)
        say.close()
        joined.set()
        left.wait()
    import ray

    ray.shutdown()


def wait_for_the_end(joined, left):
    sys.stdin.readline()  # a word, or the end of the training process: others that it has started may hold our stdin open
    if not joined.is_set():
        os._exit(0)  # nobody waits for a cluster any more
    left.set()


def serve(listener, cluster):
    while True:
        connection = listener.accept()
        threading.Thread(target=Pool(connection, cluster).serve, daemon=True).start()


def watch(cluster):
    """A head that is gone is said at once, in place of what Ray does about it a minute later."""
    import ray

    own = ray.get_runtime_context().get_node_id()
    places = [cluster.address, *(raylet(node) for node in ray.nodes() if node["NodeID"] == own)]
    failed = 0
    while failed < PROBES:
        time.sleep(PROBE_SECONDS)
        failed = 0 if all(reachable(place) for place in places) else failed + 1
    os._exit(1)  # whoever is connected sees it


class Slot:
    """A worker: its actor, the node it is on, and what it has done since the epoch began."""

    def __init__(self, number):
        self.number, self.actor, self.node, self.delivered, self.losses = number, None, None, 0, 0


class Task:
    def __init__(self, slot, index):
        self.slot, self.index, self.ref, self.actor = slot, index, None, None


class Pool:
    """The workers of one iterator, and the batches that were asked of them."""

    def __init__(self, connection, cluster):
        self._connection, self._cluster = connection, cluster
        self._slots, self._tasks, self._epoch, self._rebirths = [], {}, 0, itertools.count(1)
        self._changed, self._closed = threading.Condition(threading.RLock()), False
        self._sending, self._parts = threading.Lock(), None

    def serve(self):
        """What the training process asks, until it goes."""
        threading.Thread(target=self._deliver, daemon=True).start()
        try:
            while True:
                verb, *words = self._connection.recv()
                if verb == "close":
                    break
                self._obey(verb, words)
        except (EOFError, OSError, TypeError):  # the last where _deliver has closed the connection meanwhile
            pass
        finally:
            self._close()

    def _obey(self, verb, words):
        if verb == "data":
            self._receive(*words)
            return
        with self._changed:
            try:
                getattr(self, f"_{verb}")(*words)
            except Exception as error:
                self._give_up(error)
            self._changed.notify_all()

    def _give_up(self, error):
        """What nobody has foreseen ends the epoch with its name, and not with a reader that waits."""
        self._tasks = {}
        self._say("failed", self._epoch, f"{type(error).__name__}: {one_line(error)[:300]}")

    def _close(self):
        import ray

        with self._changed:
            self._closed, self._parts = True, None
            for slot in self._slots:
                with contextlib.suppress(Exception):
                    ray.kill(slot.actor)
            self._slots, self._tasks = [], {}
            self._changed.notify_all()
            self._connection.close()

    def _receive(self, header, sizes):
        """The data set goes into the object store once; from there Ray takes it to each node once."""
        import numpy
        import ray

        buffers = receive_buffers(self._connection, sizes, map_here)
        self._parts = ray.put([header, *(numpy.frombuffer(buffer, numpy.uint8) for buffer in buffers)])

    def _begin(self, epoch, count, base_seed, replay, paths):
        """A new epoch, from the data set on. `replay`: an IterableDataset, whose batches follow from the seeds."""
        self._forget(epoch)
        self._seeds, self._replay, self._paths, self._passes = base_seed, replay, paths, 0
        slots, self._slots = self._slots or [Slot(number) for number in range(count)], []
        places = self._cluster.places([], count)
        for slot in slots:  # a node may have come or gone
            if slot.node in places:
                places.remove(slot.node)
            elif slot.actor:
                self._end(slot)
        for slot in slots:
            slot.delivered = slot.losses = 0
            if not slot.actor:
                slot.node = places.pop(0)
                slot.actor = self._cluster.start_worker(slot.node, paths)
            self._start(slot, base_seed + slot.number)
        self._slots = slots

    def _start(self, slot, seed, passes=0, skip=0):
        slot.begun = slot.actor.begin.remote([self._parts], slot.number, seed, passes, skip)

    def _resume(self, epoch):
        self._forget(epoch)
        self._passes += 1
        for slot in self._slots:
            slot.delivered = 0
            slot.actor.resume.remote()

    def _wait(self, epoch):
        """Until every worker has begun: only then the time of a batch begins to count."""
        import ray

        ray.wait([slot.begun for slot in self._slots], num_returns=len(self._slots), timeout=START_SECONDS)
        self._say("begun", epoch)

    def _fetch(self, number, worker, index):
        self._tasks[number] = task = Task(self._slots[worker], index)
        self._ask(task)

    def _ask(self, task):
        task.actor = task.slot.actor
        task.ref = task.actor.fetch.remote(task.index)

    def _forget(self, epoch):
        self._tasks, self._epoch = {}, epoch  # not cancelled: behind a cancelled task an actor may stand still

    def _deliver(self):
        """Every batch that is ready goes over; a batch that was lost is asked for again."""
        import ray

        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._tasks or self._closed)
                    if self._closed:
                        return
                    numbers = {task.ref: number for number, task in sorted(self._tasks.items())}
                for ref in ray.wait(list(numbers), num_returns=1, timeout=LISTEN_SECONDS)[0]:
                    self._carry(numbers[ref], ref)
        except (OSError, EOFError):  # nobody is there any more
            self._close()
        except Exception as error:
            with contextlib.suppress(OSError):
                self._give_up(error)
            self._close()

    def _carry(self, number, ref):
        import ray

        try:
            found = ray.get(ref)
        except ray.exceptions.RayError as error:
            found = error
        with self._changed:
            task = self._tasks.get(number)
            if task is None or task.ref != ref:  # of an epoch that is over, or asked again meanwhile
                return
            if isinstance(found, Exception):
                self._lost(task, found)
                return
            del self._tasks[number]
            task.slot.delivered, task.slot.losses, epoch = task.slot.delivered + 1, 0, self._epoch
        header, *buffers = found
        with self._sending:  # and without the other lock: whoever waits to be read must not keep us from reading
            self._connection.send(("batch", epoch, number, header, [len(buffer) for buffer in buffers]))
            send_buffers(self._connection, buffers)

    def _say(self, *words):
        with self._sending:
            self._connection.send(words)

    def _lost(self, task, error):
        """The worker is gone, or what it had put into its node's store, or there is no room in it: once more, a few times."""
        import ray.exceptions as known

        slot, cause = task.slot, getattr(error, "cause", None)
        gone = (known.ObjectLostError, known.ObjectStoreFullError, known.OutOfDiskError, known.ObjectFetchTimedOutError)
        reason = f"{type(error).__name__}: {one_line((str(error).strip().splitlines() or [''])[0])[:200]}"
        slot.losses += 1
        hopeless = isinstance(error, (known.RayTaskError, known.RuntimeEnvSetupError)) and not isinstance(cause, gone)
        if hopeless or slot.losses > LOSSES:
            self._say(
                "failed", self._epoch, f"worker {slot.number}: {reason}" + ("" if hopeless else f", {LOSSES} times in a row")
            )
            self._tasks = {}
        elif isinstance(error, gone) or isinstance(cause, gone) or task.actor is not slot.actor:
            self._ask(task)
        else:
            self._say("lost", self._epoch, slot.number, reason)
            self._again(slot)

    def _again(self, slot):
        """Another actor for the worker, elsewhere if there is an elsewhere; it makes what the lost one had not delivered."""
        lost_node = slot.node
        self._end(slot)
        slot.node = self._cluster.places([other.node for other in self._slots if other.actor], 1, avoid=lost_node)[0]
        slot.actor = self._cluster.start_worker(slot.node, self._paths)
        seed = self._seeds + slot.number
        if self._replay:
            self._start(slot, seed, self._passes, slot.delivered)
        else:
            self._start(slot, seed + next(self._rebirths) * OTHER_SEEDS)
        for _, task in sorted(self._tasks.items()):
            if task.slot is slot:
                self._ask(task)

    def _end(self, slot):
        import ray

        with contextlib.suppress(Exception):
            ray.kill(slot.actor)
        slot.actor = None
