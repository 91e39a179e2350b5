"""The watcher of a rank without our parent process: the only one of a job,
or one of several that the platform starts itself.

It reads the rank's pulse, and connects to the watchers of the other ranks when all ranks have met. It gives
the guarantee of a parent: if a rank is killed, stopped, stuck or lost, the log names it, and the other ranks
end. If it is the only rank, it ends, too, so that the platform can start it again; in a terminal there is
only a warning.
"""

import os
import socket
import sys
import time
from typing import Callable, Optional

from common.alive import beside, heartbeat
from common.alive.beside import WatcherConnection
from common.alive.judge import CASCADE_SECONDS
from common.alive.loop import Loop
from common.alive.wire import channel, hub
from common.alive.worker import Fault, Worker
from common.errors import STOP_SIGNALS, UserError, one_line, report_failure
from common.world import World

MEETING_SECONDS = 60  # how long the watchers may take to connect, once all ranks have met
PARTING_SECONDS = 10  # how long the watcher of rank 0 waits for the others after its own rank has ended


class Watcher:
    """The policy of a watcher (loop.py): if a rank is lost, all end."""

    def __init__(
        self, world: World, worker: Worker, on_failure: Callable[[float, str], object], says_why: bool
    ):
        """`says_why`: whether the rank itself says why it ends, unless a signal ends it."""
        self._world = world
        self._loop = Loop(world.world_size, world.world_size, f"host {socket.gethostname()}")
        self._loop.workers = [worker]
        self._worker = worker
        self._on_failure = on_failure
        self._says_why = says_why
        self._only_warns = world.world_size == 1 and sys.stdin is not None and sys.stdin.isatty()
        self._warned_progress: Optional[tuple] = None  # the progress at which this watcher has warned
        self._ended_at: Optional[float] = None  # since when its rank has ended

    def run(self) -> None:
        self._loop.run(self)

    def hear(self, _node: int, _message: channel.Message) -> None:
        """Do nothing: watchers say nothing of their own to each other."""

    def handle_loss(self, node: int, _silent: bool, description: str) -> None:
        self._loop.blame(node, f"rank {node} {description}")

    def look_at(self, worker: Worker) -> None:
        self._handle_request()
        if not self.workers_finished():
            self._loop.report(worker)

    def workers_finished(self) -> bool:
        """Whether the rank has ended as it should, also by a signal, on which all stop at one step;
        or says why it has not."""
        code = self._worker.code
        return code in (0, *STOP_SIGNALS.values()) or (self._says_why and code is not None and code >= 0)

    def other_nodes_finished(self) -> bool:
        return len(self._loop.finished) == self._loop.nodes - 1

    def tell(self, _beat: bool) -> None:
        """Do nothing: the others need know no more than the loop tells them."""

    def find_cause(self, stalls: bool) -> Optional[Fault]:
        """Return what ends the job. Only the training of a single rank is timed: nobody waits for it."""
        is_timed = self._loop.ranks > 1 or self._worker.progress[0] in heartbeat.STEP_PHASES
        return self._loop.judge.verdict(stalls and is_timed)

    def end_turn(self) -> Optional[int]:
        verdict = self._loop.verdict
        if self._worker.code is not None:
            self._ended_at = self._ended_at or time.monotonic()
            if self._may_leave(time.monotonic() - self._ended_at):
                return 0
        if verdict and not self._warn(verdict):
            self._carry_out(verdict)
            return verdict["code"]
        return None

    def _warn(self, verdict: Fault) -> bool:
        """In a terminal, warn of the only rank, once, if it hangs or is stopped; return False otherwise."""
        worker = self._worker
        if not self._only_warns or worker.code is not None:
            return False
        if self._warned_progress != worker.progress:
            print(f"warning: {self._loop.log_line(verdict)}", file=sys.stderr, flush=True)
        self._warned_progress = worker.progress
        worker.reported = False
        self._loop.forget()
        return True

    def _may_leave(self, seconds: float) -> bool:
        """Whether this watcher may end, `seconds` after its rank has.

        It may have to wait for the others, or for a verdict."""
        loop = self._loop
        if self.workers_finished():
            if loop.connection:
                loop.connection.tell(finished=True)
            return not loop.hub or len(loop.finished) == loop.nodes or seconds > PARTING_SECONDS
        return seconds > CASCADE_SECONDS + channel.SILENCE_SECONDS

    def _handle_request(self):
        """If the rank asks for it, connect to the other ranks' watchers; block until all have come,
        or warn after a minute."""
        loop = self._loop
        rank = self._worker.process
        request = rank.next_request(0)
        if request is None:
            return
        try:
            if "listen" in request:
                listener = socket.create_server(("127.0.0.1" if self._world.num_nodes == 1 else "", 0))
                loop.hub = hub.Hub(listener, request["hello"], self._say, bytes.fromhex(request["listen"]))
                rank.answer(port=listener.getsockname()[1])
                loop.hub.meet(MEETING_SECONDS)
                loop.hub.send(go={"attempt": 0, "address": "127.0.0.1", "port": 1})
            else:
                join_arguments = (
                    request["address"],
                    request["port"],
                    request["hello"],
                    MEETING_SECONDS,
                    self._say,
                )
                loop.connection, _ = channel.join(*join_arguments, bytes.fromhex(request["key"]))
        except UserError as error:
            self._say(f"warning: this rank is not watched: {error}")

    def _say(self, text: str) -> None:
        print(f"rank {self._world.rank}: {one_line(text)}", flush=True)

    def _carry_out(self, verdict: Fault) -> None:
        """Log the verdict, with the stack if it asks for this rank's, and end the rank with its exit code."""
        loop = self._loop
        worker = self._worker
        rank = self._world.rank
        if rank == verdict.get("stack_of"):
            print(worker.stack(), end="", file=sys.stderr, flush=True)
        is_single = not loop.hub and not loop.connection
        if self._world.local_rank == 0 and not (is_single and worker.reported_fault()):
            # The rank, if it is alone, has not shown it itself.
            report_failure(loop.log_line(verdict))
        worker.process.end(verdict["code"])
        if rank == 0:
            self._on_failure(loop.start_time, verdict["text"])


