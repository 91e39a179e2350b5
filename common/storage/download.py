"""A bucket's objects as files of a folder: in parallel, in parts, from where it stopped, each verified before it has its name.

The folder remembers in .fetched.jsonl which object each file is, so a second start fetches only what is missing or changed.
A large object grows in NAME.part, and NAME.part.json says which parts of it are there.
"""

import collections
import contextlib
import hashlib
import os
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from typing import Any, Callable, Optional

from common.errors import TrainingFailed, UserError, one_line
from common.files import MIB
from common.progress import Progress, Tell
from common.storage import etag, obstore
from common.storage.bucket import PATIENCE_SECONDS, THREADS, Bucket, Changed, Item, Patience, Say
from common.storage.index import INDEX, Index, Parts

PART = 8 << 20  # bytes of one request; smaller objects are one part
CHUNK = 1 << 20  # bytes that are received, written and hashed at a time: few enough for the processor's cache
AHEAD, LARGE_AT_A_TIME, BATCH = 8, 4, 32  # parts of one object under way; large objects under way; small objects of one task
DAMAGED = 8  # so many times may an object arrive with wrong bytes until it counts as damaged
SPARE = 64 << 20  # bytes that stay free on the disk


def fetch(url: str, folder: str, tell: Optional[Tell] = None, say: Say = print) -> None:
    """Make `folder` hold what is at `url`: every object below it, or the one object of this name."""
    bucket = Bucket(url, say)
    os.makedirs(folder, exist_ok=True)
    with contextlib.closing(Index(folder)) as index:
        items = _named(bucket, _list(bucket, tell))
        for name in index.names() - items.keys():
            index.remove(name)
        missing = {name: item for name, item in items.items() if not index.has(name, item)}
        if not missing:
            say(f"{folder} has all {len(items)} objects of {one_line(url)}")
            return
        _need_space(folder, missing)
        with _progress(url, missing, tell) as progress:
            transfer = Transfer(bucket, folder, index, progress)
            transfer.run(missing)
    unsure = f", {transfer.by_size} of them by size alone (the store gives no digest)" if transfer.by_size else ""
    say(f"fetched {len(missing)} of {len(items)} objects, {progress.describe()}, to {folder}; all verified{unsure}")


def fetch_items(bucket: Bucket, items: dict[str, Item], folder: str) -> None:
    """{name: item} as files of `folder`, in addition to what is there already."""
    with _progress(bucket.url(bucket.prefix), items) as progress:
        Transfer(bucket, folder, None, progress).run(items)


def _progress(url: str, items: dict[str, Item], tell: Optional[Tell] = None) -> Progress:
    return Progress(f"fetching {url}", len(items), "objects", sum(item.size for item in items.values()), tell)


def _list(bucket: Bucket, tell: Optional[Tell]) -> list[Item]:
    below = bucket.below()
    items = []
    for item in bucket.items(below):
        items.append(item)
        if tell and len(items) % 1000 == 0:
            tell(f"listing {bucket.url(below)}: {len(items)} objects", len(items))
    if not items and below:
        items = [item for item in bucket.items(bucket.prefix) if item.key == bucket.prefix]
    if not items:
        raise UserError(f"{bucket.url(below)} at {bucket.endpoint} holds nothing: no object's name begins so")
    return items


def _named(bucket: Bucket, items: list[Item]) -> dict[str, Item]:
    """{path below the folder: item}; a name that leads out of the folder, or is of both a file and a folder, is refused."""
    named = {}
    for item in items:
        if item.key.endswith("/") and item.size == 0:
            continue  # how a console keeps an empty folder
        name = os.path.basename(item.key) if item.key == bucket.prefix else bucket.relative(item.key)
        words = name.split("/")
        if any(word in ("", ".", "..") for word in words) or "\0" in name or name == INDEX or len(name) > 1024:
            raise UserError(f"{one_line(bucket.url(item.key))[:300]} cannot be the name of a file: rename the object")
        named[name] = item
    for name in named:
        folders = name.split("/")[:-1]
        for depth in range(1, len(folders) + 1):
            if (folder := "/".join(folders[:depth])) in named:
                url = one_line(bucket.url(f"{bucket.prefix}/{folder}"))
                raise UserError(f"{url} is an object and a folder of others too: rename one of them")
    return named


def _need_space(folder: str, items: dict[str, Item]) -> None:
    """Refuse, before the first byte, what the disk has no room for."""
    there = sum(os.stat(path).st_blocks * 512 for name in items if os.path.exists(path := f"{os.path.join(folder, name)}.part"))
    need, disk = sum(item.size for item in items.values()) - there, os.statvfs(folder)
    free, files = disk.f_bavail * disk.f_frsize, disk.f_favail
    if need + SPARE > free:
        sizes = f"{free / MIB:.0f} MiB free, {need / MIB:.0f} MiB are to be fetched"
        raise UserError(f"{folder} has {sizes}: start the job in a folder on a larger disk")
    if disk.f_files and len(items) > files:
        raise UserError(f"{folder} can take {files} more files, {len(items)} are to be fetched: start on another disk")


