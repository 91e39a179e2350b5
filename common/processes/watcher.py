"""A small process beside each rank that a platform starts by itself (torchrun, srun, mpirun), where none has a parent of ours.

It is forked from the rank before anything has been computed, and knows nothing of its device. It reads the rank's pulse, meets
the watchers of the other ranks once these have formed a group, and keeps the promises of a node's parent: a rank that is
killed, stopped, stuck or lost is named on every node within seconds, and the others end.
"""

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NoReturn, Optional

from common import heartbeat
from common.errors import STOP_SIGNALS, UserError, one_line, show
from common.processes import channel, hub
from common.processes.watch import CASCADE_SECONDS, Watch
from common.processes.worker import Worker
from common.world import World

MEETING_SECONDS = 60  # of the watchers, when all ranks have come
ANSWER_SECONDS = 10  # of the watcher, to its rank
PARTING_SECONDS = 10  # how long the first watcher waits for the others to end, after its own rank
ENDING_SECONDS = 2  # how long a rank may take to end by itself


class Rank:
    """The process that the watcher was forked from, with what a Worker needs of a Popen."""

    def __init__(self, pid: int, files: str):
        self.pid, self._files = pid, files

    def poll(self) -> Optional[int]:
        """None while it runs; then the exit code that it has left, or the signal that has killed it."""
        if os.getppid() == self.pid:
            return None
        with contextlib.suppress(OSError, ValueError):
            return int(Path(f"{self._files}.end").read_text())
        return -signal.SIGKILL

    def send_signal(self, number: int) -> None:
        if os.getppid() == self.pid:
            os.kill(self.pid, number)


class Watcher(Watch):
    def __init__(self, here: World, rank: Rank, worker: Worker, orders: socket.socket):
        super().__init__(here.world_size, f"host {socket.gethostname()}")
        self.here, self.rank, self.workers, self._orders = here, rank, [worker], orders

    def name_of(self, node: int) -> str:
        return f"rank {node}"

    def stopped(self) -> None:
        """The rank has agreed with the others on a step, and all of them end."""

    def lost(self, node: int) -> None:
        """A rank that has ended well takes its watcher with it, as a platform may wait for both."""
        if node not in self.finished:
            super().lost(node)
        elif self.hub:
            self.hub.forget(node)
        else:
            self.line = None

    def own_finished(self) -> bool:
        return self.workers[0].code in (0, *STOP_SIGNALS.values())

    def run(self) -> None:
        told, ended = 0.0, None
        while self.verdict is None:
            for node, message in self.messages():
                self.hear(node, message)
            self._obey()
            self.workers[0].look()
            if not self.own_finished():
                self.suspect(self.workers[0])
            now = time.monotonic()
            beat = now - told >= self.beat_seconds
            if beat:
                told = now
                self.beat()
            if self.workers[0].code is not None:
                ended = ended or now
                if self._may_leave(now - ended):
                    return
            if not self.line:
                self.judge(beat)
        self._carry_out()

    def _may_leave(self, seconds):
        """Once its rank has ended: at once, unless the others still need this watcher, or it has something to hear."""
        if self.own_finished():
            if self.line:
                self.line.tell(finished=True)
            return not self.hub or len(self.finished) == self.nodes or seconds > PARTING_SECONDS
        return seconds > CASCADE_SECONDS + channel.SILENCE_SECONDS

    def _obey(self):
        """What the rank asks for."""
        while select.select([self._orders], [], [], 0)[0] and (line := self._orders.recv(65536)):
            order = json.loads(line)
            try:
                if "listen" in order:
                    listener = socket.create_server(("127.0.0.1" if self.here.num_nodes == 1 else "", 0))
                    key = bytes.fromhex(order["listen"])
                    self.hub = hub.Hub(listener, order["hello"], self._say, key)
                    self._orders.send(json.dumps({"port": listener.getsockname()[1]}).encode())
                    self.hub.meet(MEETING_SECONDS)
                    self.hub.send(go={"attempt": 0, "address": "127.0.0.1", "port": 1})
                else:
                    where = (order["address"], order["port"], order["hello"], MEETING_SECONDS, self._say)
                    self.line, _ = channel.join(*where, bytes.fromhex(order["key"]))
            except UserError as error:
                self._say(f"warning: this rank is not watched: {error}")
            return

    def _say(self, text):
        print(f"rank {self.here.rank}: {one_line(text)}", flush=True)

    def _carry_out(self):
        worker, rank = self.workers[0], self.here.rank
        if rank == self.verdict.get("stack_of"):
            print(worker.stack(), file=sys.stderr, flush=True)
        alone = not self.hub and not self.line
        if self.here.local_rank == 0 and not (alone and worker.reported_fault()):  # which the rank has said itself
            show(f"{self.verdict['text']}; stopping all {self.here.world_size} ranks")
        with contextlib.suppress(OSError):
            self._orders.send(json.dumps({"end": self.verdict["code"]}).encode())
        deadline = time.monotonic() + ENDING_SECONDS
        while self.rank.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        self.rank.send_signal(signal.SIGKILL)


class Beside:
    """The rank's side: the socket to its watcher."""

    def __init__(self, orders: socket.socket):
        self._orders, self._answers = orders, threading.Semaphore(0)
        self._port = 0
        threading.Thread(target=self._listen, name="watcher", daemon=True).start()

    def _listen(self):
        with contextlib.suppress(OSError):
            while line := self._orders.recv(65536):
                answer = json.loads(line)
                if "end" in answer:
                    sys.stdout.flush()
                    sys.stderr.flush()
                    os._exit(answer["end"])
                self._port = answer["port"]
                self._answers.release()

    def listen(self, key: str, **order: Any) -> int:
        """The port on which the watcher of rank 0 now waits for the others; 0 where it does not answer."""
        self._send(listen=key, **order)
        self._answers.acquire(timeout=ANSWER_SECONDS)
        return self._port

    def join(self, **order: Any) -> None:
        self._send(**order)

    def _send(self, **order):
        with contextlib.suppress(OSError):  # it has gone, and the rank trains on
            self._orders.send(json.dumps(order).encode())


def start(here: World) -> Beside:
    """Fork the watcher of this rank."""
    folder = tempfile.mkdtemp(prefix="anyrank-")
    files = os.path.join(folder, "worker")
    worker = Worker(here.rank, files)
    mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    rank = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    if os.fork() == 0:
        mine.close()
        _watch(here, rank, worker, its, folder)
    its.close()
    os.environ[heartbeat.FILES] = files
    heartbeat.write_stack_on_signal()
    return Beside(mine)


def _watch(here, pid, worker, orders, folder) -> NoReturn:
    try:
        for number in (*STOP_SIGNALS, signal.SIGHUP, signal.SIGUSR2):  # they are for the rank, which says what it does
            signal.signal(number, signal.SIG_IGN)
        rank = Rank(pid, worker.files)
        worker.process = rank
        Watcher(here, rank, worker, orders).run()
    except BaseException as error:
        with contextlib.suppress(OSError):
            print(f"warning: rank {here.rank} is no longer watched: {type(error).__name__}: {one_line(error)}", flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)