def start(world: World, on_failure: Callable[[float, str], object], says_why: bool) -> WatcherConnection:
    """Fork a watcher for this rank of a job with several ranks; return the connection to it.

    If the watcher ends, this rank exits as well, and the watchers of the other ranks report it as lost.
    `on_failure(since, why)`: called by the watcher of rank 0 if the job fails; `says_why`: see Watcher.
    """

    def watch(worker: Worker) -> None:
        Watcher(world, worker, on_failure, says_why).run()

    def exit_without_watcher() -> None:
        advice = "so this rank does, too: start again, the run goes on where it saved"
        report_failure(f"the watcher of rank {world.rank} has ended, {advice}")
        os._exit(1)

    file_prefix, connection = beside.start(world.rank, watch, exit_without_watcher)
    os.environ[heartbeat.FILES] = file_prefix
    heartbeat.write_stacks()  # now that the files have a name
    return connection


def start_for_single_rank(world: World, on_failure: Callable[[float, str], object]) -> None:
    """Fork the watcher of the only rank.

    Without room for its files, or if it is killed, there is a warning only.
    """

    def watch(worker: Worker) -> None:
        Watcher(world, worker, on_failure, says_why=True).run()

    def warn() -> None:
        text = "the watcher of this process has ended: no line will say so if this one hangs"
        print(f"warning: {text}", file=sys.stderr, flush=True)

    try:
        file_prefix, _ = beside.start(world.rank, watch, warn)
        heartbeat.set_files_of_single_rank(file_prefix)
        heartbeat.write_stacks()
    except OSError as error:
        print(f"warning: this process is not watched: {one_line(error)}", file=sys.stderr, flush=True)
