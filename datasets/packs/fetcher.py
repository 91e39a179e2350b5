"""Fetch a pack from a bucket while it is read: what is wanted first, the rest in order, by many threads."""

import contextlib
import dataclasses
import os
import queue
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Callable, Union

from common.alive.patience import Patience
from common.errors import UserError, count, one_line
from common.files import MIB, contents, write_atomically
from common.progress import Waiting
from common.storage import listing, once
from common.storage.bucket import Bucket, Item
from common.storage.index import Index
from common.storage.ranges import Ranges
from datasets.packs.passing import Passing, choose_passing_shards
from datasets.packs.plan import BadIndex, Content, FetchPlan
from datasets.packs.shards import ShardFile, ShardFolder, delete_growing, growing_path
from datasets.packs.state import (
    AHEAD,
    IN_ITS_SHARD,
    IN_TURN,
    ON_DISK,
    PASSING,
    SignsOfLife,
    State,
    all_states,
    lease,
    passing_folder,
)
from datasets.packs.units import Arrived, UnitFetcher

REQUESTS = 8  # at a time for what nobody wants yet
LOOK_SECONDS = 0.005  # between two looks at what is wanted
HASHED_FILES = 8  # at a time
OLD_SECONDS = 86_400  # after which what another boot or version has left is deleted


@dataclasses.dataclass(frozen=True)
class Finished:
    """A thread has compared a shard, of which all samples had come, with its SHA-256."""

    shard: ShardFile
    needs_refetch: bool  # it was wrong, and some of it an earlier start had left


Event = Union[Arrived, Finished, Exception]


