"""The mean loss of an epoch over all ranks, the same after any restart; the first loss that is not a number;
loss scaling.

The sum is in float64, and so exact in any order. Nothing here waits for the GPU in every step.
"""

from typing import Any, Callable, Optional, Union

import torch

from common import devices
from common.errors import TrainingFailed
from common.ranks.collectives import reduce

LossOfStep = tuple[int, torch.Tensor, torch.Tensor]  # the step, its loss, the ids of its samples


class UncheckedLosses:
    """Losses that are not checked yet. The device begins to check them; check() waits for its answer."""

    def __init__(self, losses: list[LossOfStep], device: torch.device):
        self.losses = losses  # none once all are known to be finite
        self._are_finite = devices.AsyncScalar(device)
        if losses:
            self._are_finite.start_copy(_are_finite(losses).all())

    def check(self, lr: float, last_good: Callable[[], str]) -> None:
        """Raise TrainingFailed if a loss is not finite.

        `lr`: the option; `last_good()`: what to go on from.
        """
        first_bad = self.first_bad()
        if first_bad:
            step, loss, ids = first_bad
            where = f"at step {step}, sample ids {ids.tolist()}"
            advice = f"lower --lr, which was {lr:g}, or look at these samples"
            raise TrainingFailed(f"the loss is {loss.item()} {where}; {advice}; {last_good()}")
        self.losses = []

    def first_bad(self) -> Optional[LossOfStep]:
        """Return the first loss that is not finite, or None. It may wait for the device."""
        losses = self.losses  # which another thread may set meanwhile
        if not losses or self._are_finite.read() == 1:
            return None
        are_finite = _are_finite(losses).tolist()
        return None if all(are_finite) else losses[are_finite.index(False)]


def _are_finite(losses: list[LossOfStep]) -> torch.Tensor:
    return torch.isfinite(torch.stack([loss for _, loss, _ in losses]))


class Losses:
    def __init__(self, device: torch.device, rank: int, world_size: int):
        self._device = device
        self._rank = rank
        self._world_size = world_size
        self._sum = torch.zeros((), dtype=devices.widest(device), device=device)
        self._count = 0
        self._is_reduced = True
        self._unchecked: list[LossOfStep] = []
        self._handed_over: list[UncheckedLosses] = []  # that another thread looks at

    def add(self, loss: torch.Tensor, step: int, ids: torch.Tensor) -> None:
        """Add this rank's loss of a step. `ids`: of its samples, to name them if the loss is not finite."""
        self._sum += loss
        # one loss of each rank, also when a restart changes the number of ranks
        self._count += self._world_size
        self._is_reduced = False
        self._unchecked.append((step, loss, ids))

    def check(self, lr: float, last_good: Callable[[], str]) -> None:
        """Raise TrainingFailed if a loss that nobody has checked is not finite: one that was added since the
        last call, or handed over and not checked yet. It is called seldom, as it waits for the GPU."""
        all_unchecked = [*self._handed_over, self._take()]
        self._handed_over = []
        for unchecked in all_unchecked:
            unchecked.check(lr, last_good)

    def hand_over(self) -> UncheckedLosses:
        """Return the losses that were added since the last hand_over() or check(),
        for another thread to check.

        Until it has, check() checks them, too, so that an error always names the first bad step."""
        self._handed_over = [unchecked for unchecked in self._handed_over if unchecked.losses]
        self._handed_over.append(self._take())
        return self._handed_over[-1]

    def _take(self) -> UncheckedLosses:
        losses = self._unchecked
        self._unchecked = []
        return UncheckedLosses(losses, self._device)

    def all_reduce(self) -> None:
        """Add up all ranks' sums on rank 0, unless no loss was added since the last call;
        the other ranks' sums become 0."""
        if self._world_size > 1 and not self._is_reduced:
            (total,) = reduce([self._sum.item()], "SUM")
            self._sum.fill_(total if self._rank == 0 else 0.0)
        self._is_reduced = True

    def close_epoch(self) -> float:
        """Return the mean loss of the epoch, and begin the next epoch.

        Call all_reduce() first; only rank 0's mean is right.
        """
        mean = (self._sum / self._count).item()
        self._sum.zero_()
        self._count = 0
        return mean

    def state_dict(self) -> dict[str, Any]:
        return {"epoch_steps": self._count, "loss_sum": self._sum}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._count = state["epoch_steps"]
        if self._rank == 0:  # the saved sum is that of all ranks
            self._sum.copy_(state["loss_sum"])


class Scaler(devices.grad_scaler()):
    """torch's GradScaler, by which small float16 gradients do not vanish.

    It also counts the steps that it skips because gradients overflowed, on the device: only reading the count
    waits for the device."""

    def __init__(self, device: str, enabled: bool = True, **options: Any):
        super().__init__(device, enabled=enabled, **options)
        self._skipped: Optional[torch.Tensor] = None

    def update(self, new_scale: Optional[Union[float, torch.Tensor]] = None) -> None:
        states = self._per_optimizer_states.values() if self.is_enabled() else []
        overflows = [found_inf for state in states for found_inf in state["found_inf_per_device"].values()]
        if overflows:  # 1.0 where a gradient of that device was not a number
            overflow = overflows[0].detach().clone()
            self._skipped = overflow if self._skipped is None else self._skipped.add_(overflow)
        super().update(new_scale)

    def skipped(self) -> int:
        """Return the number of skipped steps. It waits for the device."""
        return 0 if self._skipped is None else int(self._skipped.item())

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        return {**state, "skipped": self.skipped()} if state else state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if state_dict.get("skipped"):  # 0.1.0 did not count them
            self._skipped = torch.tensor(float(state_dict["skipped"]), device=self._device)
