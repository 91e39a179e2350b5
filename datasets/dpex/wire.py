"""Serialization in datasets.dpex: a short pickle, then the bytes of every tensor and array,
received into ordinary memory.

Batches of a process of this machine are, where the system allows it, copied by the receiver out of that
process's memory.
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


class PackedValue(NamedTuple):
    parts: list  # the pickle, and the buffers that it leaves out
    modules: set[str]  # names of the modules that unpickling needs


def pack(value: object) -> PackedValue:
    """Pickle a value. The bytes of each tensor and array in it are a part of their own."""
    import torch
    from ray import cloudpickle

    class Pickler(cloudpickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            module = (
                getattr(obj, "__module__", None)
                if isinstance(obj, TYPES_WITH_MODULE)
                else type(obj).__module__
            )
            modules.add(module)
            if type(obj) in (torch.TypedStorage, torch.UntypedStorage):
                # torch would embed a file of torch.save()
                content = torch.empty(0, dtype=torch.uint8).set_(getattr(obj, "_untyped_storage", obj))
                return _restore_storage, (content.numpy(), getattr(obj, "dtype", torch.uint8))
            if type(obj) is torch.Tensor and _is_partial(obj):
                return obj.clone().__reduce_ex__(5)
            return super().reducer_override(obj)

    modules = set()
    buffers = []
    file = io.BytesIO()
    Pickler(file, protocol=5, buffer_callback=buffers.append).dump(value)
    return PackedValue([file.getvalue(), *(buffer.raw() for buffer in buffers)], modules)


TYPES_WITH_MODULE = (
    type,
    type(pack),
)  # classes and functions have a __module__ of their own; for other objects the class's counts


def unpack(parts: Sequence) -> Any:
    """Unpickle the parts of a packed value.

    They must come from a process of this job, because unpickling runs code.
    """
    return pickle.loads(parts[0], buffers=parts[1:])


def _is_partial(tensor: Any) -> bool:
    """Return whether the tensor is a part of a larger storage, all of which would be pickled."""
    import torch

    is_dense = tensor.layout == torch.strided and not tensor.is_nested
    return is_dense and tensor.nbytes < tensor.untyped_storage().nbytes()


def _restore_storage(content: object, dtype: object) -> Any:
    import torch

    return torch.TypedStorage(
        wrap_storage=torch.from_numpy(content).untyped_storage(), dtype=dtype, _internal=True
    )


def source_packages(modules: Iterable[str]) -> set[str]:
    """Return the folders of the modules' top-level packages that are not installed,
    but part of the user's program."""
    installed = (*site.getsitepackages(), sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
    folders = set()
    for name in {str(module).split(".")[0] for module in modules if module}:
        for path in getattr(sys.modules.get(name), "__path__", []):
            if not path.startswith(installed) and os.path.isdir(path):  # a package in a bundle has no folder
                folders.add(path)
    return folders


def send(connection: socket.socket, message: object, parts: Sequence = ()) -> None:
    """Send a message, and after it the `parts` of a packed value,
    to a process of this user on this machine."""
    header = pickle.dumps((message, [len(part) for part in parts]))
    connection.sendall(LENGTH.pack(len(header)) + header)
    for part in parts:
        connection.sendall(part)


def receive(connection: socket.socket) -> tuple[Any, list[memoryview]]:
    """Wait for the next message and return it with its parts; EOFError if the connection was closed."""
    (length,) = LENGTH.unpack(_receive_bytes(connection, LENGTH.size))
    message, lengths = pickle.loads(_receive_bytes(connection, length))
    return message, [_receive_bytes(connection, length) for length in lengths]


def _receive_bytes(connection: socket.socket, length: int) -> Any:
    return _read_fully(length, lambda buffer: connection.recv_into(buffer, 0, socket.MSG_WAITALL))


def _read_fully(length: int, read_into: Callable[[Any], int]) -> Any:
    content = np.empty(length, np.uint8).data
    remaining = content
    while len(remaining):
        count = read_into(remaining)
        if not count:
            raise EOFError
        remaining = remaining[count:]
    return content


class MemoryHandle(NamedTuple):
    """The parts of a packed value that stay in the memory of a process until their receiver says that it has
    copied them."""

    pid: int
    regions: list[tuple[int, int]]  # (address, length)


def memory_handle(parts: Sequence[np.ndarray]) -> MemoryHandle:
    """Return where the parts lie in this process, which has to keep them until they are copied."""
    return MemoryHandle(os.getpid(), [(part.ctypes.data, part.nbytes) for part in parts])


def copy_parts(handle: MemoryHandle) -> list[memoryview]:
    """Return copies of the parts; OSError or EOFError if the process has ended or does not show its
    memory."""
    parts = []
    with open_memory(handle.pid) as memory:
        for address, length in handle.regions:
            memory.seek(address)
            parts.append(_read_fully(length, memory.readinto))
    return parts


def open_memory(pid: int) -> io.FileIO:
    """Open the memory of a process; OSError if it has ended or the system does not allow it."""
    return io.FileIO(f"/proc/{pid}/mem")
