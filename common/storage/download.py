"""Fetch the objects of a bucket as files: in parallel, in parts, resumable,
and each verified before it gets its name.

.fetching/index.jsonl states which object each file is, so a second start fetches only what is missing or
changed. A large object grows in .fetching, beside a list of the parts that it has. At the end, size and time
of each file are checked.
"""

import collections
import contextlib
import hashlib
import os
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from typing import Any, Callable, Optional

from common.alive.patience import Patience, Say
from common.errors import TrainingFailed, UserError, file_error, one_line, raising_path_conflict
from common.files import create, refuse_link
from common.progress import Progress, Tell
from common.storage import etag, index, listing, obstore
from common.storage.bucket import THREADS, Bucket, ObjectChanged
from common.storage.index import Index, Parts
from common.storage.item import Item
from common.storage.ranges import Ranges

PART = 8 << 20  # bytes of one request; smaller objects are one part
CHUNK = 1 << 20  # bytes that are received, written and hashed at a time: few enough for the processor's cache
AHEAD = 8  # concurrent parts of an object
LARGE_AT_A_TIME = 4  # concurrent large objects
BATCH = 32  # small objects per task
# attempts after which an object that arrives with wrong bytes, or changes each time, counts as damaged
MAX_ATTEMPTS = 8


def fetch(
    url: str,
    folder: str,
    tell: Optional[Tell] = None,
    say: Say = print,
    only: Optional[Collection[str]] = None,
) -> None:
    """Fetch missing and changed objects below `url`, or the one of this name;
    delete fetched files whose objects are gone.

    `only`: names in the folder; other objects are not fetched.
    """
    bucket = Bucket(url, say)
    with raising_path_conflict(folder):
        os.makedirs(folder, exist_ok=True)
    with contextlib.closing(Index(folder)) as file_index:
        objects = listing.list_objects(bucket, tell)
        selected = (
            objects if only is None else [item for item in objects if bucket.relative(item.key) in only]
        )
        items = listing.items_by_path(bucket, selected)
        for name in file_index.names() - items.keys() - {bucket.relative(item.key) for item in objects}:
            file_index.remove(name)
        missing = {name: item for name, item in items.items() if not file_index.has(name, item)}
        if not missing:
            say(f"{folder} has all {len(items)} objects of {one_line(url)}")
            return
        listing.require_space(folder, missing)
        with _progress(url, missing, tell) as progress:
            transfer = Transfer(bucket, folder, file_index, progress)
            transfer.run(missing)
        lost = [name for name in items if not file_index.has(name)]
        if lost:
            raise TrainingFailed(
                f"{len(lost)} of {len(items)} objects of {url} are not in {folder}, the first is "
                f"{one_line(lost[0])}: another program changes this folder, or its disk takes two names for "
                "one; start again when neither does"
            )
    unsure = (
        f", {transfer.by_size} of them by size alone (the store gives no digest)" if transfer.by_size else ""
    )
    kept = f", {transfer.kept} were there" if transfer.kept else ""
    counts = f"{len(missing) - transfer.kept} of {len(items)} objects{kept}"
    say(f"fetched {counts}, {progress.describe()}, to {folder}; all verified{unsure}")


def fetch_items(
    bucket: Bucket,
    items: dict[str, Item],
    folder: str,
    keeps_index: bool = False,
    tell: Optional[Tell] = None,
) -> None:
    """Fetch {name: item} as files of `folder`. `keeps_index`: keep an index there, skip current files."""
    with contextlib.ExitStack() as stack:
        file_index = stack.enter_context(contextlib.closing(Index(folder))) if keeps_index else None
        missing = {
            name: item for name, item in items.items() if file_index is None or not file_index.has(name, item)
        }
        if missing:
            with _progress(bucket.url(bucket.prefix), missing, tell) as progress:
                Transfer(bucket, folder, file_index, progress).run(missing)
    with contextlib.suppress(OSError):  # the index is there, or another fetch has its notes there
        os.rmdir(index.make_records_folder(folder))


def _progress(url: str, items: dict[str, Item], tell: Optional[Tell] = None) -> Progress:
    return Progress(f"fetching {url}", len(items), "objects", sum(item.size for item in items.values()), tell)


class Damaged(TrainingFailed):
    """An object in a bucket, or what it belongs to, is damaged or incomplete,
    or has changed at every attempt to read it."""


