"""How data sets and batches travel between the processes of datasets.dpex: a short pickle, and separately the bytes of every
tensor and array, which are not copied when they are read.

Between two processes of one machine the bytes are in anonymous memory whose file descriptor is sent: it needs no name, takes no
space in /dev/shm, and is freed with its last user. What a worker has made there already (memory.py) stays where it is.
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

from datasets.dpex.memory import LARGE, Memory

ALIGNMENT = 64  # bytes; as torch allocates

Buffers = Sequence[memoryview]
Place = tuple[int, int, int]  # of a buffer: in which of the descriptors, from which byte on, how many


class Packed(NamedTuple):
    header: bytes  # the pickle
    buffers: list[memoryview]  # that it leaves out
    modules: set[str]  # that the reader needs


def pack(value: object) -> Packed:
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
    return Packed(file.getvalue(), [buffer.raw() for buffer in buffers], modules)


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


def lay_out(buffers: Buffers, memory: Optional[Memory] = None) -> tuple[list[int], list[Place]]:
    """(descriptors of memory that has the bytes, where in it each buffer is). `memory`: where large ones lie, or go."""
    with open(os.memfd_create("batch"), "wb") as file:
        descriptors, places = [os.dup(file.fileno())], []
        for buffer in buffers:
            if memory and len(buffer) >= LARGE:
                descriptor, begin = memory.place(buffer)
                places.append((len(descriptors), begin, len(buffer)))
                descriptors.append(descriptor)
            else:
                places.append((0, file.tell(), len(buffer)))
                file.write(buffer)
                file.seek(-file.tell() % ALIGNMENT, os.SEEK_CUR)
        file.truncate()
    return descriptors, places


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
