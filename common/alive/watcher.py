"""The watcher of a rank without our parent process: the only one of a job, or one of several that the platform starts itself.

It reads the rank's pulse, and connects to the watchers of the other ranks when all ranks have met. It gives the guarantee of a
parent: if a rank is killed, stopped, stuck or lost, the log names it, and the other ranks end. If it is the only rank, it ends,
too, so that the platform can start it again; in a terminal there is only a warning.
"""

import os
import socket
import sys
import time
from typing import Callable, Optional

from common.alive import beside, heartbeat
from common.alive.beside import Beside
from common.alive.judge import CASCADE_SECONDS, Judge
from common.alive.watch import Watch
from common.alive.wire import channel, hub
from common.alive.worker import Fault, Worker
from common.errors import STOP_SIGNALS, UserError, one_line, report_failure
from common.world import World

MEETING_SECONDS = 60  # how long the watchers may take to connect, once all ranks have met
PARTING_SECONDS = 10  # how long the watcher of rank 0 waits for the others after its own rank has ended


class Watcher(Watch):
    def __init__(self, here: World, worker: Worker, killed: Callable[[float, str], object], says_why: bool):
        """`says_why`: whether the rank itself says why it ends, unless a signal ends it."""
        super().__init__(here.world_size, here.world_size, f"host {socket.gethostname()}")
        self.here, self.killed = here, killed
        self.rank, self.workers = worker.process, [worker]
        self._says_why = says_why
        self._only_warns = here.world_size == 1 and sys.stdin is not None and sys.stdin.isatty()
        self._warned: Optional[tuple] = None  # the progress at which this watcher has warned

    def name_of(self, node: int) -> str:
        return f"rank {node}"

    def stopped(self) -> None:
        """Do nothing: the ranks have agreed on the step at which they stop, and all of them end."""

    def own_finished(self) -> bool:
        code = self.workers[0].code
        return code in (0, *STOP_SIGNALS.values()) or (self._says_why and code is not None and code >= 0)

    def run(self) -> None:
        told, ended = 0.0, None
        while True:
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
                # Only the training of a single rank is timed: nobody waits for it.
                self.decide(beat and (self.ranks > 1 or self.workers[0].last[0] in heartbeat.STEP_PHASES))
            if self.verdict and not self._warn(self.verdict):
                self._carry_out(self.verdict)
                return

    def _warn(self, verdict: Fault) -> bool:
        """In a terminal, warn of the only rank, once, if it hangs or is stopped; return False otherwise."""
        worker = self.workers[0]
        if not self._only_warns or worker.code is not None:
            return False
        if self._warned != worker.last:
            print(f"warning: {self.line(verdict)}", file=sys.stderr, flush=True)
        self._warned, worker.reported = worker.last, False
        self.verdict, self.judge = None, Judge(self.ranks)
        return True

    def _leave(self, seconds: float) -> bool:
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

    def _say(self, text: str) -> None:
        print(f"rank {self.here.rank}: {one_line(text)}", flush=True)

    def _carry_out(self, verdict: Fault) -> None:
        worker, rank = self.workers[0], self.here.rank
        if rank == verdict.get("stack_of"):
            print(worker.stack(), end="", file=sys.stderr, flush=True)
        alone = not self.hub and not self.connection
        if self.here.local_rank == 0 and not (alone and worker.reported_fault()):  # unless the rank has shown it
            report_failure(self.line(verdict))
        self.rank.end(verdict["code"])
        if rank == 0:
            self.killed(self.since, verdict["text"])


def start(here: World, killed: Callable[[float, str], object], says_why: bool) -> Beside:
    """Fork the watcher of this rank, one of several. If the watcher is killed, the rank ends, as the others take it for lost.
    The watcher of rank 0 calls `killed(since, why)` when the job has failed. `says_why`: see Watcher."""

    def lost() -> None:
        does = "so this rank does, too: start again, the run goes on where it saved"
        report_failure(f"the watcher of rank {here.rank} has ended, {does}")
        os._exit(1)

    files, process = beside.start(here.rank, lambda worker: Watcher(here, worker, killed, says_why).run(), lost)
    os.environ[heartbeat.FILES] = files
    heartbeat.write_stacks()
    return process


def start_for_single_rank(here: World, killed: Callable[[float, str], object]) -> None:
    """Fork the watcher of the only rank. Without room for its files, or if it is killed, there is a warning only."""

    def lost() -> None:
        will = "no line will say so if this one hangs"
        print(f"warning: the watcher of this process has ended: {will}", file=sys.stderr, flush=True)

    try:
        files, _ = beside.start(here.rank, lambda worker: Watcher(here, worker, killed, says_why=True).run(), lost)
        heartbeat.set_files_of_single_rank(files)
        heartbeat.write_stacks()
    except OSError as error:
        print(f"warning: this process is not watched: {one_line(error)}", file=sys.stderr, flush=True)