class Transfer:
    """Fetches objects with many concurrent requests; the first failure that lasts stops all of them."""

    def __init__(self, bucket: Bucket, folder: str, file_index: Optional[Index], progress: Progress) -> None:
        self._bucket = bucket
        self._folder = folder
        self._index = file_index
        self._progress = progress
        index.make_records_folder(folder)
        self._ranges = Ranges(bucket, Patience())
        self._patience = self._ranges.patience
        self._requests = ThreadPoolExecutor(THREADS, thread_name_prefix="fetch")
        self._fast_reader = obstore.reader(bucket)  # of small objects
        self._folders: set[str] = set()  # that exist, and are not links out of the folder
        # objects that were small when they were listed, and are large now
        self._grown: list[tuple[str, Item]] = []
        self.by_size = 0  # objects whose digest is not known, so that only their size was verified
        self.kept = 0  # objects whose files were already there, with the right bytes

    def run(self, items: dict[str, Item]) -> None:
        """Fetch {name: item}: large objects in parts, a few objects at a time, and small objects meanwhile,
        in batches."""
        small = [pair for pair in items.items() if pair[1].size <= PART]
        batch_size = max(1, min(BATCH, len(small) // (4 * THREADS)))
        batches = [small[begin : begin + batch_size] for begin in range(0, len(small), batch_size)]
        with ThreadPoolExecutor(LARGE_AT_A_TIME, thread_name_prefix="large object") as executor:
            try:
                tasks = [
                    executor.submit(self._fetch_large, *pair) for pair in items.items() if pair[1].size > PART
                ]
                tasks += [self._requests.submit(self._fetch_batch, batch) for batch in batches]
                for task in as_completed(tasks):
                    task.result()
                for task in [executor.submit(self._fetch_large, *pair) for pair in self._grown]:
                    task.result()
            except OSError as error:
                path = error.filename2 or error.filename or self._folder
                advice = (
                    "a file belongs there: move it away"
                    if isinstance(error, IsADirectoryError)
                    else "mend that"
                )
                raise file_error(
                    error, f"cannot write to {one_line(path)}: {one_line(error.strerror)}; {advice}"
                ) from None
            finally:
                self._patience.give_up()
                self._requests.shutdown(cancel_futures=True)
                executor.shutdown(cancel_futures=True)

    # --- Small objects: one request each ---

    def _fetch_batch(self, batch: list[tuple[str, Item]]) -> None:
        for name, item in batch:
            self._fetch_small(name, item)

    def _fetch_small(self, name: str, item: Item) -> None:
        """Fetch an object in one request, again while its bytes are wrong or it changes."""
        path = self._prepare_path(name)
        if self._adopt_existing(name, item):
            return
        for _ in range(MAX_ATTEMPTS):
            try:
                content, digest = self._read_small(item)
            except ObjectChanged:
                item = self._current_item(item)
                if item.size > PART:
                    self._grown.append((name, item))
                    return
                continue
            if len(content) == item.size and digest in (None, hashlib.md5(content).hexdigest()):
                with create(f"{path}.part") as file:
                    file.write(content)
                self._finish(name, item, verified=digest is not None)
                self._progress.add(1, item.size)
                return
            self._fast_reader = None  # boto3's answer also says whether the object is encrypted
        raise self._damaged_error(item)

    def _read_small(self, item: Item) -> tuple[Any, Optional[str]]:
        """Return (bytes, the MD5 that they should have, or None if it is not known)."""
        digest = None if "-" in (item.digest or "-") else item.digest
        content = self._fast_reader.read_whole(item) if self._fast_reader and digest else None
        if content is not None:
            self._patience.succeeded()
            return content, digest

        def read(answer: dict[str, Any]) -> tuple[bytes, Optional[str]]:
            return answer["Body"].read(), None if etag.is_encrypted(answer) else digest

        return self._get(item, read)

    # --- Large objects: parts that are fetched in parallel and hashed in order ---

    def _fetch_large(self, name: str, item: Item) -> None:
        """Fetch an object in parts, again while its bytes are wrong or it changes."""
        path = self._prepare_path(name)
        if self._adopt_existing(name, item):
            return
        previous_digests: set[str] = set()
        for _ in range(MAX_ATTEMPTS):
            try:
                is_verified = self._fetch_parts(path, item, previous_digests)
            except ObjectChanged:
                item = self._current_item(item)
                continue
            if is_verified is not False:
                self._finish(name, item, is_verified)
                os.unlink(f"{path}.part.json")
                self._progress.add(1)
                return
        raise self._damaged_error(item)

    def _fetch_parts(self, path: str, item: Item, previous_digests: set[str]) -> Optional[bool]:
        """Fetch the object into PATH.part; return whether its bytes match its digest,
        or None if they cannot be checked.

        `previous_digests`: digests of earlier attempts, by a guessed part size; if one comes again, the guess
        is wrong.
        """
        parts = Parts(path, item, PART)
        hasher = self._make_hasher(item)
        pending: collections.deque[Future[Optional[etag.Crc]]] = collections.deque()
        try:
            for number in range(parts.count + AHEAD):
                if number < parts.count:
                    pending.append(
                        self._requests.submit(
                            self._fetch_part, parts, item, number, hasher.crc_of_next_piece()
                        )
                    )
                if number >= AHEAD:
                    if checksum := pending.popleft().result():
                        hasher.add(checksum)
                        continue
                    for chunk in parts.chunks(number - AHEAD, CHUNK):
                        hasher.update(chunk)
        finally:
            # tasks that could not be cancelled still write
            wait([task for task in pending if not task.cancel()])
            parts.close()
        matches = hasher.matches()
        if matches is False and hasher.is_guessed:
            matches = None if hasher.computed in previous_digests else False
            previous_digests.add(hasher.computed)
        if matches is False:
            parts.forget()
            self._progress.add(size=-item.size)
        return matches

    def _fetch_part(
        self, parts: Parts, item: Item, number: int, checksum: Optional[etag.Crc]
    ) -> Optional[etag.Crc]:
        """Fetch a part unless it is there; return `checksum` updated with it,
        or None if it must be read again to be hashed."""
        begin = number * PART
        length = parts.length(number)
        if number in parts.fetched:
            self._progress.add(size=length, old=True)
            return None

        def keep(offset: int, piece: memoryview) -> None:
            if checksum:
                checksum.update(piece)
            parts.write(offset, piece)

        if not self._ranges.stream(item, begin, length, keep):
            checksum = None  # it may have some of the pieces already
            parts.write(begin, self._ranges.read_slowly(item, begin, length))
        parts.record(number)
        self._progress.add(size=length)
        return checksum

    def _make_hasher(self, item: Item) -> etag.Hasher:
        """Return a hasher to compare bytes with the store's checksum, else with an ETag that is a digest,
        else with nothing."""
        answer = self._bucket.ask("head_object", item.key, self._patience, ChecksumMode="ENABLED")
        by_etag = None if etag.is_encrypted(answer) else item.digest
        digest, make = etag.checksum(answer) or (by_etag, hashlib.md5)
        part_size = item.size
        if digest and "-" in digest:  # then it was uploaded in parts of this size
            part_size = self._bucket.ask("head_object", item.key, self._patience, PartNumber=1)[
                "ContentLength"
            ]
        return etag.Hasher(digest, item.size, part_size, make)

    # --- Objects of any size ---

    def _get(self, item: Item, read: Callable[[Any], Any], **parameters: Any) -> Any:
        if item.etag:
            parameters["IfMatch"] = f'"{item.etag}"'
        return self._bucket.ask("get_object", item.key, self._patience, work=read, **parameters)

    def _prepare_path(self, name: str) -> str:
        """Make the folder of an object's file (no link may lead outside); return PATH of its unfinished file,
        PATH.part."""
        folder = os.path.dirname(os.path.join(self._folder, name))
        if folder not in self._folders:
            os.makedirs(folder, exist_ok=True)
            real_path = os.path.realpath(folder) + "/"
            if not real_path.startswith(os.path.realpath(self._folder) + "/"):
                refuse_link(folder)
                raise UserError(
                    f"{folder} leads out of {self._folder}, because a part of it is a link: delete it"
                )
            self._folders.add(folder)
        return index.unfinished_path(self._folder, name)

    def _adopt_existing(self, name: str, item: Item) -> bool:
        """If the file is there and its bytes match the object's digest, add it to the index;
        return whether it was added."""
        path = os.path.join(self._folder, name)
        if not self._index or not item.digest or not index.has_size(path, item.size):
            return False
        hasher = (
            self._make_hasher(item) if "-" in item.digest else etag.Hasher(item.digest, item.size, item.size)
        )
        with open(path, "rb") as file:
            while content := file.read(CHUNK):
                hasher.update(content)
        if hasher.matches() is not True:
            return False
        self._index.add(name, item)
        self._progress.add(1, item.size, old=True)
        self.kept += 1
        return True

    def _finish(self, name: str, item: Item, verified: Optional[bool]) -> None:
        """Give the complete file its name, and record it in the index."""
        os.replace(f"{index.unfinished_path(self._folder, name)}.part", os.path.join(self._folder, name))
        if self._index:
            self._index.add(name, item)
        if not verified:
            self.by_size += 1

    def _current_item(self, item: Item) -> Item:
        """Ask the store for the object that has this key now, after `item` was replaced."""
        answer = self._bucket.ask("head_object", item.key, self._patience)
        return Item(item.key, answer["ContentLength"], answer["ETag"].strip('"'))

    def _damaged_error(self, item: Item) -> Damaged:
        return Damaged(
            f"{one_line(self._bucket.url(item.key))} at {self._bucket.endpoint} arrived {MAX_ATTEMPTS} times "
            f"with other bytes than the store says (ETag {one_line(item.etag)}), or changed as often: it is "
            "damaged there or on the way"
        )
