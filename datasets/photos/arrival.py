"""Read a pack from a bucket while it arrives: look at one byte before a sample is read, and wait where it is not there yet.

begin() starts the process that fetches (fetcher.py). Order, crops and labels come from the index and the sampler alone, so a
pack that arrives delays a step and changes none.
"""

import dataclasses
import functools
import os
import time
from collections.abc import Sequence

import numpy as np

from common.alive import heartbeat, patience
from common.child import START_SECONDS, start_python
from common.errors import TrainingFailed, one_line
from common.storage import once
from common.world.folders import local_folder
from datasets.photos import fetcher, packed
from datasets.photos.fetcher import State

FIRST_PAUSE, LONGEST_PAUSE = 0.002, 0.02  # seconds between two looks
NOTED = 0.02  # seconds after which a wait is one for the store, and no slow loader
LOOKS_AT_FETCHER = 1.0  # seconds between two looks whether the fetcher is there


@dataclasses.dataclass(frozen=True)
class Arrival:
    """What a reader knows of a pack that arrives. It can be pickled: each process opens the shared memory for itself."""

    url: str
    folder: str
    path: str  # of the State
    samples: int  # of all splits
    since: float  # when the job began to read, by time.monotonic()
    rank: int  # the process that reads, or starts those that do

    def want(self, numbers: np.ndarray) -> None:
        """Announce samples that will be read next."""
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
        finally:
            wait.report_end(self.url)

    def _look_at_others(self, state, now):
        if self.rank not in (os.getpid(), os.getppid()):
            raise TrainingFailed(f"the rank of loader process {os.getpid()} has ended")
        error = state.failure(self.since)
        if error and once.is_free(fetcher.lease(self.folder)):  # else the process of another job goes on
            raise error
        heard = now - max(state.alive(), self.since)
        if heard > START_SECONDS and once.is_free(fetcher.lease(self.folder)):
            raise TrainingFailed(f"the process that fetches {one_line(self.url)} has ended: start again to go on")
        if heard > patience.limit() + START_SECONDS:
            raise TrainingFailed(f"nothing of {one_line(self.url)} has come for {heard:.0f} s: start again to go on")

    def growing(self, shard: str) -> str:
        """Return the path of a shard's file until it is whole."""
        return fetcher.growing(self.folder, shard)


@functools.lru_cache(8)
def _opened(path, samples):
    return State(path, samples)


def begin(url: str, splits: Sequence[str], inputs: str, starts: bool) -> list[packed.Packed]:
    """Return the splits of a pack, whose samples arrive while they are read. `starts`: start a process that fetches them."""
    folder, since = local_folder(url, inputs), time.monotonic()
    indexes = [packed.local_index(url, split, inputs) for split in splits]
    parts = [packed.read_index(path, folder, split) for path, split in zip(indexes, splits)]
    ends = np.cumsum([len(part) for part in parts]).tolist()
    path = os.path.abspath(fetcher.state_path(folder, indexes))
    once.once_per_node(path, lambda _: State.make(path, ends[-1]))
    packed.forget_open_files()
    if starts:
        if once.is_free(fetcher.lease(folder)):  # what is marked there is of an earlier start
            state = State(path, ends[-1])
            state.forget()
            state.wanted[:] = 0
        start_python(fetcher.__name__, str(os.getpid()), url, folder, str(ends[-1]), *indexes, env=_without_pulse())
    return [
        dataclasses.replace(
            part, arrival=Arrival(url, folder, path, ends[-1], since, os.getpid()), number=part.number + end - len(part)
        )
        for part, end in zip(parts, ends)
    ]


def _without_pulse():
    """Return the environment without the names of this rank's files, so that the fetcher's waits are not taken for its own."""
    return {name: value for name, value in os.environ.items() if name not in (heartbeat.FILES, heartbeat.PARENT)}
