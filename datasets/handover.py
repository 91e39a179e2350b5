"""How a process of torch's DataLoader hands its batches over: in memory that it uses again (memory.py), and not in /dev/shm.

torch takes new memory in /dev/shm for every tensor. Containers have little of it, and a process that finds none left dies.
"""

import functools
import os
from multiprocessing.reduction import DupFd, ForkingPickler
from typing import Any

import numpy as np
import torch
from torch.multiprocessing import reductions

from datasets.memory import HAS_MEMFD, Memory, as_array, as_tensor, mapped

SMALL = 1 << 16  # bytes; fewer go in the message itself


def begin() -> None:
    """In such a process: from here on its tensors go this way."""
    if HAS_MEMFD:
        ForkingPickler.register(torch.Tensor, functools.partial(_reduced, Memory()))


def _reduced(memory: Memory, tensor: torch.Tensor) -> tuple:
    found = as_array(tensor)
    if found is None:
        return reductions.reduce_tensor(tensor)
    array, dtype, order = found
    if array.nbytes < SMALL:
        return as_tensor, found
    try:
        descriptor, begins = memory.place(array.reshape(-1).view(np.uint8).data)
    except OSError:  # there is no /proc here, or none of this memory
        return reductions.reduce_tensor(tensor)
    try:
        return _arrived, (DupFd(descriptor), begins, array.dtype, array.shape, dtype, order)
    finally:
        os.close(descriptor)


def _arrived(handle: Any, begins: int, kind: np.dtype, shape: tuple[int, ...], dtype: torch.dtype, order: list[int]) -> Any:
    """In the training process, which may write into it."""
    descriptor = handle.detach()
    try:
        content = mapped(descriptor)
    finally:
        os.close(descriptor)
    return as_tensor(np.ndarray(shape, kind, content, begins), dtype, order)
