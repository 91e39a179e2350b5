"""The status that a worker reports to its node's parent process or its watcher: phase, number of steps,
why it failed.

One environment variable names the files. The pulse is a few bytes of shared memory, written with every change
and read at least twice a second. The fault is a line of JSON, written once. Without a parent or a watcher,
neither is read.
"""

import contextlib
import faulthandler
import json
import mmap
import os
import signal
import struct
import sys
import time
from pathlib import Path
from typing import Optional

FILES = "ANYRANK_WORKER"  # set if there is a parent or a watcher: the prefix of this worker's file names
PARENT = "ANYRANK_PARENT"  # set by the parent: its process id

# {phase: seconds without a change after which a worker counts as stuck}, for --patience 300. A larger one
# raises all of them, a smaller one lowers only "data" and "step", the training, which may take ten times the
# median step in any case.
PHASES = {
    "start": 3600,
    "join": 3600,
    "fetch": 600,
    "compile": 900,
    "data": 60,
    "step": 60,
    "evaluate": 3600,
    "save": 900,
    "publish": 3600,
    "done": 600,
}
STEP_PHASES = ("data", "step")
QUIET_SECONDS = 60  # so long after the end of a wait, another one for the same thing is logged again

_NAMES = list(PHASES)
_PROGRESS = struct.Struct("<2q")
_NUMBER = struct.Struct("<q")
_OFFSETS = {
    name: _PROGRESS.size + index * _NUMBER.size
    for index, name in enumerate(("wanted", "offered", "stop", "ended"))
}
# begin, or 0; when it becomes a hang, or its end; seconds of earlier waits; resource
_WAIT = struct.Struct("<3d160s")
_WAIT_OFFSET = _PROGRESS.size + len(_OFFSETS) * _NUMBER.size
_SIZE = _WAIT_OFFSET + 2 * _WAIT.size
_single_rank: Optional[str] = None
# {prefix: its memory}; a rank has that which it has made for its watcher
_PULSES: dict[Optional[str], "Pulse"] = {}


class Pulse:
    """The phase, steps and waits of a rank in shared memory.

    Without a prefix, only this process and its forks share it.
    """

    def __init__(self, prefix: Optional[str]):
        with open(f"{prefix}.pulse", "r+b") if prefix else contextlib.nullcontext() as file:
            self._memory = mmap.mmap(file.fileno() if file else -1, _SIZE)
        # for a store or a server, reported by the rank's processes (patience.py)
        self.store = Wait(self._memory, _WAIT_OFFSET)
        # reported by the parent or watcher (held.py)
        self.disk = Wait(self._memory, _WAIT_OFFSET + _WAIT.size)

    def waited_seconds(self) -> float:
        """Return the seconds of all waits for a store and for a disk so far."""
        return self.store.seconds() + self.disk.seconds()

    def set(self, phase: str, steps: int) -> None:
        """Report the phase (of PHASES) and the number of steps done."""
        _PROGRESS.pack_into(self._memory, 0, _NAMES.index(phase), steps)

    def read(self) -> tuple[str, int]:
        """Return (phase, steps done)."""
        phase, steps = _PROGRESS.unpack_from(self._memory, 0)
        return _NAMES[phase], steps

    # In an elastic job (common/elastic) a worker puts the generation that it waits for ("wanted"), and its
    # parent the newest one ("offered") and the signal on which to stop ("stop"); 0: none.

    def put(self, name: str, number: int) -> None:
        """Write one of the numbers "wanted", "offered", "stop" and "ended"."""
        _NUMBER.pack_into(self._memory, _OFFSETS[name], number)

    def get(self, name: str) -> int:
        """Return the number that put() has written under this name; 0 if there is none."""
        return _NUMBER.unpack_from(self._memory, _OFFSETS[name])[0]


