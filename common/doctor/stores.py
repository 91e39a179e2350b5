"""The doctor's checks of what a job reads and writes: disks, the output folder, buckets and web servers."""

import contextlib
import email.utils
import http.client
import os
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Optional

from common.address import local_folder
from common.alive.patience import Patience
from common.doctor.checks import check_clock
from common.doctor.table import BAD, Finding, bad, doubtful, finding_of_error, format_size, good
from common.errors import TrainingFailed, UserError, count, one_line
from common.files import write_atomically
from common.storage import bucket, https
from common.storage.listing import SPARE

ANSWER_SECONDS = 5  # that a store or a server may take
TRIES = 1000  # more than there are nodes, each of which removes its folders once
MIN_FREE_FILES = 1000
LISTING_SECONDS = 3  # of a bucket's objects; those not listed by then are not counted


def check_disk(row: str, folder: str, need: int, consumers: str) -> Finding:
    """Check that the disk has room for `need` bytes and a reserve, and for MIN_FREE_FILES more files.

    `row`: the first column of the finding; `consumers`: what needs the bytes, in the plural."""
    existing_folder = _existing_parent(folder)
    disk = os.statvfs(existing_folder)
    free = disk.f_bavail * disk.f_frsize
    if need + SPARE > free:
        result = (
            f"{format_size(free)} free in {one_line(existing_folder)}, {consumers} need "
            f"{format_size(need + SPARE)}"
        )
        return bad(row, result, "make room there, or give a folder on a larger disk")
    if disk.f_files and disk.f_favail < MIN_FREE_FILES:
        result = f"{one_line(existing_folder)} has room for {disk.f_favail} more files"
        return bad(row, result, "delete files there, or give another disk")
    result = f"{format_size(free)} free in {one_line(existing_folder)}"
    if need:
        result += f", {consumers} need {format_size(need)}"
    return good(row, result)


def check_output(folders: list[str]) -> Finding:
    """Check that files can be written in the folders and replaced by a rename,
    as every checkpoint needs it."""
    for folder in folders:
        new_folders = _missing_folders(folder)
        try:
            _try_rename(folder)
        except OSError as error:
            result = f"cannot write to {one_line(folder)}: {one_line(error.strerror or error)}"
            return bad("output", result, "give another --output_dir, or allow this user to write there")
        finally:
            for path in new_folders:
                with contextlib.suppress(OSError):
                    os.rmdir(path)
    return good("output", f"{one_line(folders[0])} can be written to, and a rename replaces a file whole")


def _try_rename(folder: str) -> None:
    """Raise OSError if a rename in `folder` does not replace a file;
    try again if another node has just removed the folder."""
    for attempt in range(TRIES):
        try:
            os.makedirs(folder, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".doctor-", dir=folder) as temp_dir:
                path = Path(temp_dir, "file")
                for content in (b"old", b"new"):
                    write_atomically(str(path), content)
                if path.read_bytes() != b"new" or os.listdir(temp_dir) != ["file"]:
                    raise OSError(0, "a renamed file does not replace the one of that name")
            return
        except FileNotFoundError:
            if attempt == TRIES - 1:
                raise


def _missing_folders(folder: str) -> list[str]:
    """Return the folders that os.makedirs(folder) would make, the innermost first."""
    missing = []
    path = os.path.abspath(folder)
    while not os.path.lexists(path):
        missing.append(path)
        path = os.path.dirname(path)
    return missing


def _existing_parent(folder: str) -> str:
    """Return the folder, or the nearest folder above it that exists."""
    missing = _missing_folders(folder)
    return os.path.dirname(missing[-1]) if missing else folder


# --- Buckets and web servers --------------------------------------------------------------------------------


