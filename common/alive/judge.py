"""Decide which worker or node is to blame when a job has failed or hangs, from what all nodes report:
the part of node 0.

A worker that was killed, stopped or failed by itself is the cause. A worker whose collective broke is a
victim. A victim is named only if no cause appears within the time that it takes to notice a lost node.
"""

import time
from collections.abc import Collection
from typing import Optional, TypedDict

from common.alive import heartbeat, patience
from common.alive.wire.channel import SILENCE_SECONDS
from common.alive.worker import Fault, Status, cause, describe_progress

CASCADE_SECONDS = SILENCE_SECONDS + 0.7  # how long a cause may take to appear after its victim
STALL_STEPS = 10  # a step may take this many times the median step


class Summary(TypedDict):
    """The statuses of a node's workers in a message whose size does not grow with their number."""

    # a worker outside training that has made no progress for longer than its phase allows
    late: Optional[Status]
    last: Optional[Status]  # of the workers in training, the furthest behind
    idle: float  # seconds for which no worker of the node has made progress
    median: float
    training: bool  # whether all workers are in training
    waiting: bool  # whether one waits for a store or a disk


class Judge:
    """Keeps the reports and summaries of all nodes, and decides which worker or node is to blame."""

    def __init__(self, ranks: int):
        """`ranks`: of the job. A single one is the victim of no other, so that it is named at once."""
        self._cascade_seconds = CASCADE_SECONDS if ranks > 1 else 0.0
        self._summaries: dict[int, Summary] = {}
        self._reports: list[tuple[float, Fault]] = []

    def note(self, node: int, summary: Summary) -> None:
        """Keep the latest summary of a node, for the search for a hang."""
        self._summaries[node] = summary

    def forget(self, node: int) -> None:
        """Drop the summary of a node that is lost."""
        self._summaries.pop(node, None)

    def accuse(self, report: Fault) -> None:
        """Note what has happened to a worker or a node, and when it was reported."""
        self._reports.append((time.monotonic(), report))

    def verdict(self, stalls: bool) -> Optional[Fault]:
        """Return the report that names the cause; None as long as there is none.

        `stalls`: whether to look for a hang, too.
        """
        causes = [report for _, report in self._reports if report["direct"]]
        if causes:
            return causes[0]
        if self._reports:
            since, victim = self._reports[0]
            return victim if time.monotonic() - since > self._cascade_seconds else None
        status = find_stalled(self._summaries.values()) if stalls else None
        if not status:
            return None
        return {
            **cause(f"rank {status['rank']} has made no progress {describe_progress(status)}"),
            "stack_of": status["rank"],
        }


def summarize(statuses: list[Status]) -> Summary:
    """Return the Summary of the statuses of all workers of a node, of which there must be one."""
    training = [status for status in statuses if status["phase"] in heartbeat.STEP_PHASES]
    in_other_phases = [status for status in statuses if status not in training]
    return {
        "late": next(
            (status for status in in_other_phases if status["idle"] > _limit(status["phase"])), None
        ),
        "last": min(training, key=_progress, default=None),
        "idle": min(status["idle"] for status in statuses),
        "median": max(status["median"] for status in statuses),
        "training": len(training) == len(statuses),
        "waiting": any(status["waiting"] for status in statuses),
    }


def _limit(phase: str) -> float:
    """Return how many seconds a phase may last without progress.

    A --patience below the default shortens only training.
    """
    factor = patience.limit() / patience.DEFAULT
    return heartbeat.PHASES[phase] * (factor if phase in heartbeat.STEP_PHASES else max(1.0, factor))


def _progress(status: Status) -> tuple[int, int, int]:
    return status["steps"], heartbeat.STEP_PHASES.index(status["phase"]), status["rank"]


def find_stalled(summaries: Collection[Summary]) -> Optional[Status]:
    """Return the status of a worker that hangs (in training, the furthest behind);
    None also if one waits for store or disk."""
    if any(summary["waiting"] for summary in summaries):
        # a rank waits for a store or a disk, and the others for that rank
        return None
    late = next((summary["late"] for summary in summaries if summary["late"]), None)
    if late or not summaries or not all(summary["training"] for summary in summaries):
        return late  # in other phases the others wait for this rank, up to the limit of its phase
    limit = max(_limit("step"), STALL_STEPS * max(summary["median"] for summary in summaries))
    if min(summary["idle"] for summary in summaries) <= limit:
        return None
    return min((summary["last"] for summary in summaries if summary["last"]), key=_progress)
