"""Publish a run's output folder to a bucket, in the background while the training goes on.

Each object is whole under its name and verified by the store. The manifest of a checkpoint is sent after its file, so a reader
of the bucket never sees half a checkpoint. Files that the run no longer keeps are also removed from the bucket.
"""

import base64
import contextlib
import hashlib
import os
import re
import stat
import threading
import time
from collections.abc import Iterator
from typing import Any, Callable, Optional

from common.errors import TrainingFailed, UserError, one_line
from common.files import MIB, TEMPORARY, TakenOver, unfinished
from common.patience import Patience, Say, limit
from common.storage import etag
from common.storage.bucket import Bucket, Item

INTERVAL_SECONDS = 30  # between two looks at the folder
STOP_SECONDS = 20  # to wait for a store after a stop signal, when the platform is about to kill the job
FAILURE_SECONDS = 5  # for all of the publishing after a rank has failed, as the other ranks wait to hear of it
PART = 16 << 20  # larger files go in parts of this size
NOTHING = re.compile("(?!)")  # matches no name
CHECKPOINT = re.compile(r"(?:.*/)?checkpoints/(\d{12})(?:-\d+)?\.(pt|json)")
OF_AN_EPOCH = re.compile(r"epoch_\d+\.(?:pth(?:\.sha256)?|json)|report\.(?:json|txt)|examples/.*")  # files of an epoch

Surplus = Callable[[list[str]], list[str]]  # returns those of the given names that are no longer kept


class Failures:
    """Why the last looks failed. `refused`: the reason, once the store has refused everything for longer than --patience."""

    def __init__(self) -> None:
        self.end()

    def end(self) -> None:
        self._why = self.refused = ""
        self._refused_since = 0.0

    def add(self, error: Exception) -> bool:
        """Record the error of an attempt to publish; return whether its reason differs from that of the attempt before."""
        before, now = self._why, time.monotonic()
        self._why = re.sub(r"^.* answered ", "", one_line(error))  # without the request, which names another file each time
        self._refused_since = (self._refused_since or now) if isinstance(error, UserError) else 0.0
        self.refused = self._why if self._refused_since and now - self._refused_since > limit() else ""
        return self._why != before


