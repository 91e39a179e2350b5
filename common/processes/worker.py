"""The workers of a node as their parent sees them: what each one's pulse shows, what it died of, who holds the others up."""

import collections
import contextlib
import json
import signal
import statistics
import time
from typing import Any

from common import heartbeat
from common.errors import STOP_SIGNALS

STOPPED_SECONDS = 3.0  # a process in state T for so long is no debugger's passing halt
STALL_SECONDS, STALL_STEPS = 60, 10  # training without a step for so long, or for so many median steps
STOP = "stop"  # no fault: the platform has told this worker to stop


def cause(text, direct=True, code=1, restart=True):
    """What happened, whether to itself (`direct`) or because of another, the exit code, and whether a restart could help."""
    return {"text": text, "direct": direct, "code": code, "restart": restart}


class Worker:
    """One process of this node, and what its pulse has shown."""

    def __init__(self, rank: int, files: str):
        self.rank, self.files = rank, files
        self.process: Any = None  # a Popen, once it is started
        self.pulse = heartbeat.create(files)
        self.changed = time.monotonic()
        self.last = self.pulse.read()
        self.step_seconds = collections.deque(maxlen=50)
        self.stopped_since = self.code = None
        self.reported = False

    def look(self):
        now, seen = time.monotonic(), self.pulse.read()
        if seen != self.last:
            if seen[1] > self.last[1] > 0 and seen[0] in heartbeat.TRAINING:
                self.step_seconds.append((now - self.changed) / (seen[1] - self.last[1]))
            self.last, self.changed = seen, now
        self.code = self.process.poll()
        self.stopped_since = (self.stopped_since or now) if self._is_stopped() else None

    def _is_stopped(self):
        with contextlib.suppress(OSError), open(f"/proc/{self.process.pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "T"
        return False

    def status(self):
        """What node 0 needs to know of it."""
        phase, steps = self.last
        idle = 0.0 if self.code is not None else time.monotonic() - self.changed  # who has left holds nobody up
        median = statistics.median(self.step_seconds) if self.step_seconds else 0.0
        return {"rank": self.rank, "phase": phase, "steps": steps, "idle": idle, "median": median}

    def fault(self, home):
        """What is wrong with it: a cause(), STOP, or None. `home` is the node that it runs on, in words."""
        phase, steps = self.last
        who, where = f"rank {self.rank} ({home})", f"after step {steps}, in phase {phase}"
        if self.code is None:
            halted = self.stopped_since and time.monotonic() - self.stopped_since > STOPPED_SECONDS
            return cause(f"{who} is stopped (state T) {where}") if halted else None
        if self.code == 0:
            return None if phase == "done" else cause(f"{who} left {where} although the run was not over")
        words = self.own_words()
        if words:
            text = f"{who} failed {where}: {words['text']}"
            return cause(text, direct=not words["victim"], code=words["code"], restart=words["code"] != 2)
        if self.code in STOP_SIGNALS.values():
            return STOP
        if self.code > 0:
            return cause(f"{who} left with exit code {self.code} {where}")
        hint = ", perhaps for want of memory" if self.code == -signal.SIGKILL else ""
        # The abort at the end of a broken collective is a victim's; every other signal came from outside.
        text = f"{who} was killed by {signal.Signals(-self.code).name}{hint} {where}"
        return cause(text, direct=self.code != -signal.SIGABRT)

    def own_words(self):
        """What it wrote of its failure, if it could."""
        with contextlib.suppress(OSError, ValueError), open(f"{self.files}.fault") as file:
            return json.load(file)
        return None

    def stack(self):
        """Where it is, as its own fault handler writes it when asked."""
        with contextlib.suppress(OSError):
            self.process.send_signal(signal.SIGUSR2)
            deadline = time.monotonic() + 2
            while time.monotonic() < deadline:
                with open(f"{self.files}.stack") as file:
                    text = file.read()
                if text.endswith("\n"):
                    return text
                time.sleep(0.05)
        return "its stack cannot be had"


def stalled(statuses):
    """The status of the worker that holds the others up, if the whole job has been without progress for too long."""
    for status in statuses:
        limit = heartbeat.PHASES[status["phase"]]
        if limit is not None and status["idle"] > limit:
            return status
    training = [status for status in statuses if status["phase"] in heartbeat.TRAINING]
    if not training or len(training) < len(statuses):
        return None  # somebody saves or evaluates, within the limit of that phase, and the others wait for it
    limit = max(STALL_SECONDS, STALL_STEPS * max(status["median"] for status in training))
    if min(status["idle"] for status in training) <= limit:
        return None
    return min(training, key=lambda status: (status["steps"], heartbeat.TRAINING.index(status["phase"]), status["rank"]))