class Fetcher:
    """Fetches the shards that some indexes name. It owns the threads that do, and counts what they bring.

    The FetchPlan says what comes next.
    """

    def __init__(
        self, url: str, folder: str, indexes: list[str], path: str, state: State, life: SignsOfLife
    ) -> None:
        """List the bucket; UserError if it is not what the indexes say.

        `folder`: for the shards; `indexes`: local paths of the pack's indexes; `path`: of the State's file.
        """
        self._url = url
        self._folder = folder
        self._state = state
        self._life = life
        bucket = Bucket(url, lambda text: print(text, flush=True))
        objects = listing.items_by_path(bucket, listing.list_objects(bucket, None))
        self._ranges = Ranges(bucket, Patience())
        self._passing = Passing(path, state)
        self._indexes = self._read_indexes(indexes, objects)
        content = self._checked_content(objects)
        self._samples = content.samples
        self._plan = FetchPlan(content.samples, state)
        self._units = UnitFetcher(url, self._ranges, content.samples, state, self._passing, life)
        self._files = ShardFolder(folder, content.is_checked_when_read, life.note_progress)
        self.shards = []
        for shard, samples in zip(content.shards, content.samples.in_shards(len(content.shards))):
            name = shard["name"]
            growing_file = growing_path(folder, name, shard["sha256"])
            self.shards.append(
                ShardFile(name, shard["size"], shard["sha256"], objects[name], samples, growing_file)
            )
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._in_flight = [0, 0]  # units, by their turn
        self._progress = _Progress(url, self.shards, state)

    def _read_indexes(self, paths: list[str], objects: dict[str, Item]) -> dict[str, tuple[Item, bytes]]:
        """Return {name: (object, content)}, if they are still those in the bucket."""
        indexes = {}
        for path in paths:
            name = os.path.basename(path)
            if name not in objects or not Index(os.path.dirname(path)).has(name, objects[name]):
                raise UserError(f"{one_line(self._url)} has another {name} since this run began: start again")
            indexes[name] = objects[name], contents(path)
        return indexes

    def _checked_content(self, objects: dict[str, Item]) -> Content:
        """Return what the indexes say; UserError if they contradict each other or the bucket."""
        try:
            content = Content.of(index for _, index in self._indexes.values())
        except BadIndex as error:
            raise UserError(
                f"{one_line(self._url)}: in its indexes {error}: publish the pack again"
            ) from None
        for shard in content.shards:
            name = shard["name"]
            if name not in objects or objects[name].size != shard["size"]:
                raise UserError(
                    f"{one_line(self._url)}/{name} is not what its index names: publish the pack again"
                )
        return content

    def run(self, should_continue: Callable[[], bool], keeps_shards: bool = True) -> bool:
        """Delete files that are wrong or of another version; fetch what is missing while should_continue().

        Return whether all shards are whole; then the indexes are beside them. `keeps_shards`: keep those for
        which the disk has room; else the samples of all that are missing pass through.
        """
        with ThreadPoolExecutor(HASHED_FILES) as pool:
            for shard, is_whole in zip(self.shards, pool.map(self._files.verify_or_delete, self.shards)):
                shard.is_whole = is_whole
        missing = [shard for shard in self.shards if not shard.is_whole]
        self._files.delete_growing_except(current_paths={shard.growing_path for shard in missing})
        _delete_old_passing(self._folder)
        pack_bytes = sum(shard.size for shard in self.shards)
        self._passing.most_bytes = choose_passing_shards(missing, self._folder, pack_bytes, keeps_shards)
        for shard in self.shards:
            self._set_first_place(shard)
        with ThreadPoolExecutor(self._ranges.threads) as requests, ThreadPoolExecutor(1) as finisher:
            try:
                self._fetch(missing, should_continue, requests, finisher)
            finally:
                self._ranges.patience.give_up()
                requests.shutdown(cancel_futures=True)
                finisher.shutdown(cancel_futures=True)
        is_whole = all(shard.is_whole for shard in self.shards)
        if is_whole:
            self._write_indexes()
        return is_whole

    def _set_first_place(self, shard: ShardFile) -> None:
        """Set the place of a shard's samples if it is whole or passes through; else open its growing file."""
        numbers = self._samples.number[shard.samples]
        if shard.is_whole:
            self._files.record(shard)
            self._state.place[numbers] = IN_ITS_SHARD
            self._plan.set_on_disk(shard.samples)
            self._state.arrived[ON_DISK] += shard.size
        elif shard.is_passing:
            delete_growing(shard.growing_path)  # an earlier start had room for it
            self._state.place[numbers] = PASSING
        else:
            self._files.begin(shard)

    def _write_indexes(self) -> None:
        """Put the indexes beside the shards, last, so that whoever finds one finds the whole pack."""
        for name, (item, content) in self._indexes.items():
            if not self._files.fetched.has(name, item):
                write_atomically(os.path.join(self._folder, name), content)
                self._files.fetched.add(name, item)

    # --- What is fetched next, and what has come ---

    def _fetch(
        self,
        missing: list[ShardFile],
        should_continue: Callable[[], bool],
        requests: ThreadPoolExecutor,
        finisher: ThreadPoolExecutor,
    ) -> None:
        """Have threads fetch what is wanted and, with a few of them, the rest in order,
        until all of `missing` are finished."""
        unfinished = set(missing)
        last_bell = None  # that was heard last: what is wanted is looked at after each new one
        while unfinished and should_continue():
            self._progress.report_if_due()
            ahead = []
            if self._state.bell != last_bell:
                last_bell = self._state.bell
                ahead = list(self._plan.take_wanted(self._passing.has_room()))
            in_turn = self._units_in_turn(len(ahead))
            for turn, units in ((AHEAD, ahead), (IN_TURN, in_turn)):
                self._in_flight[turn] += len(units)
                for unit in units:
                    shard = self.shards[self._samples.shard[unit.start]]
                    self._submit(requests, self._units.fetch, shard, unit, turn)
            for event in self._new_events():
                if isinstance(event, Exception):
                    raise event
                if isinstance(event, Arrived):
                    if self._count(event):
                        self._submit(finisher, self._finish, event.shard)
                elif event.needs_refetch:
                    self._plan.set_missing(event.shard.samples)
                else:
                    unfinished.remove(event.shard)
            dropped = self._passing.drop()
            if dropped:
                self._plan.set_dropped(dropped)
                last_bell = None  # there is room now for what is wanted
            if not any(self._in_flight):
                self._life.note_progress()  # nobody wants anything

    def _units_in_turn(self, ahead_count: int) -> list[slice]:
        """Return the next units in the order of the shards, after `ahead_count` wanted ones,
        up to REQUESTS."""
        units: list[slice] = []
        if self._in_flight[AHEAD] >= REQUESTS:
            return units
        while self._in_flight[IN_TURN] + ahead_count + len(units) < REQUESTS:
            unit = self._plan.next_in_turn()
            if unit is None:
                break
            units.append(unit)
        return units

    def _submit(self, pool: ThreadPoolExecutor, work: Callable[..., Event], *arguments: object) -> None:
        """Have a thread do the work, and put what it returns or raises into the events."""

        def run_and_report() -> None:
            try:
                event = work(*arguments)
            except Exception as error:
                event = error
            self._events.put(event)

        pool.submit(run_and_report)

    def _new_events(self) -> Iterator[Event]:
        """Yield what threads have done; wait a moment if that is nothing."""
        with contextlib.suppress(queue.Empty):
            yield self._events.get(timeout=LOOK_SECONDS)
            while True:
                yield self._events.get_nowait()

    def _count(self, event: Arrived) -> bool:
        """Count a unit that has come.

        Return whether its shard is complete; one that passes through never is.
        """
        shard = event.shard
        unit = event.unit
        self._in_flight[event.turn] -= 1
        self._state.arrived[ON_DISK if event.was_on_disk else event.turn] += event.size
        if shard.is_passing:
            for number, _, length, _ in self._samples.rows(unit):
                self._passing.count(number, length)
            return False
        shard.missing -= unit.stop - unit.start
        return shard.missing == 0

    # --- In a thread ---

    def _finish(self, shard: ShardFile) -> Finished:
        """Verify a shard of which all samples have come, and give it its name or have it fetched again."""
        is_right = self._files.finish(shard)
        if not is_right and shard.may_have_bytes:  # it was cut off by a kill: once more, all from the bucket
            shard.may_have_bytes = False
            shard.missing = shard.samples.stop - shard.samples.start
            return Finished(shard, needs_refetch=True)
        os.close(shard.file)
        if is_right:
            self._files.record(shard)
        else:
            print(
                (
                    f"warning: {one_line(self._url)}/{shard.name} is not what its index says, between its "
                    "samples"
                ),
                flush=True,
            )
        return Finished(shard, needs_refetch=False)


