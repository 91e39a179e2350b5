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
# without a look(): this process was suspended (Ctrl-Z, or by the cluster), and with it the rank
ASLEEP_SECONDS = 10


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
    """Return a Fault with these fields; the text is cut off after 2000 characters."""
    return {"text": text[:2000], "direct": direct, "code": code, "restart": restart}


class Worker:
    """A worker process, and the progress that it has reported through shared memory."""

    def __init__(self, rank: int, file_prefix: str):
        """`file_prefix`: of the names of the files through which the worker reports (heartbeat.py)."""
        self.rank = rank
        self.file_prefix = file_prefix
        self.process: Any = None  # a Popen or a beside.WatchedRank, once it is started
        self.pulse = heartbeat.create(file_prefix)
        self.last_change = self.last_look = time.monotonic()
        self.progress = self.pulse.read()
        self.step_seconds = collections.deque(maxlen=50)
        self.stopped_since = self.code = None
        self.blocked_threads = held.BlockedThreads()
        # seconds of waits, at the last look() and at the last progress
        self.waited_seconds = self.waited_at_progress = 0.0
        self.reported = False

    def look(self) -> None:
        """Read what the worker has reported, and whether it runs, is stopped or blocked. To be polled."""
        now = time.monotonic()
        progress = self.pulse.read()
        waited_seconds = self.pulse.waited_seconds()
        self._look_for_a_disk(now)
        # Time in which the rank waited for a store or a disk, or in which both processes were suspended, is
        # not idle time.
        suspended_seconds = now - self.last_look if now - self.last_look > ASLEEP_SECONDS else 0.0
        self.last_change = min(
            now, self.last_change + max(suspended_seconds, waited_seconds - self.waited_seconds)
        )
        self.last_look = now
        if progress != self.progress:
            is_timed = (
                self.progress[1] > 0 or self.progress[0] == "compile"
            ) and waited_seconds == self.waited_at_progress
            if progress[1] > self.progress[1] and is_timed and progress[0] in heartbeat.STEP_PHASES:
                self.step_seconds.append((now - self.last_change) / (progress[1] - self.progress[1]))
            self.progress = progress
            self.last_change = now
            self.waited_at_progress = waited_seconds
        self.waited_seconds = waited_seconds
        self.code = self.process.poll()
        self.stopped_since = (self.stopped_since or now) if self._is_stopped() else None

    def _look_for_a_disk(self, now: float) -> None:
        """Report (shared memory, log) when the kernel begins or ceases to block the rank on a disk;
        the rank itself cannot."""
        disk = self.pulse.disk
        limit = patience.limit()
        may_be_blocked = self.code is None and (now - self.last_change > held.least_seconds() or disk.text())
        since = self.blocked_threads.blocked_since(self.process.pid) if may_be_blocked else None
        warning = f"warning: rank {self.rank} (process {self.process.pid})"
        if since is None:
            if waited_seconds := disk.report_end(held.DISK):
                print(f"{warning} has waited {waited_seconds:.0f} s for {held.DISK}", flush=True)
        elif now < since + limit and disk.report_begin(held.DISK, since, since + limit):
            print(
                f"{warning} waits for {held.DISK} that does not answer, for {limit:g} s (--patience)",
                flush=True,
            )

    def _is_stopped(self):
        with contextlib.suppress(OSError):
            return held.state(f"/proc/{self.process.pid}") == "T"
        return False

    def status(self) -> Status:
        """Return the progress of the worker, as of the last look()."""
        phase, steps = self.progress
        idle = 0.0  # also of a worker that has ended: no other rank waits for it
        if self.code is None:
            idle = time.monotonic() - self.last_change
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

    def fault(self, location: str) -> Optional[Fault]:
        """Return a report of the fault of the worker, or None. `location`: its node or host."""
        phase, steps = self.progress
        name = f"rank {self.rank} ({location})"
        position = f"after step {steps}, in phase {phase}"
        if self.code is None:
            is_halted = self.stopped_since and time.monotonic() - self.stopped_since > STOPPED_SECONDS
            return cause(f"{name} is stopped (state T) {position}") if is_halted else None
        if self.code == 0 and phase == "done":
            return None
        if self.code == 0:
            return cause(f"{name} ended {position} although the run was not over")
        fault = self.reported_fault()  # first: it says more than the exit code does
        if fault:
            text = f"{name} failed {position}: {fault['text']}"
            return cause(text, direct=not fault["victim"], code=fault["code"], restart=fault["code"] != 2)
        if self.was_stopped():
            return None
        if self.code > 0:
            return cause(f"{name} ended with exit code {self.code} {position}")
        return self._fault_of_signal(name, position)

    def _fault_of_signal(self, name: str, position: str) -> Fault:
        assert self.code is not None
        number = -self.code
        signal_name = next((member.name for member in signal.Signals if member == number), f"signal {number}")
        hint = getattr(self.process, "doubt", "")  # of a rank that is no child of this process
        if number == signal.SIGKILL:
            hint = ", perhaps for want of memory"
        # SIGABRT ends a victim, whose collective has broken; any other signal is a cause of its own.
        is_cause = number != signal.SIGABRT
        fault = cause(f"{name} was killed by {signal_name}{hint} {position}", direct=is_cause)
        return {**fault, "stack_of": self.rank}

    def reported_fault(self) -> Optional[dict[str, Any]]:
        """Return the fault that the worker has reported (heartbeat.report_fault()), or None.

        Its keys are "text"; "code", the exit code; and "victim", whether another worker failed first.
        """
        with contextlib.suppress(OSError, ValueError):
            return json.loads(Path(f"{self.file_prefix}.fault").read_text())
        return None

    def stack(self) -> str:
        """Return the stack that an ended worker left (perhaps empty) or a running one writes;
        a line that says so if not."""
        if self.code is not None:
            return heartbeat.crash_stack(self.file_prefix)
        with contextlib.suppress(OSError):
            self.process.send_signal(signal.SIGUSR2)
            deadline = time.monotonic() + 2
            while time.monotonic() < deadline:
                text = Path(f"{self.file_prefix}.stack").read_text()
                if text.endswith("\n"):
                    return text
                time.sleep(0.05)
        return f"rank {self.rank} did not write its stack\n"


def describe_progress(status: Status) -> str:
    """Return how long a worker is idle, after which step, and for what it waits, for the log."""
    waiting = f", waiting for {status['waits']}" if status["waits"] else ""
    return f"for {status['idle']:.0f} s after step {status['steps']}, in phase {status['phase']}{waiting}"
