"""Find the packs of a job, and read one from a bucket while it arrives: a reader looks at one byte before it reads a sample.

begin() starts the process that fetches (fetcher.py). Order, crops and labels come from the index and the sampler alone, so a
pack that arrives delays a step and changes none.
"""

import argparse
import collections
import dataclasses
import functools
import os
import time
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from common import moments, progress, storage
from common.alive import heartbeat, patience
from common.child import START_SECONDS, start_python
from common.errors import TrainingFailed, one_line
from common.files import MIB
from common.storage import once
from common.world.folders import is_address, is_bucket, local_folder
from datasets.photos import fetcher, packed, splits
from datasets.photos.fetcher import State

FIRST_PAUSE, LONGEST_PAUSE = 0.002, 0.02  # seconds between two looks
NOTED = 0.02  # seconds after which a wait is one for the store, and no slow loader
AHEAD_BATCHES, AHEAD_SAMPLES = 4, 1024  # the least that are wanted before they are loaded
LOOKS_AT_FETCHER = 1.0  # seconds between two looks whether the fetcher is there
LOST_SECONDS = 60  # without a sign of life, after which a fetcher is given up


@dataclasses.dataclass(frozen=True)
class Arrival:
    """What a reader knows of a pack that arrives. It can be pickled: each process opens the shared memory for itself."""

    url: str
    folder: str
    path: str  # of the State
    samples: int  # of all splits
    since: float  # when the job began to read, by time.monotonic()
    rank: int  # the process that reads, or starts those that do

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
        missing = numbers[(state.there[numbers] == 0) & (state.wanted[numbers] == 0)]
        if len(missing):
            state.wanted[missing] = time.monotonic_ns()
            state.ring()

    def wait(self, number: int) -> None:
        """Return when the sample is there; UserError or TrainingFailed if it does not come."""
        state = _opened(self.path, self.samples)
        if state.there[number]:
            return
        state.wanted[number] = 1
        state.ring()
        wait, began, pause, looked = heartbeat.of_this_process().store, time.monotonic(), FIRST_PAUSE, 0.0
        try:
            while not state.there[number]:
                time.sleep(pause)
                pause, now = min(LONGEST_PAUSE, 1.5 * pause), time.monotonic()
                if now - began > NOTED:
                    wait.report_begin(self.url, began, max(state.alive(), self.since) + patience.limit())
                if now - looked > LOOKS_AT_FETCHER:
                    looked = now
                    self._look_at_others(state, now)
                    state.wanted[number] = 1  # another rank, which has begun anew, may have deleted the mark
        finally:
            wait.report_end(self.url)

    def _look_at_others(self, state, now):
        if self.rank not in (os.getpid(), os.getppid()):
            raise TrainingFailed(f"the rank of loader process {os.getpid()} has ended")
        free = once.is_free(fetcher.lease(self.folder))
        error = state.failure(self.since)
        if error and free:  # else the process of another job goes on
            raise error
        alive = state.alive()
        silent = now - max(alive, self.since)
        if silent > (LOST_SECONDS if alive > self.since else START_SECONDS):
            what = "has ended" if free else f"has shown no sign of life for {silent:.0f} s"
            raise TrainingFailed(f"the process that fetches {one_line(self.url)} {what}: start again to go on")

    def growing(self, shard: str) -> str:
        """Return the path of a shard's file until it is whole."""
        return fetcher.growing(self.folder, shard)


@functools.lru_cache(8)
def _opened(path, samples):
    return State(path, samples)


def find(args: argparse.Namespace) -> list[packed.Packed]:
    """Return the splits that a job reads, of a pack in a folder or in a bucket."""
    url, inputs, remote = args.data_url, args.input_dir, args.data_backend == "packed-remote"
    if is_bucket(url) and not remote and not args.fetch_first:
        try:
            return begin(url, splits.SPLITS, inputs, args.world.local_rank == 0)
        except OSError as error:  # macOS and some mounts lack what the shared memory needs
            progress.warn(
                f"{inputs} has no memory that processes can share ({one_line(error)}): the whole pack is fetched first"
            )
    if is_bucket(url) and not remote:
        fetcher.drop_unfinished(local_folder(url, inputs))
    root = url if remote else storage.fetch(url, inputs=inputs)
    needed = splits.needed(args.evaluate and not remote, packed.index_path(root, splits.SPLITS[0]))
    found = [packed.load(root, split, inputs) for split in needed]
    for part in found if is_address(url) and not remote else ():
        packed.verify_once(part)
    return found


def begin(url: str, names: Sequence[str], inputs: str, starts: bool) -> list[packed.Packed]:
    """Return these splits of a pack, whose samples arrive while they are read. `starts`: start a process that fetches them."""
    folder, since = local_folder(url, inputs), time.monotonic()
    indexes = [packed.local_index(url, split, inputs) for split in names]
    parts = [packed.read_index(path, folder, split) for path, split in zip(indexes, names)]
    ends = np.cumsum([len(part) for part in parts]).tolist()
    path = os.path.abspath(fetcher.state_path(folder, indexes))
    once.once_per_node(path, lambda _: State.make(path, ends[-1]))
    packed.forget_open_files()
    state = State(path, ends[-1])
    if starts:
        if once.is_free(fetcher.lease(folder)):  # what is marked there is of an earlier start
            state.forget()
            state.wanted[:] = 0
        start_python(fetcher.__name__, str(os.getpid()), url, folder, str(ends[-1]), *indexes, env=_without_pulse())
        moments.listen(_Came(state))
    return [
        dataclasses.replace(
            part, arrival=Arrival(url, folder, path, ends[-1], since, os.getpid()), number=part.number + end - len(part)
        )
        for part, end in zip(parts, ends)
    ]


class _Came:
    """Adds to the rows of speed.jsonl how many bytes have come since the last one, and how many were on the disk already."""

    def __init__(self, state: State) -> None:
        self._state, self._told = state, np.zeros(len(fetcher.CAME), np.int64)

    def row(self, row: dict) -> None:
        now = self._state.came.copy()
        if (now < self._told).any():  # another process fetches now, and counts anew
            self._told[:] = 0
        row.update((name, round(size / MIB, 3)) for name, size in zip(fetcher.CAME, (now - self._told).tolist()))
        self._told = now


def _without_pulse():
    """Return the environment without the names of this rank's files, so that the fetcher's waits are not taken for its own."""
    return {name: value for name, value in os.environ.items() if name not in (heartbeat.FILES, heartbeat.PARENT)}
