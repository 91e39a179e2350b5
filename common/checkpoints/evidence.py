"""Records of a run's steps: the step that was under way when a start died, and the samples of each step."""

import argparse
import contextlib
import io
import json
import os
import struct
import time
from typing import Any, Callable, Optional

import torch

from common.errors import TrainingFailed
from common.files import (
    TakenOver,
    append,
    claim,
    drop_partial_line,
    open_regular,
    remove,
    replace_with_copy,
    tidy,
)


class Evidence:
    """The records of this rank: an Attempt, a ledger, both or neither.

    The ledger (--ledger true) is ledger/rank_R.jsonl, append-only: a line {"start": [epoch, consumed], "t":
    ...} for every start, and a line {"step": [epoch, consumed], "ids": [...], "t": ...} for every step. A
    step counts unless a later start begins at it or before it. tests/check_ledger.py checks that no restart
    has lost or repeated a sample.
    """

    def __init__(self, args: argparse.Namespace, say: Callable[[str], None], last_good: Callable[[], str]):
        self._args = args
        self._say = say
        self._last_good = last_good
        self.attempt: Optional[Attempt] = None
        self._ledger: Any = None

    def keep(self, rank: int, needs_attempt: bool, needs_ledger: bool) -> None:
        """Begin the records that this rank needs, each only once; the ledger only with --ledger true."""
        if needs_attempt and not self.attempt:
            self.attempt = Attempt(self._args.checkpoint_dir, self._say)
        if needs_ledger and self._args.ledger and not self._ledger:
            folder = os.path.join(self._args.output_dir, "ledger")
            with self._raising_training_failed():
                os.makedirs(folder, exist_ok=True)
                if not needs_attempt:  # this rank writes nothing else, so has claimed no folder
                    claim(folder, f"rank_{rank}")
                    tidy()
                self._ledger = replace_with_copy(os.path.join(folder, f"rank_{rank}.jsonl"), os.O_APPEND)
                drop_partial_line(self._ledger)

    def begin(self, epoch: int, consumed: int) -> None:
        """Note in the ledger, if this rank has one, that a start begins at this step."""
        if self._ledger:
            self._write({"start": [epoch, consumed]})

    def note_step_begins(self, epoch: int, consumed: int) -> None:
        """Note in the Attempt, if this rank keeps one, that this step is about to be taken."""
        if self.attempt:
            self.attempt.set(epoch, consumed)

    def note_step_counts(self, epoch: int, consumed: int, ids: torch.Tensor) -> None:
        """Note in the ledger that this step counts, and in the Attempt that no step is under way,
        if they are kept."""
        if self._ledger:
            self._write({"step": [epoch, consumed], "ids": ids.tolist()})
        self.note_step_begins(-1, -1)

    def _write(self, record: dict[str, Any]) -> None:
        with self._raising_training_failed():
            append(self._ledger, json.dumps({**record, "t": time.time()}).encode() + b"\n")

    @contextlib.contextmanager
    def _raising_training_failed(self):
        """Raise TrainingFailed in place of an OSError, as a ledger that lacks a line would be false."""
        try:
            yield
        except OSError as error:
            raise TrainingFailed(
                f"the ledger cannot be written: {error.strerror}; {self._last_good()}"
            ) from None

    def remove_attempt(self) -> None:
        """Remove the Attempt's file, if this rank keeps one: the start has ended as it should."""
        if self.attempt:
            self.attempt.remove()


class Attempt:
    """A file that names the step under way, so that the next start sees if two starts died in the same
    step."""

    # (epoch, consumed) of the step under way, -1 if there is none, and of the last step in which an earlier
    # start died
    _FORM = struct.Struct("<4q")

    def __init__(self, folder: str, say: Callable[[str], None]):
        self._file: Optional[io.FileIO] = None
        self.previous_start_died = False  # whether there was a file, which a start removes at a regular end
        self._say = say
        self._has_warned = False
        self._path = os.path.join(folder, ".attempt")
        record = (-1, -1, -1, -1)
        with contextlib.suppress(OSError, struct.error), open_regular(self._path) as file:
            self.previous_start_died = True
            record = self._FORM.unpack(file.read(self._FORM.size))
        died_in = record[:2]
        died_in_earlier = record[2:]
        self.died_twice_in = died_in if died_in[0] >= 0 and died_in == died_in_earlier else None
        self._died_in = died_in if died_in[0] >= 0 else died_in_earlier
        with self._warning_once():
            self._file = replace_with_copy(self._path)
        self.set(-1, -1)

    def set(self, epoch: int, consumed: int) -> None:
        """Write that this step is under way; (-1, -1): none is."""
        if self._file is not None:
            with self._warning_once():
                os.pwrite(self._file.fileno(), self._FORM.pack(epoch, consumed, *self._died_in), 0)

    def remove(self) -> None:
        """Remove the file, even if this start could not write to it,
        unless a later start has taken the folder over."""
        with self._warning_once(), contextlib.suppress(TakenOver):
            if self._file is not None:
                self._file.close()
            remove(self._path)

    @contextlib.contextmanager
    def _warning_once(self):
        try:
            yield
        except OSError as error:
            if not self._has_warned:
                self._say(
                    f"warning: {self._path} cannot be written: {error.strerror}; a step that kills the "
                    "job may go unnoticed"
                )
            self._has_warned = True
