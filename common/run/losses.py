"""The mean loss of an epoch over all ranks, the same after any restart; and the first loss that is not a number.

Summed in float64, so exactly, whatever the order. Nothing here waits for the GPU in every step.
"""

import torch

from common.processes.collectives import reduce


class Losses:
    def __init__(self, device, rank, world_size):
        self._rank, self._world_size = rank, world_size
        self._sum = torch.zeros((), dtype=torch.float64, device=device)
        self._count, self._shared, self._unchecked = 0, True, []

    def add(self, loss, step, ids):
        self._sum += loss
        self._count += self._world_size  # one of each rank, also when a restart changes their number
        self._shared = False
        self._unchecked.append((step, loss, ids))

    def first_bad(self):
        """(step, loss, ids) of the first since the last look that is not a finite number, or None. Waits for the GPU."""
        unchecked, self._unchecked = self._unchecked, []
        if not unchecked:
            return None
        good = torch.isfinite(torch.stack([loss for _, loss, _ in unchecked])).tolist()
        return None if all(good) else unchecked[good.index(False)]

    def share(self):
        """Rank 0 takes over the others' sums, so that its checkpoint has them all."""
        if self._world_size > 1 and not self._shared:
            (total,) = reduce([self._sum.item()], "SUM")
            self._sum.fill_(total if self._rank == 0 else 0.0)
        self._shared = True

    def close_epoch(self):
        """The mean of the epoch; the next one begins at nothing."""
        mean = (self._sum / self._count).item()
        self._sum.zero_()
        self._count = 0
        return mean

    def state_dict(self):
        return {"epoch_steps": self._count, "loss_sum": self._sum}

    def load_state_dict(self, state):
        self._count = state["epoch_steps"]
        if self._rank == 0:  # it holds what all ranks had
            self._sum.copy_(state["loss_sum"])
