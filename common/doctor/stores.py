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
from common.doctor.table import BAD, Finding, bad, doubtful, good, refusal, size
from common.errors import TrainingFailed, UserError, count, one_line
from common.files import write_atomically
from common.storage import bucket, https
from common.storage.listing import SPARE

ANSWER_SECONDS = 5  # that a store or a server may take
TRIES = 1000  # more than there are nodes, each of which removes its folders once
LISTING_SECONDS = 3  # of a bucket's objects; those not listed by then are not counted


def check_disk(what: str, folder: str, need: int, users: str) -> Finding:
    """Check that the disk has room for `need` bytes and a reserve, and for more files. `users`: what needs the bytes."""
    place = _existing(folder)
    disk = os.statvfs(place)
    free = disk.f_bavail * disk.f_frsize
    if need + SPARE > free:
        found = f"{size(free)} free in {one_line(place)}, {users} need {size(need + SPARE)}"
        return bad(what, found, "make room there, or give a folder on a larger disk")
    if disk.f_files and disk.f_favail < 1000:
        found = f"{one_line(place)} has room for {disk.f_favail} more files"
        return bad(what, found, "delete files there, or give another disk")
    return good(what, f"{size(free)} free in {one_line(place)}" + (f", {users} need {size(need)}" if need else ""))


def check_output(folders: list[str]) -> Finding:
    """Check that files can be written in the folders and replaced by a rename, as every checkpoint needs it."""
    for folder in folders:
        made = _missing(folder)
        try:
            _try_rename(folder)
        except OSError as error:
            found = f"cannot write to {one_line(folder)}: {one_line(error.strerror or error)}"
            return bad("output", found, "give another --output_dir, or allow this user to write there")
        finally:
            for path in made:
                with contextlib.suppress(OSError):
                    os.rmdir(path)
    return good("output", f"{one_line(folders[0])} can be written to, and a rename replaces a file whole")


def _try_rename(folder: str) -> None:
    """Raise OSError if a rename in `folder` does not replace a file; try again if another node has just removed the folder."""
    for number in range(TRIES):
        try:
            os.makedirs(folder, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".doctor-", dir=folder) as own:
                path = Path(own, "file")
                for content in (b"old", b"new"):
                    write_atomically(str(path), content)
                if path.read_bytes() != b"new" or os.listdir(own) != ["file"]:
                    raise OSError(0, "a renamed file does not replace the one of that name")
            return
        except FileNotFoundError:
            if number == TRIES - 1:
                raise


def _missing(folder: str) -> list[str]:
    """Return the folders that os.makedirs(folder) would make, the innermost first."""
    missing = []
    path = os.path.abspath(folder)
    while not os.path.lexists(path):
        missing.append(path)
        path = os.path.dirname(path)
    return missing


def _existing(folder: str) -> str:
    return os.path.dirname(missing[-1]) if (missing := _missing(folder)) else folder


# --- Buckets and web servers --------------------------------------------------------------------------------------------


def check_bucket(
    url: str, what: str, writes: bool = False, inputs: Optional[str] = None, passes: bool = False
) -> Iterator[Finding]:
    """Check that a bucket can be listed and read, or written if `writes`. If so, check the clock, and the disk of `inputs`.

    `passes`: what the disk has no room for passes through.
    """
    patience = Patience(ANSWER_SECONDS)
    try:
        place = bucket.Bucket(url, say=lambda text: None)
        items, whole, ahead = _list(place, patience)
        if writes:
            key = f"{place.below()}.doctor"
            place.ask("put_object", key, patience, Body=b"written by --doctor, may be deleted")
            place.ask("delete_object", key, patience)
        elif items:
            smallest = min(items, key=lambda key: items[key])
            place.ask("get_object", smallest, patience, work=lambda answer: answer["Body"].read())
    except UserError as error:
        yield refusal(what, error)
        return
    except TrainingFailed as error:
        reason = one_line(error).rpartition("; ")[0]
        yield bad(what, reason, "check the endpoint (AWS_ENDPOINT_URL_S3, AWS_REGION) and the network of this node")
        return
    where = f"{one_line(url)} at {place.endpoint}"
    if not items and not writes:
        yield bad(what, f"{where} holds nothing", "check the address")
        return
    total = sum(items.values())
    some = "" if whole else "at least "
    done = "written and deleted" if writes else "read"
    yield good(what, f"{where}: {some}{count(len(items), 'object')}, {size(total)}; one was {done}")
    yield check_clock(ahead, "the store")
    if inputs:
        folder = local_folder(url, inputs)
        need = max(0, total - _size_of_files(folder))
        disk = check_disk("disk", folder, need, f"{some}{count(len(items), 'object')} to be fetched")
        yield doubtful(*disk[1:3], "what has no room comes again in every epoch") if passes and disk.severity == BAD else disk


def _list(place: bucket.Bucket, patience: Patience) -> tuple[dict[str, int], bool, float]:
    """Return ({key: size}, whether these are all, seconds by which this node's clock is ahead of the store's)."""
    sizes = {}
    marker = ""
    began = time.monotonic()
    while True:
        asked = time.time()
        page = place.ask("list_objects", place.below(), patience, Prefix=place.below(), Marker=marker, MaxKeys=1000)
        date = email.utils.parsedate_to_datetime(page["ResponseMetadata"]["HTTPHeaders"]["date"]).timestamp()
        ahead = min(0, time.time() - date) or max(0, asked - date)  # the store answered at some time in between
        entries = page.get("Contents", [])
        sizes.update((entry["Key"], entry["Size"]) for entry in entries)
        if not entries and place.prefix and not sizes:  # the address may be that of one object
            page = place.ask("list_objects", place.prefix, patience, Prefix=place.prefix, MaxKeys=1)
            sizes.update((entry["Key"], entry["Size"]) for entry in page.get("Contents", []) if entry["Key"] == place.prefix)
        if not page.get("IsTruncated") or not entries or time.monotonic() - began > LISTING_SECONDS:
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
        return bad("data", f"{one_line(url)[:200]}: {one_line(error)[:200]}", f"check the address, or {https.ELSEWHERE}")
    if not length:
        found = f"the server of {one_line(url)[:200]} states no length, so an incomplete file would not be noticed"
        return bad("data", found, f"give another server, or {https.ELSEWHERE}")
    return good("data", f"{one_line(url)[:200]}: {size(length)}")


def _size_of_files(folder: str) -> int:
    return sum(os.path.getsize(os.path.join(where, name)) for where, _, names in os.walk(folder) for name in names)
