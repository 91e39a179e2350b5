"""Reading untrusted archives and pickles: nothing in them is executed,
and nothing is written outside the folder.

Modules that read them for Python have been bypassed more than once, and a pickle can execute any code, so
none is trusted here: an archive may hold only plain files whose names lead below its folder, and folders,
which are ignored; the pickle only the opcodes of a dictionary of lists, byte strings and one array of uint8.
"""

import contextlib
import gzip
import io
import json
import os
import pickle
import shutil
import socket
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Callable, ClassVar, Optional

import numpy as np

from common.address import is_fetchable_name
from common.errors import TrainingFailed, UserError, is_system_error, one_line
from common.files import MIB, open_regular
from common.weights.unpickler import PlainUnpickler, opcodes

NOTE = ".archive.json"  # file in an unpacked folder that identifies its archive
BLOCK = tarfile.BLOCKSIZE
MAX_HEADER_BYTES = 1 << 16  # bytes that say more of the next file of a tar
MAX_FILE_BYTES = 256 << 20  # of a file in an archive

Member = tuple[str, int, bytes]  # a file's name, where it begins in a tar, and what is in it
IsWanted = Callable[[str], object]  # whether the content of a file is wanted; it may raise a ValueError


class _Bounded:
    """A stream of at most `limit` bytes, so that neither an archive bomb nor a giant header fills the
    memory."""

    def __init__(self, stream: Any, limit: float) -> None:
        self._stream = stream
        self._remaining = limit

    def read(self, size: int) -> bytes:
        content = self._stream.read(min(size, self._remaining + 1))
        if len(content) > self._remaining:
            raise ValueError("it unpacks to more than the data set can hold, or the disk")
        self._remaining -= len(content)
        return content


def is_unpacked(archive: str, folder: str) -> bool:
    """Return whether unpack() made the folder from this archive,
    whose size and time have not changed since."""
    try:
        return Path(folder, NOTE).read_text() == _identity(archive, os.stat(archive))
    except (OSError, ValueError):
        return False


def _identity(archive: str, status: os.stat_result) -> str:
    return json.dumps([os.path.basename(archive), status.st_size, status.st_mtime_ns])


def unpack(
    archive: str, folder: str, place_of: Callable[[str], Optional[str]], max_bytes: int,
    needed: Collection[str] = (), count: Callable[[], object] = lambda: None,
) -> None:  # fmt: skip
    """Unpack a .zip, .tar or .tar.gz into `folder`, which appears whole or not at all and replaces an earlier
    one.

    `place_of(name)`: where a file belongs below `folder`, or None to leave it out; a ValueError refuses the
    archive.
    `max_bytes`: of all files. `needed`: places that have to be there. `count()` is called for each file.
    """
    parent, name = os.path.split(os.path.abspath(folder))
    unfinished = os.path.join(parent, f".unpacking-{name}-{socket.gethostname()}")
    shutil.rmtree(unfinished, ignore_errors=True)  # what a kill has left
    os.makedirs(unfinished)
    try:
        with open_regular(archive) as file:
            Path(unfinished, NOTE).write_text(_identity(archive, os.fstat(file.fileno())))
            written = set()
            for name, _, content in _members(file, max_bytes, place_of):
                place = str(place_of(name))
                if place in written:
                    raise ValueError(f"{one_line(name)[:80]!r} is in it twice")
                written.add(place)
                os.makedirs(os.path.dirname(os.path.join(unfinished, place)), exist_ok=True)
                Path(unfinished, place).write_bytes(content)
                count()
        missing = sorted(set(needed) - written)
        if missing:
            raise ValueError(f"it lacks {', '.join(missing)}")
        if not written:
            raise ValueError("it has no file that is wanted")
        if is_unpacked(archive, folder):  # by another node, which reads it already
            return
        if os.path.isdir(folder):
            os.rename(folder, os.path.join(unfinished, ".replaced"))
        os.rename(unfinished, folder)
        shutil.rmtree(os.path.join(folder, ".replaced"), ignore_errors=True)
    except (*DAMAGES, OSError) as error:
        if is_system_error(error):
            raise TrainingFailed(
                f"{archive} cannot be unpacked: {one_line(error)}; mend that and start again"
            ) from None
        raise UserError(
            f"{archive} cannot be unpacked: {one_line(error)[:200]}; make or fetch it again"
        ) from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


