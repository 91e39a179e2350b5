"""Writing a file so that it exists under its name whole, or not at all."""

import contextlib
import os
from typing import Union

MIB = 1 << 20
TEMPORARY = ".unfinished"  # the ending of a file that is being written


def write_atomically(path: str, content: Union[bytes, memoryview]) -> None:
    """The file exists under its name whole or not at all, even after a power cut."""
    write_aside(path, content)
    give_name(path)


def write_aside(path: str, content: Union[bytes, memoryview]) -> None:
    """Write the whole file under its temporary name; where that fails, nothing of it stays on the disk, which may be full."""
    try:
        with open(path + TEMPORARY, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(path + TEMPORARY)
        raise


def give_name(path: str) -> None:
    """The file that write_aside() wrote appears under its name, and replaces what had it."""
    os.replace(path + TEMPORARY, path)
    folder = os.open(os.path.dirname(path) or ".", os.O_RDONLY)
    try:
        os.fsync(folder)
    except OSError:
        pass  # some mounted stores cannot; the digest in a manifest still tells an incomplete file
    finally:
        os.close(folder)


def remove(path: str) -> None:
    if os.path.exists(path):
        os.unlink(path)
