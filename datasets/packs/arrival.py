"""Find the packs of a job, and read one from a bucket while it arrives: a reader looks at one byte before it reads a sample.

begin() starts the process that fetches (fetcher.py). Order, crops and labels come from the index and the sampler alone, so a
pack that arrives delays a step and changes none.
"""

import argparse
import collections
import contextlib
import dataclasses
import functools
import json
import multiprocessing
import os
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Optional

import numpy as np

from common import moments, progress, storage
from common.address import is_address, is_bucket, local_folder
from common.alive import heartbeat, patience
from common.errors import TrainingFailed, UserError, one_line
from common.files import MIB, contents
from common.machine.child import START_SECONDS, start_python
from common.storage import once
from datasets.packs import fetcher, packed
from datasets.packs.fetcher import State
from datasets.photos import splits

FIRST_PAUSE, LONGEST_PAUSE = 0.002, 0.02  # seconds between two looks
NOTED = 0.02  # seconds after which a wait is one for the store, and no slow loader
AHEAD_BATCHES, AHEAD_SAMPLES = 4, 1024  # the least that are wanted before they are loaded
LOOKS_AT_FETCHER = 1.0  # seconds between two looks whether the fetcher is there
GONE_SECONDS = 5  # without its file, after which somebody else has deleted a sample
LOST_SECONDS = 50  # without a sign of life, after which a fetcher is given up


class Unshared(Exception):
    """macOS and some mounts lack what the shared memory needs."""


