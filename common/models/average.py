"""The moving average of a network, which often generalises better than the network itself."""

import copy

import torch
from torch import nn


class Average(nn.Module):
    """A moving average of weights and buffers.

    Its state_dict is that of torch's AveragedModel; no update waits for the GPU.
    """

    n_averaged: torch.Tensor

    def __init__(self, network: nn.Module, decay: float):
        super().__init__()
        self.module = copy.deepcopy(network)
        self._decay = decay
        self._has_begun = False
        self.register_buffer("n_averaged", torch.tensor(0))
        self.register_load_state_dict_post_hook(lambda average, _: average._update_has_begun())

    def _update_has_begun(self):
        self._has_begun = bool(self.n_averaged)  # this waits for the GPU, but only once, after a restart

    @torch.no_grad()
    def update(self, network: nn.Module) -> None:
        """Add a network to the average.

        The first is copied; later, floating-point tensors are averaged, counters copied.
        """
        pairs = list(
            zip(
                (*self.module.parameters(), *self.module.buffers()),
                (*network.parameters(), *network.buffers()),
            )
        )
        for is_floating in (True, False):  # floating-point tensors, then counters
            matching = [pair for pair in pairs if pair[0].is_floating_point() == is_floating]
            averages = [average for average, _ in matching]
            values = [value for _, value in matching]
            if is_floating and self._has_begun:
                torch._foreach_lerp_(averages, values, 1 - self._decay)
            elif matching:
                torch._foreach_copy_(averages, values)
        self.n_averaged += 1
        self._has_begun = True
