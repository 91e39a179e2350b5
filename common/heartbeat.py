"""What a worker tells the parent of its node: the phase it is in, how many steps it has done, why it failed.

The parent names the files in one variable. The pulse is a few bytes of shared memory, written with every change and read
twice a second; the fault is a line of JSON, written once. A job without a parent writes neither.
"""

import contextlib
import faulthandler
import json
import mmap
import os
import signal
import struct
import sys
from pathlib import Path
from typing import Any, Optional

FILES = "ANYRANK_WORKER"  # set by the parent: the beginning of the names of this worker's files
PARENT = "ANYRANK_PARENT"  # and the parent's process id

# Every phase, and the seconds without a change after which it counts as stuck. "data" and "step" are the training, whose
# limit is ten times the median step, and at least a minute.
PHASES = {
    "start": 3600,
    "join": 3600,
    "fetch": 600,
    "compile": 900,
    "data": None,
    "step": None,
    "evaluate": 3600,
    "save": 900,
    "publish": 3600,
    "done": 600,
}
TRAINING = ("data", "step")

_NAMES = list(PHASES)
_FORM = struct.Struct("<2q")
_NUMBER = struct.Struct("<q")
_SLOTS = {name: _FORM.size + place * _NUMBER.size for place, name in enumerate(("wanted", "offered", "stop"))}
_SIZE = _FORM.size + len(_SLOTS) * _NUMBER.size
_alone: Optional[str] = None


class Pulse:
    """The phase and the number of steps in shared memory; without a prefix, set() does nothing."""

    def __init__(self, prefix: Optional[str]):
        self._memory: Any = None
        if prefix:
            with open(f"{prefix}.pulse", "r+b") as file:
                self._memory = mmap.mmap(file.fileno(), _SIZE)

    def set(self, phase: str, steps: int) -> None:
        if self._memory:
            _FORM.pack_into(self._memory, 0, _NAMES.index(phase), steps)

    def read(self) -> tuple[str, int]:
        """(phase, steps done)"""
        phase, steps = _FORM.unpack_from(self._memory, 0)
        return _NAMES[phase], steps

    # Where nodes come and go (common/elastic) a worker says which generation it waits for ("wanted"), and its parent which one
    # is the last ("offered"), and on which signal to stop ("stop"); 0: none.

    def put(self, name: str, number: int) -> None:
        _NUMBER.pack_into(self._memory, _SLOTS[name], number)

    def get(self, name: str) -> int:
        return _NUMBER.unpack_from(self._memory, _SLOTS[name])[0]


def create(prefix: str) -> Pulse:
    """The pulse of a worker that is about to start, in a new file."""
    Path(f"{prefix}.pulse").write_bytes(bytes(_SIZE))
    return Pulse(prefix)


def of_this_process() -> Pulse:
    return Pulse(_files())


def watched_alone(prefix: str) -> None:
    """This process has no other ranks, and a process of ours watches it (watching/alone.py)."""
    global _alone
    _alone = prefix


def _files():
    return os.environ.get(FILES) or _alone


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
    """The stack of a worker that has crashed, or nothing."""
    with contextlib.suppress(OSError):
        return Path(f"{prefix}.crash").read_text()
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
