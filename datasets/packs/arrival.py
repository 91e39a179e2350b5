"""Find the packs of a job, and read one from a bucket while it arrives:
a reader looks at one byte before it reads a sample.

begin() starts the process that fetches (process.py). Order, crops and labels come from the index and the
sampler alone, so a pack that arrives delays a step and changes none.
"""

import argparse
import collections
import contextlib
import dataclasses
import functools
import json
import multiprocessing
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Callable, Optional

import numpy as np

from common import moments, progress, storage
from common.address import is_address, is_bucket, local_folder
from common.alive import heartbeat, patience
from common.errors import TrainingFailed, UserError, one_line
from common.files import MIB, contents
from common.machine.child import START_SECONDS, Child
from common.storage import once
from datasets.packs import packed, process, shards
from datasets.packs.process import GAP_SECONDS
from datasets.packs.state import (
    ABSENT,
    ARRIVED_COLUMNS,
    IN_ITS_SHARD,
    PASSING,
    UNREAD_SECONDS,
    WAITING,
    State,
    lease,
    passing_folder,
    state_path,
)  # fmt: skip
from datasets.photos import splits

FIRST_PAUSE = 0.002  # seconds between two looks
LONGEST_PAUSE = 0.02
REPORTED_WAIT_SECONDS = 0.02  # seconds after which a wait is one for the store, and no slow loader
# The least that are wanted before they are loaded.
AHEAD_BATCHES = 4
AHEAD_SAMPLES = 1024
FETCHER_CHECK_SECONDS = 1.0  # seconds between two looks whether the fetcher is there
NO_FILE_SECONDS = 5  # without its file, after which somebody else has deleted a sample
LOST_SECONDS = 50  # without a sign of life, after which a fetcher is given up


class NoSharedMemory(Exception):
    """macOS and some mounts lack what the shared memory needs."""


@dataclasses.dataclass(frozen=True)
class Arrival:
    """A reader's side of a pack that arrives: it asks for samples, and waits for them.

    Each process can have a copy.
    """

    url: str
    folder: str
    path: str  # of the State
    samples: int  # of all splits
    since: float  # when the job began to read, by time.monotonic()

    def announced(self, batches: Iterable[np.ndarray], state_numbers: np.ndarray) -> Iterator[np.ndarray]:
        """Yield the batches, and ask for their samples some batches ahead.

        `state_numbers`: of the samples, by their numbers in the split.
        """
        pending: collections.deque = collections.deque()
        for batch in batches:
            self.request(state_numbers[batch])
            pending.append(batch)
            if len(pending) > AHEAD_BATCHES and len(pending) * len(batch) > AHEAD_SAMPLES:
                yield pending.popleft()
        yield from pending

    def request(self, numbers: np.ndarray) -> None:
        """Ask for samples that will be read soon, unless they are in their shard, waited for,
        or were asked for lately."""
        state = _mapped(self.path, self.samples)
        asked_at = state.requested_at[numbers]
        # what was wanted UNREAD_SECONDS ago no longer is
        renew_before = time.monotonic_ns() - UNREAD_SECONDS // 2 * 10**9
        is_due = (asked_at == 0) | ((asked_at != WAITING) & (asked_at < renew_before))
        missing = numbers[is_due & (state.place[numbers] != IN_ITS_SHARD)]
        if len(missing):
            state.requested_at[missing] = time.monotonic_ns()
            state.ring()

    def wait(self, number: int) -> Optional[bytes]:
        """Wait until a sample is there.

        Return its bytes if it passes through, None if it can be read from its shard.

        UserError or TrainingFailed if it cannot come.
        """
        state = _mapped(self.path, self.samples)
        seconds_without_file = 0.0  # in a row, though the State says that the sample is in its file
        while True:
            place = state.place[number]
            if place == IN_ITS_SHARD:
                if state.requested_at[number] == WAITING:  # a fetcher that takes over would bring it first
                    state.requested_at[number] = 0
                return None
            if place in (ABSENT, PASSING):
                seconds_without_file = 0.0
                self._wait_for_place(number, state)
                continue
            with contextlib.suppress(FileNotFoundError):  # the fetcher has deleted it just now
                content = contents(os.path.join(passing_folder(self.path), str(number)))
                state.requested_at[number] = 0
                return content
            if seconds_without_file > NO_FILE_SECONDS:
                raise TrainingFailed(f"samples in {passing_folder(self.path)} are gone: start again to go on")
            seconds_without_file += FIRST_PAUSE
            time.sleep(FIRST_PAUSE)

    def _wait_for_place(self, number: int, state: State) -> None:
        """Wait until the sample has a place.

        A wait that a user could notice is reported as one for the store.
        """
        state.requested_at[number] = WAITING
        state.ring()
        store = heartbeat.of_this_process().store
        fetcher = _FetcherWatch(self, state)
        start_time = time.monotonic()
        last_check = 0.0
        pause = FIRST_PAUSE
        try:
            while state.place[number] in (ABSENT, PASSING):
                time.sleep(pause)
                pause = min(LONGEST_PAUSE, 1.5 * pause)
                fetcher.note_pause()
                now = time.monotonic()
                if now - start_time > REPORTED_WAIT_SECONDS:
                    store.report_begin(self.url, start_time, max(state.pulse, self.since) + patience.limit())
                if now - last_check > FETCHER_CHECK_SECONDS:
                    last_check = now
                    fetcher.require_alive()
                    # another rank, which has begun anew, may have deleted the mark
                    state.requested_at[number] = WAITING
                    state.ring()
        finally:
            store.report_end(self.url)

    def growing_path(self, shard: dict) -> str:
        """Return the path of a shard's file until it is whole."""
        return shards.growing_path(self.folder, shard["name"], shard["sha256"])


