"""A worker as its parent or watcher sees it: its progress, and what is wrong with it."""

import collections
import contextlib
import json
import signal
import statistics
import time
from pathlib import Path
from typing import Any, Optional, TypedDict

from common.alive import heartbeat, held, patience
from common.errors import STOP_SIGNALS

STOPPED_SECONDS = 3.0  # how long in state T until it counts; a debugger may stop a process for a moment
ASLEEP_SECONDS = 10  # without a look(): this process was suspended (Ctrl-Z, or by the cluster), and with it the rank


class Cause(TypedDict):
    text: str
    direct: bool  # not because of another worker
    code: int  # the exit code for it
    restart: bool  # whether a restart could help


class Fault(Cause, total=False):
    """What has happened to a worker or a node."""

    stack_of: int  # the rank whose stack is to be shown


class Status(TypedDict):
    """The progress of a worker."""

    rank: int
    phase: str
    steps: int
    idle: float  # seconds without progress
    median: float  # seconds of a step
    waits: str  # for what it waits, and for how long; empty if it does not wait
    waiting: bool  # whether it waits for a store or a disk


def cause(text: str, direct: bool = True, code: int = 1, restart: bool = True) -> Fault:
    return {"text": text[:2000], "direct": direct, "code": code, "restart": restart}


class Worker:
    """A worker process, and the progress that it has reported through shared memory."""

    def __init__(self, rank: int, files: str):
        self.rank = rank
        self.files = files
        self.process: Any = None  # a Popen or a beside.Rank, once it is started
        self.pulse = heartbeat.create(files)
        self.changed = self.looked = time.monotonic()
        self.last = self.pulse.read()
        self.step_seconds = collections.deque(maxlen=50)
        self.stopped_since = self.code = None
        self.held = held.Held()
        self.waited = self.waited_before = 0.0  # seconds of waits, by the last look() and by the last one that saw progress
        self.reported = False

    def look(self) -> None:
        now = time.monotonic()
        seen = self.pulse.read()
        waited = self.pulse.waited()
        self._look_for_a_disk(now)
        # Time in which the rank waited for a store or a disk, or in which both processes were suspended, is not idle time.
        slept = now - self.looked if now - self.looked > ASLEEP_SECONDS else 0.0
        self.changed = min(now, self.changed + max(slept, waited - self.waited))
        self.looked = now
        if seen != self.last:
            counts = (self.last[1] > 0 or self.last[0] == "compile") and waited == self.waited_before
            if seen[1] > self.last[1] and counts and seen[0] in heartbeat.STEP_PHASES:
                self.step_seconds.append((now - self.changed) / (seen[1] - self.last[1]))
            self.last = seen
            self.changed = now
            self.waited_before = waited
        self.waited = waited
        self.code = self.process.poll()
        self.stopped_since = (self.stopped_since or now) if self._is_stopped() else None

    def _look_for_a_disk(self, now: float) -> None:
        """Report (shared memory, log) when the kernel begins or ceases to block the rank on a disk; the rank itself cannot."""
        disk = self.pulse.disk
        longest = patience.limit()
        idle = self.code is None and (now - self.changed > held.least_seconds() or disk.text())
        since = self.held.look(self.process.pid) if idle else None
        who = f"warning: rank {self.rank} (process {self.process.pid})"
        if since is None:
            if waited := disk.report_end(held.DISK):
                print(f"{who} has waited {waited:.0f} s for {held.DISK}", flush=True)
        elif now < since + longest and disk.report_begin(held.DISK, since, since + longest):
            print(f"{who} waits for {held.DISK} that does not answer, for {longest:g} s (--patience)", flush=True)

    def _is_stopped(self):
        with contextlib.suppress(OSError):
            return held.state(f"/proc/{self.process.pid}") == "T"
        return False

    def status(self) -> Status:
        phase, steps = self.last
        idle = 0.0 if self.code is not None else time.monotonic() - self.changed  # no other rank waits for one that has ended
        median = statistics.median(self.step_seconds) if self.step_seconds else 0.0
        store = self.pulse.store
        disk = self.pulse.disk
        return {
            "rank": self.rank, "phase": phase, "steps": steps, "idle": idle, "median": median,
            "waits": store.text() or disk.text(), "waiting": store.lasts() or disk.lasts(),
        }  # fmt: skip

    def was_stopped(self) -> bool:
        """Whether a stop signal has ended the worker, which is no fault."""
        return self.code in STOP_SIGNALS.values() and not self.reported_fault()

    def fault(self, home: str) -> Optional[Fault]:
        """Return a report of the fault of the worker, or None. `home`: its node or host."""
        phase, steps = self.last
        name = f"rank {self.rank} ({home})"
        where = f"after step {steps}, in phase {phase}"
        if self.code is None:
            halted = self.stopped_since and time.monotonic() - self.stopped_since > STOPPED_SECONDS
            return cause(f"{name} is stopped (state T) {where}") if halted else None
        if self.code == 0:
            return None if phase == "done" else cause(f"{name} ended {where} although the run was not over")
        fault = self.reported_fault()
        if fault:
            text = f"{name} failed {where}: {fault['text']}"
            return cause(text, direct=not fault["victim"], code=fault["code"], restart=fault["code"] != 2)
        if self.was_stopped():
            return None
        if self.code > 0:
            return cause(f"{name} ended with exit code {self.code} {where}")
        hint = ", perhaps for want of memory" if self.code == -signal.SIGKILL else getattr(self.process, "doubt", "")
        # A victim aborts when its collective breaks (SIGABRT); a worker that ended by another signal is a cause.
        by = next((known.name for known in signal.Signals if known == -self.code), f"signal {-self.code}")
        text = f"{name} was killed by {by}{hint} {where}"
        return {**cause(text, direct=self.code != -signal.SIGABRT), "stack_of": self.rank}

    def reported_fault(self) -> Optional[dict[str, Any]]:
        """Return what the worker has reported, {"text", exit "code", "victim": whether another one failed first}, or None."""
        with contextlib.suppress(OSError, ValueError):
            return json.loads(Path(f"{self.files}.fault").read_text())
        return None

    def stack(self) -> str:
        """Return the stack that an ended worker left (perhaps empty) or a running one writes; a line that says so if not."""
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


def where(status: Status) -> str:
    waits = f", waiting for {status['waits']}" if status["waits"] else ""
    return f"for {status['idle']:.0f} s after step {status['steps']}, in phase {status['phase']}{waits}"
