"""Fetch a pack while a job reads it: one process of a node, which brings wanted samples first, and whole shards meanwhile.

It is a fresh interpreter without torch, because obstore does not work in a process that was forked while it was in use. Of
several jobs on a node one fetches; the others stand by. Readers (arrival.py) share memory with it:

    which samples are there     written by the fetcher alone, after their bytes were compared with the checksum of the index
    which are wanted            written by the readers alone

A shard grows in .fetching and gets its name when it is whole and its SHA-256 is right; the indexes get theirs when all are.
Shards for which the disk has no room pass through: what is wanted of them is kept until it was read.
"""

import collections
import contextlib
import ctypes
import dataclasses
import errno
import glob
import hashlib
import io
import json
import os
import queue
import resource
import shutil
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
from common.errors import STOP_SIGNALS, TrainingFailed, UserError, count, one_line
from common.files import MIB, contents, create, read_note, refuse_link, sha256, write_atomically
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
BLOCK = 512  # bytes of a header in a tar file, and of what st_blocks counts
ABSENT, IN_ITS_SHARD, PASSES, IN_ITS_FILE = range(4)  # where a sample is; PASSES: not here, and its shard passes through
NOW = 1  # in State.wanted
PASSING_SHARE, MOST_PASSING = 20, 1 << 30  # the part of the disk, and the most bytes, for samples that pass through
DROP_SECONDS = 0.05  # between two looks at what was read
UNREAD_SECONDS = 600  # after which a sample that passes through is no longer kept for who has wanted it
WANTED, REST, ON_DISK, WHOLE = range(4)  # what a thread has done; the first three are places in CAME
HASHED = 8  # files at a time
OLD_SECONDS = 86_400  # after which what another boot or version has left is deleted
CAME = ("from_bucket_first_mib", "from_bucket_mib", "on_disk_mib")  # as speed.jsonl names the bytes that were counted
BEAT_SECONDS = 1.0  # between two signs of life
STUCK_SECONDS = 60  # without a byte and beyond --patience, after which there are none: a request or the disk never ends
GAP_SECONDS = 5  # between two looks, after which this process itself was stopped meanwhile
FROZEN_SECONDS = 30  # without a sign of life, after which another process takes over


class State:
    """The memory that the fetcher shares with the readers of a pack, in a file. Samples of all splits are counted together."""

    HEAD, TEXT_AT = 4096, 1024  # bytes before the arrays; where the reason of a failure is in them

    def __init__(self, path: str, samples: int) -> None:
        memory = np.memmap(path, np.uint8, "r+", shape=self._size(samples))
        numbers = memory[: self.TEXT_AT].view(np.int64)
        self._bell, self._alive = numbers[0:1], numbers[1:2]
        self._holder, self.whole = numbers[2:4], numbers[4:5]  # the process that fetches, and its namespace of processes
        self.came = numbers[5 : 5 + len(CAME)]  # bytes, since the fetcher began
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
        self.heard = time.monotonic()
        self._alive[0], self._holder[:] = time.monotonic_ns(), (os.getpid(), _namespace())
        while not over.wait(BEAT_SECONDS):
            if time.monotonic() - self.heard < patience.limit() + STUCK_SECONDS:
                self._alive[0] = time.monotonic_ns()

    def alive(self) -> float:
        """Return when a fetcher last showed a sign of life, by time.monotonic()."""
        return int(self._alive[0]) / 1e9

    def end_frozen(self, url: str) -> None:
        """Kill the process that fetches, if it can be seen from here and has shown no sign of life for long."""
        if time.monotonic() - self.alive() > FROZEN_SECONDS and self._holder[1] == _namespace():
            with contextlib.suppress(OSError):  # it has ended, or is another user's
                command = contents(f"/proc/{self._holder[0]}/cmdline").split(b"\0")
                if os.fsencode(url) in command and any(__name__.encode() in word for word in command):
                    os.kill(int(self._holder[0]), signal.SIGKILL)

    def forget(self) -> None:
        """Forget what an earlier fetcher said: files may have changed since."""
        self.there[:] = self.came[:] = self.whole[:] = 0
        self._text[:] = 0

    def fail(self, error: Exception, node: str = "") -> None:
        """Note the error that ends the fetcher. `node`: names the processes of a job on a node."""
        note = {"at": time.monotonic(), "node": node, "text": mask(error)[:200], "code": getattr(error, "exit_code", 1)}
        self._text[:] = np.frombuffer(json.dumps(note).encode().ljust(len(self._text)), np.uint8)

    def failure(self, since: float, node: str = "") -> Optional[Exception]:
        """Return the error that has ended a fetcher after `since`, by time.monotonic(), of `node` if that is given."""
        with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):  # there is none, or it is being written
            note = json.loads(bytes(self._text))
            if note["at"] > since and note["node"] in (node or note["node"],):
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
    passes: bool = False  # whether the disk has no room for it: then what is wanted of it comes in each epoch anew