def check_bucket(
    url: str, check: str, needs_write: bool = False, inputs: Optional[str] = None, is_streamed: bool = False
) -> Iterator[Finding]:
    """Check that a bucket can be listed and read, or written if `needs_write`; then the clock and the disk.

    `inputs`: the folder for the data; None: no check of the disk. `is_streamed`: data for which the disk has
    no room are fetched again in every epoch.
    """
    patience = Patience(ANSWER_SECONDS)
    try:
        store = bucket.Bucket(url, say=lambda text: None)
        items, is_complete, ahead = _list_objects(store, patience)
        if needs_write:
            key = f"{store.key_prefix()}.doctor"
            store.ask("put_object", key, patience, Body=b"written by --doctor, may be deleted")
            store.ask("delete_object", key, patience)
        elif items:
            smallest = min(items, key=lambda key: items[key])
            store.ask("get_object", smallest, patience, work=lambda answer: answer["Body"].read())
    except UserError as error:
        yield finding_of_error(check, error)
        return
    except TrainingFailed as error:
        reason = one_line(error).rpartition("; ")[0]
        yield bad(
            check, reason, "check the endpoint (AWS_ENDPOINT_URL_S3, AWS_REGION) and the network of this node"
        )
        return
    address = f"{one_line(url)} at {store.endpoint}"
    if not items and not needs_write:
        yield bad(check, f"{address} holds nothing", "check the address")
        return
    total = sum(items.values())
    at_least = "" if is_complete else "at least "
    action = "written and deleted" if needs_write else "read"
    yield good(
        check, f"{address}: {at_least}{count(len(items), 'object')}, {format_size(total)}; one was {action}"
    )
    yield check_clock(ahead, "the store")
    if inputs:
        folder = local_folder(url, inputs)
        need = max(0, total - _size_of_files(folder))
        disk = check_disk("disk", folder, need, f"{at_least}{count(len(items), 'object')} to be fetched")
        if is_streamed and disk.severity == BAD:
            disk = doubtful(disk.check, disk.result, "what has no room comes again in every epoch")
        yield disk


def _list_objects(store: bucket.Bucket, patience: Patience) -> tuple[dict[str, int], bool, float]:
    """Return ({key: size}, whether these are all, seconds by which this node's clock is ahead of the
    store's)."""
    sizes = {}
    marker = ""
    start = time.monotonic()
    while True:
        request_time = time.time()
        page = store.ask(
            "list_objects",
            store.key_prefix(),
            patience,
            Prefix=store.key_prefix(),
            Marker=marker,
            MaxKeys=1000,
        )
        date = email.utils.parsedate_to_datetime(page["ResponseMetadata"]["HTTPHeaders"]["date"]).timestamp()
        # the store answered at some time in between
        ahead = min(0, time.time() - date) or max(0, request_time - date)
        entries = page.get("Contents", [])
        sizes.update((entry["Key"], entry["Size"]) for entry in entries)
        if not entries and store.prefix and not sizes:  # the address may be that of one object
            page = store.ask("list_objects", store.prefix, patience, Prefix=store.prefix, MaxKeys=1)
            sizes.update(
                (entry["Key"], entry["Size"])
                for entry in page.get("Contents", [])
                if entry["Key"] == store.prefix
            )
        if not page.get("IsTruncated") or not entries or time.monotonic() - start > LISTING_SECONDS:
            return sizes, not page.get("IsTruncated"), ahead
        marker = page.get("NextMarker") or entries[-1]["Key"]


def check_web(url: str) -> Finding:
    """Check that the server answers with a file, not with a web page, and states its length."""
    try:
        https.refuse_unsafe(url)
        with urllib.request.build_opener(https.SafeRedirects).open(url, timeout=ANSWER_SECONDS) as answer:
            answer.read(1)
            length = https.stated_length(url, answer)
    except (OSError, ValueError, http.client.HTTPException) as error:
        return bad(
            "data",
            f"{one_line(url)[:200]}: {one_line(error)[:200]}",
            f"check the address, or {https.BUCKET_ADVICE}",
        )
    if not length:
        result = (
            f"the server of {one_line(url)[:200]} states no length, so an incomplete file would not be "
            "noticed"
        )
        return bad("data", result, f"give another server, or {https.BUCKET_ADVICE}")
    return good("data", f"{one_line(url)[:200]}: {format_size(length)}")


def _size_of_files(folder: str) -> int:
    return sum(
        os.path.getsize(os.path.join(root, name)) for root, _, names in os.walk(folder) for name in names
    )