class Publisher:
    """Copies the changes of a folder, or of one file, to a bucket.

    start() publishes in the background; finish() publishes the rest. `ours`: the names whose unfinished uploads by an earlier
    start are removed from the bucket. `starts`: the numbered starts of a run (common/checkpoints/starts.py).
    """

    def __init__(self, folder: str, url: str, say: Say = print, ours: "re.Pattern[str]" = NOTHING, starts: Any = None) -> None:
        self._folder = folder
        self._say = say
        self._ours = ours
        self._bucket = Bucket(url, say)
        self._there: dict[str, tuple[int, int]] = {}  # {name: (size, mtime) of the file that the bucket has}
        self._wake, self._over = threading.Event(), threading.Event()
        self._thread: Optional[threading.Thread] = None
        self._surplus: Optional[Surplus] = None
        self._pruned: Optional[Surplus] = None
        self._patience = Patience()
        self._starts = starts
        self._later = self.taken_over = False  # there is a later start; and its version of shared files is restored
        self.failures = Failures()

    def start(self) -> None:
        """Fail if the bucket cannot be written to; clean up after earlier starts; then publish in the background."""
        self._put(".writable", b"")
        self._bucket.ask("delete_object", self._key(".writable"), self._patience)
        self._abort_unfinished()
        if self._starts:
            self._restore_shared_files()
        self._patience.set_limit(limit(), in_the_way=False)
        self._thread = threading.Thread(target=self._run, name="publisher", daemon=True)
        self._thread.start()

    def saved(self, surplus: Surplus) -> None:
        """Publish soon, as a checkpoint was written or found. `surplus(names)` returns the objects that may be deleted."""
        self._surplus = surplus
        self._wake.set()

    def finish(self, in_a_hurry: bool = False, at_most: Optional[float] = None) -> None:
        """Publish what is left, and wait for it, no longer than `at_most` seconds if given; raise the error if that fails.

        `in_a_hurry`: wait for the store at most `at_most` seconds, or else STOP_SECONDS. May be called again.
        """
        self._patience.set_limit(min(limit(), at_most or STOP_SECONDS) if in_a_hurry else limit(), in_the_way=True)
        self._over.set()
        self._wake.set()
        failed: list[Exception] = []
        last = threading.Thread(target=self._last_look, args=(self._thread, failed), name="last look", daemon=True)
        last.start()
        last.join(at_most)
        if last.is_alive():
            raise TrainingFailed(f"there was no more time than {at_most:g} s")
        if failed:
            raise failed[0]
        self._thread = None

    def _last_look(self, background: Optional[threading.Thread], failed: list[Exception]) -> None:
        try:
            if background:
                background.join()
            self._patience.succeeded()
            self._sync()
        except Exception as error:
            failed.append(error)

    def _run(self):
        while not self._over.is_set():
            self._wake.wait(INTERVAL_SECONDS)
            self._wake.clear()
            if self._over.is_set():
                return
            try:
                self._patience.succeeded()
                self._sync(background=True)
                self.failures.end()
            except TakenOver:  # the next save raises it
                return
            except Exception as error:  # the training goes on, and the next look at the folder tries again
                if self.failures.add(error):
                    self._say(f"warning: results cannot be published now, the next attempt follows: {one_line(error)}")
                with contextlib.suppress(Exception):  # an AWS profile is just being written, for instance
                    self._bucket.renew()
                    if self._starts:
                        self._starts.bucket.renew()

    # --- One look at the folder ---

    def _sync(self, background: bool = False) -> None:
        if not self._has_later_start():
            self._look(background)
        if self._has_later_start():  # checked again after everything was sent
            self._restore_shared_files()
            self.taken_over = True
            raise TakenOver(self._bucket.url(self._bucket.prefix))

    def _has_later_start(self) -> bool:
        self._later = self._later or (bool(self._starts) and self._starts.later(self._patience))
        return self._later

    def _restore_shared_files(self) -> None:
        """Put back each file that all starts write under one name, from the latest start that has a copy; ignore UserErrors."""
        for name, copy in self._starts.copies(self._patience).items():
            with contextlib.suppress(UserError):  # the latest start has just replaced or deleted the copy
                self._copy(copy, name)

    def _look(self, background: bool) -> None:
        surplus = self._surplus  # read first: what it keeps is in the folder now, so uploaded before others are deleted
        unread: list[OSError] = []
        files = self._changed(unread)
        manifests = {name: _content(self._path(name)) for name in files if CHECKPOINT.fullmatch(name) and name.endswith("json")}
        for name in sorted(files, key=_order):
            if background and self._over.is_set():
                return  # finish() looks again, and begins with what is newest then
            content = manifests.get(name)
            if name in manifests and not self._has_file_of(name):
                continue
            try:
                self._send_temporary_manifest(name)
                self._upload(name, content)
                self._delete_temporary_manifest(name)
            except FileNotFoundError:  # deleted meanwhile, as it is no longer kept
                continue
            except OSError as error:  # of the file: requests to the store raise other errors
                unread.append(error)
                continue
            self._there[name] = files[name]
        if surplus and surplus is not self._pruned:
            self._prune(surplus)
            self._pruned = surplus
        if unread:
            raise TrainingFailed(
                f"{len(unread)} files or folders of {self._folder} cannot be read, so they are not published; the first is "
                f"{one_line(unread[0].filename)}: {unread[0].strerror}"
            )

    def _changed(self, unread: list[OSError]) -> dict[str, tuple[int, int]]:
        """Return {name: (size, mtime)} of new and changed files, except hidden and temporary ones. Add errors to `unread`."""
        changed = {}
        for path in self._paths(unread):
            name = os.path.relpath(path, self._folder).replace(os.sep, "/") if path != self._folder else ""
            base = os.path.basename(path)
            if base.startswith(".") or base.endswith((TEMPORARY, ".lock")):
                continue
            try:
                status = os.stat(path)
            except FileNotFoundError:
                continue
            except OSError as error:
                unread.append(error)
                continue
            now = (status.st_size, status.st_mtime_ns)
            if stat.S_ISREG(status.st_mode) and self._there.get(name) != now:
                changed[name] = now
        return changed

    def _paths(self, unread: list[OSError]) -> Iterator[str]:
        if os.path.isfile(self._folder):
            yield self._folder
            return
        for folder, folders, names in os.walk(self._folder, onerror=unread.append):
            folders[:] = [name for name in folders if not name.startswith(".")]
            yield from (os.path.join(folder, name) for name in names)

    def _send_temporary_manifest(self, name: str) -> None:
        """If `name` is a checkpoint's file, first send its manifest under a temporary name: the bucket may have an older file.

        A reader of the new file uses the temporary one until the manifest itself is replaced.
        """
        if (match := CHECKPOINT.fullmatch(name)) and match[2] == "pt":
            manifest = re.sub(r"pt$", "json", name)
            places = (*unfinished(self._path(manifest)), self._path(manifest))  # an unfinished one is newer
            content = next(filter(None, map(_content, places)), None)
            if content:
                self._put(manifest + TEMPORARY, content)

    def _delete_temporary_manifest(self, name: str) -> None:
        if (match := CHECKPOINT.fullmatch(name)) and match[2] == "json":
            self._bucket.ask("delete_object", self._key(name + TEMPORARY), self._patience)

    def _has_file_of(self, manifest: str) -> bool:
        """Whether the checkpoint of this manifest was sent, and its file in the folder has not changed since."""
        name = re.sub(r"json$", "pt", manifest)
        with contextlib.suppress(FileNotFoundError):
            status = os.stat(os.path.join(self._folder, name))
            return self._there.get(name) == (status.st_size, status.st_mtime_ns)
        return False

    def _path(self, name):
        return os.path.join(self._folder, name) if name else self._folder

    def _key(self, name):
        name = self._starts.named(name) if self._starts else name
        return "/".join(word for word in (self._bucket.prefix, name) if word)

    # --- Requests ---

    def _upload(self, name, content):
        copy = self._starts.copy_of(name) if self._starts else None
        self._send(copy or name, name, content)
        if copy:
            self._copy(copy, name)
            for outdated in self._starts.pop_outdated(name):
                self._bucket.ask("delete_object", self._key(outdated), self._patience)

    def _copy(self, there, name):
        source = {"Bucket": self._bucket.name, "Key": self._key(there)}
        self._bucket.ask("copy_object", self._key(name), self._patience, CopySource=source)

    def _send(self, to, name, content):
        if content is not None:
            self._put(to, content)
            return
        with open(self._path(name), "rb") as file:
            content = file.read(PART + 1)  # a file that still grows is sent as it is now
            if len(content) <= PART:
                self._put(to, content)
            else:
                file.seek(0)
                self._put_in_parts(to, file)

    def _put(self, name, content):
        digest = hashlib.md5(content)

        def check(answer):
            if not etag.is_encrypted(answer) and answer["ETag"].strip('"') != digest.hexdigest():
                raise ConnectionError("the store has received other bytes than were sent")

        self._bucket.ask("put_object", self._key(name), self._patience, work=check, Body=content, ContentMD5=_base64(digest))

    def _put_in_parts(self, name, file):
        key = self._key(name)
        upload = self._bucket.ask("create_multipart_upload", key, self._patience)["UploadId"]
        try:
            parts = []
            while content := file.read(PART):
                number, digest = len(parts) + 1, hashlib.md5(content)
                words = {"UploadId": upload, "PartNumber": number, "Body": content, "ContentMD5": _base64(digest)}
                answer = self._bucket.ask("upload_part", key, self._patience, **words)
                parts.append({"PartNumber": number, "ETag": answer["ETag"]})
            words = {"UploadId": upload, "MultipartUpload": {"Parts": parts}}
            self._bucket.ask("complete_multipart_upload", key, self._patience, **words)
        except BaseException:
            with contextlib.suppress(Exception):
                self._bucket.client.abort_multipart_upload(Bucket=self._bucket.name, Key=key, UploadId=upload)
            raise

    def _abort_unfinished(self):
        """Abort uploads that a killed start left, if their names match `ours`; ignore errors, as not every store lists them."""
        with contextlib.suppress(Exception):  # not every store can list them
            client, name = self._bucket.client, self._bucket.name
            answer = client.list_multipart_uploads(Bucket=name, Prefix=self._bucket.below())
            for upload in answer.get("Uploads", []):
                if self._ours.fullmatch(self._bucket.relative(upload["Key"])):
                    client.abort_multipart_upload(Bucket=name, Key=upload["Key"], UploadId=upload["UploadId"])

    def _prune(self, surplus: Surplus) -> None:
        for name in surplus(
            [self._bucket.relative(item.key) for item in self._bucket.items(self._bucket.below(), self._patience)]
        ):
            here = self._starts.here(name) if self._starts else name
            if here and os.path.exists(self._path(here)):  # written again meanwhile, or not yet removed here
                continue
            copies = [self._starts.copy_of(name), *self._starts.pop_outdated(name)] if self._starts else []
            for key in filter(None, (name, *copies)):
                self._bucket.ask("delete_object", self._bucket.below() + key, self._patience)
            self._there.pop(here, None)


def is_up_to_date(item: Optional[Item], path: str) -> bool:
    """Return whether the ETag of an object proves that it has the bytes of the file; False for None (no such object)."""
    if item is None or item.size != os.path.getsize(path) or not item.digest:
        return False
    hasher = etag.Hasher(item.digest, item.size, PART)
    with open(path, "rb") as file:
        while content := file.read(MIB):
            hasher.update(content)
    return hasher.matches() is True


def _order(name: str) -> tuple:
    """Return a sort key for uploads: files of an epoch, checkpoints from the newest, each before its manifest, then the rest.

    A stop may leave little time, and a start that goes on from a checkpoint does not make the files of its epoch again.
    """
    if OF_AN_EPOCH.fullmatch(name):
        return -1, 0, name
    match = CHECKPOINT.fullmatch(name)
    return (0, -int(match[1]), match[2] == "json") if match else (1, 0, name)


def _content(path: str) -> Optional[bytes]:
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return file.read()
    return None


def _base64(digest: Any) -> str:
    return base64.b64encode(digest.digest()).decode()