class Wait:
    """A reported wait: for what, since when, and until when it does not count as a hang.

    Several processes may report it.
    """

    def __init__(self, memory: mmap.mmap, offset: int):
        self._memory = memory
        self._offset = offset

    def _read(self):
        return _WAIT.unpack_from(self._memory, self._offset)

    def report_begin(self, resource: str, since: float, until: float) -> bool:
        """Report a wait for `resource`, a hang after `until`.

        Return whether to log it: not if known or too soon.
        """
        now = time.monotonic()
        name = resource.encode()[:160].ljust(160, b"\0")
        began, stored_until, earlier_seconds, stored_name = self._read()
        if began and (stored_until < now or name != stored_name):
            # It is an earlier wait, whose end was not reported.
            earlier_seconds = earlier_seconds + min(stored_until, now) - began
            began = 0.0
        _WAIT.pack_into(
            self._memory,
            self._offset,
            began or max(since, min(stored_until, now)),
            until,
            earlier_seconds,
            name,
        )
        return name != stored_name or now - stored_until > QUIET_SECONDS

    def report_end(self, resource: str) -> float:
        """Report that the wait for `resource` is over; return its seconds,
        or 0.0 if there is no such wait."""
        began, until, earlier_seconds, name = self._read()
        if not began or name.rstrip(b"\0") != resource.encode()[:160]:
            return 0.0
        now = time.monotonic()
        _WAIT.pack_into(self._memory, self._offset, 0.0, now, earlier_seconds + min(until, now) - began, name)
        return now - began

    def lasts(self) -> bool:
        """Whether a wait goes on and does not count as a hang."""
        began, until, _, _ = self._read()
        return bool(began) and time.monotonic() <= until

    def text(self) -> str:
        """Return "RESOURCE for N s"; empty while there is no wait."""
        began, _, _, name = self._read()
        resource = name.rstrip(b"\0").decode(errors="replace")
        return f"{resource} for {time.monotonic() - began:.0f} s" if began else ""

    def seconds(self) -> float:
        """Return the seconds of all waits so far, without those in which a wait counted as a hang."""
        began, until, earlier_seconds, _ = self._read()
        return earlier_seconds + (min(time.monotonic(), until) - began if began else 0.0)


def create(prefix: str) -> Pulse:
    """Create the file PREFIX.pulse, the shared memory of a rank, and return its Pulse."""
    Path(f"{prefix}.pulse").write_bytes(bytes(_SIZE))
    _PULSES[prefix] = Pulse(prefix)
    return _PULSES[prefix]


def of_this_process() -> Pulse:
    """Return the Pulse of this process's rank: its status, in memory that forked loader processes share."""
    prefix = _prefix()
    return _PULSES.get(prefix) or _PULSES.setdefault(prefix, Pulse(prefix))


def set_files_of_single_rank(prefix: str) -> None:
    """Set the prefix of this process's files in a job with one rank and a watcher (watcher.py)."""
    global _single_rank
    _single_rank = prefix


def _prefix():
    """Return the prefix of the names of this rank's files; None without a parent or a watcher."""
    return os.environ.get(FILES) or _single_rank


def has_parent() -> bool:
    """Whether this process was started by the parent process of its node."""
    return PARENT in os.environ


def has_watcher() -> bool:
    """Whether this rank, started by the platform as one of several, has a watcher (watcher.py)."""
    return FILES in os.environ and not has_parent()


def write_stacks() -> None:
    """Let faulthandler write the stacks to a file on SIGUSR2,
    and to another one at a crash unless it is enabled already."""
    prefix = _prefix()
    faulthandler.register(signal.SIGUSR2, file=open(f"{prefix}.stack", "w"))  # noqa: SIM115
    if not faulthandler.is_enabled():
        faulthandler.enable(file=open(f"{prefix}.crash", "w"))  # noqa: SIM115


def crash_stack(prefix: str) -> str:
    """Return the stack that a worker wrote at its crash, ending with a newline; empty if there is none.

    `prefix`: of the names of the worker's files.
    """
    with contextlib.suppress(OSError):
        text = Path(f"{prefix}.crash").read_text()
        if text and not text.endswith("\n"):  # a second crash may cut off the text of the first
            text += "\n"
        return text
    return ""


def report_end(code: object) -> None:
    """Tell the watcher, if there is one, with which exit code this process ends, in "ended": 1 + the code."""
    if has_parent() or not _prefix():
        return
    if not isinstance(code, int):
        code = 0 if code is None else 1
    of_this_process().put("ended", 1 + code % 256)


def report_fault(text: str, code: int, victim: bool) -> None:
    """Tell the parent or watcher (if the disk is full, stderr) why this worker fails.

    `victim`: another worker is the cause.
    """
    prefix = os.environ[FILES]
    try:
        Path(f"{prefix}.writing").write_text(json.dumps({"text": text, "code": code, "victim": victim}))
        os.replace(f"{prefix}.writing", f"{prefix}.fault")
    except OSError:  # the disk is full
        print(f"error: {text}", file=sys.stderr, flush=True)