class Passing:
    """The samples of shards that pass through: each is a file of its own until it was read."""

    def __init__(self, path: str, state: State) -> None:
        self._folder, self._state = passing(path), state
        self._there: collections.deque[tuple[int, int]] = collections.deque()  # (number, bytes), the oldest first
        self._size = self.most = 0  # bytes
        self._looked = 0.0
        shutil.rmtree(self._folder, ignore_errors=True)  # of an earlier start

    def write(self, number: int, content: Any) -> None:
        """Write a sample, and say that it is there. From any thread."""
        os.makedirs(self._folder, exist_ok=True)
        path = os.path.join(self._folder, str(number))
        with create(f"{path}.new") as file:
            file.write(content)
        os.replace(f"{path}.new", path)
        self._state.there[number] = IN_ITS_FILE

    def count(self, number: int, size: int) -> None:
        self._there.append((number, size))
        self._size += size

    def full(self) -> bool:
        return self._size > self.most

    def drop(self) -> list[int]:
        """While they are too many, delete the oldest that nobody wants, or has not read for long. Return their numbers."""
        gone, still, long_ago, now = [], collections.deque(), _long_ago(), time.monotonic()
        if now - self._looked < DROP_SECONDS:
            return gone
        self._looked = now
        while self._there and self.full():
            number, size = self._there.popleft()
            since = int(self._state.wanted[number])
            if since == NOW or since > long_ago:
                still.append((number, size))
                continue
            self._state.there[number] = PASSES
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(self._folder, str(number)))
            self._size -= size
            gone.append(number)
        self._there.extendleft(reversed(still))
        return gone


