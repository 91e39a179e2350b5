"""The workers of a node as their parent sees them: the progress of each, why one died, which one the others wait for."""

import collections
import contextlib
import json
import signal
import statistics
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any, Optional, Union

from common import heartbeat
from common.errors import STOP_SIGNALS

STOPPED_SECONDS = 3.0  # a debugger may put a process into state T for a moment; this is longer
STALL_SECONDS, STALL_STEPS = 60, 10  # training without a step for this long, or for as long as this many median steps
ASLEEP_SECONDS = 10  # without a look at a worker: a terminal's Ctrl-Z, or a cluster that has suspended the job
STOP = "stop"  # no fault: the platform has told this worker to stop


def cause(text: str, direct: bool = True, code: int = 1, restart: bool = True) -> dict[str, Any]:
    """What happened; `direct`: not because of another worker; the exit code; and whether a restart could help."""
    return {"text": text[:2000], "direct": direct, "code": code, "restart": restart}


class Worker:
    """One process of this node, and the progress that its pulse has shown."""

    def __init__(self, rank: int, files: str):
        self.rank, self.files = rank, files
        self.process: Any = None  # a Popen, once it is started
        self.pulse = heartbeat.create(files)
        self.changed = self.looked = time.monotonic()
        self.last = self.pulse.read()
        self.step_seconds = collections.deque(maxlen=50)
        self.stopped_since = self.code = None
        self.reported = False

    def look(self) -> None:
        """Read the pulse and the state of the process."""
        now, seen = time.monotonic(), self.pulse.read()
        if now - self.looked > ASLEEP_SECONDS:  # this process was stopped, and what it watches was, too: no time of the run
            self.changed += now - self.looked
        self.looked = now
        if seen != self.last:
            if seen[1] > self.last[1] and (self.last[1] > 0 or self.last[0] == "compile") and seen[0] in heartbeat.TRAINING:
                self.step_seconds.append((now - self.changed) / (seen[1] - self.last[1]))
            self.last, self.changed = seen, now
        self.code = self.process.poll()
        self.stopped_since = (self.stopped_since or now) if self._is_stopped() else None

    def _is_stopped(self):
        with contextlib.suppress(OSError):
            return Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        return False

    def status(self) -> dict[str, Any]:
        """The progress that node 0 needs to find a stall."""
        phase, steps = self.last
        idle = 0.0 if self.code is not None else time.monotonic() - self.changed  # no other rank waits for one that has ended
        median = statistics.median(self.step_seconds) if self.step_seconds else 0.0
        return {"rank": self.rank, "phase": phase, "steps": steps, "idle": idle, "median": median}

    def fault(self, home: str) -> Union[dict[str, Any], str, None]:
        """What is wrong with it: a cause(), STOP, or None. `home`: the node and host that it runs on."""
        phase, steps = self.last
        name, where = f"rank {self.rank} ({home})", f"after step {steps}, in phase {phase}"
        if self.code is None:
            halted = self.stopped_since and time.monotonic() - self.stopped_since > STOPPED_SECONDS
            return cause(f"{name} is stopped (state T) {where}") if halted else None
        if self.code == 0:
            return None if phase == "done" else cause(f"{name} ended {where} although the run was not over")
        fault = self.reported_fault()
        if fault:
            text = f"{name} failed {where}: {fault['text']}"
            return cause(text, direct=not fault["victim"], code=fault["code"], restart=fault["code"] != 2)
        if self.code in STOP_SIGNALS.values():
            return STOP
        if self.code > 0:
            return cause(f"{name} ended with exit code {self.code} {where}")
        hint = ", perhaps for want of memory" if self.code == -signal.SIGKILL else getattr(self.process, "doubt", "")
        # A victim aborts at the end of its broken collective; every other signal came from outside.
        text = f"{name} was killed by {signal.Signals(-self.code).name}{hint} {where}"
        return {**cause(text, direct=self.code != -signal.SIGABRT), "stack_of": self.rank}

    def reported_fault(self) -> Optional[dict[str, Any]]:
        """What the worker has written with heartbeat.report_fault, if it could."""
        with contextlib.suppress(OSError, ValueError):
            return json.loads(Path(f"{self.files}.fault").read_text())
        return None

    def stack(self) -> str:
        """The stack of the worker, which its fault handler writes on a signal, or has written when it crashed."""
        if self.code is not None:
            return heartbeat.crash(self.files)
        with contextlib.suppress(OSError):
            self.process.send_signal(signal.SIGUSR2)
            deadline = time.monotonic() + 2
            while time.monotonic() < deadline:
                text = Path(f"{self.files}.stack").read_text()
                if text.endswith("\n"):
                    return text
                time.sleep(0.05)
        return f"rank {self.rank} did not write its stack\n"


def summary(statuses: list[dict[str, Any]]) -> dict[str, Any]:
    """What node 0 needs of the workers of a node to find a stall, however many they are."""
    limits = [(status, heartbeat.PHASES[status["phase"]]) for status in statuses]
    training = [status for status, limit in limits if limit is None]
    return {
        "late": next((status for status, limit in limits if limit is not None and status["idle"] > limit), None),
        "last": min(training, key=_progress, default=None),
        "idle": min(status["idle"] for status in statuses),
        "median": max(status["median"] for status in statuses),
        "training": len(training) == len(statuses),
    }


def _progress(status):
    return status["steps"], heartbeat.TRAINING.index(status["phase"]), status["rank"]


def stalled(summaries: Collection[dict[str, Any]]) -> Optional[dict[str, Any]]:
    """The status of the worker that the others wait for, if the whole job has made no progress for too long."""
    late = next((node["late"] for node in summaries if node["late"]), None)
    if late or not summaries or not all(node["training"] for node in summaries):
        return late  # a rank saves or evaluates within the limit of its phase, and the others wait for it
    limit = max(STALL_SECONDS, STALL_STEPS * max(node["median"] for node in summaries))
    if min(node["idle"] for node in summaries) <= limit:
        return None
    return min((node["last"] for node in summaries), key=_progress)