@dataclasses.dataclass(frozen=True)
class Arrival:
    """What a reader knows of a pack that arrives. It can be pickled: each process opens the shared memory for itself."""

    url: str
    folder: str
    path: str  # of the State
    samples: int  # of all splits
    since: float  # when the job began to read, by time.monotonic()

    def announced(self, batches: Iterable[np.ndarray], number: np.ndarray) -> Iterator[np.ndarray]:
        """Yield the batches, each some batches after its samples were wanted. `number`: of a sample in the pack."""
        ahead: collections.deque = collections.deque()
        for batch in batches:
            self.want(number[batch])
            ahead.append(batch)
            if len(ahead) > AHEAD_BATCHES and len(ahead) * len(batch) > AHEAD_SAMPLES:
                yield ahead.popleft()
        yield from ahead

    def want(self, numbers: np.ndarray) -> None:
        state = _opened(self.path, self.samples)
        before = state.wanted[numbers]
        old = (before != fetcher.NOW) & (before < time.monotonic_ns() - fetcher.UNREAD_SECONDS // 2 * 10**9)  # or not at all
        missing = numbers[(state.there[numbers] != fetcher.IN_ITS_SHARD) & old]
        if len(missing):
            state.wanted[missing] = time.monotonic_ns()
            state.ring()

    def wait(self, number: int) -> Optional[bytes]:
        """Return when the sample is there: its bytes, if it passes through. UserError or TrainingFailed if it does not come."""
        state, gone = _opened(self.path, self.samples), 0.0
        while True:
            where = state.there[number]
            if where == fetcher.IN_ITS_SHARD:
                return None
            if where != fetcher.IN_ITS_FILE:
                gone = 0.0
                self._wait(number, state)
                continue
            with contextlib.suppress(FileNotFoundError):  # it was deleted just now
                content = contents(os.path.join(fetcher.passing(self.path), str(number)))
                state.wanted[number] = 0
                return content
            if gone > GONE_SECONDS:
                raise TrainingFailed(f"samples in {fetcher.passing(self.path)} are gone: start again to go on")
            gone += FIRST_PAUSE
            time.sleep(FIRST_PAUSE)

    def _wait(self, number, state):
        state.wanted[number] = fetcher.NOW
        state.ring()
        wait, began, pause = heartbeat.of_this_process().store, time.monotonic(), FIRST_PAUSE
        since, before, looked, failing = began, began, 0.0, False
        try:
            while state.there[number] in (fetcher.ABSENT, fetcher.PASSES):
                time.sleep(pause)
                pause, now = min(LONGEST_PAUSE, 1.5 * pause), time.monotonic()
                since, before = now if now - before > fetcher.GAP_SECONDS else since, now  # all processes were stopped
                if now - began > NOTED:
                    wait.report_begin(self.url, began, max(state.alive(), self.since) + patience.limit())
                if now - looked > LOOKS_AT_FETCHER:
                    looked = now
                    failing = self._look_at_others(state, since, failing)
                    state.wanted[number] = fetcher.NOW  # another rank, which has begun anew, may have deleted the mark
                    state.ring()
        finally:
            wait.report_end(self.url)

    def _look_at_others(self, state, since, failing):
        """Raise an error if there is nothing to wait for. Return whether the fetcher has failed; after the second look in a row
        it is raised, as the process of another job may be about to go on."""
        rank = multiprocessing.parent_process()
        if rank and not rank.is_alive():
            raise TrainingFailed(f"the rank of loader process {os.getpid()} has ended")
        free = once.is_free(fetcher.lease(self.path))
        error = state.failure(self.since)
        if error and free and failing:
            raise error
        alive = state.alive()
        silent = time.monotonic() - max(alive, since)
        if silent > (LOST_SECONDS if alive > self.since else START_SECONDS):
            what = "has ended" if free else f"has shown no sign of life for {silent:.0f} s"
            raise TrainingFailed(f"the process that fetches {one_line(self.url)} {what}: start again to go on")
        return bool(error and free)

    def growing(self, shard: dict) -> str:
        """Return the path of a shard's file until it is whole."""
        return fetcher.growing(self.folder, shard["name"], shard["sha256"])


@functools.lru_cache(8)
def _opened(path, samples):
    return State(path, samples)


def find(args: argparse.Namespace) -> list[packed.Packed]:
    """Return the splits that a job reads, of a pack in a folder or in a bucket."""
    url, inputs, remote = args.data_url, args.input_dir, args.data_backend == "packed-remote"
    if is_bucket(url) and (remote or not args.fetch_first):
        starts = args.world.local_rank == 0 or bool(args.min_nodes)  # of an elastic job any rank may be lost
        names = ("val",) if args.evaluate and not packed.has_index(url, "train", inputs) else splits.SPLITS
        try:
            return begin(url, names, inputs, starts, keeps=not remote)
        except Unshared as error:
            if remote:
                raise UserError(f"{error}, which --data_backend packed-remote needs: give --data_backend packed") from None
            progress.warn(f"{error}: the whole pack is fetched first")
    if is_bucket(url):
        fetcher.drop_unfinished(local_folder(url, inputs))
    root = storage.fetch(url, inputs=inputs)
    found = [packed.load(root, split) for split in splits.needed(args.evaluate, packed.index_path(root, splits.SPLITS[0]))]
    for part in found if is_address(url) else ():
        packed.verify_once(part)
    return found


def begin(url: str, names: Sequence[str], inputs: str, starts: bool, keeps: bool = True) -> list[packed.Packed]:
    """Return these splits of a pack, whose samples arrive while they are read.

    `starts`: start a process that fetches them; `keeps`: on the disk, as far as it has room.
    """
    folder, since = local_folder(url, inputs if keeps else os.path.join(inputs, "passing")), time.monotonic()
    with _fetching(url, folder) if starts else contextlib.nullcontext() as fetch:
        indexes = [packed.local_index(url, split, inputs) for split in names]
        parts = [packed.read_index(path, folder, split) for path, split in zip(indexes, names)]
        for part in parts:
            packed.refuse_folders(part)
        ends = np.cumsum([len(part) for part in parts]).tolist()
        path = os.path.abspath(fetcher.state_path(folder, indexes))
        try:
            once.once_per_node(path, lambda _: State.make(path, ends[-1]))
            state = State(path, ends[-1])
        except OSError as error:
            raise Unshared(f"{inputs} has no memory that processes can share ({one_line(error)})") from None
        packed.forget_open_files()
        if fetch:
            once_more = iter([True])
            with once.when_free(fetcher.lease(path), lambda: next(once_more, False)) as free:
                if free:  # what is marked there is of an earlier start
                    state.forget()
                    state.wanted[:] = 0
            fetch(path, ends[-1], keeps, *indexes)
            moments.listen(_Came(state))
    arrives = Arrival(url, folder, path, ends[-1], since)
    numbers = [part.number + end - len(part) for part, end in zip(parts, ends)]
    return [dataclasses.replace(part, arrival=arrives, number=number) for part, number in zip(parts, numbers)]


@contextlib.contextmanager
def _fetching(url, folder):
    """Start a process that fetches once it was told what; not told, it ends with this context."""
    words = [str(os.getpid()), os.environ.get(heartbeat.PARENT, str(os.getpid())), url, folder]
    pipe = subprocess.PIPE
    child = start_python(fetcher.__name__, *words, env=_without_pulse(), stdin=pipe, stdout=pipe, text=True)
    threading.Thread(target=_repeat, args=(child.stdout,), name="what the fetcher says", daemon=True).start()
    told: Any = child.stdin
    try:
        yield lambda *what: told.write(json.dumps(what) + "\n")
    finally:
        with contextlib.suppress(BrokenPipeError):  # it has ended, which readers notice
            told.close()


class _Came:
    """Adds to the rows of speed.jsonl how many bytes have come since the last one, and how many were on the disk already."""

    def __init__(self, state: State) -> None:
        self._state, self._told = state, state.came.copy()  # not what has come before this start

    def row(self, row: dict) -> None:
        now = self._state.came.copy()
        if (now < self._told).any():  # another process fetches now, and counts anew
            self._told = now
        row.update((name, round(size / MIB, 3)) for name, size in zip(fetcher.CAME, (now - self._told).tolist()))
        self._told = now


def _repeat(lines):
    for line in lines:
        progress.say(line.rstrip("\n"))


def _without_pulse():
    """Return the environment without the names of this rank's files, so that the fetcher's waits are not taken for its own."""
    return {name: value for name, value in os.environ.items() if name not in (heartbeat.FILES, heartbeat.PARENT)}
