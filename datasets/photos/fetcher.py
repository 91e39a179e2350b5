"""Fetch a pack while a job reads it: one process of a node, which brings wanted samples first, and whole shards meanwhile.

It is a fresh interpreter without torch, because obstore does not work in a process that was forked while it was in use. Of
several jobs on a node one fetches; the others stand by. Readers (arrival.py) share memory with it:

    which samples are there     written by the fetcher alone, after their bytes were compared with the checksum of the index
    which are wanted            written by the readers alone

A shard grows in .fetching and gets its name when it is whole and its SHA-256 is right; the indexes get theirs when all are.
"""

import contextlib
import ctypes
import dataclasses
import errno
import glob
import hashlib
import json
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable, Optional

import numpy as np

from common.alive import patience
from common.alive.patience import Patience
from common.errors import TrainingFailed, UserError, count, one_line
from common.files import MIB, contents, create, refuse_link, sha256, write_atomically
from common.progress import LINE_SECONDS
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
WANTED, REST, ON_DISK, WHOLE = range(4)  # what a thread has done; the first three are places in CAME
HASHED = 8  # files at a time
CAME = ("from_bucket_first_mib", "from_bucket_mib", "on_disk_mib")  # as speed.jsonl names the bytes that were counted
BEAT_SECONDS = 1.0  # between two signs of life
STUCK_SECONDS = 60  # without a byte and beyond --patience, after which there are none: a request or the disk never ends
FROZEN_SECONDS = 30  # without a sign of life, after which another process takes over


class State:
    """The memory that the fetcher shares with the readers of a pack, in a file. Samples of all splits are counted together."""

    HEAD, TEXT_AT = 4096, 1024  # bytes before the arrays; where the reason of a failure is in them

    def __init__(self, path: str, samples: int) -> None:
        memory = np.memmap(path, np.uint8, "r+", shape=self._size(samples))
        numbers = memory[: self.TEXT_AT].view(np.int64)
        self._bell, self._alive = numbers[0:1], numbers[1:2]
        self._holder, self.whole = numbers[2:3], numbers[3:4]
        self.came = numbers[4 : 4 + len(CAME)]  # bytes, since the fetcher began
        self._text = memory[self.TEXT_AT : self.HEAD]
        self.there = memory[self.HEAD : self.HEAD + samples]
        self.wanted = memory[-8 * samples :].view(np.int64)  # 0, or since when, by time.monotonic_ns(); 1: now
        self.heard = time.monotonic()  # when this process, if it fetches, last got something

    @classmethod
    def make(cls, path: str, samples: int) -> None:
        """Make the file, unless it is there."""
        refuse_link(path)
        if not os.path.exists(path):
            if not hasattr(os, "posix_fallocate"):
                raise OSError(errno.ENOSYS, "this system cannot reserve the bytes of a file")
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

    def live(self, over: threading.Event) -> None:
        """Show signs of life until `over`, as long as something comes or may come yet."""
        self._holder[0], self.heard = os.getpid(), time.monotonic()
        while time.monotonic() - self.heard < patience.limit() + STUCK_SECONDS:
            self._alive[0] = time.monotonic_ns()
            if over.wait(BEAT_SECONDS):
                return

    def alive(self) -> float:
        """Return when a fetcher last showed a sign of life, by time.monotonic()."""
        return int(self._alive[0]) / 1e9

    def end_frozen(self, url: str) -> None:
        """Kill the process that fetches, if it is one of this machine and has shown no sign of life for long."""
        if time.monotonic() - self.alive() > FROZEN_SECONDS:
            with contextlib.suppress(OSError):  # it has ended, or is another user's
                command = contents(f"/proc/{self._holder[0]}/cmdline").split(b"\0")
                if os.fsencode(url) in command and any(__name__.encode() in word for word in command):
                    os.kill(int(self._holder[0]), signal.SIGKILL)

    def forget(self) -> None:
        """Forget what an earlier fetcher said: files may have changed since."""
        self.there[:] = self.came[:] = self.whole[:] = 0
        self._text[:] = 0

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
    place: np.ndarray  # here, of a number in the State
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
        return Samples(order, np.argsort(order), **ordered, begin=begin, end=end)


@dataclasses.dataclass(eq=False)
class ShardFile:
    name: str
    size: int
    sha256: str
    item: Item
    growing: str  # the path of its file until it is whole
    samples: slice
    file: int = -1
    whole: bool = False
    left: int = 0  # samples that have not come
    suspect: bool = False  # whether the file may have right bytes, of which nothing is known