# What reading a damaged archive raises.
DAMAGES = (
    tarfile.TarError,
    zipfile.BadZipFile,
    EOFError,
    ValueError,
    RecursionError,
    NotImplementedError,
    zlib.error,
)


def _members(file: BinaryIO, max_bytes: float, is_wanted: IsWanted) -> Iterator[Member]:
    """Return the wanted files of a zip, tar or tar.gz; its first bytes say which it is."""
    magic = file.read(2)
    text = (magic + file.read(200)).removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    file.seek(0)
    if text.startswith((b"<!doctype html", b"<html", b"<?xml")):
        raise ValueError("it is a web page, as a server sends it that wants a login, and no archive")
    if magic == b"PK":
        return _zipped(file, max_bytes, is_wanted)
    return in_tar(_Bounded(gzip.open(file) if magic == b"\x1f\x8b" else file, max_bytes), is_wanted)


def in_tar(stream: Any, is_wanted: IsWanted) -> Iterator[Member]:
    """Read a tar to its end, and yield its files that are wanted.

    Unlike tarfile, which takes a damaged header for the end, it accounts for every byte. A ValueError or
    TarError refuses all but plain files and folders.
    """
    position = 0
    extension = {}

    def take(size: int) -> bytes:
        nonlocal position
        content = stream.read(size)
        if len(content) < size:
            raise ValueError("it is cut off")
        position += size
        return content

    while (header := take(BLOCK)).count(0) < BLOCK:
        member = tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
        if member.type in (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME):
            if not 0 <= member.size <= MAX_HEADER_BYTES:
                raise ValueError("one of its headers is too long")
            extra_header = take(member.size + -member.size % BLOCK)[: member.size]
            if member.type == tarfile.XHDTYPE:
                extension = _records(extra_header)
            elif member.type == tarfile.GNUTYPE_LONGNAME:
                extension = {"path": extra_header.rstrip(b"\0").decode("utf-8", "surrogateescape")}
            continue
        name = _clean_name(extension.get("path", member.name))
        size = int(extension.get("size", member.size))
        is_sparse = "GNU.sparse.major" in extension or "GNU.sparse.size" in extension
        extension = {}
        if member.isdir():
            continue
        if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or is_sparse or size < 0:
            raise ValueError(f"{one_line(name)[:80]!r} in it is not a plain file")
        is_kept = _is_kept(name, size, is_wanted)
        start = position
        content = b""
        if is_kept:
            content = take(size)
        else:
            for remaining in range(size, 0, -MIB):
                take(min(MIB, remaining))
        take(-size % BLOCK)
        if is_kept:
            yield name, start, content
    while trailing := stream.read(MIB):
        if trailing.count(0) < len(trailing):
            raise ValueError("it goes on after its end")


def _records(header: bytes) -> dict[str, Any]:
    """Return {key: value} of the header that says more of the next file.

    Each record is b"LENGTH KEY=VALUE\\n".
    """
    records = {}
    position = 0
    while position < len(header):
        length = int(header[position : header.index(b" ", position)])
        record = header[position : position + length]
        key, equals, value = record.partition(b" ")[2].partition(b"=")
        if length < 5 or len(record) < length or not equals or not record.endswith(b"\n"):
            raise ValueError("one of its headers is damaged")
        records[key.decode("utf-8", "replace")] = value[:-1].decode("utf-8", "surrogateescape")
        position += length
    return records


def _clean_name(name: str) -> str:
    return name.removeprefix("./").replace("//", "/")


def _is_kept(name: str, size: int, is_wanted: IsWanted) -> bool:
    if not is_fetchable_name(name):
        raise ValueError(f"{one_line(name)[:80]!r} in it is no name of a file below a folder")
    if not is_wanted(name):
        return False
    if size > MAX_FILE_BYTES:
        raise ValueError(f"{one_line(name)[:80]!r} in it has more than {MAX_FILE_BYTES // MIB} MiB")
    return True


