"""Files that exist under their name whole or not at all, and reading or writing none that somebody else has planted there."""

import contextlib
import errno
import hashlib
import io
import os
import stat
from typing import BinaryIO, Union

MIB = 1 << 20
TEMPORARY = ".unfinished"  # the ending of a file that is being written


def write_atomically(path: str, content: Union[bytes, memoryview]) -> None:
    """The file exists under its name whole or not at all, even after a power cut."""
    write_aside(path, content)
    with _or_nothing(path):
        give_name(path)


def write_aside(path: str, content: Union[bytes, memoryview]) -> None:
    """Write the whole file under its temporary name; where that fails, nothing of it stays on the disk, which may be full."""
    with _or_nothing(path), create(path + TEMPORARY) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def _or_nothing(path):
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(path + TEMPORARY)
        raise


def give_name(path: str) -> None:
    """The file that write_aside() wrote appears under its name, and replaces what had it."""
    os.replace(path + TEMPORARY, path)
    with contextlib.suppress(OSError):  # some mounted stores cannot; the digest in a manifest still tells an incomplete file
        folder = os.open(os.path.dirname(path) or ".", os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def create(path: str) -> BinaryIO:
    """A new file, to write and read. What has its name goes first: a link that was planted there is not written through."""
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
    """The last one, which a kill or a lost machine may have cut off: the next one would be appended to it."""
    end = file.seek(0, os.SEEK_END)
    if end and file.seek(end - 1) and file.read(1) != b"\n":
        file.seek(0)
        file.truncate(file.readall().rfind(b"\n") + 1)


def open_regular(path: str) -> BinaryIO:
    """A file to read; OSError for a pipe, which would block until somebody writes, or a device, which may never end."""
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
    if os.path.exists(path):
        os.unlink(path)