class Damaged(TrainingFailed):
    """An object's bytes do not have the digest that the store states."""


class Transfer:
    """One fetch: many requests under way; the first failure that lasts stops them all."""

    def __init__(self, bucket: Bucket, folder: str, index: Optional[Index], progress: Progress) -> None:
        self._bucket, self._folder, self._index, self._progress = bucket, folder, index, progress
        self._patience = Patience(PATIENCE_SECONDS)
        self._requests = ThreadPoolExecutor(THREADS, thread_name_prefix="fetch")
        self._fast_reader = obstore.reader(bucket)
        self._folders: set[str] = set()  # that exist already
        self._grown: list[tuple[str, Item]] = []  # small objects that were replaced by large ones meanwhile
        self.by_size = 0  # objects that have no digest, so that only their size was verified

    def run(self, items: dict[str, Item]) -> None:
        """Large objects in parts, a few objects at a time; small objects meanwhile, a batch of them as one task."""
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

    def _batch(self, batch: list[tuple[str, Item]]) -> None:
        for name, item in batch:
            self._small(name, item)

    def _small(self, name: str, item: Item) -> None:
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
            self._fast_reader = None  # boto3's answer tells more
        raise self._damaged(item)

    def _read_small(self, item: Item) -> tuple[Any, Optional[str]]:
        """(bytes, the MD5 that they should have or None)"""
        digest = None if "-" in (item.digest or "-") else item.digest
        content = self._fast_reader(item) if self._fast_reader and digest else None
        if content is not None:
            self._patience.good()
            return content, digest

        def read(answer):
            return answer["Body"].read(), None if etag.is_encrypted(answer) else digest

        return self._get(item, read)

    # --- Large objects: parts that are fetched in parallel and hashed in order ---

    def _large(self, name: str, item: Item) -> None:
        path = self._place(name)
        for _ in range(DAMAGED):
            try:
                verified = self._attempt(path, item)
            except Changed:
                item = self._as_it_is_now(item)
                continue
            if verified is not False:
                self._finish(name, item, verified)
                os.unlink(f"{path}.part.json")
                self._progress.add(1)
                return
        raise self._damaged(item)

    def _attempt(self, path: str, item: Item) -> Optional[bool]:
        """Fetch into PATH.part. Whether the bytes are right; None where that cannot be known."""
        parts = Parts(path, item, PART)
        part_size, encrypted = self._head(item)
        hasher = etag.Hasher(None if encrypted else item.digest, item.size, part_size)
        ahead: collections.deque[Future[None]] = collections.deque()
        try:
            for number in range(parts.count + AHEAD):
                if number < parts.count:
                    ahead.append(self._requests.submit(self._part, parts, item, number))
                if number >= AHEAD:
                    ahead.popleft().result()
                    for chunk in parts.chunks(number - AHEAD, CHUNK):
                        hasher.update(chunk)
        finally:
            wait([task for task in ahead if not task.cancel()])  # those that could not be cancelled still write
            parts.close()
        right = hasher.right()
        if right is False:
            parts.forget()
            self._progress.add(size=-item.size)
        return right

    def _part(self, parts: Parts, item: Item, number: int) -> None:
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
                raise ConnectionError("the answer has another length than was asked for")

        self._get(item, keep, Range=f"bytes={begin}-{begin + length - 1}")
        parts.have(number)
        self._progress.add(size=length)

    def _head(self, item: Item) -> tuple[int, bool]:
        """(bytes of the parts in which the object was uploaded, whether it is encrypted, so that its ETag is no digest)"""
        first_part: dict[str, Any] = {"PartNumber": 1} if item.digest and "-" in item.digest else {}
        answer = self._bucket.ask("head_object", item.key, self._patience, **first_part)
        return answer["ContentLength"] if first_part else item.size, etag.is_encrypted(answer)

    # --- What both kinds share ---

    def _get(self, item: Item, read: Callable[[Any], Any], **parameters: Any) -> Any:
        if item.etag:
            parameters["IfMatch"] = f'"{item.etag}"'
        return self._bucket.ask("get_object", item.key, self._patience, work=read, **parameters)

    def _place(self, name: str) -> str:
        path = os.path.join(self._folder, name)
        folder = os.path.dirname(path)
        if folder not in self._folders:
            os.makedirs(folder, exist_ok=True)
            self._folders.add(folder)
        return path

    def _finish(self, name: str, item: Item, verified: Optional[bool]) -> None:
        path = os.path.join(self._folder, name)
        os.replace(f"{path}.part", path)
        if self._index:
            self._index.add(name, item)
        self.by_size += not verified

    def _as_it_is_now(self, item: Item) -> Item:
        """The object that has replaced the one that we were reading."""
        answer = self._bucket.ask("head_object", item.key, self._patience)
        return Item(item.key, answer["ContentLength"], answer["ETag"].strip('"'))

    def _damaged(self, item: Item) -> Damaged:
        return Damaged(
            f"{one_line(self._bucket.url(item.key))} at {self._bucket.endpoint} arrived {DAMAGED} times with other bytes than "
            f"its ETag {one_line(item.etag)} names, or changed as often: it is damaged there or on the way"
        )