class Fetcher:
    def __init__(self, url: str, folder: str, indexes: list[str], state: State) -> None:
        self._url, self._folder = url, folder
        self._state = state
        bucket, self._patience = Bucket(url, lambda text: print(text, flush=True)), Patience()
        items = listing.named(bucket, listing.everything(bucket, None))
        self._ranges = Ranges(bucket, self._patience)
        self._known, self._checked = Index(folder), _Checked(folder)
        self._indexes: dict[str, Item] = {}
        for path in indexes:
            name = os.path.basename(path)
            if name not in items or not Index(os.path.dirname(path)).has(name, items[name]):
                raise UserError(f"{one_line(url)} has another {name} since this run began: start again")
            self._indexes[path] = items[name]
        self._read(items)
        self._asked = np.zeros(len(self._samples.number), bool)  # whether a sample of the State is there or under way
        self._events: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self._began = self._told = time.monotonic()

    def _read(self, items):
        """Read the indexes, which a reader has checked."""
        shards, parts = [], []
        for path in self._indexes:
            with np.load(path, allow_pickle=False) as stored:
                parts.append({name: stored[name] for name in ("shard", "offset", "length", "checksum")})
                parts[-1]["shard"] = parts[-1]["shard"] + len(shards)
                about = json.loads(bytes(stored["about"]))
                shards += about["shards"]
                self._compared = about["form"] != "raw"  # at every read, too
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
            name, samples = shard["name"], slice(*bounds[number : number + 2])
            path = growing(self._folder, name)
            self.shards.append(ShardFile(name, shard["size"], shard["sha256"], items[name], path, samples))

    def run(self, goes_on: Callable[[], bool]) -> bool:
        """Fetch what is missing while goes_on(); return whether all shards are whole."""
        with ThreadPoolExecutor(HASHED) as pool:
            for shard, whole in zip(self.shards, pool.map(self._is_whole, self.shards)):
                shard.whole = whole
        missing = [shard for shard in self.shards if not shard.whole]
        listing.require_space(self._folder, {shard.name: shard.item for shard in missing}, ".arriving")
        for path in {*glob.glob(f"{glob.escape(index.notes(self._folder))}/*.arriving")} - {one.growing for one in self.shards}:
            os.unlink(path)  # of another pack that was here
        for shard in self.shards:
            (self._note_whole if shard.whole else self._open)(shard)
        with ThreadPoolExecutor(self._ranges.threads) as requests, ThreadPoolExecutor(1) as whole:
            try:
                self._serve(len(missing), goes_on, requests, whole)
            finally:
                self._patience.give_up()
                requests.shutdown(cancel_futures=True)
                whole.shutdown(cancel_futures=True)
        if not all(shard.whole for shard in self.shards):
            return False
        for path, item in self._indexes.items():
            name = os.path.basename(path)
            if not self._known.has(name, item):
                write_atomically(os.path.join(self._folder, name), contents(path))
                self._known.add(name, item)
        return True

    # --- The files ---

    def _numbers(self, shard):
        return self._samples.number[shard.samples]

    def _is_whole(self, shard):
        """Whether the shard's file is there and was verified, now or before. If it was by the store's digest, in another way of
        fetching it, that is enough where each read compares a checksum."""
        known = self._compared and shard.item.digest and self._known.has(shard.name, shard.item)
        if known or self._checked.has(shard):
            return True
        path = os.path.join(self._folder, shard.name)
        if not index.has_size(path, shard.size) or sha256(path) != shard.sha256:
            return False
        self._state.heard = time.monotonic()
        self._checked.add(shard)
        return True

    def _note_whole(self, shard):
        if not self._known.has(shard.name, shard.item):
            self._known.add(shard.name, shard.item)
        self._state.there[self._numbers(shard)] = self._asked[self._numbers(shard)] = 1
        self._state.came[ON_DISK] += shard.size

    def _tell(self):
        """Print how far it is, every ten seconds."""
        now = time.monotonic()
        if now - self._told > LINE_SECONDS:
            self._told = now
            whole, total = sum(shard.whole for shard in self.shards), sum(shard.size for shard in self.shards)
            first, rest, old = self._state.came.tolist()
            rate = max(1, first + rest) / (now - self._began)
            said = f"{whole} of {count(len(self.shards), 'shard')}, {(first + rest + old) // MIB} of {total // MIB} MiB"
            said += f", {rate / MIB:.1f} MiB/s, {(total - first - rest - old) / rate:.0f} s left"
            print(f"arriving {one_line(self._url)}: {said}; {first / total:.0%} came ahead of its shard", flush=True)

    def _open(self, shard):
        """Open the file of an unfinished shard. What is not known to be right in it is compared before it is fetched again."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(self._folder, shard.name))  # a wrong one, or that of another pack
        shard.suspect = index.has_size(shard.growing, shard.size)
        shard.left = len(self._numbers(shard))
        shard.file = os.open(shard.growing, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        os.ftruncate(shard.file, shard.size)

    def _finish(self, shard):
        """Give the shard its name, and return it. What is wrong now lies between the samples, which were compared already."""
        path = os.path.join(self._folder, shard.name)
        if index.has_size(path, shard.size):  # another process has fetched it, too
            with contextlib.suppress(FileNotFoundError):
                os.unlink(shard.growing)
            shard.whole = True
        elif sha256(shard.growing) == shard.sha256:
            os.fsync(shard.file)
            os.replace(shard.growing, path)
            self._checked.add(shard)
            shard.whole = True
        elif shard.suspect:  # it was cut off by a kill: once more, all from the bucket
            shard.suspect, shard.left = False, len(self._numbers(shard))
            return shard
        else:
            print(f"warning: {one_line(self._url)}/{shard.name} is not what its index says, between its samples", flush=True)
        os.close(shard.file)
        return shard

    # --- What is fetched next ---

    def _serve(self, growing, goes_on, requests, whole):
        """Have threads fetch what is wanted and, with a few of them, the rest in order, until no shard is growing."""
        under_way, heard, cursor = [0, 0], -1, 0

        def submit(pool, what, work, *arguments):
            def done():
                try:
                    self._events.put((what, work(*arguments)))
                except Exception as error:
                    self._events.put((what, error))

            pool.submit(done)

        while growing and goes_on():
            self._tell()
            units = []
            if self._state.bell() != heard:
                heard = self._state.bell()
                units = [(WANTED, unit) for unit in self._wanted()]
            while under_way[REST] + len(units) < RUNS and under_way[WANTED] < RUNS:
                if (cursor := self._next(cursor)) == len(self._asked):
                    break
                units.append((REST, self._unit(cursor)))
            for what, unit in units:
                under_way[what] += 1
                submit(requests, what, self._obtain, unit)
            for what, found in self._happened():
                if isinstance(found, Exception):
                    raise found
                if what == WHOLE and found.left:
                    self._asked[self._numbers(found)], cursor = False, min(cursor, found.samples.start)
                elif what == WHOLE:
                    growing -= 1
                    if found.whole and not self._known.has(found.name, found.item):
                        self._known.add(found.name, found.item)
                else:
                    shard, came, size, old = found
                    under_way[what] -= 1
                    shard.left -= came
                    self._state.came[ON_DISK if old else what] += size
                    if not shard.left:
                        submit(whole, WHOLE, self._finish, shard)

    def _happened(self):
        """Yield what the threads have done; wait a moment if that is nothing."""
        with contextlib.suppress(queue.Empty):
            yield self._events.get(timeout=LOOK)
            while True:
                yield self._events.get_nowait()

    def _wanted(self):
        """Yield units of samples that are wanted and not asked for yet, the longest wanted first."""
        since = self._state.wanted
        wanted = (since != 0) & ~self._asked
        numbers = np.flatnonzero(wanted)
        for number in numbers[np.argsort(since[numbers], kind="stable")].tolist():
            if not self._asked[number]:
                yield self._unit(int(self._samples.place[number]), wanted)

    def _next(self, place):
        """Return the first place from `place` on of a sample that nobody has asked for, or the end."""
        while place < len(self._asked) and self._asked[self._samples.number[place]]:
            place += 1
        return place

    def _unit(self, first, among=None):
        """Return the samples from `first` on, of one shard and `among` these, that are not too many. Now they are asked for."""
        samples, last = self._samples, first
        while (
            last < len(self._asked) and not self._asked[samples.number[last]] and samples.shard[last] == samples.shard[first]
            and (among is None or among[samples.number[last]])
            and (last == first or samples.end[last] - samples.begin[first] <= RUN)
        ):  # fmt: skip
            self._asked[samples.number[last]] = True
            last += 1
        return slice(first, last)

    # --- In a thread ---

    def _obtain(self, unit):
        """Bring the bytes of a unit to their place, and say that its samples are there.

        Return (their shard, how many they are, bytes, whether those were on the disk).
        """
        shard = self.shards[self._samples.shard[unit.start]]
        begin, end = int(self._samples.begin[unit.start]), int(self._samples.end[unit.stop - 1])
        old = shard.suspect and self._is_right(unit, os.pread(shard.file, end - begin, begin))
        if not old:
            _write(shard.file, self._from_bucket(shard, unit, begin, end - begin), begin)
        self._state.there[self._samples.number[unit]] = 1
        self._state.heard = time.monotonic()
        return shard, unit.stop - unit.start, end - begin, old

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


class _Checked:
    """Notes in the folder of which files had the SHA-256 of which shard: a store's digest may be of something else."""

    def __init__(self, folder: str) -> None:
        self._folder, self._path = folder, os.path.join(index.notes(folder), "arrived.json")
        self._known: dict[str, Any] = {}
        self._lock = threading.Lock()
        with contextlib.suppress(OSError, ValueError, RecursionError):
            self._known = dict(json.loads(contents(self._path)))

    def has(self, shard: ShardFile) -> bool:
        seen = self._seen(shard)
        return seen is not None and self._known.get(shard.name) == seen

    def add(self, shard: ShardFile) -> None:
        with self._lock:
            self._known[shard.name] = self._seen(shard)
            write_atomically(self._path, json.dumps(self._known).encode())

    def _seen(self, shard):
        with contextlib.suppress(OSError):
            status = os.lstat(os.path.join(self._folder, shard.name))
            return [shard.sha256, status.st_size, status.st_mtime_ns]


