"""What the parent of a node (supervisor.py) and the watcher of a rank (watcher.py) have in common.

Each of them reports the state of its workers to node 0, which decides what has happened (judge.py).
"""

import time
from typing import Any, Optional

from common.alive.judge import Judge, summarize
from common.alive.wire import channel
from common.alive.wire.channel import SILENCE_SECONDS
from common.alive.worker import Fault, Worker, cause

OWN = -1  # this node itself, among the numbers of the other nodes


class Watch:
    """One of `nodes` parents or watchers, all called nodes here. `home`: the node or host of its workers, for the log."""

    def __init__(self, nodes: int, ranks: int, home: str):
        self.nodes, self.ranks = nodes, ranks
        self.home = home
        self.hub: Any = None  # on node 0: the connections to the other nodes
        self.connection: Any = None  # on every other node: the connection to node 0
        self.workers: list[Worker] = []
        self.finished: set[int] = set()
        self.judge = Judge(ranks)  # asked on node 0
        self.stop_signal: Any = None
        self.verdict: Optional[Fault] = None  # what node 0 has decided
        self.since = time.time()  # the time.time() at which its workers were started
        self.beat_seconds = channel.beat_seconds(nodes)

    def name_of(self, node: int) -> str:
        raise NotImplementedError

    def stopped(self) -> None:
        """Called when a worker has ended on a stop signal that this process has not received."""
        raise NotImplementedError

    def messages(self) -> list[tuple]:
        """Wait up to 0.1 s for messages; return a list of (node, message). A message of None means that the node is lost."""
        if self.hub or self.connection:
            return (self.hub or self.connection).poll(0.1)
        time.sleep(0.05)
        return []

    def hear(self, node: int, message: Optional[dict]) -> None:
        if message is None:
            self.lost(node)
        elif "status" in message:
            self.judge.note(node, message["status"])
        elif "fault" in message:
            self.judge.accuse(message["fault"])
        elif "finished" in message:
            self.finished.add(node)
        elif "end" in message:
            self.finished.update(range(self.nodes))
        elif "stop" in message and not self.stop_signal:
            self.stop_signal = message["stop"]
        elif "verdict" in message:
            self.verdict = message["verdict"]

    def lost(self, node: int) -> None:
        seconds = time.monotonic() - (self.connection or self.hub.connections[node]).heard
        if self.hub:
            self.hub.remove(node)
        if self.stop_signal or node in self.finished:
            self.connection = None
            return
        how = f"has been silent for {seconds:.0f} s (machine or network)" if seconds > SILENCE_SECONDS else "is lost"
        text = f"{self.name_of(node)} {how}"
        report = cause(text, restart=False)
        if self.hub:
            self.judge.accuse(report)
        else:
            self.verdict = report

    def suspect(self, worker: Worker) -> None:
        """Unless the job stops, report a failed worker (or one in state T) once; call stopped() if a stop signal ended it."""
        if worker.reported or self.stop_signal:
            return
        report = worker.fault(self.home)
        worker.reported = worker.was_stopped() or report is not None
        if worker.was_stopped():
            self.stopped()
        elif report is None:
            return
        elif self.connection:
            self.connection.tell(fault=report)
        else:
            self.judge.accuse(report)

    def beat(self) -> None:
        mine = summarize([worker.status() for worker in self.workers])
        if self.connection:
            self.connection.tell(status=mine)
            if self.own_finished():
                self.connection.tell(finished=True)
            return
        self.judge.note(OWN, mine)
        if self.hub:
            self.hub.send(beat=True)
            if self.own_finished() and self.others_finished():
                self.hub.send(end=True)
                self.finished.add(OWN)

    def decide(self, stalls: bool) -> None:
        """On node 0, set the verdict and send it to the others if the job has failed. `stalls`: whether to look for a hang."""
        self.verdict = self.verdict or self.judge.verdict(stalls and not self.stop_signal)
        if self.verdict and self.hub:
            self.hub.send(verdict=self.verdict)

    def line(self, verdict: Fault) -> str:
        """Return the line for the log about the verdict."""
        return f"{verdict['text']}; stopping all {self.ranks} ranks" if self.ranks > 1 else verdict["text"]

    def others_finished(self) -> bool:
        return len(self.finished) == self.nodes - 1

    def own_finished(self) -> bool:
        return bool(self.workers) and all(worker.code == 0 and worker.last[0] == "done" for worker in self.workers)
