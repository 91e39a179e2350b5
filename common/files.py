"""Atomic files: each is whole under its name or not there. Safe access where somebody else may have planted a file.

A frozen machine may continue hours later, between a check and the write after it. A start that claims a folder therefore makes
a subfolder of its own. It writes each file there and then renames it to its place; it also moves a file there to delete it. The
next start takes this subfolder away, so all later writes of the earlier start fail and change nothing.
"""

import contextlib
import errno
import fcntl
import glob
import hashlib
import io
import os
import secrets
import shutil
import socket
import stat
import tempfile
import threading
from collections.abc import Iterator
from typing import BinaryIO, Union

from common.errors import UserError

MIB = 1 << 20
TEMPORARY = ".unfinished"  # the ending of a file that is being written
CLAIMED: dict[str, str] = {}  # {a folder that this process has claimed: its own in there}


class TakenOver(UserError):
    """Another start has claimed the folder, or it is gone. A UserError, as a restart would end that other start."""

    def __init__(self, place: str):
        gone = [folder for folder, own in CLAIMED.items() if _is_gone(own)]
        moved = any(not os.path.isdir(folder) or not os.listdir(folder) for folder in gone)  # another start leaves something
        why = "the folder was moved or deleted" if moved else "another start of this run writes there by now"
        super().__init__(f"{place}: {why}, so this one ends")


def claim(folder: str, name: str = "start", also: str = "") -> list[str]:
    """From here on this process writes in the folder, and whoever has claimed it under this name before cannot any more.

    `also`: another folder that goes with it. Returns what the one before had not finished, until tidy() removes it.
    """
    folder = os.path.realpath(folder)
    own = os.path.join(folder, f".{name}-{secrets.token_hex(6)}")
    os.mkdir(own)
    for other in glob.glob(os.path.join(glob.escape(folder), f".{name}-*")):
        if other != own:
            try:
                os.rename(other, os.path.join(own, os.path.basename(other)))
            except OSError:  # yet another start has been faster, or this disk renames no folders
                shutil.rmtree(other, ignore_errors=True)
    CLAIMED[folder] = own
    if also and os.stat(also).st_dev == os.stat(own).st_dev:
        CLAIMED[os.path.realpath(also)] = own  # at one moment, so that of two starts one has both
    elif also:
        claim(also, name)
    found = [os.path.join(where, name) for where, _, names in os.walk(own) for name in names]
    return sorted(path for path in found if path.endswith(TEMPORARY))


def tidy() -> None:
    """Remove what claim() has taken away."""
    for own in CLAIMED.values():
        for other in glob.glob(os.path.join(glob.escape(own), ".*")):
            shutil.rmtree(other, ignore_errors=True)


def release() -> None:
    """What this process has claimed; the folders of its own go."""
    for own in CLAIMED.values():
        shutil.rmtree(own, ignore_errors=True)
    CLAIMED.clear()


def taken_over() -> bool:
    """Whether another start has claimed what this one had."""
    return any(map(_is_gone, CLAIMED.values()))


def _is_gone(folder: str) -> bool:
    """Whether the folder is gone; False where the disk fails."""
    try:
        os.stat(folder)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        pass
    return False


def _own(path: str) -> tuple[str, str]:
    """Return (the folder that this process has claimed and that holds the path, its own in there), or empty."""
    where = os.path.realpath(os.path.dirname(path)) + os.sep
    folder, own = max((pair for pair in CLAIMED.items() if where.startswith(pair[0] + os.sep)), default=("", ""))
    with contextlib.suppress(OSError):
        if own and os.stat(where).st_dev != os.stat(own).st_dev:  # another disk is mounted there
            return "", ""
    return folder, own


@contextlib.contextmanager
def if_ours(path: str) -> Iterator[None]:
    """TakenOver in place of the error that an operation on the path ends with, where that is why."""
    try:
        yield
    except OSError:
        folder, own = _own(path)
        if own and _is_gone(own):
            raise TakenOver(folder) from None
        raise


