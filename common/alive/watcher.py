"""The watcher of a rank, for jobs whose ranks the platform starts itself (torchrun, srun, mpirun), without our parent process.

It reads the rank's pulse, and connects to the watchers of the other ranks when all ranks have met. It gives the guarantee of a
parent: if a rank is killed, stopped, stuck or lost, the log of every node names it, and the other ranks end.
"""

import os
import socket
import sys
import time
from typing import Callable

from common.alive import beside, heartbeat
from common.alive.beside import Beside
from common.alive.watch import CASCADE_SECONDS, Watch
from common.alive.wire import channel, hub
from common.alive.worker import Worker
from common.errors import STOP_SIGNALS, UserError, one_line, report_failure
from common.world import World

MEETING_SECONDS = 60  # how long the watchers may take to connect, once all ranks have met
PARTING_SECONDS = 10  # how long the watcher of rank 0 waits for the others after its own rank has ended


class Watcher(Watch):
    def __init__(self, here: World, worker: Worker, killed: Callable[[float, str], object]):
        super().__init__(here.world_size, f"host {socket.gethostname()}")
        self.here = here
        self.rank, self.workers = worker.process, [worker]
        self.killed = killed

    def name_of(self, node: int) -> str:
        return f"rank {node}"

    def stopped(self) -> None:
        """Do nothing: the ranks have agreed on the step at which they stop, and all of them end."""

    def lost(self, node: int) -> None:
        """Report a node as lost, unless its rank has finished: then its watcher has ended as it should."""
        if node not in self.finished:
            super().lost(node)
        elif self.hub:
            self.hub.remove(node)
        else:
            self.connection = None

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
                if self._leave(now - ended):
                    return
            if not self.connection:
                self.judge(beat)
        self._carry_out()

    def _leave(self, seconds):
        """Whether this watcher may end, `seconds` after its rank has: it may have to wait for the others or a verdict."""
        if self.own_finished():
            if self.connection:
                self.connection.tell(finished=True)
            return not self.hub or len(self.finished) == self.nodes or seconds > PARTING_SECONDS
        return seconds > CASCADE_SECONDS + channel.SILENCE_SECONDS

    def _obey(self):
        """If the rank asks for it, connect to the other ranks' watchers; block until all have come, or warn after a minute."""
        order = self.rank.order(0)
        if order is None:
            return
        try:
            if "listen" in order:
                listener = socket.create_server(("127.0.0.1" if self.here.num_nodes == 1 else "", 0))
                self.hub = hub.Hub(listener, order["hello"], self._say, bytes.fromhex(order["listen"]))
                self.rank.answer(port=listener.getsockname()[1])
                self.hub.meet(MEETING_SECONDS)
                self.hub.send(go={"attempt": 0, "address": "127.0.0.1", "port": 1})
            else:
                where = (order["address"], order["port"], order["hello"], MEETING_SECONDS, self._say)
                self.connection, _ = channel.join(*where, bytes.fromhex(order["key"]))
        except UserError as error:
            self._say(f"warning: this rank is not watched: {error}")

    def _say(self, text):
        print(f"rank {self.here.rank}: {one_line(text)}", flush=True)

    def _carry_out(self):
        worker, rank = self.workers[0], self.here.rank
        if rank == self.verdict.get("stack_of"):
            print(worker.stack(), end="", file=sys.stderr, flush=True)
        single = not self.hub and not self.connection
        if self.here.local_rank == 0 and not (single and worker.reported_fault()):  # unless the rank has shown it
            report_failure(self.verdict_line(self.here.world_size))
        self.rank.end(self.verdict["code"])
        if rank == 0:
            self.killed(self.since, self.verdict["text"])


def start(here: World, killed: Callable[[float, str], object]) -> Beside:
    """Fork the watcher of this rank. If the watcher is killed, the rank ends, as the other watchers then take it for lost.
    The watcher of rank 0 calls `killed(since, why)` when the job has failed."""

    def lost() -> None:
        does = "so this rank does, too: start again, the run goes on where it saved"
        report_failure(f"the watcher of rank {here.rank} has ended, {does}")
        os._exit(1)

    files, process = beside.start(here.rank, lambda worker: Watcher(here, worker, killed).run(), lost)
    os.environ[heartbeat.FILES] = files
    heartbeat.write_stacks()
    return process
