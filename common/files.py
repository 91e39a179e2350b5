"""Atomic writes: a file is whole under its name or not there. Safe access where another user may have planted a link or a pipe.

A run may be started again while an earlier start of it is still there, such as on a frozen machine that continues hours later.
Each start therefore makes a subfolder of its own in the folder that it claims. It writes a file there and renames it to its
place, and it moves a file there to delete it. The next start takes this subfolder away, so later writes of the old one fail.
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
CLAIMED: dict[str, str] = {}  # {a folder that this process has claimed: the subfolder through which it writes}


class TakenOver(UserError):
    """The folder was moved, deleted, or claimed by another start. A UserError, as a restart would take it from that start."""

    def __init__(self, place: str):
        gone = [folder for folder, own in CLAIMED.items() if _is_gone(own)]
        moved = any(not os.path.isdir(folder) or not os.listdir(folder) for folder in gone)  # a start leaves its subfolder
        why = "the folder was moved or deleted" if moved else "another start of this run writes there by now"
        super().__init__(f"{place}: {why}, so this one ends")


def claim(folder: str, name: str = "start", also: str = "") -> list[str]:
    """Claim a folder for this process. An earlier one that claimed it by this `name` can no longer write there by this module.

    `also`: a folder to claim with it. Returns unfinished files of earlier starts found in `folder`; they remain until tidy().
    """
    folder = os.path.realpath(folder)
    own = os.path.join(folder, f".{name}-{secrets.token_hex(6)}")
    os.mkdir(own)
    for other in glob.glob(os.path.join(glob.escape(folder), f".{name}-*")):
        if other != own:
            try:
                os.rename(other, os.path.join(own, os.path.basename(other)))
            except OSError:  # a third start was faster, or this disk cannot rename folders
                shutil.rmtree(other, ignore_errors=True)
    CLAIMED[folder] = own
    if also and os.stat(also).st_dev == os.stat(own).st_dev:
        CLAIMED[os.path.realpath(also)] = own  # one subfolder for both, so that one of two starts at a time gets both
    elif also:
        claim(also, name)
    found = [os.path.join(where, name) for where, _, names in os.walk(own) for name in names]
    return sorted(path for path in found if path.endswith(TEMPORARY))


def tidy() -> None:
    """Remove the subfolders of earlier starts, which claim() has moved into the subfolder of this process."""
    for own in CLAIMED.values():
        for other in glob.glob(os.path.join(glob.escape(own), ".*")):
            shutil.rmtree(other, ignore_errors=True)


def release() -> None:
    """Give up all claims of this process, and remove its subfolders."""
    for own in CLAIMED.values():
        shutil.rmtree(own, ignore_errors=True)
    CLAIMED.clear()


def is_taken_over() -> bool:
    """Whether a folder that this process has claimed was moved, deleted, or claimed by another start."""
    return any(map(_is_gone, CLAIMED.values()))


def _is_gone(folder: str) -> bool:
    """Whether the folder no longer exists; False if the disk cannot tell."""
    try:
        os.stat(folder)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        pass
    return False


def _own(path: str) -> tuple[str, str]:
    """Return the claimed folder that holds `path` on the same disk, and this process's subfolder for it; else ("", "")."""
    where = os.path.realpath(os.path.dirname(path)) + os.sep
    folder, own = max((pair for pair in CLAIMED.items() if where.startswith(pair[0] + os.sep)), default=("", ""))
    with contextlib.suppress(OSError):
        if own and os.stat(where).st_dev != os.stat(own).st_dev:  # another disk is mounted there
            return "", ""
    return folder, own


@contextlib.contextmanager
def raising_taken_over(path: str) -> Iterator[None]:
    """Raise TakenOver in place of an OSError inside `with` if this process had claimed the folder of `path` and has lost it."""
    try:
        yield
    except OSError:
        folder, own = _own(path)
        if own and _is_gone(own):
            raise TakenOver(folder) from None
        raise


def temporary(path: str) -> str:
    """Return a file's name during writing: in this process's subfolder if it has claimed the folder, else next to `path`."""
    folder, own = _own(path)
    if not own:
        return path + TEMPORARY
    inside = os.path.relpath(os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path)), folder)
    return os.path.join(own, inside.replace(os.sep, "+") + TEMPORARY)


def unfinished(path: str) -> list[str]:
    """Return the files, beside `path` or in a start's subfolder, that were written to become `path` and not yet renamed."""
    folder, name = os.path.split(path)
    places = [path + TEMPORARY]
    for inside in (".start-*", os.path.join(".start-*", ".*")):
        places += sorted(glob.glob(os.path.join(glob.escape(folder), inside, glob.escape(name + TEMPORARY))))
    return list(filter(os.path.exists, places))


def write_atomically(path: str, content: Union[bytes, memoryview]) -> None:
    """Write a file so that its name has either all of `content` or what it had before, even after a power cut."""
    write_aside(path, content)
    with _or_nothing(path):
        give_name(path)


