"""The output folder of a run: made, locked against other jobs, cleared; the step that a start died in, the samples of each."""

import argparse
import contextlib
import fcntl
import json
import os
import re
import shutil
import struct
import time
from typing import Any, Callable

import torch

from common import optional
from common.errors import TrainingFailed, UserError, of_a_file
from common.files import MIB, TEMPORARY, append, drop_half_a_line, write_atomically

LOCK_SECONDS = 10  # the start before this one may not have ended yet

# What a run writes, and nothing else: only this is ever deleted.
LEFT_BY_A_RUN = re.compile(
    r"checkpoints/(\d{12}\.(pt|json)|\.attempt)|epoch_\d+\.pth(\.sha256)?|metrics\.jsonl|speed\.jsonl|journal\.jsonl|state\.json|"
    r"curves\.png|report\.(txt|json|html)|evaluation\.json|trace\.json\.gz|examples/(epoch_\d+|mistakes)\.png|"
    r"tensorboard/events\.out\.tfevents\.[^/]*|ledger/rank_\d+\.jsonl"
)


def make_folders(args: argparse.Namespace) -> None:
    """Make the output folders; an error where one cannot be written to."""
    for folder in (args.output_dir, args.checkpoint_dir, args.tensorboard_dir):
        try:
            os.makedirs(folder, exist_ok=True)
            probe = os.path.join(folder, ".writable")
            write_atomically(probe, b"")
            os.unlink(probe)
        except OSError as error:
            raise _not_writable(folder, error) from None


def require_room(args: argparse.Namespace, size: int) -> None:
    """An error where the run's checkpoints will not fit on the disk. `size`: the bytes of one, and of the weights beside it."""
    with os.scandir(args.checkpoint_dir) as entries:
        there = sum(entry.stat().st_size for entry in entries)  # of an earlier start, which make room for those to come
    number = min(args.keep, 2) + 2  # the last ones, the best, and the next
    if shutil.disk_usage(args.checkpoint_dir).free + there < number * size:
        raise UserError(
            f"{args.checkpoint_dir} has no room for {number} checkpoints: {room_for(args.checkpoint_dir, number * size)}"
        )


def room_for(folder: str, size: int) -> str:
    """What is needed, what is free, and what to do."""
    free = shutil.disk_usage(folder).free
    return (
        f"{size / MIB:.1f} MiB are needed and {free / MIB:.1f} MiB are free: delete what is not needed there, lower --keep, or "
        "give another --output_dir"
    )


def _not_writable(folder, error):
    return of_a_file(error, f"cannot write to {folder}: {error.strerror}; give another --output_dir")


def lock(folder: str) -> None:
    """Lock the run's folder, so that two runs never write into one; the lock ends with this process, however that ends."""
    try:
        file = os.open(os.path.join(folder, ".lock"), os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise _not_writable(folder, error) from None
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise UserError(f"{folder} is in use by another job that is still running: give another --output_dir") from None
            time.sleep(0.1)
        except OSError:
            return  # a mounted store without locks


def names(folder: str) -> list[str]:
    """Those of the files in it, sorted; none where there is no such folder."""
    return sorted(os.listdir(folder)) if os.path.isdir(folder) else []


def delete_run(args: argparse.Namespace) -> None:
    """Remove what a run wrote to the folders, and nothing else."""
    folders = {"": args.output_dir, "checkpoints/": args.checkpoint_dir, "tensorboard/": args.tensorboard_dir}
    folders.update({f"{name}/": os.path.join(args.output_dir, name) for name in ("examples", "ledger")})
    for place, folder in folders.items():
        for name in names(folder):
            whole = name[: -len(TEMPORARY)] if name.endswith(TEMPORARY) else name
            if LEFT_BY_A_RUN.fullmatch(place + whole):
                os.unlink(os.path.join(folder, name))


def what_is_there(args: argparse.Namespace) -> str:
    """The files for a person, and where they are."""
    folder, url = args.output_dir, args.output_url
    shown = ("report.html", "metrics.jsonl", "curves.png", "report.txt")
    there = [name for name in shown if os.path.exists(os.path.join(folder, name))]
    parts = [f"{', '.join(there)} in {url or folder}"] if there else []
    events = args.tensorboard_dir.replace(folder, url.rstrip("/")) if url else args.tensorboard_dir
    return "; ".join([*parts, *([f"TensorBoard in {events}"] if optional.there(optional.EVENTS) else [])])


class Attempt:
    """A file that tells, however a start ended, which step was being taken, and whether the start before died in the same.

    A run can do without it: where it cannot be written, a warning says so, once.
    """

    # epoch and consumed of the step that is being taken (-1: none), and of the step that the last start died in
    _FORM = struct.Struct("<4q")

    def __init__(self, folder: str, say: Callable[[str], None], active: bool):
        self.died_twice_in = self._file = None
        self.left = False  # by the start before, which so did not end as it should
        self._say, self._warned, self.active = say, False, active
        if not active:
            return
        self._path = os.path.join(folder, ".attempt")
        last = (-1, -1, -1, -1)
        with contextlib.suppress(OSError, struct.error), open(self._path, "rb", buffering=0) as file:
            self.left = True
            last = self._FORM.unpack(file.read(self._FORM.size))
        died_in, before = last[:2], last[2:]
        self.died_twice_in = died_in if died_in[0] >= 0 and died_in == before else None
        self._died_in = died_in if died_in[0] >= 0 else before
        with self._spare():
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o644)
        self.set(-1, -1)

    def set(self, epoch: int, consumed: int) -> None:
        if self._file is not None:
            with self._spare():
                os.pwrite(self._file, self._FORM.pack(epoch, consumed, *self._died_in), 0)

    def done(self) -> None:
        """The run ends as it should: the file goes, also one of an earlier start that this one could not write to."""
        if self.active:
            with self._spare(), contextlib.suppress(FileNotFoundError):
                if self._file is not None:
                    os.close(self._file)
                os.unlink(self._path)

    @contextlib.contextmanager
    def _spare(self):
        try:
            yield
        except OSError as error:
            if not self._warned:
                self._say(
                    f"warning: {self._path} cannot be written: {error.strerror}; a step that kills the job may go unnoticed"
                )
            self._warned = True


class Ledger:
    """Which samples were trained on, step by step: the evidence that no restart loses or repeats one (--ledger true).

    ledger/rank_R.jsonl, append-only: a line {"start": [epoch, consumed], "t": ...} for every start, and a line {"step": [epoch,
    consumed], "ids": [...], "t": ...} for every step. A step counts unless a later start begins at it or before it.
    tests/check_ledger.py adds them up.
    """

    def __init__(self, output_dir: str, rank: int, active: bool, last_good: Callable[[], str]):
        self._file: Any = None
        self._last_good = last_good
        if active:
            folder = os.path.join(output_dir, "ledger")
            os.makedirs(folder, exist_ok=True)
            self._file = open(os.path.join(folder, f"rank_{rank}.jsonl"), "a+b", buffering=0)  # noqa: SIM115 (for the whole run)
            drop_half_a_line(self._file)

    def start(self, epoch: int, consumed: int) -> None:
        if self._file:
            self._write({"start": [epoch, consumed]})

    def step(self, epoch: int, consumed: int, ids: torch.Tensor) -> None:
        if self._file:
            self._write({"step": [epoch, consumed], "ids": ids.tolist()})

    def _write(self, line):
        try:
            append(self._file, json.dumps({**line, "t": time.time()}).encode() + b"\n")
        except OSError as error:  # without this line it would be untrue
            raise TrainingFailed(f"the ledger cannot be written: {error.strerror}; {self._last_good()}") from None