class Fetcher:
    """`indexes`: their paths; `path`: of the State."""

    def __init__(self, url: str, folder: str, indexes: list[str], path: str, state: State) -> None:
        self._url, self._folder = url, folder
        self._state = state
        bucket = Bucket(url, lambda text: print(text, flush=True))
        items = listing.named(bucket, listing.everything(bucket, None))
        self._ranges, self._passing = Ranges(bucket, Patience()), Passing(path, state)
        self._known, self._checked = Index(folder), _Checked(folder)
        self._indexes: dict[str, tuple[Item, bytes]] = {}
        for path in indexes:
            name = os.path.basename(path)
            if name not in items or not Index(os.path.dirname(path)).has(name, items[name]):
                raise UserError(f"{one_line(url)} has another {name} since this run began: start again")
            self._indexes[name] = items[name], contents(path)
        self._read(items)
        self._asked = np.zeros(len(self._samples.number), bool)  # whether a sample of the State is there or under way
        self._events: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self._began = self._told = time.monotonic()

    def _read(self, items):
        """Read the indexes, which a reader has checked."""
        numbers, shards, parts = {}, [], []
        for _, content in self._indexes.values():
            with np.load(io.BytesIO(content), allow_pickle=False) as stored:
                about = json.loads(bytes(stored["about"]))
                for shard in about["shards"]:  # one may have samples of both splits
                    numbers.setdefault(shard["name"], len(numbers))
                    shards += [shard] if len(numbers) > len(shards) else []
                parts.append({name: stored[name] for name in ("shard", "offset", "length", "checksum")})
                parts[-1]["shard"] = np.array([numbers[shard["name"]] for shard in about["shards"]])[parts[-1]["shard"]]
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
            path = growing(self._folder, name, shard["sha256"])
            self.shards.append(ShardFile(name, shard["size"], shard["sha256"], items[name], path, samples))

    def run(self, goes_on: Callable[[], bool], keep: bool = True) -> bool:
        """Fetch what is missing while goes_on(); return whether all shards are whole. `keep`: as far as there is room."""
        with ThreadPoolExecutor(HASHED) as pool:
            for shard, whole in zip(self.shards, pool.map(self._is_there, self.shards)):
                shard.whole = whole
        missing = [shard for shard in self.shards if not shard.whole]
        self._let_pass(missing, keep)
        for path in {*glob.glob(f"{glob.escape(index.notes(self._folder))}/*.arriving")} - {one.growing for one in self.shards}:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)  # of another pack that was here
        for path in glob.glob(f"{glob.escape(index.notes(self._folder))}/*.state"):
            if os.stat(path).st_mtime < time.time() - OLD_SECONDS and once.is_free(lease(path)):
                shutil.rmtree(passing(path), ignore_errors=True)  # of another boot or version
        for shard in self.shards:
            (self._note_whole if shard.whole else self._open)(shard)
        with ThreadPoolExecutor(self._ranges.threads) as requests, ThreadPoolExecutor(1) as whole:
            try:
                self._serve(missing, goes_on, requests, whole)
            finally:
                self._ranges.patience.give_up()
                requests.shutdown(cancel_futures=True)
                whole.shutdown(cancel_futures=True)
        if not all(shard.whole for shard in self.shards):
            return False
        for name, (item, content) in self._indexes.items():
            if not self._known.has(name, item):
                write_atomically(os.path.join(self._folder, name), content)
                self._known.add(name, item)
        return True

    # --- The files ---

    def _numbers(self, shard):
        return self._samples.number[shard.samples]

    def _is_there(self, shard):
        """_is_whole(), for the files that were there at the beginning; a wrong one is deleted."""
        path, status = os.path.join(self._folder, shard.name), None
        with contextlib.suppress(OSError):
            status = os.stat(path)
        whole = self._is_whole(shard)
        with contextlib.suppress(OSError):
            if status and not whole and os.path.samestat(status, os.stat(path)):  # none that came meanwhile, from another node
                os.unlink(path)
        return whole

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
        self._state.there[self._numbers(shard)] = IN_ITS_SHARD
        self._asked[self._numbers(shard)] = True
        self._state.came[ON_DISK] += shard.size

    def _tell(self):
        """Print how far it is, every ten seconds while shards grow that stay."""
        now, stay = time.monotonic(), [shard for shard in self.shards if not shard.passes]
        if now - self._told > LINE_SECONDS and not all(shard.whole for shard in stay):
            self._told = now
            total, (first, rest, old) = sum(shard.size for shard in stay), self._state.came.tolist()
            rate = max(1, first + rest) / (now - self._began)
            said = f"{sum(shard.whole for shard in stay)} of {count(len(stay), 'shard')}, {rate / MIB:.1f} MiB/s"
            if len(stay) == len(self.shards):
                came = first + rest + old
                said += f", {came // MIB} of {total // MIB} MiB, {max(0, total - came) / rate:.0f} s left"
                said += f"; {first / total:.0%} came ahead of its shard"
            print(f"arriving {one_line(self._url)}: {said}", flush=True)

    def _let_pass(self, missing, keep):
        """Let the shards pass for which the disk has no room, the last ones; all unless `keep`."""
        disk = os.statvfs(self._folder)
        room, part = disk.f_bavail * disk.f_frsize - listing.SPARE, disk.f_blocks * disk.f_frsize // PASSING_SHARE
        needed = {
            shard: shard.size - (os.stat(shard.growing).st_blocks * BLOCK if os.path.exists(shard.growing) else 0)
            for shard in missing
        }
        if keep and sum(needed.values()) <= room:
            return
        if room <= 0:
            free = f"{one_line(self._folder)} has {max(0, room + listing.SPARE) // MIB} MiB free"
            raise UserError(f"{free}, too few for a pack that passes through: give --input_dir on a larger disk")
        self._passing.most = min(part, MOST_PASSING)
        left = room - self._passing.most - part if keep else 0  # a part for what others write, as checkpoints
        for shard, size in needed.items():
            left -= size
            shard.passes = left < 0
        if not keep:
            return
        passes = sum(shard.size for shard in missing if shard.passes) // MIB
        said = f"{passes} of {sum(shard.size for shard in self.shards) // MIB} MiB"
        print(
            f"warning: {one_line(self._folder)} has no room for {said}, which come again in every epoch: "
            "--input_dir on a larger disk keeps all", flush=True,
        )  # fmt: skip

    def _open(self, shard):
        """Open the file of an unfinished shard. What is not known to be right in it is compared before it is fetched again."""
        if shard.passes:
            self._state.there[self._numbers(shard)] = PASSES
            return
        shard.suspect = index.has_size(shard.growing, shard.size)
        shard.left = len(self._numbers(shard))
        shard.file = os.open(shard.growing, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        os.ftruncate(shard.file, shard.size)

    def _finish(self, shard):
        """Give the shard its name, and return it."""
        try:
            return self._name(shard)
        except FileNotFoundError:  # another node has just given it its name
            return self._name(shard)

    def _name(self, shard):
        # What is wrong now lies between the samples, which were compared already.
        path = os.path.join(self._folder, shard.name)
        if index.has_size(path, shard.size) and self._is_whole(shard):  # another process has fetched it, too
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

    def _serve(self, missing, goes_on, requests, whole):
        """Have threads fetch what is wanted and, with a few of them, the rest in order, until no shard is growing or passes."""
        under_way, heard, cursor, growing = [0, 0], -1, 0, len(missing)

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
                    shard, unit, size, old = found
                    under_way[what] -= 1
                    self._state.came[ON_DISK if old else what] += size
                    if shard.passes:
                        for number, length in zip(self._samples.number[unit].tolist(), self._samples.length[unit].tolist()):
                            self._passing.count(number, length)
                        continue
                    shard.left -= unit.stop - unit.start
                    if not shard.left:
                        submit(whole, WHOLE, self._finish, shard)
            self._asked[self._passing.drop()] = False
            if not any(under_way):
                self._state.heard = time.monotonic()  # nobody wants anything

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
        if self._passing.full():  # then only what is waited for, or was wanted lately and stays
            wanted &= (since == NOW) | (self._state.there == ABSENT)
        wanted &= (since == NOW) | (since > _long_ago())
        numbers = np.flatnonzero(wanted)
        for number in numbers[np.argsort(since[numbers], kind="stable")].tolist():
            if not self._asked[number]:
                yield self._unit(int(self._samples.place[number]), wanted)

    def _next(self, place):
        """Return the first place from `place` on of a sample that stays and that nobody has asked for, or the end."""
        numbers, there = self._samples.number, self._state.there
        while place < len(numbers) and (self._asked[numbers[place]] or there[numbers[place]] == PASSES):
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

        Return (their shard, the unit, bytes, whether those were on the disk).
        """
        shard = self.shards[self._samples.shard[unit.start]]
        first, last = unit.start, unit.stop - 1
        whole = slice(int(self._samples.begin[first]), int(self._samples.end[last]))
        gap = 0 if shard.passes else RUN
        begin = max(whole.start, int(self._samples.offset[first]) - gap)
        end = min(whole.stop, int(self._samples.offset[last] + self._samples.length[last]) + gap)
        old = shard.suspect and self._is_right(unit, os.pread(shard.file, end - begin, begin), begin)
        content = b"" if old else self._from_bucket(shard, unit, begin, end - begin)
        if shard.passes:
            for number, place, length in zip(
                *(of[unit].tolist() for of in (self._samples.number, self._samples.offset, self._samples.length))
            ):
                self._passing.write(number, memoryview(content)[place - begin :][:length])
        else:
            _write(shard.file, content, begin)
            self._state.there[self._samples.number[unit]] = IN_ITS_SHARD
            for lower, upper in () if old else ((whole.start, begin), (end, whole.stop)):
                self._fill(shard, lower, upper)
        self._state.heard = time.monotonic()
        return shard, unit, end - begin if shard.passes else whole.stop - whole.start, old

    def _from_bucket(self, shard, unit, begin, length):
        for _ in range(DAMAGED):
            content = self._part(shard, begin, length)
            if self._is_right(unit, content, begin):
                return content
        place = f"{one_line(self._url)}/{shard.name}, {length} bytes from {begin} on"
        raise Damaged(f"{place}, arrived {DAMAGED} times with others than its index says")

    def _fill(self, shard, begin, end):
        """Bring what lies between two samples and is none: in a shard of others it may be much."""
        for at in range(begin, end, RUN):
            _write(shard.file, self._part(shard, at, min(RUN, end - at)), at)
            self._state.heard = time.monotonic()

    def _part(self, shard, begin, length):
        try:
            return self._ranges.read(shard.item, begin, length)
        except ObjectChanged:
            raise UserError(f"{one_line(self._url)}/{shard.name} has changed since this run began: start again") from None

    def _is_right(self, unit, content, at):
        samples, view = self._samples, memoryview(content)
        begins = (samples.offset[unit] - at).tolist()
        parts = zip(begins, samples.length[unit].tolist(), samples.checksum[unit].tolist())
        return all(crc32(view[begin : begin + length]) == checksum for begin, length, checksum in parts)


class _Checked:
    """Notes in the folder of which files had the SHA-256 of which shard: a store's digest may be of something else."""

    def __init__(self, folder: str) -> None:
        self._folder, self._path = folder, os.path.join(index.notes(folder), "arrived.json")
        self._known = read_note(self._path)
        self._lock = threading.Lock()

    def has(self, shard: ShardFile) -> bool:
        seen = self._seen(shard)
        return seen is not None and self._known.get(shard.name) == seen

    def add(self, shard: ShardFile) -> None:
        with self._lock:
            self._known[shard.name] = self._seen(shard)
            with contextlib.suppress(OSError):  # another node writes it, too; without it, the next start reads the file again
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


def main(job: str, node: str, url: str, folder: str) -> None:
    """Fetch the pack at `url` to `folder` for the process `job`, as long as that lives, unless another process does.

    `node`: names the processes of the job on this node. A line of JSON on the standard input has the path of the State, its
    samples, whether what has room is kept, and the paths of the indexes; without it this process ends.
    """
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # it is meant for the job, which needs samples until it has saved
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))  # PR_SET_PDEATHSIG: if it is stopped, it cannot look for the job
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each shard that grows is one
    with contextlib.suppress(UserError):  # it comes again, where it can be told
        Bucket(url)  # imports what takes a while, meanwhile the reader fetches the indexes
    if not (words := sys.stdin.readline()):
        return
    path, samples, keep, *indexes = json.loads(words)
    state = State(path, samples)
    asked = waited = looked = time.monotonic()

    def goes_on():
        return os.getppid() == int(job)

    def waits():
        nonlocal waited, looked
        if time.monotonic() - looked > GAP_SECONDS:  # all processes were stopped: count anew
            waited = time.monotonic()
        looked = time.monotonic()
        if looked - waited > FROZEN_SECONDS:
            state.end_frozen(url)
        return goes_on()

    with once.when_free(lease(path), waits) as held:
        if not held or state.failure(asked, node):  # a process of this job has tried it already
            return
        over = threading.Event()
        threading.Thread(target=state.live, args=(over,), daemon=True).start()
        try:
            if os.path.abspath(state_path(folder, indexes)) != path:
                raise UserError(f"{one_line(url)} has another index since this run began: start again")
            if not state.whole:  # else another process has fetched it
                _require_alone(url, folder, path)
                state.forget()
                _fetch(url, folder, indexes, path, state, goes_on, keep)
            while goes_on():  # no other start takes the marks for old ones
                state.heard = time.monotonic()
                time.sleep(BEAT_SECONDS)
        except (UserError, TrainingFailed) as error:
            state.fail(error, node)
        except OSError as error:
            state.fail(TrainingFailed(f"cannot fetch {one_line(url)} to {folder}: {error.strerror or error!r}"), node)
        except Exception as error:
            state.fail(TrainingFailed(f"cannot fetch {one_line(url)} to {folder}: {error!r}"), node)
            raise
        finally:
            over.set()