def write_aside(path: str, content: Union[bytes, memoryview]) -> None:
    """Write a file under its temporary name and flush it to the disk. If that fails it is removed, as the disk may be full."""
    with raising_taken_over(path), _or_nothing(path), create(temporary(path)) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def _or_nothing(path: str) -> Iterator[None]:
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary(path))
        raise


def give_name(path: str) -> None:
    """Give the file that write_aside() has written the name `path`, in place of a file that has this name."""
    with raising_taken_over(path):
        os.replace(temporary(path), path)
    with contextlib.suppress(OSError):  # some mounted stores cannot; a manifest's digest still tells an incomplete file
        folder = os.open(os.path.dirname(path) or ".", os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def refuse_link(path: str) -> None:
    if os.path.islink(path):
        raise UserError(f"{path} is a link, which is not followed when data are fetched: delete it")


def create(path: str) -> BinaryIO:
    """Create a file, to write and read. A file that has its name is removed, so that no link that was planted is followed."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666), "w+b")


def write_at(file: int, content: Union[bytes, memoryview], place: int) -> None:
    """Write all of the content to a file descriptor's file, from this place on."""
    remaining = memoryview(content)
    while remaining:
        written = os.pwrite(file, remaining, place)
        place += written
        remaining = remaining[written:]


def append(file: io.RawIOBase, content: Union[bytes, memoryview]) -> None:
    """Append all of the content; if that fails, cut the file back to its size before and raise the error."""
    size = file.seek(0, os.SEEK_END)
    left = memoryview(content)
    try:
        while left:
            left = left[file.write(left) :]
    except OSError:
        with contextlib.suppress(OSError):
            file.truncate(size)
        raise


def drop_half_a_line(file: io.FileIO) -> None:
    """Drop the last line if it has no line end, as after a kill, so that the next line is not appended to it."""
    file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
    if file.read(1) not in (b"", b"\n"):
        file.seek(0)
        file.truncate(file.readall().rfind(b"\n") + 1)


def open_regular(path: str) -> BinaryIO:
    """Open a regular file to read. Raises OSError for anything else: a pipe might block, and a device might never end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise OSError(errno.EINVAL, "it is not a regular file", path)


def contents(path: str) -> bytes:
    """Return the bytes of a regular file; OSError for anything else."""
    with open_regular(path) as file:
        return file.read()


def read_note(path: str) -> dict[str, Any]:
    """Return the JSON object in a file of ours, which can be done without; {} if it is missing, damaged or of another kind."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        note = json.loads(contents(path))
        if isinstance(note, dict):
            return note
    return {}


def sha256(path: str) -> str:
    digest = hashlib.sha256()
    with open_regular(path) as file:
        while content := file.read(MIB):
            digest.update(content)
    return digest.hexdigest()


def remove(path: str) -> None:
    """Remove the file if it exists. Raises TakenOver if this process had claimed the folder and has lost it."""
    own = _own(path)[1]
    aside = os.path.join(own, f"removed-{threading.get_ident()}")
    with raising_taken_over(path):
        try:
            if own:
                os.replace(path, aside)
            os.unlink(aside if own else path)
        except FileNotFoundError:
            if own:
                os.stat(own)  # raises if it is the subfolder that is missing


def own_copy(path: str, flags: int = 0) -> io.FileIO:
    """Replace a file with a copy, empty if it was no regular file; return the copy, open. Earlier starts keep the original."""
    place = temporary(path)
    with raising_taken_over(path), _or_nothing(path):
        file = io.FileIO(os.open(place, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | flags, 0o666), "r+b")
        if os.path.isfile(path) and not os.path.islink(path):
            with open_regular(path) as before:
                while content := before.read(MIB):
                    append(file, content)
        os.fsync(file.fileno())
        os.replace(place, path)
    return file


def scratch_folder() -> str:
    """Create a temporary folder for this process and its forks, and remove those that killed processes have left.

    The lock on a folder ends with the last fork of its process. The folder's name holds a digest of the host's name, because on
    a disk that hosts share, one host may not see the locks of another.
    """
    prefix = f"anyrank-run-{hashlib.sha256(socket.gethostname().encode()).hexdigest()[:6]}-"
    for other in glob.glob(os.path.join(glob.escape(tempfile.gettempdir()), f"{prefix}*")):
        with contextlib.suppress(OSError):
            file = os.open(other, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(file).st_uid == os.getuid():
                    shutil.rmtree(other, ignore_errors=True)
            finally:
                os.close(file)
    while True:
        folder = tempfile.mkdtemp(prefix=prefix)
        with contextlib.suppress(OSError):  # another start has just removed it, or this disk has no locks
            fcntl.flock(os.open(folder, os.O_RDONLY), fcntl.LOCK_EX)  # open, and so locked, until the process ends
        if os.path.isdir(folder):
            return folder
