"""Publish a run's output folder to a bucket, in the background while the training goes on.

The manifest of a checkpoint is sent after its file, so a reader of the bucket never sees half a checkpoint.
Files that the run no longer keeps are also removed from the bucket.
"""

import contextlib
import os
import re
import threading
import time
from typing import Callable, Optional

from common.alive.patience import Say, limit
from common.alive.stops import STOPS
from common.checkpoints import names, run_folder
from common.checkpoints.starts import Starts
from common.errors import TrainingFailed, UserError, one_line
from common.files import TEMPORARY, TakenOver, unfinished_files
from common.storage.upload import Files, Uploads, changed_files, require_readable

INTERVAL_SECONDS = 30  # between two looks at the folder
STOP_SECONDS = 20  # to wait for a store after a stop signal, when the platform is about to kill the job
POLL_SECONDS = 0.5  # after which a stop signal is noticed at the end
# for all of the publishing after a rank has failed, as the other ranks wait to hear of it
FAILURE_SECONDS = 5
EVALUATION_FILE = re.compile(r"report\.(?:json|txt)|examples/.*")

# returns those of the given names in the folder that are no longer kept
Surplus = Callable[[list[str]], list[str]]


class Failures:
    """Why the last attempt to publish failed.

    `refusal`: the reason, once all attempts for longer than --patience have raised UserErrors; else "".
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all failures, as after an attempt that succeeded."""
        self._reason = self.refusal = ""
        self._refused_since = 0.0

    def add(self, error: Exception) -> bool:
        """Record the error of a failed attempt; return whether its reason differs from the last one's."""
        previous = self._reason
        now = time.monotonic()
        # without the request, which names another file each time
        self._reason = re.sub(r"^.* answered ", "", one_line(error))
        self._refused_since = (self._refused_since or now) if isinstance(error, UserError) else 0.0
        self.refusal = self._reason if self._refused_since and now - self._refused_since > limit() else ""
        return self._reason != previous


