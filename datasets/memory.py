"""Memory in which a loader process gives its batches to the training process, and which it uses again once nobody has it open.

It is anonymous: it needs no name, takes no space in /dev/shm, of which containers have little, and is freed with its last user.
A page of memory that is new costs more than what is written into it: of the time to put a batch of 38 MB together nine tenths.
So a block is kept here when its batch is sent, and the kernel tells when it is free: it grants a lease on a file to write only
while nobody else has that open, or in memory, or on its way through a socket. Where it does not tell, no block is used again.
"""

import contextlib
import ctypes
import fcntl
import mmap
import os
import sys
import threading
from typing import Any, Optional

LARGE = 1 << 20  # bytes; for smaller tensors it is not worth it, and sizes are multiples of it
SPARE = 4  # free blocks that are kept
MOST = 32  # blocks in all: of what the training process keeps longer, the rest is its own
HAS_MEMFD = hasattr(os, "memfd_create")  # a Python that was built for an old system does not


class Block:
    def __init__(self, size: int) -> None:
        made = os.memfd_create("batch")
        try:
            os.ftruncate(made, size)
            self.descriptor = _opened(made)  # how the kernel counts who has it open leaves out the first one
        finally:
            os.close(made)
        self._map = mmap.mmap(self.descriptor, size)
        self.size, self.address = size, ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._unused = self._references()
        alone, other = self._is_open_here_alone(), _opened(self.descriptor)
        self.kernel_tells = alone and not self._is_open_here_alone()
        os.close(other)

    def bytes(self, size: int) -> memoryview:
        """The first ones, for this process; while anything here uses them, the block is not free."""
        return memoryview(self._map)[:size]

    def is_used_here(self) -> bool:
        return self._references() != self._unused

    def is_free(self) -> bool:
        return self.kernel_tells and not self.is_used_here() and self._is_open_here_alone()

    def _references(self):
        return sys.getrefcount(self._map)

    def _is_open_here_alone(self):
        with contextlib.suppress(OSError):
            fcntl.fcntl(self.descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            fcntl.fcntl(self.descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
            return True
        return False

    def close(self) -> None:
        self._map.close()
        os.close(self.descriptor)


def _opened(descriptor):
    """Another description of the same file: those that one was sent to share it."""
    return os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)


class Memory:
    """The blocks of a worker and its threads. A process that it forks begins with none: to the kernel the two are one user."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self):
        self._process, self._lock = os.getpid(), threading.Lock()
        self._blocks: list[Block] = []

    def _begin_if_forked(self):
        if self._process != os.getpid():
            self._begin()

    def take(self, size: int) -> memoryview:
        """Bytes of a block that is free, or new."""
        self._begin_if_forked()
        with self._lock:
            return self._free_or_new(size).bytes(size)

    def _free_or_new(self, size):
        free = sorted((block for block in self._blocks if block.is_free()), key=lambda block: block.size)
        block = next((block for block in free if block.size >= size), None)
        spare = free[: max(0, len(free) - SPARE)] if block else free[:1]  # too many, or too small
        sent = [one for one in self._blocks if one not in free and not one.is_used_here()]
        for one in (*spare, *sent[: max(0, len(self._blocks) - MOST)], *(one for one in sent if not one.kernel_tells)):
            if one is not block and one in self._blocks:
                self._blocks.remove(one)
                one.close()
        if block is None:
            block = Block(-(-size // LARGE) * LARGE)
            self._blocks.append(block)
        return block

    def place(self, content: memoryview) -> tuple[int, int]:
        """(a descriptor to send, where in there the content begins); it is copied unless it lies in a block."""
        self._begin_if_forked()
        for block in tuple(self._blocks):
            if 0 <= (begin := _address(content) - block.address) <= block.size - len(content):
                return _opened(block.descriptor), begin
        copy = self.take(len(content))
        copy[:] = content
        return self.place(copy)


def _address(content):
    import numpy

    return numpy.frombuffer(content, numpy.uint8).ctypes.data


def mapped(descriptor: int) -> memoryview:
    """All of the memory, for this process; it may keep any number of them, as no descriptor stays open."""
    import torch

    length = os.fstat(descriptor).st_size
    return torch.from_file(f"/proc/self/fd/{descriptor}", shared=True, size=length, dtype=torch.uint8).numpy().data


def as_array(tensor: Any) -> Optional[tuple[Any, Any, list[int]]]:
    """(an array with the tensor's bytes in the order in memory, and what as_tensor() needs besides); None where it has none."""
    import torch

    plain = tensor.layout == torch.strided and tensor.device.type == "cpu" and not tensor.is_quantized
    if not plain or tensor.is_nested or tensor.requires_grad:
        return None
    tensor = tensor.resolve_conj().resolve_neg()
    order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)  # channels last stays channels last
    contiguous = tensor.permute(order).contiguous()
    try:
        # numpy has no bfloat16
        array = contiguous.view(torch.int16 if tensor.dtype == torch.bfloat16 else tensor.dtype).numpy()
    except TypeError:  # nor others, of 8 bits
        return None
    return array, tensor.dtype, order


def as_tensor(array: Any, dtype: Any, order: list[int]) -> Any:
    import torch

    tensor = torch.from_numpy(array).view(dtype)
    return tensor.permute([order.index(dimension) for dimension in range(len(order))])
