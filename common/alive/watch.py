"""Decide what happened to a job: the base of the parent of a node (supervisor.py) and the watcher of a rank (watcher.py).

Each of them reports the state of its workers to node 0, which decides. A worker that was killed, stopped or failed by itself is
the cause. A worker whose collective broke is a victim. A victim is named only if no cause appears within the time that it takes
to notice a lost node.
"""

import time
from typing import Any, Optional

from common.alive.wire import channel
from common.alive.wire.channel import SILENCE_SECONDS
from common.alive.worker import STOP, Worker, cause, stalled, summary, where

OWN = -1  # this node itself, among the numbers of the other nodes
CASCADE_SECONDS = SILENCE_SECONDS + 0.7  # how long a cause may take to appear after its victim


class Watch:
    """One of `nodes` parents or watchers, all called nodes here. `home`: the node or host of its workers, for the log."""

    def __init__(self, nodes: int, home: str):
        self.nodes, self.home = nodes, home
        self.hub: Any = None  # on node 0: the connections to the other nodes
        self.connection: Any = None  # on every other node: the connection to node 0
        self.workers: list[Worker] = []
        self.statuses: dict[int, dict] = {}
        self.finished: set[int] = set()
        self.suspects: list[tuple[float, dict]] = []
        self.stop_signal: Any = None
        self.verdict: Any = None  # what node 0 has decided: a cause()
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
            self.statuses[node] = message["status"]
        elif "fault" in message:
            self.suspects.append((time.monotonic(), message["fault"]))
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
        if self.stop_signal or (node in self.finished and (self.connection or self.own_finished())):
            self.connection = None
            return
        how = f"has been silent for {seconds:.0f} s (machine or network)" if seconds > SILENCE_SECONDS else "is lost"
        text = f"{self.name_of(node)} {how}"
        report = {**cause(text), "restart": False}
        if self.hub:
            self.suspects.append((time.monotonic(), report))
        else:
            self.verdict = report

    def suspect(self, worker: Worker) -> None:
        """Unless the job stops, report a failed worker (or one in state T) once; call stopped() if a stop signal ended it."""
        if worker.reported or self.stop_signal:
            return
        report: Any = worker.fault(self.home)
        if report is None:
            return
        worker.reported = True
        if report is STOP:
            self.stopped()
        elif self.connection:
            self.connection.tell(fault=report)
        else:
            self.suspects.append((time.monotonic(), report))

    def beat(self) -> None:
        mine = summary([worker.status() for worker in self.workers])
        if self.connection:
            self.connection.tell(status=mine)
            if self.own_finished():
                self.connection.tell(finished=True)
            return
        self.statuses[OWN] = mine
        if self.hub:
            self.hub.send(beat=True)
            if self.own_finished() and self.others_finished():
                self.hub.send(end=True)
                self.finished.add(OWN)

    def judge(self, stalls: bool) -> None:
        """Set the verdict, and send it to the other nodes, if the job has failed. `stalls`: whether to look for a hang, too."""
        now = time.monotonic()
        causes = [report for _, report in self.suspects if report["direct"]]
        victims = [(since, report) for since, report in self.suspects if not report["direct"]]
        if causes:
            self.verdict = causes[0]
        elif victims and now - victims[0][0] > CASCADE_SECONDS:
            self.verdict = victims[0][1]
        elif stalls and not self.suspects and not self.stop_signal:
            status = stalled(self.statuses.values())
            if status:
                report = cause(f"rank {status['rank']} has made no progress {where(status)}")
                self.verdict = {**report, "stack_of": status["rank"]}
        if self.verdict and self.hub:
            self.hub.send(verdict=self.verdict)

    def verdict_line(self, workers: int) -> str:
        """Return the line for the log about the verdict. `workers`: the number of ranks."""
        return f"{self.verdict['text']}; stopping all {workers} ranks" if workers > 1 else self.verdict["text"]

    def others_finished(self) -> bool:
        return len(self.finished) == self.nodes - 1

    def own_finished(self) -> bool:
        return all(worker.code == 0 and worker.last[0] == "done" for worker in self.workers)