class Publisher:
    """Copies the changes of a run's output folder to a bucket: start() in the background, finish() the rest.

    `starts`: the numbered starts of the run in that bucket; unset if no other start can write there.
    """

    def __init__(self, folder: str, url: str, say: Say = print, starts: Optional[Starts] = None) -> None:
        self._folder = folder
        self._say = say
        self._uploads = Uploads(url, say)
        self._published: Files = {}  # the files that the bucket has
        self._wake = threading.Event()
        self._finishing = threading.Event()
        self._thread: Optional[threading.Thread] = None
        self._surplus: Optional[Surplus] = None
        self._pruned_surplus: Optional[Surplus] = None
        self._patience = self._uploads.patience
        self._starts = starts or Starts(self._uploads.bucket)
        self._is_superseded = False  # whether there is a later start
        self.is_taken_over = False  # whether there is, and its version of the shared files is restored
        self.failures = Failures()

    def start(self) -> None:
        """Raise an error if the bucket cannot be written to.

        Abort uploads that earlier starts left unfinished, restore the files that all starts share, and then
        publish in a thread."""
        self._uploads.put(".writable", b"")
        self._uploads.delete(".writable")
        self._uploads.abort_unfinished(run_folder.is_run_file)
        self._restore_shared_files()
        self._patience.set_limit(limit(), blocks_training=False)  # it does not wait for the thread
        self._thread = threading.Thread(target=self._run, name="publisher", daemon=True)
        self._thread.start()

    def publish_soon(self, surplus: Surplus) -> None:
        """Publish soon, as a checkpoint was written or found.

        `surplus(names)`: those that are no longer kept.
        """
        self._surplus = surplus
        self._wake.set()

    def finish(self, in_a_hurry: bool = False, timeout: Optional[float] = None) -> None:
        """Publish the rest and wait for it, at most `timeout` seconds if given; raise an error if it fails.

        `in_a_hurry`: wait for a silent store only for `timeout`, or else for STOP_SECONDS, as after a stop
        signal that comes meanwhile. May be called again.
        """
        self._patience.set_limit(
            min(limit(), timeout or STOP_SECONDS) if in_a_hurry else limit(), blocks_training=True
        )
        self._finishing.set()
        self._wake.set()
        errors: list[Exception] = []
        thread = threading.Thread(
            target=self._final_sync, args=(self._thread, errors), name="final sync", daemon=True
        )
        thread.start()
        if timeout:
            thread.join(timeout)
        while thread.is_alive() and not timeout:
            thread.join(POLL_SECONDS)
            if STOPS.noted and not in_a_hurry:
                in_a_hurry = True
                self._patience.succeeded()  # the seconds count from now
                self._patience.set_limit(min(limit(), STOP_SECONDS), blocks_training=True)
        if thread.is_alive():
            raise TrainingFailed(f"there was no more time than {timeout:g} s")
        if errors:
            raise errors[0]
        self._thread = None

    def _final_sync(self, thread: Optional[threading.Thread], errors: list[Exception]) -> None:
        try:
            if thread:
                thread.join()
            self._patience.succeeded()
            self._sync()
        except Exception as error:
            errors.append(error)

    def _run(self):
        """Publish at every interval or save, until finish() is called or a later start has taken over."""
        while not self._finishing.is_set():
            self._wake.wait(INTERVAL_SECONDS)
            self._wake.clear()
            if self._finishing.is_set():
                return
            try:
                self._patience.succeeded()
                self._sync(is_background=True)
                self.failures.clear()
            except TakenOver:  # the next save raises it
                return
            except Exception as error:  # the training goes on, and the next look at the folder tries again
                if self.failures.add(error):
                    self._say(
                        "warning: results cannot be published now, the next attempt follows: "
                        f"{one_line(error)}"
                    )
                with contextlib.suppress(Exception):  # an AWS profile is just being written, for instance
                    self._uploads.bucket.renew()
                    self._starts.bucket.renew()

    # --- One look at the folder ---

    def _sync(self, is_background: bool = False) -> None:
        if not self._has_later_start():
            self._upload_changes(is_background)
        if self._has_later_start():  # checked again after everything was sent
            self._restore_shared_files()
            self.is_taken_over = True
            raise TakenOver(self._uploads.bucket.url(self._uploads.bucket.prefix))

    def _has_later_start(self) -> bool:
        self._is_superseded = self._is_superseded or self._starts.has_later(self._patience)
        return self._is_superseded

    def _restore_shared_files(self) -> None:
        """Put back each file that all starts write under one name, from the latest start that has a copy;
        ignore UserErrors."""
        for name, copy_name in self._starts.copies(self._patience).items():
            with contextlib.suppress(UserError):  # the latest start has just replaced or deleted the copy
                self._uploads.copy(copy_name, name)

    def _upload_changes(self, is_background: bool) -> None:
        """Upload the files that have changed, then delete from the bucket those that are no longer kept."""
        # read first: what it keeps is in the folder now, so uploaded before others are deleted
        surplus = self._surplus
        unread: list[OSError] = []
        files = changed_files(self._folder, self._published, unread)
        manifests = {name: _content(self._path(name)) for name in files if _ending(name) == "json"}
        for name in sorted(files, key=_upload_order):
            if is_background and self._finishing.is_set():
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
            self._published[name] = files[name]
        if surplus and surplus is not self._pruned_surplus:
            self._prune(surplus)
            self._pruned_surplus = surplus
        require_readable(self._folder, unread)

    def _send_temporary_manifest(self, name: str) -> None:
        """If `name` is a checkpoint's file, first send its manifest under a temporary name:
        the bucket may have an older file.

        A reader of the new file uses the temporary one until the manifest itself is replaced.
        """
        if _ending(name) == "pt":
            manifest = re.sub(r"pt$", "json", name)
            # an unfinished one is newer
            paths = (*unfinished_files(self._path(manifest)), self._path(manifest))
            content = next(filter(None, map(_content, paths)), None)
            if content:
                self._uploads.put(self._starts.bucket_name(manifest + TEMPORARY), content)

    def _delete_temporary_manifest(self, name: str) -> None:
        if _ending(name) == "json":
            self._uploads.delete(self._starts.bucket_name(name + TEMPORARY))

    def _has_file_of(self, manifest: str) -> bool:
        """Return whether the file of this manifest's checkpoint was sent and has not changed since."""
        name = re.sub(r"json$", "pt", manifest)
        with contextlib.suppress(FileNotFoundError):
            status = os.stat(os.path.join(self._folder, name))
            return self._published.get(name) == (status.st_size, status.st_mtime_ns)
        return False

    def _path(self, name: str) -> str:
        return os.path.join(self._folder, name) if name else self._folder

    def _upload(self, name: str, content: Optional[bytes]) -> None:
        """Upload a file, or its `content` if given; first as this start's copy if starts share the name."""
        copy_name = self._starts.copy_of(name)
        target = copy_name or self._starts.bucket_name(name)
        if content is None:
            self._uploads.send(self._path(name), target)
        else:
            self._uploads.put(target, content)
        if copy_name:
            self._uploads.copy(copy_name, name)
            for outdated in self._starts.pop_outdated(name):
                self._uploads.delete(outdated)

    def _prune(self, surplus: Surplus) -> None:
        for name in self._starts.surplus(self._uploads.names(), surplus):
            local_name = self._starts.local_name(name)
            if local_name and os.path.exists(self._path(local_name)):
                # written again meanwhile, or not yet removed here
                continue
            for object_name in filter(
                None, (name, self._starts.copy_of(name), *self._starts.pop_outdated(name))
            ):
                self._uploads.delete(object_name)
            self._published.pop(local_name or "", None)


def _upload_order(name: str) -> tuple:
    """Return a sort key for uploads: files of an epoch, checkpoints from the newest,
    each before its manifest, then the rest.

    A stop may leave little time, and a start that goes on from a checkpoint does not make the files of its
    epoch again.
    """
    if names.epoch_of(name) is not None or EVALUATION_FILE.fullmatch(name):
        return -1, 0, name
    parsed = names.parse(name, names.FOLDER)
    return (0, -parsed.samples, parsed.ending == "json") if parsed else (1, 0, name)


def _ending(name: str) -> Optional[str]:
    parsed = names.parse(name, names.FOLDER)
    return parsed.ending if parsed else None


def _content(path: str) -> Optional[bytes]:
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return file.read()
    return None
