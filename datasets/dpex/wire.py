"""Serialization in datasets.dpex: a short pickle, then the bytes of every tensor and array, received into ordinary memory.

Batches of a process of this machine are, where the system allows it, copied by the receiver out of that process's memory.
"""

import io
import os
import pickle
import site
import socket
import struct
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from typing import Any, Callable, NamedTuple

import numpy as np

LENGTH = struct.Struct("!Q")


class PackedBatch(NamedTuple):
    parts: list  # the pickle, and the buffers that it leaves out
    modules: set[str]  # names of the modules that unpickling needs


def pack(value: object) -> PackedBatch:
    import torch
    from ray import cloudpickle

    class Pickler(cloudpickle.Pickler):
        def reducer_override(self, thing: Any) -> Any:
            module = getattr(thing, "__module__", None) if isinstance(thing, NAMED) else type(thing).__module__
            modules.add(module)
            if type(thing) in (torch.TypedStorage, torch.UntypedStorage):  # torch would embed a file of torch.save()
                content = torch.empty(0, dtype=torch.uint8).set_(getattr(thing, "_untyped_storage", thing))
                return _stored, (content.numpy(), getattr(thing, "dtype", torch.uint8))
            if type(thing) is torch.Tensor and _is_a_part(thing):
                return thing.clone().__reduce_ex__(5)
            return super().reducer_override(thing)

    modules = set()
    buffers = []
    file = io.BytesIO()
    Pickler(file, protocol=5, buffer_callback=buffers.append).dump(value)
    return PackedBatch([file.getvalue(), *(buffer.raw() for buffer in buffers)], modules)


NAMED = (type, type(pack))  # classes and functions have a __module__ of their own; for other objects the class's counts


def unpack(parts: Sequence) -> Any:
    """Unpickle the parts of a packed value. They must come from a process of this job, because unpickling runs code."""
    return pickle.loads(parts[0], buffers=parts[1:])


def _is_a_part(tensor: Any) -> bool:
    """Return whether the tensor is a part of a larger storage, all of which would be pickled."""
    plain = str(tensor.layout) == "torch.strided" and not tensor.is_nested
    return plain and tensor.nbytes < tensor.untyped_storage().nbytes()


def _stored(content: object, dtype: object) -> Any:
    import torch

    return torch.TypedStorage(wrap_storage=torch.from_numpy(content).untyped_storage(), dtype=dtype, _internal=True)


def source_packages(modules: Iterable[str]) -> set[str]:
    """Return the folders of the modules' top-level packages that are not installed, but part of the user's program."""
    installed = (*site.getsitepackages(), sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
    folders = set()
    for name in {str(module).split(".")[0] for module in modules if module}:
        for path in getattr(sys.modules.get(name), "__path__", []):
            if not path.startswith(installed) and os.path.isdir(path):  # a package in a bundle has no folder
                folders.add(path)
    return folders


def send(connection: socket.socket, message: object, parts: Sequence = ()) -> None:
    """Send a message, and after it the `parts` of a packed value, to a process of this user on this machine."""
    header = pickle.dumps((message, [len(part) for part in parts]))
    connection.sendall(LENGTH.pack(len(header)) + header)
    for part in parts:
        connection.sendall(part)


def receive(connection: socket.socket) -> tuple[Any, list[memoryview]]:
    """Wait for the next message and return it with its parts; EOFError if the connection was closed."""
    (length,) = LENGTH.unpack(_read(connection, LENGTH.size))
    message, lengths = pickle.loads(_read(connection, length))
    return message, [_read(connection, length) for length in lengths]


def _read(connection: socket.socket, length: int) -> Any:
    return _filled(length, lambda missing: connection.recv_into(missing, 0, socket.MSG_WAITALL))


def _filled(length: int, read_into: Callable[[Any], int]) -> Any:
    content = np.empty(length, np.uint8).data
    missing = content
    while len(missing):
        arrived = read_into(missing)
        if not arrived:
            raise EOFError
        missing = missing[arrived:]
    return content


class Left(NamedTuple):
    """The parts of a packed value that stay in the memory of a process until their receiver says that it has copied them."""

    process: int
    places: list[tuple[int, int]]  # (address, length)


def leave(parts: Sequence[np.ndarray]) -> Left:
    return Left(os.getpid(), [(part.ctypes.data, part.nbytes) for part in parts])


def copy(left: Left) -> list[memoryview]:
    """Return copies of the parts; OSError or EOFError if the process has ended or does not show its memory."""
    parts = []
    with memory_of(left.process) as memory:
        for address, length in left.places:
            memory.seek(address)
            parts.append(_filled(length, memory.readinto))
    return parts


def memory_of(process: int) -> io.FileIO:
    """Open the memory of a process; OSError if it has ended or the system does not allow it."""
    return io.FileIO(f"/proc/{process}/mem")
