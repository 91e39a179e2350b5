"""A step in smaller portions, whose gradients are added, after the memory of the device was full."""

from collections.abc import Sequence
from typing import Callable

import torch

from common.devices.diagnosis import full_device
from common.devices.work import give_memory_back

FIRST_STEPS = 10  # of a start, in which portions may be halved: what is full later has a leak


def halved_until_it_fits(
    compute: Callable[[int], torch.Tensor], size: int, buffers: Sequence[torch.Tensor], say: Callable[[str], None]
) -> tuple[torch.Tensor, int]:
    """Return (compute(size), size) with the first of `size`, a half of it, a quarter and so on for which there is memory.

    `buffers` get back what they had after each try without success, as the running statistics of batch norms.
    """
    before = [buffer.clone() for buffer in buffers]
    while True:
        try:
            return compute(size), size
        except RuntimeError as error:
            full = full_device(error)
            if full is None or size == 1:
                raise
        size //= 2
        for buffer, value in zip(buffers, before):
            buffer.copy_(value)
        give_memory_back(before[0].device)  # which the traceback of the error held
        say(f"warning: {full}: this start goes on in portions of {size} and the same total batch, as with --batch_size {size}")
