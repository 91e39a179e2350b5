"""How data sets and batches travel between the processes of datasets.dpex: a short pickle, and separately the bytes of every
tensor and array, which are not copied when they are read.

Between two processes of one machine the bytes are in anonymous memory whose file descriptor is sent: it needs no name, takes no
space in /dev/shm, and is freed with its last user. A tensor that torch has already made in shared memory stays there.
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
from typing import Any, Callable, NamedTuple, Optional

ALIGNMENT = 64  # bytes; as torch allocates
LARGE = 1 << 20  # bytes; smaller tensors are copied, as each descriptor has its price

Buffers = Sequence[memoryview]
Place = tuple[int, int, int]  # of a buffer: in which of the descriptors, from which byte on, how many


class Packed(NamedTuple):
    header: bytes  # the pickle
    buffers: list[memoryview]  # that it leaves out
    modules: set[str]  # that the reader needs
    shared: dict[int, Any]  # {address: torch's storage} of those buffers that are in shared memory


def pack(value: object) -> Packed:
    from ray import cloudpickle

    class Pickler(cloudpickle.Pickler):
        def reducer_override(self, thing):
            module = getattr(thing, "__module__", None) if isinstance(thing, NAMED) else type(thing).__module__
            modules.add(module)
            if type(thing).__name__ == "Tensor" and type(thing).__module__ == "torch":
                return _reduce_tensor(thing, shared)
            return super().reducer_override(thing)

    modules, buffers, shared, file = set(), [], {}, io.BytesIO()
    Pickler(file, protocol=5, buffer_callback=buffers.append).dump(value)
    return Packed(file.getvalue(), [buffer.raw() for buffer in buffers], modules, shared)


NAMED = (type, type(pack))  # classes and functions have a module of their own, other objects that of their class


def unpack(header: bytes, buffers: Iterable) -> Any:
    """Use it only for what a process that this job started has packed: unpickling runs code."""
    return pickle.loads(header, buffers=buffers)


def _reduce_tensor(tensor, shared):
    """The tensor as an array with the same layout in memory, and how to restore it."""
    import torch

    plain = tensor.layout == torch.strided and tensor.device.type == "cpu" and not tensor.is_quantized
    if not plain or tensor.requires_grad or tensor.is_conj() or tensor.is_neg():
        return tensor.__reduce_ex__(5)
    order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)  # channels last stays channels last
    contiguous = tensor.permute(order).contiguous()
    storage = contiguous.untyped_storage()
    if storage.nbytes() == contiguous.nbytes >= LARGE and storage.is_shared():
        shared[storage.data_ptr()] = storage
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


def lay_out(buffers: Buffers, shared: Optional[dict[int, Any]] = None) -> tuple[list[int], list[Place]]:
    """(descriptors of memory that has the bytes, where in it each buffer is). `shared`: see Packed."""
    there = [shared.get(_address(buffer)) if shared and len(buffer) >= LARGE else None for buffer in buffers]
    descriptors = [os.dup(storage._share_fd_cpu_()[0]) for storage in there if storage is not None]  # as torch hands it on
    places, given, copies = [], iter(range(len(descriptors))), len(descriptors)
    with open(os.memfd_create("batch"), "wb") as file:
        for storage, buffer in zip(there, buffers):
            if storage is not None:
                places.append((next(given), 0, len(buffer)))
            else:
                places.append((copies, file.tell(), len(buffer)))
                file.write(buffer)
                file.seek(-file.tell() % ALIGNMENT, os.SEEK_CUR)
        file.truncate()
        if copies < len(buffers):
            descriptors.append(os.dup(file.fileno()))
    return descriptors, places


def _address(buffer):
    import numpy

    return numpy.frombuffer(buffer, numpy.uint8).ctypes.data


def send_descriptors(connection: Connection, descriptors: Sequence[int]) -> None:
    """To the process at the other end; they are closed here. A message before has to tell it how many."""
    try:
        for descriptor in descriptors:
            reduction.send_handle(connection, descriptor, None)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def receive_descriptors(connection: Connection, count: int) -> list[int]:
    return [reduction.recv_handle(connection) for _ in range(count)]


def map_with_mmap(descriptor: int, length: int) -> memoryview:
    """For few and short-lived buffers: Python keeps a descriptor open for each."""
    return memoryview(mmap.mmap(descriptor, length))


def map_with_torch(descriptor: int, length: int) -> memoryview:
    """For batches, of which a reader may keep any number."""
    import torch

    return torch.from_file(f"/proc/self/fd/{descriptor}", shared=True, size=length, dtype=torch.uint8).numpy().data


def map_buffers(
    descriptors: Sequence[int], places: Sequence[Place], mapped: Callable[[int, int], memoryview] = map_with_torch
) -> list[memoryview]:
    """The same bytes in memory that only the receiver uses, and may write to. The descriptors are closed."""
    memories = []
    for descriptor in descriptors:
        length = os.fstat(descriptor).st_size
        memories.append(mapped(descriptor, length) if length else memoryview(bytearray()))
        os.close(descriptor)
    return [memories[which][begin : begin + length] for which, begin, length in places]