def _require_alone(url, folder, path):
    """Raise a UserError if a job on this node reads another version of the pack, whose files would be replaced."""
    for other in glob.glob(f"{glob.escape(index.notes(folder))}/{_boot()}-*.state"):
        if os.path.basename(other) != os.path.basename(path) and not once.is_free(lease(other)):
            reads = f"a job on this node reads another version of {one_line(url)}"
            raise UserError(f"{reads}: start when it has ended, or give another --input_dir")


def _fetch(url, folder, indexes, path, state, goes_on, keep):
    began, fetcher = time.monotonic(), Fetcher(url, folder, indexes, path, state)
    state.whole[0] = fetcher.run(goes_on, keep)
    if state.whole:
        first, rest, old = (state.came / MIB).tolist()
        came = f"{first + rest:.1f} MiB in {time.monotonic() - began:.0f} s, {first:.1f} of them ahead of their shards"
        here = f"{old:.1f} MiB were there" if old else "none were there"
        print(f"arrived: {count(len(fetcher.shards), 'shard')} of {one_line(url)}: {came}; {here}; all verified", flush=True)


def drop_unfinished(folder: str) -> None:
    """Delete what has come of unfinished shards, unless a process fetches them: another way of fetching begins anew."""
    notes = glob.escape(index.notes(folder))
    if all(map(once.is_free, map(lease, glob.glob(f"{notes}/*.state")))):
        for path in glob.glob(f"{notes}/*.arriving"):
            with contextlib.suppress(FileNotFoundError):  # another rank deletes them, too
                os.unlink(path)


def _long_ago():
    return time.monotonic_ns() - UNREAD_SECONDS * 10**9


def _namespace():
    """Return a number of the namespace of processes, in which an id means this process and no other; 0 if there is none."""
    with contextlib.suppress(OSError):
        return os.stat("/proc/self/ns/pid").st_ino
    return 0


def passing(state: str) -> str:
    """Return the folder of the samples that pass through; each is named by its number in the State at this path."""
    return f"{state}.passing"


def lease(state: str) -> str:
    """Return the path of what one process holds that fetches for the readers of the State at this path."""
    return f"{state}.fetcher"


def state_path(folder: str, indexes: Sequence[str]) -> str:
    """Return the path of the State. Another pack has another one, and so has another boot, which has another clock."""
    digest = hashlib.sha256(" ".join(map(sha256, indexes)).encode()).hexdigest()[:16]
    return os.path.join(index.notes(folder), f"{_boot()}-{digest}.state")


def _boot():
    return hashlib.sha256(once.boot_id().encode()).hexdigest()[:8]


def growing(folder: str, shard: str, sha256: str) -> str:
    """Return the path of a shard's file until it is whole."""
    return f"{index.unfinished(folder, f'{shard} {sha256}')}.arriving"