def temporary(path: str) -> str:
    """Return where a file is until it is whole."""
    folder, own = _own(path)
    if not own:
        return path + TEMPORARY
    inside = os.path.relpath(os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path)), folder)
    return os.path.join(own, inside.replace(os.sep, "+") + TEMPORARY)


def unfinished(path: str) -> list[str]:
    """Return where this file may be, of whichever start, while it has not its name yet."""
    folder, name = os.path.split(path)
    places = [path + TEMPORARY]
    for inside in (".start-*", os.path.join(".start-*", ".*")):
        places += sorted(glob.glob(os.path.join(glob.escape(folder), inside, glob.escape(name + TEMPORARY))))
    return list(filter(os.path.exists, places))


def write_atomically(path: str, content: Union[bytes, memoryview]) -> None:
    """The file exists under its name whole or not at all, even after a power cut."""
    write_aside(path, content)
    with _or_nothing(path):
        give_name(path)


def write_aside(path: str, content: Union[bytes, memoryview]) -> None:
    """Write the whole file under its temporary name; where that fails, nothing of it stays on the disk, which may be full."""
    with if_ours(path), _or_nothing(path), create(temporary(path)) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def _or_nothing(path):
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary(path))
        raise


def give_name(path: str) -> None:
    """The file that write_aside() wrote appears under its name, and replaces what had it."""
    with if_ours(path):
        os.replace(temporary(path), path)
    with contextlib.suppress(OSError):  # some mounted stores cannot; the digest in a manifest still tells an incomplete file
        folder = os.open(os.path.dirname(path) or ".", os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def create(path: str) -> BinaryIO:
    """Create a new file, to write and read. What has its name is removed: a link that was planted there is not followed."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666), "w+b")


def append(file: io.RawIOBase, content: Union[bytes, memoryview]) -> None:
    """Append all of it, or nothing where that fails."""
    size, left = file.seek(0, os.SEEK_END), memoryview(content)
    try:
        while left:
            left = left[file.write(left) :]
    except OSError:
        with contextlib.suppress(OSError):
            file.truncate(size)
        raise


def drop_half_a_line(file: io.FileIO) -> None:
    """Drop the last line, which a kill or a lost machine may have cut off: the next one would be appended to it."""
    end = file.seek(0, os.SEEK_END)
    if end and file.seek(end - 1) and file.read(1) != b"\n":
        file.seek(0)
        file.truncate(file.readall().rfind(b"\n") + 1)


def open_regular(path: str) -> BinaryIO:
    """Open a file to read; OSError for a pipe, which would block until somebody writes, or a device, which may never end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise OSError(errno.EINVAL, "it is not a regular file", path)


def sha256(path: str) -> str:
    digest = hashlib.sha256()
    with open_regular(path) as file:
        while content := file.read(MIB):
            digest.update(content)
    return digest.hexdigest()


def remove(path: str) -> None:
    """Remove the file, if it is there."""
    own = _own(path)[1]
    aside = os.path.join(own, f"removed-{threading.get_ident()}")
    with if_ours(path):
        try:
            if own:
                os.replace(path, aside)
            os.unlink(aside if own else path)
        except FileNotFoundError:
            if own:
                os.stat(own)  # an error where it is that which is not there


def own_copy(path: str, flags: int = 0) -> io.FileIO:
    """Return the file, made if missing, to read and write; whoever opened it before no longer has the one of this name."""
    place = temporary(path)
    with if_ours(path), _or_nothing(path):
        file = io.FileIO(os.open(place, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | flags, 0o666), "r+b")
        if os.path.isfile(path) and not os.path.islink(path):
            with open_regular(path) as before:
                while content := before.read(MIB):
                    append(file, content)
        os.fsync(file.fileno())
        os.replace(place, path)
    return file


def scratch_folder() -> str:
    """Create a temporary folder for this process and its forks, and remove those of processes that have been killed.

    Such a process removes nothing itself. The lock on its folder ends with the last of its forks. The folder's name tells the
    host, as not every disk that several hosts share tells one of the locks of another.
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
