"""A bucket's objects as files of a folder: in parallel, in parts, resumed where it stopped, each file verified and then named.

The folder remembers in .fetched.jsonl which object each file is, so a second start fetches only what is missing or changed.
A large object lies beside its place as NAME.part, with NAME.part.json saying which parts of it are there.
"""

import collections
import contextlib
import hashlib
import os
from concurrent.futures import ThreadPoolExecutor, as_completed, wait

from common.errors import TrainingFailed, UserError, one_line
from common.files import MIB
from common.progress import Progress
from common.storage import etag, obstore
from common.storage.bucket import PATIENCE_SECONDS, THREADS, Bucket, Changed, Item, Patience
from common.storage.index import INDEX, Index, Parts

PART = 8 << 20  # bytes of one request; smaller objects are one part
CHUNK = 1 << 20  # bytes that are received, written and hashed at a time: they stay in the processor's cache
AHEAD, LARGE_AT_A_TIME, BATCH = 8, 4, 32  # parts of one object under way; objects in parts; small objects of one task
DAMAGED = 8  # deliveries of one object with wrong bytes until the store is no longer believed
SPARE = 64 << 20  # bytes that stay free on the disk


def fetch(url, folder, tell=None, say=print):
    """Make `folder` hold what lies under `url`: every object below it, or the one object that has this name."""
    bucket = Bucket(url, say)
    os.makedirs(folder, exist_ok=True)
    index = Index(folder)
    items = _named(bucket, _list(bucket, tell))
    for name in index.names() - items.keys():
        index.remove(name)
    missing = {name: item for name, item in items.items() if not index.has(name, item)}
    if not missing:
        index.close()
        say(f"{folder} has all {len(items)} objects of {url}")
        return
    _need_space(folder, missing)
    with contextlib.closing(index), _progress(url, missing, tell) as progress:
        transfer = Transfer(bucket, folder, index, progress)
        transfer.run(missing)
    unsure = f", {transfer.by_size} of them by size alone (the store gives no digest)" if transfer.by_size else ""
    say(f"fetched {len(missing)} of {len(items)} objects, {progress.describe()}, to {folder}; all verified{unsure}")


def fetch_items(bucket, items, folder):
    """{name: item} as files of `folder`, beside what is there already."""
    with _progress(bucket.url(bucket.prefix), items) as progress:
        Transfer(bucket, folder, None, progress).run(items)


def _progress(url, items, tell=None):
    return Progress(f"fetching {url}", len(items), "objects", sum(item.size for item in items.values()), tell)


def _list(bucket, tell):
    below = bucket.below()
    found = []
    for item in bucket.items(below):
        found.append(item)
        if tell and len(found) % 1000 == 0:
            tell(f"listing {bucket.url(below)}: {len(found)} objects", len(found))
    if not found and below:
        found = [item for item in bucket.items(bucket.prefix) if item.key == bucket.prefix]
    if not found:
        raise UserError(f"{bucket.url(below)} at {bucket.endpoint} holds nothing: no object's name begins with {below!r}")
    return found


def _named(bucket, items):
    """{path below the folder: item}; names that would lead out of it, or stand for both a file and a folder, are refused."""
    named = {}
    for item in items:
        if item.key.endswith("/") and item.size == 0:
            continue  # a console's mark for an empty folder
        name = os.path.basename(item.key) if item.key == bucket.prefix else bucket.relative(item.key)
        words = name.split("/")
        if any(word in ("", ".", "..") for word in words) or "\0" in name or name == INDEX or len(name) > 1024:
            raise UserError(f"{one_line(bucket.url(item.key))[:300]} cannot be the name of a file: rename the object")
        named[name] = item
    for name in named:
        folders = name.split("/")[:-1]
        for depth in range(1, len(folders) + 1):
            if "/".join(folders[:depth]) in named:
                clash = one_line(bucket.url(bucket.prefix + "/" + "/".join(folders[:depth])))
                raise UserError(f"{clash} is an object and a folder of others too: rename one of them")
    return named


def _need_space(folder, items):
    """Before the first byte: bytes and files that the disk must still take."""
    there = sum(os.stat(path).st_blocks * 512 for name in items if os.path.exists(path := f"{os.path.join(folder, name)}.part"))
    need, disk = sum(item.size for item in items.values()) - there, os.statvfs(folder)
    free, files = disk.f_bavail * disk.f_frsize, disk.f_favail
    if need + SPARE > free:
        sizes = f"{free / MIB:.0f} MiB free, {need / MIB:.0f} MiB are to be fetched"
        raise UserError(f"{folder} has {sizes}: start the job in a folder on a larger disk")
    if disk.f_files and len(items) > files:
        raise UserError(f"{folder} can take {files} more files, {len(items)} are to be fetched: start on another disk")


class Damaged(TrainingFailed):
    """The store's bytes are not those that it names."""


