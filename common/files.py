"""Atomic writes: a file is whole under its name or not there.

Safe access where another user may have planted a link or a pipe.

A run may be started again while an earlier start of it is still there, such as on a frozen machine that
continues hours later. Each start therefore makes a subfolder of its own in the folder that it claims. It
writes a file there and renames it to its place, and it moves a file there to delete it. The next start takes
this subfolder away, so later writes of the old one fail.
"""

import contextlib
import errno
import fcntl
import glob
import hashlib
import io
import json
import os
import secrets
import shutil
import socket
import stat
import tempfile
import threading
from collections.abc import Iterator
from typing import Any, BinaryIO, Union

from common.errors import UserError

MIB = 1 << 20
TEMPORARY = ".unfinished"  # the ending of a file that is being written
# {a folder that this process has claimed: the subfolder through which it writes}
CLAIMED: dict[str, str] = {}


class TakenOver(UserError):
    """The folder was moved, deleted, or claimed by another start.

    A UserError, as a restart would take it from that start.
    """

    def __init__(self, destination: str):
        lost = [folder for folder, subfolder in CLAIMED.items() if _is_missing(subfolder)]
        # a start leaves its subfolder
        was_moved = any(not os.path.isdir(folder) or not os.listdir(folder) for folder in lost)
        reason = (
            "the folder was moved or deleted"
            if was_moved
            else "another start of this run writes there by now"
        )
        super().__init__(f"{destination}: {reason}, so this one ends")


def claim(folder: str, name: str = "start", extra_folder: str = "") -> list[str]:
    """Claim a folder for this process.

    An earlier one that claimed it by this `name` can no longer write there by this module.

    `extra_folder`: a folder to claim with it. Returns the unfinished files that earlier starts have left in
    `folder`, until tidy().
    """
    folder = os.path.realpath(folder)
    subfolder = os.path.join(folder, f".{name}-{secrets.token_hex(6)}")
    os.mkdir(subfolder)
    for earlier in glob.glob(os.path.join(glob.escape(folder), f".{name}-*")):
        if earlier != subfolder:
            try:
                os.rename(earlier, os.path.join(subfolder, os.path.basename(earlier)))
            except OSError:  # a third start was faster, or this disk cannot rename folders
                shutil.rmtree(earlier, ignore_errors=True)
    CLAIMED[folder] = subfolder
    if extra_folder and os.stat(extra_folder).st_dev == os.stat(subfolder).st_dev:
        CLAIMED[os.path.realpath(extra_folder)] = (
            subfolder  # one subfolder for both, so that one of two starts at a time gets both
        )
    elif extra_folder:
        claim(extra_folder, name)
    paths = [os.path.join(parent, name) for parent, _, names in os.walk(subfolder) for name in names]
    return sorted(path for path in paths if path.endswith(TEMPORARY))


def tidy() -> None:
    """Remove the subfolders of earlier starts, which claim() has moved into the subfolder of this process."""
    for subfolder in CLAIMED.values():
        for earlier in glob.glob(os.path.join(glob.escape(subfolder), ".*")):
            shutil.rmtree(earlier, ignore_errors=True)


def release() -> None:
    """Give up all claims of this process, and remove its subfolders."""
    for subfolder in CLAIMED.values():
        shutil.rmtree(subfolder, ignore_errors=True)
    CLAIMED.clear()


def is_taken_over() -> bool:
    """Whether a folder that this process has claimed was moved, deleted, or claimed by another start."""
    return any(map(_is_missing, CLAIMED.values()))


def _is_missing(folder: str) -> bool:
    """Whether the folder no longer exists; False if the disk cannot tell."""
    try:
        os.stat(folder)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False


def _claim_of(path: str) -> tuple[str, str]:
    """Return the claimed folder that holds `path` on the same disk, and this process's subfolder for it;
    else ("", "")."""
    parent = os.path.realpath(os.path.dirname(path)) + os.sep
    folder, subfolder = max(
        (pair for pair in CLAIMED.items() if parent.startswith(pair[0] + os.sep)), default=("", "")
    )
    with contextlib.suppress(OSError):
        if subfolder and os.stat(parent).st_dev != os.stat(subfolder).st_dev:  # another disk is mounted there
            return "", ""
    return folder, subfolder


@contextlib.contextmanager
def raising_taken_over(path: str) -> Iterator[None]:
    """Raise TakenOver in place of an OSError inside `with` if this process had claimed the folder of `path`
    and has lost it."""
    try:
        yield
    except OSError:
        folder, subfolder = _claim_of(path)
        if subfolder and _is_missing(subfolder):
            raise TakenOver(folder) from None
        raise


def temporary_path(path: str) -> str:
    """Return a file's name during writing: in this process's subfolder if it has claimed the folder,
    else next to `path`."""
    folder, subfolder = _claim_of(path)
    if not subfolder:
        return path + TEMPORARY
    relative_path = os.path.relpath(
        os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path)), folder
    )
    return os.path.join(subfolder, relative_path.replace(os.sep, "+") + TEMPORARY)


def unfinished_files(path: str) -> list[str]:
    """Return the files, beside `path` or in a start's subfolder,
    that were written to become `path` and not yet renamed."""
    folder, name = os.path.split(path)
    candidates = [path + TEMPORARY]
    for pattern in (".start-*", os.path.join(".start-*", ".*")):
        candidates += sorted(
            glob.glob(os.path.join(glob.escape(folder), pattern, glob.escape(name + TEMPORARY)))
        )
    return list(filter(os.path.exists, candidates))


