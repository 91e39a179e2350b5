"""The output folder of a run, on the disk of the rank that writes."""

import argparse
import contextlib
import fcntl
import functools
import os
import re
import shutil
import time

from common import files, packages, progress
from common.checkpoints import checkpoint, names
from common.errors import UserError, file_error

LOCK_SECONDS = 10  # the start before this one may not have ended yet
QUIET_SECONDS = 0.5  # of waiting for it, before a line says so

# What a run writes, and nothing else: only this is ever deleted.
_OTHER_RUN_FILE = re.compile(
    r"checkpoints/\.attempt|\.starts/\d+/.*|metrics\.jsonl|speed\.jsonl|journal\.jsonl|state\.json|"
    r"curves\.png|report\.(txt|json|html)|nodes\.json|tracked-\w+\.json|evaluation\.json|trace\.json\.gz|examples/(epoch_\d+|mistakes)\.png|"
    r"tensorboard/events\.out\.tfevents\.[^/]*|ledger/rank_\d+\.jsonl"
)


def is_run_file(name: str) -> bool:
    """Return whether a run writes files of this name below its output folder; False for temporary names."""
    parsed = names.parse(name, names.FOLDER)
    return bool(
        (parsed and parsed.ending != names.UNFINISHED)
        or names.epoch_of(name) is not None
        or _OTHER_RUN_FILE.fullmatch(name)
    )


class RunFolder:
    """The output folder as a place of the run. Saving uses a RunBucket by the same methods."""

    def __init__(self, args: argparse.Namespace):
        self._args = args

    def open(self) -> None:
        """Create the folders, and lock them until this process ends."""
        make_folders(self._args)
        lock(self._args.checkpoint_dir)

    def address(self, samples: int) -> str:
        """Return the path that the checkpoint after so many samples has."""
        return f"{self._args.checkpoint_dir}/{names.of_checkpoint(samples, 'pt')}"

    def manifests(self) -> set[tuple[int, int, str]]:
        """Return {(samples seen, 0, digest)} of the manifests, to see what other starts write meanwhile."""
        folder = self._args.checkpoint_dir
        entries = set()
        for number in checkpoint.numbers(folder):
            with contextlib.suppress(OSError):  # another start has just removed it
                entries.add(
                    (number, 0, files.sha256(re.sub(r"pt$", "json", checkpoint.path_of(folder, number))))
                )
        return entries

    def fetch_newest(self, check_only: bool = False) -> bool:
        """Return whether there is a checkpoint. On the disk, none has to be fetched."""
        return bool(checkpoint.numbers(self._args.checkpoint_dir))

    def claim(self, starts_anew: bool) -> None:
        """Keep earlier starts from writing here; complete their last save or, if `starts_anew`, delete it."""
        try:
            unfinished_paths = files.claim(self._args.checkpoint_dir, extra_folder=self._args.output_dir)
        except OSError as error:
            raise _not_writable(self._args.output_dir, error) from None
        if not starts_anew:
            checkpoint.sweep(self._args.checkpoint_dir, unfinished_paths)
        files.tidy()

    def is_taken_over(self) -> bool:
        return files.is_taken_over()

    def delete_run(self) -> None:
        """Delete the files of the run in all of its folders. Other files stay."""
        args = self._args
        folders = {
            "": args.output_dir,
            names.FOLDER: args.checkpoint_dir,
            "tensorboard/": args.tensorboard_dir,
        }
        folders.update({f"{name}/": os.path.join(args.output_dir, name) for name in ("examples", "ledger")})
        for prefix, folder in folders.items():
            for name in sorted_names(folder):
                if is_run_file(prefix + name.removesuffix(files.TEMPORARY)):
                    files.remove(os.path.join(folder, name))

    def delete_after(self, samples: int) -> None:
        """Delete the checkpoints after so many samples."""
        for number in checkpoint.numbers(self._args.checkpoint_dir):
            if number > samples:
                checkpoint.delete(self._args.checkpoint_dir, number)


