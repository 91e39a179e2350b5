"""Loss scaling for float16, so that small gradients do not vanish. Steps whose gradients overflow are skipped and counted."""

from typing import Any, Optional, Union

import torch

from common import devices


class Scaler(devices.grad_scaler()):
    """torch's GradScaler, which also counts skipped steps. The count is on the device; only reading it waits for the device."""

    def __init__(self, device: str, enabled: bool = True, **options: Any):
        super().__init__(device, enabled=enabled, **options)
        self._skipped: Optional[torch.Tensor] = None

    def update(self, new_scale: Optional[Union[float, torch.Tensor]] = None) -> None:
        states = self._per_optimizer_states.values() if self.is_enabled() else []
        overflowed = [number for state in states for number in state["found_inf_per_device"].values()]
        if overflowed:  # 1.0 where a gradient of that device was not a number
            first = overflowed[0].detach().clone()
            self._skipped = first if self._skipped is None else self._skipped.add_(first)
        super().update(new_scale)

    def skipped(self) -> int:
        return 0 if self._skipped is None else int(self._skipped.item())

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        return {**state, "skipped": self.skipped()} if state else state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if state_dict.get("skipped"):  # 0.1.0 did not count them
            self._skipped = torch.tensor(float(state_dict["skipped"]), device=self._device)
