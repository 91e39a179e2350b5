"""Reading untrusted archives and pickles: nothing in them is executed, and nothing is written outside the folder.

tarfile's own filters have been bypassed more than once and a pickle can execute any code, so neither is trusted here: the
archive may hold only plain files with the expected names, and folders, which are ignored; the pickle only the opcodes of a
dictionary of lists, byte strings and one array of uint8.
"""

import gzip
import io
import json
import os
import pickle
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import TrainingFailed, UserError, is_of_the_system, one_line
from common.files import MIB, open_regular

NOTE = ".archive.json"  # file in an unpacked folder that identifies its archive


class _Bounded:
    """A stream of at most `limit` bytes, so that neither an archive bomb nor a giant header fills the memory."""

    def __init__(self, stream, limit):
        self._stream, self._left = stream, limit

    def read(self, size):
        content = self._stream.read(min(size, self._left + 1))
        if len(content) > self._left:
            raise ValueError("it unpacks to more than the data set can hold")
        self._left -= len(content)
        return content


def is_unpacked(archive: str, folder: str) -> bool:
    """Whether unpack() made the folder from this archive, whose size and time have not changed since."""
    try:
        return Path(folder, NOTE).read_text() == _identity(archive, os.stat(archive))
    except (OSError, ValueError):
        return False


def _identity(archive, status):
    return json.dumps([os.path.realpath(archive), status.st_size, status.st_mtime_ns])


def unpack(archive: str, folder: str, names: list[str], max_bytes: int, may_have: Sequence[str] = ()) -> None:
    """Unpack the files `names` of a .tar.gz into `folder`, which appears whole or not at all and replaces an earlier one. The
    archive may also have the files `may_have`; any other file is an error."""
    parent = os.path.dirname(os.path.abspath(folder))
    os.makedirs(parent, exist_ok=True)
    unfinished = tempfile.mkdtemp(prefix=".unpacking-", dir=parent)
    try:
        with open_regular(archive) as file, gzip.open(file) as stream:
            Path(unfinished, NOTE).write_text(_identity(archive, os.fstat(file.fileno())))
            bounded = _Bounded(stream, max_bytes)
            written = _write_members(bounded, unfinished, {*names, *may_have})
            while rest := bounded.read(MIB):  # tarfile stops before gzip's checksum, and after its own end there are only zeros
                if any(rest):
                    raise ValueError("it goes on after its end")
        missing = sorted(set(names) - written)
        if missing:
            raise ValueError(f"it lacks {', '.join(missing)}")
        if os.path.isdir(folder):
            os.rename(folder, os.path.join(unfinished, ".replaced"))
        os.rename(unfinished, folder)
        shutil.rmtree(os.path.join(folder, ".replaced"), ignore_errors=True)
    except (tarfile.TarError, EOFError, OSError, ValueError, RecursionError, zlib.error) as error:
        if is_of_the_system(error):
            raise TrainingFailed(f"{archive} cannot be unpacked: {one_line(error)}; mend that and start again") from None
        raise UserError(f"{archive} cannot be unpacked: {one_line(error)}; delete it and fetch it again") from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _write_members(stream: Any, folder, names):
    written = set()
    with tarfile.open(fileobj=stream, mode="r|") as archive:
        for member in archive:
            if member.isdir():
                continue
            path, name = os.path.split(member.name)
            if not member.isreg() or member.issparse():
                raise ValueError(f"{one_line(member.name)[:80]!r} in it is not a plain file")
            if name not in names or name in written or path.count("/") or path in ("..", "."):
                raise ValueError(f"{one_line(member.name)[:80]!r} in it does not belong to the data set, or is there twice")
            content: Any = archive.extractfile(member)
            with open(os.path.join(folder, name), "xb") as file:
                shutil.copyfileobj(content, file)
            written.add(name)
    return written


class _Array:
    """Replaces numpy's array while unpickling: builds it only if it is plain uint8."""

    array = None

    def __setstate__(self, state):
        _version, shape, dtype, fortran, data = state
        if not isinstance(dtype, _Dtype) or fortran is not False or type(data) is not bytes:
            raise pickle.UnpicklingError("an array that is not plain uint8")
        self.array = np.frombuffer(data, np.uint8).reshape(shape)


class _Dtype:
    def __setstate__(self, state):
        pass  # byte order and alignment, which uint8 does not have


def _reconstruct(*_arguments):
    return _Array()


def _dtype(name, *_flags):
    if name not in (b"u1", "u1"):
        raise pickle.UnpicklingError("an array that is not uint8")
    return _Dtype()


class _BatchUnpickler(pickle._Unpickler):
    """Accepts only the opcodes and names that the original batches use. It is written in Python and keeps its memo in a dict;
    the unpickler in C allocates memory up to the largest memo index in the file."""

    _OPCODES = [
        pickle.PROTO, pickle.STOP, pickle.MARK, pickle.EMPTY_DICT, pickle.SETITEM, pickle.SETITEMS,
        pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS, pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1,
        pickle.TUPLE2, pickle.TUPLE3, pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BININT, pickle.BININT1,
        pickle.BININT2, pickle.BINSTRING, pickle.SHORT_BINSTRING, pickle.BINPUT, pickle.LONG_BINPUT,
        pickle.BINGET, pickle.LONG_BINGET, pickle.GLOBAL, pickle.REDUCE, pickle.BUILD,
    ]  # fmt: skip
    dispatch = {opcode[0]: pickle._Unpickler.dispatch[opcode[0]] for opcode in _OPCODES}

    _NAMES = {
        ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
        ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
        ("numpy", "ndarray"): None,
        ("numpy", "dtype"): _dtype,
    }

    def find_class(self, module, name):
        if (module, name) not in self._NAMES:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return self._NAMES[module, name]


def read_batch(path: str) -> tuple[np.ndarray, np.ndarray]:
    """Return (images uint8 (N, 3, 32, 32), labels int64 (N,)) of a CIFAR-10 file (Python version); UserError if it is none."""
    with open(path, "rb") as file:
        content = file.read(64 * 2**20)
    try:
        batch = _BatchUnpickler(io.BytesIO(content), encoding="bytes").load()
        images, labels = batch[b"data"].array, batch[b"labels"]
        if images.ndim != 2 or images.shape[1] != 3 * 32 * 32 or len(images) == 0:
            raise ValueError(f"its data has shape {images.shape}, not (N, 3072)")
        if type(labels) is not list or len(labels) != len(images):
            raise ValueError(f"{len(images)} images but {len(labels)} labels")
        if any(type(label) is not int or not 0 <= label < 10 for label in labels):
            raise ValueError("a label is not in 0..9")
    except Exception as error:  # a damaged pickle can raise anything
        reason = f"it lacks {error}" if isinstance(error, KeyError) else error
        raise UserError(f"{path} is not a CIFAR-10 batch: {one_line(reason)[:200]}; fetch the data set again") from None
    return images.reshape(-1, 3, 32, 32), np.asarray(labels, dtype=np.int64)