def make_folders(args: argparse.Namespace) -> None:
    """Create the output folders; raise an error if one of them cannot be written to."""
    for folder in (args.output_dir, args.checkpoint_dir, args.tensorboard_dir):
        try:
            os.makedirs(folder, exist_ok=True)
            probe = os.path.join(folder, ".writable")
            files.write_atomically(probe, b"")
            os.unlink(probe)
        except OSError as error:
            raise _not_writable(folder, error) from None


def require_room(args: argparse.Namespace, size: int) -> None:
    """Raise UserError if the disk lacks room for 3 or 4 checkpoints (by --keep) of `size` bytes,
    each with its weights file."""
    with os.scandir(args.checkpoint_dir) as entries:
        # The space of earlier checkpoints counts as free, as later ones replace them.
        used = sum(entry.stat(follow_symlinks=False).st_size for entry in entries)
    count = min(args.keep, 2) + 2  # the last ones, the best, and the next
    if shutil.disk_usage(args.checkpoint_dir).free + used < count * size:
        raise UserError(
            f"{args.checkpoint_dir} has no room for {count} checkpoints: "
            f"{describe_room(args.checkpoint_dir, count * size)}"
        )


def describe_room(folder: str, size: int) -> str:
    """Return words for an error: how much space is needed, how much is free, and what to do."""
    free = shutil.disk_usage(folder).free
    return (
        f"{size / files.MIB:.1f} MiB are needed and {free / files.MIB:.1f} MiB are free: delete what is not "
        "needed there, lower --keep, or give another --output_dir"
    )


def _not_writable(folder: str, error: OSError) -> Exception:
    return file_error(error, f"cannot write to {folder}: {error.strerror}; give another --output_dir")


_locked: set[tuple[int, int]] = set()  # (device, inode) of held lock files: a second Run may use the folder


def lock(folder: str) -> None:
    """Lock the folder until this process ends, if the disk has locks;
    UserError if another job holds it for LOCK_SECONDS."""
    try:
        file = os.open(os.path.join(folder, ".lock"), os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise _not_writable(folder, error) from None
    status = os.fstat(file)
    file_id = (status.st_dev, status.st_ino)
    if file_id in _locked:
        os.close(file)
        return
    began = time.monotonic()
    has_reported = False
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.register_at_fork(after_in_child=functools.partial(_close_in_child, [file]))
            _locked.add(file_id)
            return
        except BlockingIOError:
            waited = time.monotonic() - began
            if waited > LOCK_SECONDS:
                raise UserError(
                    f"{folder} is in use by another job that is still running: give another --output_dir"
                ) from None
            if waited > QUIET_SECONDS and not has_reported:
                progress.say(
                    f"{folder} is in use by another job or start: waiting up to {LOCK_SECONDS} s for its end"
                )
                has_reported = True
            time.sleep(0.1)
        except OSError:
            return  # a mounted store without locks


def _close_in_child(descriptors: list[int]) -> None:
    """Close the lock file in a forked process, such as a loader worker,
    which would keep the lock if it outlived its parent."""
    _locked.clear()
    while descriptors:
        os.close(descriptors.pop())


def sorted_names(folder: str) -> list[str]:
    """Return the sorted names in a folder; none if it does not exist."""
    return sorted(os.listdir(folder)) if os.path.isdir(folder) else []


def describe_files(args: argparse.Namespace) -> str:
    """Return text for the log: which result files there are, in which folder or bucket,
    and where TensorBoard's files are."""
    folder = args.output_dir
    url = args.output_url
    result_files = ("report.html", "metrics.jsonl", "curves.png", "report.txt")
    existing = [name for name in result_files if os.path.exists(os.path.join(folder, name))]
    parts = []
    if existing:
        parts.append(f"{', '.join(existing)} in {url or folder}")
    if packages.is_available(packages.EVENTS):
        events_folder = args.tensorboard_dir.replace(folder, url.rstrip("/")) if url else args.tensorboard_dir
        parts.append(f"TensorBoard in {events_folder}")
    return "; ".join(parts)
