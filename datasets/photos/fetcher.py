"""Fetch a pack while a job reads it: one process of a node, which brings wanted samples first, and whole shards meanwhile.

It is a fresh interpreter without torch, because obstore does not work in a process that was forked while it was in use. Of
several jobs on a node one fetches; the others stand by. Readers (arrival.py) share memory with it:

    which samples are there     written by the fetcher alone, after their bytes were compared with the checksum of the index
    which are wanted            written by the readers alone

A shard grows in .fetching and gets its name when it is whole and its SHA-256 is right; the indexes get theirs when all are.
"""

import contextlib
import dataclasses
import json
import os
import queue
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable, Optional

import numpy as np

from common.alive.patience import Patience
from common.errors import TrainingFailed, UserError, count, one_line
from common.files import MIB, contents, create, refuse_link, sha256, write_atomically
from common.secrets import mask
from common.storage import index, listing, once
from common.storage.bucket import Bucket, Item, ObjectChanged
from common.storage.download import DAMAGED, Damaged
from common.storage.index import Index
from common.storage.ranges import Ranges
from datasets.crc import crc32

RUN = 4 << 20  # most bytes of one request
RUNS = 8  # requests at a time for what nobody wants yet
LOOK = 0.005  # seconds between two looks at what is wanted
BLOCK = 512  # bytes of a header in a tar file
WANTED, REST, WHOLE = "wanted", "rest", "whole"  # what a thread has done