def _delete_old_passing(folder: str) -> None:
    """Delete the samples that passed through for another boot or version, long ago."""
    for path in all_states(folder):
        if os.stat(path).st_mtime < time.time() - OLD_SECONDS and once.is_free(lease(path)):
            shutil.rmtree(passing_folder(path), ignore_errors=True)


class _Progress:
    """Prints how much of the pack has arrived, every ten seconds until all shards that are kept are whole."""

    def __init__(self, url: str, shards: list[ShardFile], state: State) -> None:
        self._url = url
        self._shards = shards
        self._state = state
        self._waiting = Waiting()

    def report_if_due(self) -> None:
        """Print the line if ten seconds have passed since the last one."""
        if not self._waiting.claim_line():
            return
        kept = [shard for shard in self._shards if not shard.is_passing]
        if all(shard.is_whole for shard in kept):
            return
        ahead, in_turn, on_disk = self._state.arrived.tolist()
        rate = max(1, ahead + in_turn) / self._waiting.seconds
        whole_count = sum(shard.is_whole for shard in kept)
        text = f"{whole_count} of {count(len(kept), 'shard')}, {rate / MIB:.1f} MiB/s"
        if len(kept) == len(self._shards):  # else some come again in each epoch, and there is no end to tell
            arrived = ahead + in_turn + on_disk
            total = sum(shard.size for shard in kept)
            text += f", {arrived // MIB} of {total // MIB} MiB, {max(0, total - arrived) / rate:.0f} s left"
            text += f"; {ahead / total:.0%} came ahead of its shard"
        print(f"arriving {one_line(self._url)}: {text}", flush=True)
