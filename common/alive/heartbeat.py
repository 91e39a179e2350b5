"""The status that a worker reports to its node's parent process or its watcher: phase, number of steps, why it failed.

One environment variable names the files. The pulse is a few bytes of shared memory, written with every change and read at least
twice a second. The fault is a line of JSON, written once. Without a parent or a watcher, neither is read.
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

# {phase: seconds without a change after which a worker counts as stuck}, for --patience 300. A larger one raises all of them, a
# smaller one lowers only "data" and "step", the training, which may take ten times the median step in any case.
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
_FORM = struct.Struct("<2q")
_NUMBER = struct.Struct("<q")
_SLOTS = {name: _FORM.size + place * _NUMBER.size for place, name in enumerate(("wanted", "offered", "stop", "ended"))}
_WAIT = struct.Struct("<3d160s")  # when it began, or 0; until when it is no hang, or its end; seconds before; for what
_WAIT_AT = _FORM.size + len(_SLOTS) * _NUMBER.size
_SIZE = _WAIT_AT + 2 * _WAIT.size
_single_rank: Optional[str] = None
_PULSES: dict[Optional[str], "Pulse"] = {}  # {prefix: its memory}; a rank has that which it has made for its watcher


class Pulse:
    """The phase, steps and waits of a rank in shared memory. Without a prefix, only this process and its forks share it."""

    def __init__(self, prefix: Optional[str]):
        with open(f"{prefix}.pulse", "r+b") if prefix else contextlib.nullcontext() as file:
            self._memory = mmap.mmap(file.fileno() if file else -1, _SIZE)
        self.store = Wait(self._memory, _WAIT_AT)  # for a store or a server, reported by the rank's processes (patience.py)
        self.disk = Wait(self._memory, _WAIT_AT + _WAIT.size)  # reported by the parent or watcher (held.py)

    def waited(self) -> float:
        """Return the seconds of all waits for a store and for a disk so far."""
        return self.store.seconds() + self.disk.seconds()

    def set(self, phase: str, steps: int) -> None:
        _FORM.pack_into(self._memory, 0, _NAMES.index(phase), steps)

    def read(self) -> tuple[str, int]:
        """Return (phase, steps done)."""
        phase, steps = _FORM.unpack_from(self._memory, 0)
        return _NAMES[phase], steps

    # In an elastic job (common/elastic) a worker puts the generation that it waits for ("wanted"), and its parent the newest
    # one ("offered") and the signal on which to stop ("stop"); 0: none.

    def put(self, name: str, number: int) -> None:
        _NUMBER.pack_into(self._memory, _SLOTS[name], number)

    def get(self, name: str) -> int:
        return _NUMBER.unpack_from(self._memory, _SLOTS[name])[0]


class Wait:
    """A reported wait: for what, since when, and until when it does not count as a hang. Several processes may report it."""

    def __init__(self, memory: mmap.mmap, at: int):
        self._memory = memory
        self._at = at

    def _read(self):
        return _WAIT.unpack_from(self._memory, self._at)

    def report_begin(self, what: str, since: float, until: float) -> bool:
        """Report a wait that is a hang after `until`. Return whether to log it: not if it goes on, or recurs too soon."""
        now = time.monotonic()
        name = what.encode()[:160].ljust(160, b"\0")
        began, over, before, known = self._read()
        if began and (over < now or name != known):  # an earlier wait, whose end was not reported
            before = before + min(over, now) - began
            began = 0.0
        _WAIT.pack_into(self._memory, self._at, began or max(since, min(over, now)), until, before, name)
        return name != known or now - over > QUIET_SECONDS

    def report_end(self, what: str) -> float:
        """Report that the wait for `what` is over, and return its seconds; 0.0 if there is none, or its end was reported."""
        began, over, before, name = self._read()
        if not began or name.rstrip(b"\0") != what.encode()[:160]:
            return 0.0
        now = time.monotonic()
        _WAIT.pack_into(self._memory, self._at, 0.0, now, before + min(over, now) - began, name)
        return now - began

    def lasts(self) -> bool:
        """Whether a wait goes on and does not count as a hang."""
        began, until, _, _ = self._read()
        return bool(began) and time.monotonic() <= until

    def text(self) -> str:
        """Return "WHAT for N s"; empty while there is no wait."""
        began, _, _, name = self._read()
        what = name.rstrip(b"\0").decode(errors="replace")
        return f"{what} for {time.monotonic() - began:.0f} s" if began else ""

    def seconds(self) -> float:
        """Return the seconds of all waits so far, without those in which a wait counted as a hang."""
        began, until, before, _ = self._read()
        return before + (min(time.monotonic(), until) - began if began else 0.0)


def create(prefix: str) -> Pulse:
    Path(f"{prefix}.pulse").write_bytes(bytes(_SIZE))
    _PULSES[prefix] = Pulse(prefix)
    return _PULSES[prefix]


def of_this_process() -> Pulse:
    """Return the Pulse of this process's rank: its status, in memory that forked loader processes share."""
    prefix = _files()
    return _PULSES.get(prefix) or _PULSES.setdefault(prefix, Pulse(prefix))


def set_files_of_single_rank(prefix: str) -> None:
    """Set the prefix of this process's files in a job with one rank and a watcher (watcher.py)."""
    global _single_rank
    _single_rank = prefix


def _files():
    return os.environ.get(FILES) or _single_rank


def has_parent() -> bool:
    return PARENT in os.environ


def has_watcher() -> bool:
    """Whether this rank, started by the platform as one of several, has a watcher (watcher.py)."""
    return FILES in os.environ and not has_parent()


def write_stacks() -> None:
    """Let faulthandler write the stacks to a file on SIGUSR2, and to another one at a crash unless it is enabled already."""
    prefix = _files()
    faulthandler.register(signal.SIGUSR2, file=open(f"{prefix}.stack", "w"))  # noqa: SIM115
    if not faulthandler.is_enabled():
        faulthandler.enable(file=open(f"{prefix}.crash", "w"))  # noqa: SIM115


def crash(prefix: str) -> str:
    """Return the stack that a worker wrote at its crash, with a line end, or an empty text. `prefix`: of its files' names."""
    with contextlib.suppress(OSError):
        text = Path(f"{prefix}.crash").read_text()
        return text + "\n" * (text[-1:] not in ("", "\n"))  # a second crash may cut off the text of the first
    return ""


def report_end(code: object) -> None:
    """Tell the watcher, if there is one, with which exit code this process ends, in "ended": 1 + the code."""
    if not has_parent() and _files():
        of_this_process().put("ended", 1 + (code if isinstance(code, int) else int(code is not None)) % 256)


def report_fault(text: str, code: int, victim: bool) -> None:
    """Tell the parent or watcher (if the disk is full, stderr) why this worker fails. `victim`: another worker is the cause."""
    prefix = os.environ[FILES]
    try:
        Path(f"{prefix}.writing").write_text(json.dumps({"text": text, "code": code, "victim": victim}))
        os.replace(f"{prefix}.writing", f"{prefix}.fault")
    except OSError:  # the disk is full
        print(f"error: {text}", file=sys.stderr, flush=True)
