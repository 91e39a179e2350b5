"""A step in smaller portions, whose gradients are added, after the memory of the device was full."""

from collections.abc import Sequence
from typing import Callable

import torch

from common.devices.diagnosis import out_of_memory_message
from common.devices.kinds import has_streams, module
from common.devices.work import empty_cache

FIRST_STEPS = 10  # of a start, in which portions may be halved: what is full later has a leak


def halved_until_it_fits(
    compute: Callable[[int], torch.Tensor],
    size: int,
    device: torch.device,
    buffers: Sequence[torch.Tensor],
    say: Callable[[str], None],
) -> tuple[torch.Tensor, int]:
    """Return (compute(size), size) with the first of `size`, a half of it,
    a quarter and so on for which there is memory.

    After each try without success `buffers`, such as the running statistics of batch norms, and the random
    generators get back what they had.
    """
    saved_buffers = [buffer.clone() for buffer in buffers]
    random_state = torch.get_rng_state()
    device_random_state = module().get_rng_state(device) if has_streams(device) else None
    while True:
        try:
            return compute(size), size
        except RuntimeError as error:
            reason = out_of_memory_message(error)
            if reason is None or size == 1:
                raise
        size //= 2
        for buffer, value in zip(buffers, saved_buffers):
            buffer.copy_(value)
        torch.set_rng_state(random_state)
        if device_random_state is not None:
            module().set_rng_state(device_random_state, device)
        empty_cache(device)  # which the traceback of the error held
        say(
            f"warning: {reason}: this start goes on in portions of {size} and the same total batch, as "
            f"with --batch_size {size}"
        )