def _write(file, content, begin):
    view = memoryview(content)
    while view:
        written = os.pwrite(file, view, begin)
        begin, view = begin + written, view[written:]


def main(job: str, url: str, folder: str, samples: str, *indexes: str) -> None:
    """Fetch the pack at `url` to `folder` for a process, unless another one of this node does. `indexes`: their paths."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it is meant for the job, which needs samples until it has saved
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))  # PR_SET_PDEATHSIG: if it is stopped, it cannot look for the job
    path = state_path(folder, indexes)
    State.make(path, int(samples))  # another one, of which nobody reads, if an index was replaced since
    state = State(path, int(samples))
    asked = time.monotonic()

    def goes_on():
        return os.getppid() == int(job)

    def waits():
        if time.monotonic() - asked > FROZEN_SECONDS:
            state.end_frozen(url)
        return goes_on()

    with once.when_free(lease(folder), waits) as held:
        if not held or state.whole:  # another process has fetched it meanwhile
            return
        over = threading.Event()
        threading.Thread(target=state.live, args=(over,), daemon=True).start()
        state.forget()
        began = time.monotonic()
        try:
            fetcher = Fetcher(url, folder, list(indexes), state)
            state.whole[0] = fetcher.run(goes_on)
        except (UserError, TrainingFailed) as error:
            return state.fail(error)
        except OSError as error:
            return state.fail(TrainingFailed(f"cannot write to {folder}: {one_line(error.strerror)}"))
        except Exception as error:
            state.fail(TrainingFailed(f"{one_line(url)} cannot be fetched to {folder}: {error!r}"))
            raise
        finally:
            over.set()
    if state.whole and goes_on():
        first, rest, old = (state.came / MIB).tolist()
        came = f"{first + rest:.1f} MiB in {time.monotonic() - began:.0f} s, {first:.1f} of them ahead of their shards"
        here = f"{old:.1f} MiB were there" if old else "none were there"
        print(f"arrived: {count(len(fetcher.shards), 'shard')} of {one_line(url)}: {came}; {here}; all verified", flush=True)


def drop_unfinished(folder: str) -> None:
    """Delete what has come of unfinished shards, unless a process fetches them: another way of fetching begins anew."""
    for path in glob.glob(f"{glob.escape(index.notes(folder))}/*.arriving") if once.is_free(lease(folder)) else ():
        with contextlib.suppress(FileNotFoundError):  # another rank deletes them, too
            os.unlink(path)


def lease(folder: str) -> str:
    return os.path.join(index.notes(folder), "arriving")


def state_path(folder: str, indexes: Sequence[str]) -> str:
    """Return the path of the State. Another pack has another one, and so has another boot, which has another clock."""
    digest = hashlib.sha256(" ".join([once.boot_id(), *map(sha256, indexes)]).encode()).hexdigest()[:16]
    return os.path.join(index.notes(folder), f"{digest}.state")


def growing(folder: str, shard: str) -> str:
    """Return the path of a shard's file until it is whole."""
    return f"{index.unfinished(folder, shard)}.arriving"
