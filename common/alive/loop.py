"""The loop in which the parent of a node, or the watcher of a rank, sees who is alive.

A policy decides what to do about it.

Each turn hears the other nodes, looks at the workers here, tells node 0 of them, and asks there who is to
blame (judge.py). The policies are parent.py, watcher.py and, in an elastic job, common/elastic/parent.py.
Watchers are called nodes here, too.
"""

import time
from typing import Optional, Protocol

from common.alive.judge import Judge, summarize
from common.alive.wire import channel
from common.alive.wire.channel import SILENCE_SECONDS, Connection, Message
from common.alive.wire.hub import Hub
from common.alive.worker import Fault, Worker, cause

THIS_NODE = -1  # this node itself, among the numbers of the other nodes


class Policy(Protocol):
    """What the loop asks of a parent or a watcher, which decides what to do."""

    def hear(self, node: int, message: Message, /) -> None:
        """Take a message that the loop does not know."""
        ...

    def handle_loss(self, node: int, is_silent: bool, description: str, /) -> None:
        """Handle the loss of a node.

        `is_silent`: it may still run; `description`: what is known, for the log.
        """
        ...

    def look_at(self, worker: Worker) -> None:
        """React to the state of a worker here: report its fault by Loop.report(),
        or drop it from Loop.workers."""
        ...

    def workers_finished(self) -> bool:
        """Whether all workers here have finished the run."""
        ...

    def other_nodes_finished(self) -> bool:
        """Whether all other nodes have said that their workers have.

        Asked on the node that leads: node 0 or, in an elastic job, another one after its loss.
        """
        ...

    def tell(self, is_beat: bool, /) -> None:
        """Tell the other nodes what the loop does not. `is_beat`: whether a beat was due in this turn."""
        ...

    def find_cause(self, stalls: bool) -> Optional[Fault]:
        """Return the fault that ends the job, or None. `stalls`: whether to look for a hang, too.

        Asked on the node that leads: node 0 or, in an elastic job, another one after its loss.
        """
        ...

    def end_turn(self) -> Optional[int]:
        """Return the exit code if this was the last turn."""
        ...


class Loop:
    """The turns of a parent or watcher: its connections, its workers, and what node 0 has decided."""

    def __init__(self, nodes: int, ranks: int, location: str):
        """`nodes`, `ranks`: how many there are in the job; `location`: the node or host, for the log."""
        self.nodes = nodes
        self.ranks = ranks
        self.location = location
        self.hub: Optional[Hub] = None  # on node 0: the connections to the other nodes
        self.connection: Optional[Connection] = None  # on every other node: the connection to node 0
        self.workers: list[Worker] = []
        self.finished: set[int] = set()  # the nodes whose workers have finished the run
        self.judge = Judge(ranks)  # asked on node 0
        self.stop_signal: Optional[int] = None  # on which the job stops
        self.verdict: Optional[Fault] = None  # what node 0 has decided
        self.start_time = time.time()  # the time.time() at which the workers were started
        self.beat_seconds = channel.beat_seconds(nodes)

    def run(self, policy: Policy) -> int:
        """Watch until the policy ends it; return the exit code that it gives."""
        last_beat = 0.0
        while True:
            for node, message in self.messages():
                self._hear(node, message, policy)
            for worker in list(self.workers):
                worker.look()
                policy.look_at(worker)
            now = time.monotonic()
            is_beat_due = now - last_beat >= self.beat_seconds
            if is_beat_due:
                last_beat = now
                self._beat(policy)
            policy.tell(is_beat_due)
            if not self.connection:
                self._decide(policy.find_cause(stalls=is_beat_due))
            code = policy.end_turn()
            if code is not None:
                return code

    def forget(self) -> None:
        """Forget what was wrong and who has finished, as another attempt begins, or another node leads."""
        self.verdict = None
        self.judge = Judge(self.ranks)
        self.finished = set()

    def messages(self) -> list[tuple]:
        """Wait up to 0.1 s for messages; return a list of (node, message).

        A message of None means that the node is lost.
        """
        connections = self.hub or self.connection
        if connections:
            return connections.poll(0.1)
        time.sleep(0.05)
        return []

    def _hear(self, node: int, message: Optional[Message], policy: Policy) -> None:
        """Handle a message of a node, or its loss (None). The policy gets what the loop does not know."""
        if message is None:
            self._lose(node, policy)
        elif "status" in message:
            self.judge.note(node, message["status"])
        elif "fault" in message:
            self.judge.accuse(message["fault"])
        elif "finished" in message:
            self.finished.add(node)
        elif "end" in message:
            self.finished.update(range(self.nodes))
        elif "verdict" in message:
            self.verdict = message["verdict"]
        else:
            policy.hear(node, message)

    def _lose(self, node: int, policy: Policy) -> None:
        connection = self.hub.connections[node] if self.hub else self.connection
        seconds = time.monotonic() - connection.last_received if connection else 0.0
        is_silent = seconds > SILENCE_SECONDS
        description = f"has been silent for {seconds:.0f} s (machine or network)" if is_silent else "is lost"
        policy.handle_loss(node, is_silent, description)

    def _beat(self, policy: Policy) -> None:
        """Report how the workers here are; node 0 notes it, and tells all nodes when all have finished."""
        if not self.workers:
            return
        summary = summarize([worker.status() for worker in self.workers])
        if self.connection:
            self.connection.tell(status=summary)
            if policy.workers_finished():
                self.connection.tell(finished=True)
            return
        self.judge.note(THIS_NODE, summary)
        if self.hub:
            self.hub.send(beat=True)
            if policy.workers_finished() and policy.other_nodes_finished():
                self.hub.send(end=True)
                self.finished.add(THIS_NODE)

    def _decide(self, verdict: Optional[Fault]) -> None:
        self.verdict = self.verdict or verdict
        if self.verdict and self.hub:
            self.hub.send(verdict=self.verdict)

    # --- For the policies ---

    def report(self, worker: Worker) -> None:
        """Unless the job stops, tell node 0 once of a worker that has failed or is in state T."""
        if worker.reported or self.stop_signal:
            return
        fault = worker.fault(self.location)
        if fault is None:
            return
        worker.reported = True
        if self.connection:
            self.connection.tell(fault=fault)
        else:
            self.judge.accuse(fault)

    def blame(self, node: int, text: str) -> None:
        """Remove a lost node. Unless it had finished or the job stops, this ends the job, as `text` says."""
        if self.hub:
            self.hub.remove(node)
        if self.stop_signal or node in self.finished:
            self.connection = None
            return
        fault = cause(text, restart=False)
        if self.hub:
            self.judge.accuse(fault)
        else:
            self.verdict = fault

    def log_line(self, verdict: Fault) -> str:
        """Return the line for the log about the verdict."""
        return f"{verdict['text']}; stopping all {self.ranks} ranks" if self.ranks > 1 else verdict["text"]
