"""How data sets and batches travel between the processes of datasets.dpex: a short pickle, and separately the bytes of every
tensor and array, which are not copied when they are read.

Between two processes of one machine the bytes are in anonymous memory whose file descriptor is sent (datasets/memory.py). What
a worker has made there already stays where it is.
"""

import contextlib
import io
import mmap
import os
import pickle
import site
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Sequence
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any, Callable, NamedTuple, Optional

from datasets.memory import HAS_MEMFD, LARGE, Memory, as_array, as_tensor, mapped

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
                found = as_array(thing)
                return (as_tensor, found) if found else thing.__reduce_ex__(5)
            return super().reducer_override(thing)

    modules, buffers, file = set(), [], io.BytesIO()
    Pickler(file, protocol=5, buffer_callback=buffers.append).dump(value)
    return Packed(file.getvalue(), [buffer.raw() for buffer in buffers], modules)


NAMED = (type, type(pack))  # classes and functions have a module of their own, other objects that of their class


def unpack(header: bytes, buffers: Iterable) -> Any:
    """Use it only for what a process that this job started has packed: unpickling runs code."""
    return pickle.loads(header, buffers=buffers)


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
    with open(_anonymous(), "wb") as file, _closed_on_failure() as descriptors:
        descriptors.append(os.dup(file.fileno()))
        places = []
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


def _anonymous():
    if HAS_MEMFD:
        return os.memfd_create("batch")
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        return os.dup(file.fileno())


@contextlib.contextmanager
def _closed_on_failure():
    """A list of descriptors, for whoever asked for them."""
    descriptors: list[int] = []
    try:
        yield descriptors
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise


def send_descriptors(connection: Connection, message: object, descriptors: Sequence[int]) -> None:
    """To the process at the other end, which learns from the message how many come after it; they are closed here."""
    try:
        connection.send(message)
        for descriptor in descriptors:
            reduction.send_handle(connection, descriptor, None)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def receive_descriptors(connection: Connection, count: int) -> list[int]:
    with _closed_on_failure() as descriptors:
        for _ in range(count):
            descriptors.append(reduction.recv_handle(connection))
    return descriptors


def map_with_mmap(descriptor: int) -> memoryview:
    """For few and short-lived buffers: Python keeps a descriptor open for each."""
    return memoryview(mmap.mmap(descriptor, 0))


def map_buffers(
    descriptors: Sequence[int], places: Sequence[Place], mapped: Callable[[int], memoryview] = mapped
) -> list[memoryview]:
    """The same bytes in memory that only the receiver uses, and may write to. The descriptors are closed."""
    memories = []
    for descriptor in descriptors:
        memories.append(mapped(descriptor) if os.fstat(descriptor).st_size else memoryview(bytearray()))
        os.close(descriptor)
    return [memories[which][begin : begin + length] for which, begin, length in places]