def write_atomically(path: str, content: Union[bytes, memoryview]) -> None:
    """Write a file so that its name has either all of `content` or what it had before,
    even after a power cut."""
    write_aside(path, content)
    with _discarding_on_error(path):
        give_name(path)


def write_aside(path: str, content: Union[bytes, memoryview]) -> None:
    """Write a file under its temporary name and flush it to the disk.

    If that fails it is removed, as the disk may be full.
    """
    with raising_taken_over(path), _discarding_on_error(path), create(temporary_path(path)) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def _discarding_on_error(path: str) -> Iterator[None]:
    """Delete the temporary file of `path` if the block raises an error."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary_path(path))
        raise


def give_name(path: str) -> None:
    """Give the file that write_aside() has written the name `path`, in place of a file that has this name."""
    with raising_taken_over(path):
        os.replace(temporary_path(path), path)
    # some mounted stores cannot; a manifest's digest still tells an incomplete file
    with contextlib.suppress(OSError):
        folder = os.open(os.path.dirname(path) or ".", os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def refuse_link(path: str) -> None:
    """Raise UserError if `path` is a link, which another user may have planted."""
    if os.path.islink(path):
        raise UserError(f"{path} is a link, which is not followed when data are fetched: delete it")


def create(path: str) -> BinaryIO:
    """Create a file, to write and read.

    A file that has its name is removed, so that no link that was planted is followed.
    """
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666), "w+b")


def write_at(file: int, content: Union[bytes, memoryview], offset: int) -> None:
    """Write all of the content to the descriptor `file`, from this byte offset on."""
    remaining = memoryview(content)
    while remaining:
        written = os.pwrite(file, remaining, offset)
        offset += written
        remaining = remaining[written:]


def append(file: io.RawIOBase, content: Union[bytes, memoryview]) -> None:
    """Append all of the content; if that fails, cut the file back to its size before and raise the error."""
    size = file.seek(0, os.SEEK_END)
    remaining = memoryview(content)
    try:
        while remaining:
            remaining = remaining[file.write(remaining) :]
    except OSError:
        with contextlib.suppress(OSError):
            file.truncate(size)
        raise


def drop_partial_line(file: io.FileIO) -> None:
    """Drop the last line if it has no line end, as after a kill,
    so that the next line is not appended to it."""
    file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
    if file.read(1) not in (b"", b"\n"):
        file.seek(0)
        file.truncate(file.readall().rfind(b"\n") + 1)


drop_half_a_line = drop_partial_line  # its name in copies of jobs/speedrun.py of 0.3.0


def open_regular(path: str) -> BinaryIO:
    """Open a regular file to read.

    Raises OSError for anything else: a pipe might block, and a device might never end.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise OSError(errno.EINVAL, "it is not a regular file", path)


def contents(path: str) -> bytes:
    """Return the bytes of a regular file; OSError for anything else."""
    with open_regular(path) as file:
        return file.read()


def read_json_dict(path: str) -> dict[str, Any]:
    """Return the JSON object in an optional file; {} if it is missing, damaged or holds something else."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        parsed = json.loads(contents(path))
        if isinstance(parsed, dict):
            return parsed
    return {}


def sha256(path: str) -> str:
    """Return the SHA-256 of a regular file's bytes, in hex."""
    digest = hashlib.sha256()
    with open_regular(path) as file:
        while content := file.read(MIB):
            digest.update(content)
    return digest.hexdigest()


def remove(path: str) -> None:
    """Remove the file if it exists.

    Raises TakenOver if this process had claimed the folder and has lost it.
    """
    subfolder = _claim_of(path)[1]
    moved_path = os.path.join(subfolder, f"removed-{threading.get_ident()}")
    with raising_taken_over(path):
        try:
            if subfolder:
                os.replace(path, moved_path)
            os.unlink(moved_path if subfolder else path)
        except FileNotFoundError:
            if subfolder:
                os.stat(subfolder)  # raises if it is the subfolder that is missing


def replace_with_copy(path: str, flags: int = 0) -> io.FileIO:
    """Replace a file with its copy and return the copy, open; earlier starts still write to the original.

    The copy is empty if `path` was not a regular file.
    """
    copy_path = temporary_path(path)
    with raising_taken_over(path), _discarding_on_error(path):
        file = io.FileIO(
            os.open(copy_path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | flags, 0o666), "r+b"
        )
        if os.path.isfile(path) and not os.path.islink(path):
            with open_regular(path) as original:
                while content := original.read(MIB):
                    append(file, content)
        os.fsync(file.fileno())
        os.replace(copy_path, path)
    return file


def create_scratch_folder() -> str:
    """Create a temporary folder for this process and its forks,
    and remove those that killed processes have left.

    The lock on a folder ends with the last fork of its process. The folder's name holds a digest of the
    host's name, because on a disk that hosts share, one host may not see the locks of another.
    """
    prefix = f"anyrank-run-{hashlib.sha256(socket.gethostname().encode()).hexdigest()[:6]}-"
    for earlier in glob.glob(os.path.join(glob.escape(tempfile.gettempdir()), f"{prefix}*")):
        with contextlib.suppress(OSError):
            descriptor = os.open(earlier, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(descriptor).st_uid == os.getuid():
                    shutil.rmtree(earlier, ignore_errors=True)
            finally:
                os.close(descriptor)
    while True:
        folder = tempfile.mkdtemp(prefix=prefix)
        with contextlib.suppress(OSError):  # another start has just removed it, or this disk has no locks
            # open, and so locked, until the process ends
            fcntl.flock(os.open(folder, os.O_RDONLY), fcntl.LOCK_EX)
        if os.path.isdir(folder):
            return folder