class _FetcherWatch:
    """What a waiting reader sees of the process that fetches."""

    def __init__(self, arrival: Arrival, state: State) -> None:
        self._arrival = arrival
        self._state = state
        self._watching_since = time.monotonic()  # since when this process could have seen a sign of life
        self._last_call = self._watching_since  # when note_pause() was last called
        self._had_failed = False

    def note_pause(self) -> None:
        """Call after each pause: count the fetcher's silence anew if this process was stopped meanwhile.

        It was if more than GAP_SECONDS have passed since the last call or require_alive(). Perhaps the
        fetcher was stopped, too.
        """
        now = time.monotonic()
        if now - self._last_call > GAP_SECONDS:
            self._watching_since = now
        self._last_call = now

    def require_alive(self) -> None:
        """Raise an error if this loader's rank has ended, the fetcher has failed,
        or it has been silent for too long.

        The fetcher's error is raised at the second look in a row, as the fetcher of another job may be about
        to take over.
        """
        rank_process = multiprocessing.parent_process()
        if rank_process and not rank_process.is_alive():
            raise TrainingFailed(f"the rank of loader process {os.getpid()} has ended")
        nobody_fetches = once.is_free(lease(self._arrival.path))
        failure = self._state.failure(self._arrival.since) if nobody_fetches else None
        if failure is not None and self._had_failed:
            raise failure
        self._had_failed = failure is not None
        has_begun = self._state.pulse > self._arrival.since
        silent_seconds = time.monotonic() - max(self._state.pulse, self._watching_since)
        if silent_seconds > (LOST_SECONDS if has_begun else START_SECONDS):
            reason = (
                "has ended" if nobody_fetches else f"has shown no sign of life for {silent_seconds:.0f} s"
            )
            raise TrainingFailed(
                f"the process that fetches {one_line(self._arrival.url)} {reason}: start again to go on"
            )
        self._last_call = time.monotonic()  # a look at the lease may take long on a slow disk


@functools.lru_cache(8)
def _mapped(path: str, samples: int) -> State:
    """Return this process's mapping of the State at this path, made once."""
    return State(path, samples)


