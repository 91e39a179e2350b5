"""How large a batch the memory of a device takes."""

from typing import Callable

import torch

from common.devices import kinds
from common.devices.diagnosis import no_memory
from common.devices.work import give_memory_back, synchronize
from common.errors import UserError

MOST = 2**20


def largest_batch(device: torch.device, step: Callable[[int], None]) -> int:
    """The largest size for which `step(size)` has room, to within a 64th."""
    if not kinds.has_queues(device):
        raise UserError("--find_max_batch true looks for the memory of a GPU, and this process has none")

    def fits(size):
        try:
            step(size)
            synchronize(device)
        except RuntimeError as error:
            if no_memory(error) is None:
                raise
            return False
        finally:
            give_memory_back(device)
        return True

    return largest(fits)


def largest(fits: Callable[[int], bool]) -> int:
    """Doubled as long as it fits, then halved between the last that does and the first that does not."""
    low = 1
    if not fits(low):
        raise UserError("not even one sample fits into the memory of this GPU: take a smaller network or --image_size")
    while 2 * low <= MOST and fits(2 * low):
        low *= 2
    high = min(2 * low, MOST)
    while high - low > max(1, low // 64):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