class State:
    """The memory that the fetcher shares with the readers of a pack, in a file. Samples of all splits are counted together."""

    HEAD, TEXT_AT = 4096, 1024  # bytes before the arrays; where the reason of a failure is in them

    def __init__(self, path: str, samples: int) -> None:
        memory = np.memmap(path, np.uint8, "r+", shape=self._size(samples))
        self._bell, self._alive = (memory[begin : begin + 8].view(np.int64) for begin in (0, 8))
        self._text = memory[self.TEXT_AT : self.HEAD]
        self.there = memory[self.HEAD : self.HEAD + samples]
        self.wanted = memory[-8 * samples :].view(np.int64)  # 0, or since when, by time.monotonic_ns(); 1: now

    @classmethod
    def make(cls, path: str, samples: int) -> None:
        """Make the file, unless it is there."""
        refuse_link(path)
        if not os.path.exists(path):
            with create(f"{path}.new") as file:
                os.posix_fallocate(file.fileno(), 0, cls._size(samples))  # a hole could become SIGBUS on a full disk
            os.replace(f"{path}.new", path)

    @classmethod
    def _size(cls, samples):
        return cls.HEAD + -(-samples // 8) * 8 + 8 * samples

    def ring(self) -> None:
        self._bell[0] = time.monotonic_ns()

    def bell(self) -> int:
        return int(self._bell[0])

    def note_life(self) -> None:
        self._alive[0] = time.monotonic_ns()

    def alive(self) -> float:
        """Return when the fetcher last got something, by time.monotonic()."""
        return int(self._alive[0]) / 1e9

    def fail(self, error: Exception) -> None:
        note = {"at": time.monotonic(), "text": mask(error)[:400], "code": getattr(error, "exit_code", 1)}
        self._text[:] = np.frombuffer(json.dumps(note).encode().ljust(len(self._text)), np.uint8)

    def failure(self, since: float) -> Optional[Exception]:
        """Return the error that has ended a fetcher after `since`, by time.monotonic()."""
        with contextlib.suppress(ValueError):  # there is none, or it is being written
            note = json.loads(bytes(self._text))
            if note["at"] > since:
                return (UserError if note["code"] == 2 else TrainingFailed)(note["text"])
        return None


@dataclasses.dataclass(frozen=True)
class Samples:
    """The samples of a pack in the order of their places. The parts from `begin` to `end` are all of each shard."""

    number: np.ndarray  # in the State
    shard: np.ndarray
    offset: np.ndarray  # of the sample itself
    length: np.ndarray
    checksum: np.ndarray
    begin: np.ndarray
    end: np.ndarray

    @staticmethod
    def of(parts: list[dict[str, np.ndarray]], sizes: np.ndarray) -> "Samples":
        """`parts`: of each split "shard", "offset", "length" and "checksum". ValueError if samples overlap."""
        together = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        order = np.lexsort((together["offset"], together["shard"]))
        ordered = {name: values[order] for name, values in together.items()}
        shard, offset, ends = ordered["shard"], ordered["offset"], ordered["offset"] + ordered["length"]
        new = np.flatnonzero(np.diff(shard, prepend=-1))  # the first samples of the shards
        begin = np.concatenate([[0], np.maximum(offset[1:] - BLOCK, ends[:-1])])
        begin[new] = 0
        overlap = offset < np.concatenate([[0], ends[:-1]])
        overlap[new] = False
        if overlap.any() or len(new) != len(sizes):
            raise ValueError("samples overlap, or a shard has none")
        end = np.concatenate([begin[1:], [0]])
        end[np.append(new[1:], len(shard)) - 1] = sizes
        return Samples(order, **ordered, begin=begin, end=end)


@dataclasses.dataclass(eq=False)
class ShardFile:
    name: str
    size: int
    sha256: str
    item: Item
    growing: str  # the path of its file until it is whole
    samples: slice
    file: int = -1
    suspect: bool = False  # whether the file may have right bytes of which nothing is known
    ends: bool = False  # whether all samples are there, and it is made whole


class Fetcher:
    def __init__(self, url: str, folder: str, indexes: list[str], state: State, goes_on: Callable[[], bool]) -> None:
        self._url, self._folder = url, folder
        self._state, self._goes_on = state, goes_on
        bucket = Bucket(url, lambda text: print(text, flush=True))
        items = listing.named(bucket, listing.everything(bucket, None))
        self._ranges = Ranges(bucket, Patience())
        self._known = Index(folder)
        self._indexes = {path: items[os.path.basename(path)] for path in indexes}
        self._read(items)
        self._asked = np.zeros(len(self._samples.number), bool)  # whether a sample is there or under way
        self._events: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self.fetched = 0  # bytes

    def _read(self, items):
        """Read the indexes, which a reader has checked."""
        shards, parts = [], []
        for path in self._indexes:
            with np.load(path, allow_pickle=False) as stored:
                parts.append({name: stored[name] for name in ("shard", "offset", "length", "checksum")})
                parts[-1]["shard"] = parts[-1]["shard"] + len(shards)
                shards += json.loads(bytes(stored["about"]))["shards"]
        for shard in shards:
            if shard["name"] not in items or items[shard["name"]].size != shard["size"]:
                raise UserError(f"{one_line(self._url)}/{shard['name']} is not what its index names: publish the pack again")
        try:
            self._samples = Samples.of(parts, np.array([shard["size"] for shard in shards]))
        except ValueError as error:
            raise UserError(f"{one_line(self._url)}: in its indexes {error}: publish the pack again") from None
        bounds = np.searchsorted(self._samples.shard, range(len(shards) + 1)).tolist()
        self.shards = []
        for number, shard in enumerate(shards):
            path, samples = growing(self._folder, shard["name"]), slice(*bounds[number : number + 2])
            self.shards.append(ShardFile(**shard, item=items[shard["name"]], growing=path, samples=samples))

    def run(self) -> None:
        """Fetch what is missing; return when all of it is there, or the job is gone."""
        missing = [shard for shard in self.shards if not self._is_whole(shard)]
        listing.require_space(self._folder, {shard.name: shard.item for shard in missing})
        for shard in missing:
            self._open(shard)
        with ThreadPoolExecutor(self._ranges.threads) as requests, ThreadPoolExecutor(1) as whole:
            try:
                self._serve(len(missing), requests, whole)
            finally:
                requests.shutdown(cancel_futures=True)
                whole.shutdown(cancel_futures=True)
        if all(map(self._is_whole, self.shards)):
            for path, item in self._indexes.items():
                name = os.path.basename(path)
                if not self._known.has(name, item):
                    write_atomically(os.path.join(self._folder, name), contents(path))
                    self._known.add(name, item)
        self._known.close()

    # --- The files ---

    def _numbers(self, shard):
        return self._samples.number[shard.samples]

    def _is_whole(self, shard):
        """Whether the shard's file is there and right; a wrong one is deleted."""
        path = os.path.join(self._folder, shard.name)
        if not self._known.has(shard.name, shard.item):
            if not index.has_size(path, shard.size) or sha256(path) != shard.sha256:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
                return False
            self._known.add(shard.name, shard.item)
        self._state.there[self._numbers(shard)] = self._asked[shard.samples] = 1
        return True

    def _open(self, shard):
        """Open the file of an unfinished shard. What is not known to be right in it is compared before it is fetched again."""
        there = self._state.there
        shard.suspect = index.has_size(shard.growing, shard.size)
        if shard.suspect and there[self._numbers(shard)].all():
            shard.suspect = sha256(shard.growing) == shard.sha256
        if not shard.suspect:
            there[self._numbers(shard)] = 0
        shard.file = os.open(shard.growing, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        os.ftruncate(shard.file, shard.size)
        self._asked[shard.samples] = there[self._numbers(shard)] != 0
        self._events.put(("", shard))  # all of it may be there

    def _finish(self, shard):
        if sha256(shard.growing) == shard.sha256:
            os.fdatasync(shard.file)
            os.replace(shard.growing, os.path.join(self._folder, shard.name))
            self._known.add(shard.name, shard.item)
        else:  # what was trained on is right: it was compared with the checksums
            what = f"{one_line(self._url)}/{shard.name} has other bytes between its samples than its index says"
            print(f"warning: {what}; the next start fetches it again", flush=True)
        os.close(shard.file)

    # --- What is fetched next ---

    def _serve(self, growing, requests, whole):
        """Have threads fetch what is wanted and, with a few of them, the rest in order, until no shard is growing."""
        under_way, heard, cursor = {WANTED: 0, REST: 0}, -1, 0

        def submit(pool, what, work, *arguments):
            def done():
                try:
                    self._events.put((what, work(*arguments)))
                except Exception as error:
                    self._events.put((what, error))

            pool.submit(done)

        while growing and self._goes_on():
            units = []
            if self._state.bell() != heard:
                heard = self._state.bell()
                units = [(WANTED, unit) for unit in self._wanted()]
            while under_way[REST] + len(units) < RUNS and under_way[WANTED] < RUNS and cursor < len(self._asked):
                unit = self._unit(cursor, ~self._asked)
                cursor = max(cursor + 1, unit.stop)
                units += [(REST, unit)] if unit.stop > unit.start else []
            for what, unit in units:
                under_way[what] += 1
                submit(requests, what, self._obtain, unit)
            with contextlib.suppress(queue.Empty):
                what, shard = self._events.get(timeout=LOOK)
                if isinstance(shard, Exception):
                    raise shard
                if what == WHOLE:
                    growing -= 1
                elif what:
                    under_way[what] -= 1
                if what != WHOLE and not shard.ends and self._state.there[self._numbers(shard)].all():
                    shard.ends = True
                    submit(whole, WHOLE, self._finish_and_return, shard)

    def _finish_and_return(self, shard):
        self._finish(shard)
        return shard

    def _wanted(self):
        """Yield units of samples that are wanted and not asked for yet, the longest wanted first."""
        since = self._state.wanted[self._samples.number]
        wanted = (since != 0) & ~self._asked
        places = np.flatnonzero(wanted)
        for place in places[np.argsort(since[places], kind="stable")].tolist():
            if not self._asked[place]:
                yield self._unit(place, wanted)

    def _unit(self, first, among):
        """Return the samples from `first` on that are `among` these, of one shard and not too many; now they are asked for."""
        samples, last = self._samples, first
        while (
            last < len(among) and among[last] and not self._asked[last] and samples.shard[last] == samples.shard[first]
            and (last == first or samples.end[last] - samples.begin[first] <= RUN)
        ):  # fmt: skip
            last += 1
        self._asked[first:last] = True
        return slice(first, last)

    # --- In a thread ---

    def _obtain(self, unit):
        """Bring the bytes of a unit to their place, say that its samples are there, and return their shard."""
        shard = self.shards[self._samples.shard[unit.start]]
        begin, end = int(self._samples.begin[unit.start]), int(self._samples.end[unit.stop - 1])
        if not shard.suspect or not self._is_right(unit, os.pread(shard.file, end - begin, begin)):
            content = self._from_bucket(shard, unit, begin, end - begin)
            self.fetched += len(content)
            _write(shard.file, content, begin)
        self._state.there[self._samples.number[unit]] = 1
        self._state.note_life()
        return shard

    def _from_bucket(self, shard, unit, begin, length):
        place = f"{one_line(self._url)}/{shard.name}"
        for _ in range(DAMAGED):
            try:
                content = self._ranges.read(shard.item, begin, length)
            except ObjectChanged:
                raise UserError(f"{place} has changed since this run began: start again") from None
            if self._is_right(unit, content):
                return content
        raise Damaged(f"{place}, {length} bytes from {begin} on, arrived {DAMAGED} times with others than its index says")

    def _is_right(self, unit, content):
        samples, view = self._samples, memoryview(content)
        begins = (samples.offset[unit] - samples.begin[unit.start]).tolist()
        parts = zip(begins, samples.length[unit].tolist(), samples.checksum[unit].tolist())
        return all(crc32(view[begin : begin + length]) == checksum for begin, length, checksum in parts)


def _write(file, content, begin):
    view = memoryview(content)
    while view:
        written = os.pwrite(file, view, begin)
        begin, view = begin + written, view[written:]


def main(url: str, folder: str, state_path: str, samples: str, *indexes: str) -> None:
    """Fetch the pack at `url` to `folder`, unless another process of this node does. `indexes`: the paths of its indexes."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it is meant for the job, which needs samples until it has saved
    job, state = os.getppid(), State(state_path, int(samples))

    def goes_on():
        return os.getppid() == job

    with once.when_free(lease(folder), goes_on) as held:
        if not held:
            return
        state.note_life()
        began = time.monotonic()
        try:
            fetcher = Fetcher(url, folder, list(indexes), state, goes_on)
            fetcher.run()
        except (UserError, TrainingFailed) as error:
            return state.fail(error)
        except Exception as error:
            state.fail(TrainingFailed(f"{one_line(url)} cannot be fetched to {folder}: {error!r}"))
            raise
    if goes_on():
        now = f"{fetcher.fetched / MIB:.1f} MiB of them now, in {time.monotonic() - began:.0f} s"
        print(f"arrived: {count(len(fetcher.shards), 'shard')} of {one_line(url)}, {now}; all verified", flush=True)


def lease(folder: str) -> str:
    return os.path.join(index.notes(folder), "arriving")


def growing(folder: str, shard: str) -> str:
    """Return the path of a shard's file until it is whole."""
    return f"{index.unfinished(folder, shard)}.arriving"