def find(args: argparse.Namespace) -> list[packed.Packed]:
    """Return the splits that a job reads, of a pack in a folder or in a bucket."""
    url = args.data_url
    inputs = args.input_dir
    is_remote = args.data_backend == "packed-remote"
    if is_bucket(url) and (is_remote or not args.fetch_first):
        # of an elastic job any rank may be lost
        starts_fetcher = args.world.local_rank == 0 or bool(args.min_nodes)
        split_names: Sequence[str] = splits.SPLITS
        if args.evaluate and not packed.has_index(url, "train", inputs):
            split_names = ("val",)
        try:
            return begin(url, split_names, inputs, starts_fetcher, keeps_shards=not is_remote)
        except NoSharedMemory as error:
            if is_remote:
                raise UserError(
                    f"{error}, which --data_backend packed-remote needs: give --data_backend packed"
                ) from None
            progress.warn(f"{error}: the whole pack is fetched first")
    if is_bucket(url):
        shards.drop_unfinished(local_folder(url, inputs))
    root = storage.fetch(url, inputs=inputs)
    training_index = packed.index_path(root, splits.SPLITS[0])
    parts = [packed.load(root, split) for split in splits.needed_splits(args.evaluate, training_index)]
    if is_address(url):
        for part in parts:
            packed.verify_once(part)
    return parts


def begin(
    url: str, split_names: Sequence[str], inputs: str, starts_fetcher: bool, keeps_shards: bool = True
) -> list[packed.Packed]:
    """Return these splits of a pack, whose samples arrive while they are read.

    `starts_fetcher`: start a process that fetches them; `keeps_shards`: keep them, as far as the disk has
    room.
    """
    folder = local_folder(url, inputs if keeps_shards else os.path.join(inputs, "passing"))
    since = time.monotonic()
    with _started_fetcher(url, folder) if starts_fetcher else contextlib.nullcontext() as send_order:
        indexes = [packed.local_index(url, split, inputs) for split in split_names]
        parts = [packed.read_index(path, folder, split) for path, split in zip(indexes, split_names)]
        for part in parts:
            packed.refuse_folders(part)
        samples = sum(map(len, parts))
        path = os.path.abspath(state_path(folder, indexes))
        state = _shared_state(path, samples, inputs)
        packed.close_shards()
        if send_order:
            _forget_earlier_start(path, state)
            moments.listen(_SpeedColumns(state))
            send_order(path, samples, keeps_shards, *indexes)
    arrival = Arrival(url, folder, path, samples, since)
    first_numbers = np.cumsum([0, *map(len, parts)]).tolist()
    return [
        dataclasses.replace(part, arrival=arrival, number=part.number + first_number)
        for part, first_number in zip(parts, first_numbers)
    ]


def _shared_state(path: str, samples: int, inputs: str) -> State:
    """Return the State at this path. One process of a node makes its file; NoSharedMemory if it cannot."""
    try:
        once.once_per_node(path, lambda _: State.make(path, samples))
        return State(path, samples)
    except OSError as error:
        raise NoSharedMemory(f"{inputs} has no memory that processes can share ({one_line(error)})") from None


def _forget_earlier_start(path: str, state: State) -> None:
    """Delete what an earlier start has marked, unless a process fetches and the marks are its own."""
    with once.if_free(lease(path)) as nobody_fetches:
        if nobody_fetches:
            state.forget()
            state.requested_at[:] = 0


@contextlib.contextmanager
def _started_fetcher(url: str, folder: str) -> Iterator[Callable[..., object]]:
    """Start a fetcher process, and yield a function that sends its order, without which it ends."""
    rank_pid = str(os.getpid())
    node = os.environ.get(heartbeat.PARENT, rank_pid)  # the parent of the ranks of a node, if there is one
    child = Child(process.__name__, rank_pid, node, url, folder, env=_without_pulse())
    child.start_reader(progress.say, "what the fetcher says")
    try:
        yield lambda *order: child.write_line(json.dumps(order))
    finally:
        child.end_input()


class _SpeedColumns:
    """Adds to each row of speed.jsonl the MiB since the previous row: ahead, in turn, and on the disk."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._previous = state.arrived.copy()  # not what has come before this start

    def row(self, row: dict[str, Any]) -> None:
        arrived = self._state.arrived.copy()
        # A new fetcher counts from 0, and what it has found on the disk is not new.
        has_new_fetcher = bool((arrived < self._previous).any())
        added = np.zeros_like(arrived) if has_new_fetcher else arrived - self._previous
        row.update((name, round(size / MIB, 3)) for name, size in zip(ARRIVED_COLUMNS, added.tolist()))
        self._previous = arrived


def _without_pulse() -> dict[str, str]:
    """Return the environment without the names of this rank's files,
    so that the fetcher's waits are not taken for its own."""
    return {
        name: value for name, value in os.environ.items() if name not in (heartbeat.FILES, heartbeat.PARENT)
    }