def _zipped(file: BinaryIO, max_bytes: float, is_wanted: IsWanted) -> Iterator[Member]:
    """Yield the files of a zip that are wanted. A ValueError refuses all but plain files and folders."""
    with zipfile.ZipFile(file) as archive:
        if sum(member.file_size for member in archive.infolist()) > max_bytes:
            raise ValueError("it unpacks to more than the data set can hold, or the disk")
        for name, member in zip(_names_in_zip(archive), archive.infolist()):
            if name.endswith("/"):
                continue
            is_plain = (
                stat.S_IFMT(member.external_attr >> 16) in (0, stat.S_IFREG) and not member.flag_bits & 1
            )
            if not is_plain or member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                # others know no limit
                raise ValueError(
                    f"{one_line(name)[:80]!r} in it is no plain file, or is encrypted, or in a form of "
                    "few programs"
                )
            if _is_kept(name, member.file_size, is_wanted):
                with archive.open(member) as stream:
                    content = stream.read(member.file_size)
                if len(content) < member.file_size:
                    raise ValueError("it is cut off")
                yield name, 0, content


def _names_in_zip(archive: zipfile.ZipFile) -> list[str]:
    """Return the names of the files.

    Those that are not said to be UTF-8 are all that or, of Windows in China, all GB 18030.
    """
    names = [member.filename for member in archive.infolist()]
    undeclared = [number for number, member in enumerate(archive.infolist()) if not member.flag_bits & 0x800]
    for code in ("utf-8", "gb18030"):
        with contextlib.suppress(UnicodeError):
            for number, name in zip(
                undeclared, [names[number].encode("cp437").decode(code) for number in undeclared]
            ):
                names[number] = name
            break
    return [_clean_name(name.replace("\\", "/")) for name in names]


class _Array:
    """Replaces numpy's array while unpickling: builds it only if it is plain uint8."""

    array = None

    def __setstate__(self, state: Any) -> None:
        _version, shape, dtype, fortran, data = state
        if not isinstance(dtype, _Dtype) or fortran is not False or type(data) is not bytes:
            raise pickle.UnpicklingError("an array that is not plain uint8")
        self.array = np.frombuffer(data, np.uint8).reshape(shape)


class _Dtype:
    def __setstate__(self, state: object) -> None:
        pass  # byte order and alignment, which uint8 does not have


def _reconstruct(*_arguments: object) -> _Array:
    return _Array()


def _dtype(name: object, *_flags: object) -> _Dtype:
    if name not in (b"u1", "u1"):
        raise pickle.UnpicklingError("an array that is not uint8")
    return _Dtype()


class _BatchUnpickler(PlainUnpickler):
    """Accepts only the opcodes and names that the original batches use."""

    allowed = {
        ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
        ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
        ("numpy", "ndarray"): None,
        ("numpy", "dtype"): _dtype,
    }
    dispatch: ClassVar[Any] = {
        **PlainUnpickler.dispatch,
        **opcodes(
            pickle.SETITEM, pickle.SETITEMS, pickle.APPEND, pickle.APPENDS, pickle.REDUCE, pickle.BUILD
        ),
    }


def read_batch(path: str) -> tuple[np.ndarray, np.ndarray]:
    """Return (images uint8 (N, 3, 32, 32), labels int64 (N,)) of a CIFAR-10 file (Python version);
    UserError if it is none."""
    with open(path, "rb") as file:
        content = file.read(64 * 2**20)
    try:
        batch = _BatchUnpickler(io.BytesIO(content), encoding="bytes").load()
        images = batch[b"data"].array
        labels = batch[b"labels"]
        if images.ndim != 2 or images.shape[1] != 3 * 32 * 32 or len(images) == 0:
            raise ValueError(f"its data has shape {images.shape}, not (N, 3072)")
        if type(labels) is not list or len(labels) != len(images):
            raise ValueError(f"{len(images)} images but {len(labels)} labels")
        if any(type(label) is not int or not 0 <= label < 10 for label in labels):
            raise ValueError("a label is not in 0..9")
    except Exception as error:  # a damaged pickle can raise anything
        reason = f"it lacks {error}" if isinstance(error, KeyError) else error
        raise UserError(
            f"{path} is not a CIFAR-10 batch: {one_line(reason)[:200]}; fetch the data set again"
        ) from None
    return images.reshape(-1, 3, 32, 32), np.asarray(labels, dtype=np.int64)