class Transfer:
    """One fetch: many requests under way, the first lasting failure stops them all."""

    def __init__(self, bucket, folder, index, progress):
        self._bucket, self._folder, self._index, self._progress = bucket, folder, index, progress
        self._patience = Patience(PATIENCE_SECONDS)
        self._requests = ThreadPoolExecutor(THREADS, thread_name_prefix="fetch")
        self._fast = obstore.reader(bucket)
        self._folders = set()  # made already
        self._in_parts = set()  # names of large objects
        self._grown = []  # (name, item) of small ones that became large meanwhile
        self.by_size = 0

    def run(self, items):
        """Large objects a few at a time, in parts; beside them the small ones, a batch of them as one task."""
        small = [pair for pair in items.items() if pair[1].size <= PART]
        size = max(1, min(BATCH, len(small) // (4 * THREADS)))
        batches = [small[begin : begin + size] for begin in range(0, len(small), size)]
        with ThreadPoolExecutor(LARGE_AT_A_TIME, thread_name_prefix="large object") as objects:
            try:
                tasks = [objects.submit(self._large, *pair) for pair in items.items() if pair[1].size > PART]
                tasks += [self._requests.submit(self._batch, batch) for batch in batches]
                for task in as_completed(tasks):
                    task.result()
                for task in [objects.submit(self._large, *pair) for pair in self._grown]:
                    task.result()
            except OSError as error:
                raise UserError(f"cannot write to {self._folder}: {one_line(error.strerror)}") from None
            finally:
                self._patience.give_up()
                self._requests.shutdown(cancel_futures=True)
                objects.shutdown(cancel_futures=True)

    # --- Small objects: one request each ---

    def _batch(self, batch):
        for name, item in batch:
            self._small(name, item)

    def _small(self, name, item):
        path = self._place(name)
        for _ in range(DAMAGED):
            try:
                content, digest = self._read_small(item)
            except Changed:
                item = self._as_it_is_now(item)
                if item.size > PART:
                    self._grown.append((name, item))
                    return
                continue
            if len(content) == item.size and digest in (None, hashlib.md5(content).hexdigest()):
                with open(f"{path}.part", "wb") as file:
                    file.write(content)
                self._finish(name, item, verified=digest is not None)
                self._progress.add(1, item.size)
                return
            self._fast = None  # boto3's answer tells more
        raise self._damaged(item)

    def _read_small(self, item):
        """(bytes, the MD5 that they should have or None)"""
        digest = None if "-" in (item.digest or "-") else item.digest
        content = self._fast(item) if self._fast and digest else None
        if content is not None:
            self._patience.good()
            return content, digest

        def read(answer):
            return answer["Body"].read(), None if etag.is_encrypted(answer) else digest

        return self._get(item, read)

    # --- Large objects: parts, fetched side by side and hashed in order ---

    def _large(self, name, item):
        path = self._place(name)
        self._in_parts.add(name)
        for _ in range(DAMAGED):
            try:
                verified = self._attempt(path, item)
            except Changed:
                item = self._as_it_is_now(item)
                continue
            if verified is not False:
                self._finish(name, item, verified)
                self._progress.add(1)
                return
        raise self._damaged(item)

    def _attempt(self, path, item):
        """Whether the object's bytes are right, None where that cannot be known; they are in PATH.part then."""
        parts = Parts(path, item, PART)
        first = self._head(item)
        hasher = etag.Hasher(None if first["encrypted"] else item.digest, item.size, first["part_size"])
        ahead = collections.deque()
        try:
            for number in range(parts.count + AHEAD):
                if number < parts.count:
                    ahead.append(self._requests.submit(self._part, parts, item, number))
                if number >= AHEAD:
                    ahead.popleft().result()
                    for chunk in parts.chunks(number - AHEAD, CHUNK):
                        hasher.update(chunk)
        finally:
            wait([task for task in ahead if not task.cancel()])  # a cancelled one is never heard of again
            parts.close()
        right = hasher.right()
        if right is False:
            parts.forget()
            self._progress.add(size=-item.size)
        return right

    def _part(self, parts, item, number):
        begin, length = number * PART, parts.length(number)
        if number in parts.there:
            self._progress.add(size=length, old=True)
            return

        def keep(answer):
            have = 0
            while chunk := answer["Body"].read(CHUNK):
                if have + len(chunk) <= length:
                    parts.write(begin + have, chunk)
                have += len(chunk)
            if have != length:
                raise ConnectionError("its body has another length than was asked for")

        self._get(item, keep, Range=f"bytes={begin}-{begin + length - 1}")
        parts.have(number)
        self._progress.add(size=length)

    def _head(self, item):
        """How the object was stored: the size of its parts, where the store tells, and whether its ETag is a digest at all."""
        words = {"PartNumber": 1} if item.digest and "-" in item.digest else {}
        answer = self._bucket.ask("head_object", item.key, self._patience, **words)
        return {"part_size": answer["ContentLength"] if words else item.size, "encrypted": etag.is_encrypted(answer)}

    # --- What both kinds share ---

    def _get(self, item, read, **words):
        if item.etag:
            words["IfMatch"] = f'"{item.etag}"'
        return self._bucket.ask("get_object", item.key, self._patience, work=read, **words)

    def _place(self, name):
        path = os.path.join(self._folder, name)
        folder = os.path.dirname(path)
        if folder not in self._folders:
            os.makedirs(folder, exist_ok=True)
            self._folders.add(folder)
        return path

    def _finish(self, name, item, verified):
        path = os.path.join(self._folder, name)
        os.replace(f"{path}.part", path)
        if self._index:
            self._index.add(name, item)
        if name in self._in_parts:
            os.unlink(f"{path}.part.json")
        self.by_size += not verified

    def _as_it_is_now(self, item):
        """The object after it was replaced while we read it."""
        answer = self._bucket.ask("head_object", item.key, self._patience)
        return Item(item.key, answer["ContentLength"], answer["ETag"].strip('"'))

    def _damaged(self, item):
        return Damaged(
            f"{one_line(self._bucket.url(item.key))} at {self._bucket.endpoint} arrived {DAMAGED} times with other bytes than "
            f"its ETag {one_line(item.etag)} names, or changed as often: it is damaged there or on the way"
        )
