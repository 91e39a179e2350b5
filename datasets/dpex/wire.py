"""How data sets and batches travel between the processes of datasets.dpex: a short pickle, and separately the bytes of every
tensor and array, which are not copied when they are read.

Between two processes of one machine the bytes are in anonymous memory whose file descriptor is sent: it needs no name, takes no
space in /dev/shm, and is freed with its last user.
"""

import io
import mmap
import os
import pickle
import site
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any, Callable

ALIGNMENT = 64  # bytes; as torch allocates

Buffers = Sequence[memoryview]


def pack(value: object) -> tuple[bytes, list[memoryview], set[str]]:
    """(the pickle, the buffers that it leaves out, the modules that the reader needs)"""
    from ray import cloudpickle

    class Pickler(cloudpickle.Pickler):
        def reducer_override(self, thing):
            module = getattr(thing, "__module__", None) if isinstance(thing, NAMED) else type(thing).__module__
            modules.add(module)
            if type(thing).__name__ == "Tensor" and type(thing).__module__ == "torch":
                return _reduce_tensor(thing)
            return super().reducer_override(thing)

    modules, buffers, file = set(), [], io.BytesIO()
    Pickler(file, protocol=5, buffer_callback=buffers.append).dump(value)
    return file.getvalue(), [buffer.raw() for buffer in buffers], modules


NAMED = (type, type(pack))  # classes and functions have a module of their own, other objects that of their class


def unpack(header: bytes, buffers: Iterable) -> Any:
    """Use it only for what a process that this job started has packed: unpickling runs code."""
    return pickle.loads(header, buffers=buffers)


def _reduce_tensor(tensor):
    """The tensor as an array with the same layout in memory, and how to restore it."""
    import torch

    plain = tensor.layout == torch.strided and tensor.device.type == "cpu" and not tensor.is_quantized
    if not plain or tensor.requires_grad or tensor.is_conj() or tensor.is_neg():
        return tensor.__reduce_ex__(5)
    order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)  # channels last stays channels last
    contiguous = tensor.permute(order).contiguous()
    # numpy has no bfloat16
    array = contiguous.view(torch.int16 if tensor.dtype == torch.bfloat16 else tensor.dtype).numpy()
    return _restore_tensor, (array, tensor.dtype, order)


def _restore_tensor(array, dtype, order):
    import torch

    tensor = torch.from_numpy(array).view(dtype)
    return tensor.permute([order.index(dimension) for dimension in range(len(order))])


def source_packages(modules: Iterable[str]) -> set[str]:
    """The folders of those top-level packages that are not installed: they are part of the user's program."""
    installed = (*site.getsitepackages(), sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
    folders = set()
    for name in {str(module).split(".")[0] for module in modules if module}:
        for path in getattr(sys.modules.get(name), "__path__", []):
            if not path.startswith(installed) and os.path.isdir(path):  # a package in a bundle has no folder
                folders.add(path)
    return folders


def send_buffers(connection: Connection, buffers: Buffers) -> None:
    """Send the bytes to the process at the other end. A message before has to tell it their sizes."""
    if not buffers:
        return
    with open(os.memfd_create("batch"), "wb") as file:
        for buffer in buffers:
            file.write(buffer)
            file.seek(-file.tell() % ALIGNMENT, os.SEEK_CUR)
        file.truncate()
        reduction.send_handle(connection, file.fileno(), None)


def map_with_mmap(descriptor: int, length: int) -> memoryview:
    """For few and short-lived buffers: Python keeps a descriptor open for each."""
    return memoryview(mmap.mmap(descriptor, length))


def map_with_torch(descriptor: int, length: int) -> memoryview:
    """For batches, of which a reader may keep any number."""
    import torch

    return torch.from_file(f"/proc/self/fd/{descriptor}", shared=True, size=length, dtype=torch.uint8).numpy().data


def receive_buffers(
    connection: Connection, sizes: Sequence[int], mapped: Callable[[int, int], memoryview] = map_with_torch
) -> list[memoryview]:
    """The same bytes in memory that only the receiver uses, and may write to."""
    if not sizes:
        return []
    descriptor = reduction.recv_handle(connection)
    try:
        length = os.fstat(descriptor).st_size
        memory = mapped(descriptor, length) if length else memoryview(bytearray())
    finally:
        os.close(descriptor)
    buffers, at = [], 0
    for size in sizes:
        buffers.append(memory[at : at + size])
        at += -(-size // ALIGNMENT) * ALIGNMENT
    return buffers
