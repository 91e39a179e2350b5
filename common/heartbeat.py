"""The status that a worker reports to the parent process of its node: its phase, its number of steps, why it failed.

One environment variable names the files. The pulse is a few bytes of shared memory, written with every change and read at least
twice a second. The fault is a line of JSON, written once. Without a parent or a watcher, neither is read.
"""

import contextlib
import faulthandler
import functools
import json
import mmap
import os
import signal
import struct
import sys
import time
from pathlib import Path
from typing import Optional

FILES = "ANYRANK_WORKER"  # set by the parent: the beginning of the names of this worker's files
PARENT = "ANYRANK_PARENT"  # and the parent's process id

# Every phase, and the seconds without a change after which it counts as stuck, with --patience 300: a larger one raises them.
# "data" and "step" are the training, which may also take ten times the median step.
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
TRAINING = ("data", "step")
QUIET_SECONDS = 60  # after which it is news again that the same is waited for

_NAMES = list(PHASES)
_FORM = struct.Struct("<2q")
_NUMBER = struct.Struct("<q")
_SLOTS = {name: _FORM.size + place * _NUMBER.size for place, name in enumerate(("wanted", "offered", "stop"))}
_WAIT = struct.Struct("<3d160s")  # since when, or 0; until when it is no hang; seconds of all before; for what
_WAIT_AT = _FORM.size + len(_SLOTS) * _NUMBER.size
_SIZE = _WAIT_AT + 2 * _WAIT.size
_single_rank: Optional[str] = None


class Pulse:
    """The phase and the number of steps in shared memory. Without a prefix, only this process and its forks share it."""

    def __init__(self, prefix: Optional[str]):
        with open(f"{prefix}.pulse", "r+b") if prefix else contextlib.nullcontext() as file:
            self._memory = mmap.mmap(file.fileno() if file else -1, _SIZE)
        self.store = Wait(self._memory, _WAIT_AT)  # for a store or a server, as a process of the rank says (patience.py)
        self.disk = Wait(self._memory, _WAIT_AT + _WAIT.size)  # as who watches it has seen (watching/held.py)

    def waited(self) -> float:
        """Return the seconds of waits for a store and for a disk."""
        return self.store.seconds() + self.disk.seconds()

    def set(self, phase: str, steps: int) -> None:
        _FORM.pack_into(self._memory, 0, _NAMES.index(phase), steps)

    def read(self) -> tuple[str, int]:
        """Return (phase, steps done)."""
        phase, steps = _FORM.unpack_from(self._memory, 0)
        return _NAMES[phase], steps

    # In an elastic job (common/elastic) a worker says which generation it waits for ("wanted"), and its parent which one
    # is the last ("offered"), and on which signal to stop ("stop"); 0: none.

    def put(self, name: str, number: int) -> None:
        _NUMBER.pack_into(self._memory, _SLOTS[name], number)

    def get(self, name: str) -> int:
        return _NUMBER.unpack_from(self._memory, _SLOTS[name])[0]


class Wait:
    """A reported wait: for what, since when, and until when it is no hang. Any process of the rank may report it."""

    def __init__(self, memory: mmap.mmap, at: int):
        self._memory, self._at = memory, at

    def _read(self):
        return _WAIT.unpack_from(self._memory, self._at)

    def begins(self, what: str, since: float, until: float) -> bool:
        """Or goes on. Whether that is news."""
        now, name = time.monotonic(), what.encode()[:160].ljust(160, b"\0")
        began, over, before, known = self._read()
        if began and (over < now or name != known):  # another wait, of which nobody has said that it is over
            before, began = before + min(over, now) - began, 0.0
        _WAIT.pack_into(self._memory, self._at, began or max(since, min(over, now)), until, before, name)
        return name != known or now - over > QUIET_SECONDS

    def ends(self, what: str) -> float:
        """Return the seconds that it took, for the first who says so."""
        began, over, before, name = self._read()
        if not began or name.rstrip(b"\0") != what.encode()[:160]:
            return 0.0
        now = time.monotonic()
        _WAIT.pack_into(self._memory, self._at, 0.0, now, before + min(over, now) - began, name)
        return now - began

    def lasts(self) -> bool:
        """Whether a wait lasts, and is no hang."""
        began, until, _, _ = self._read()
        return bool(began) and time.monotonic() <= until

    def text(self) -> str:
        """What has not come, and for how long; empty where nothing is waited for."""
        began, _, _, name = self._read()
        what = name.rstrip(b"\0").decode(errors="replace")
        return f"{what} for {time.monotonic() - began:.0f} s" if began else ""

    def seconds(self) -> float:
        """Return the seconds of all waits."""
        began, until, before, _ = self._read()
        return before + (min(time.monotonic(), until) - began if began else 0.0)


def create(prefix: str) -> Pulse:
    """Create the pulse of a worker that is about to start, in a new file."""
    Path(f"{prefix}.pulse").write_bytes(bytes(_SIZE))
    return Pulse(prefix)


def of_this_process() -> Pulse:
    """Return the pulse of its rank, also in a process that loads."""
    return _pulse(_files())


@functools.lru_cache(1)
def _pulse(prefix):
    return Pulse(prefix)


def watched_as_single_rank(prefix: str) -> None:
    """This process has no other ranks, and a process of ours watches it (watching/single_rank.py)."""
    global _single_rank
    _single_rank = prefix


def _files():
    return os.environ.get(FILES) or _single_rank


def has_parent() -> bool:
    return PARENT in os.environ


def has_watcher() -> bool:
    """Whether a process of ours watches this rank, which the platform has started (watching/watcher.py)."""
    return FILES in os.environ and not has_parent()


def write_stacks() -> None:
    """Who watches this process can ask for its stack, and finds it when it has crashed."""
    prefix = _files()
    faulthandler.register(signal.SIGUSR2, file=open(f"{prefix}.stack", "w"))  # noqa: SIM115
    if not faulthandler.is_enabled():
        faulthandler.enable(file=open(f"{prefix}.crash", "w"))  # noqa: SIM115


def crash(prefix: str) -> str:
    """Return the stack of a worker that has crashed, in whole lines, or nothing."""
    with contextlib.suppress(OSError):
        text = Path(f"{prefix}.crash").read_text()
        return text + "\n" * (text[-1:] not in ("", "\n"))  # a second crash cuts off what is written of the first
    return ""


def report_end(code: object) -> None:
    """Tell the watcher with which exit code this process ends."""
    if not has_parent() and _files():
        with contextlib.suppress(OSError):
            Path(f"{_files()}.end").write_text(str(code if isinstance(code, int) else int(code is not None)))


def report_fault(text: str, code: int, victim: bool) -> None:
    """Tell the parent why this worker fails; `victim`: only because another one failed."""
    prefix = os.environ[FILES]
    try:
        Path(f"{prefix}.writing").write_text(json.dumps({"text": text, "code": code, "victim": victim}))
        os.replace(f"{prefix}.writing", f"{prefix}.fault")
    except OSError:  # the disk is full
        print(f"error: {text}", file=sys.stderr, flush=True)
