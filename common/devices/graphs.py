"""A training step as one CUDA graph: the host launches it at once, whatever it consists of."""

from collections.abc import Sequence
from itertools import chain
from typing import Callable

import torch
from torch.optim.optimizer import Optimizer, _global_optimizer_post_hooks, register_optimizer_step_post_hook

from common.devices import kinds

WARM_UP = 3  # steps before the recording, in which torch allocates, compiles and chooses what it keeps

Step = Callable[..., torch.Tensor]


def one_graph(device: torch.device, step: Step) -> Step:
    """Return `step`; on an NVIDIA GPU a graph of it, which is recorded after a few steps and then replayed.

    `step` takes tensors on the device, trains on them from the forward pass to the optimizers' steps, and returns the loss. It
    neither waits for the device nor looks at values: a replay repeats what the device did, not what Python did. The learning
    rates may be changed between the steps. Inputs of other sizes than those of the recording are trained on without it.
    """
    return GraphedStep(device, step) if kinds.is_nvidia(device) else step


class GraphedStep:
    """A training step that is recorded at its fourth call, and the optimizers that step in it."""

    def __init__(self, device: torch.device, step: Step) -> None:
        self._device = device
        self._step = step
        self._stream = torch.cuda.Stream(device)
        self._graph = torch.cuda.CUDAGraph()
        self._calls = 0
        self._inputs: Sequence[torch.Tensor] = ()  # what a replay reads
        self._loss = torch.zeros((), device=device)  # what it writes
        self._optimizers: list[Optimizer] = []
        self._rates: list[tuple[dict, torch.Tensor]] = []  # parameter groups, and what a replay reads as their rates

    def __call__(self, *inputs: torch.Tensor) -> torch.Tensor:
        self._calls += 1
        if self._calls <= WARM_UP:
            return self._warm_up(inputs)
        if self._calls == WARM_UP + 1:
            self._record(inputs)
            return self._replay(inputs)
        if [tensor.shape for tensor in inputs] != [tensor.shape for tensor in self._inputs]:
            return self._step(*inputs)
        loss = self._replay(inputs)
        self._call_hooks()
        return loss

    def _warm_up(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Train on the stream of the recording, where autograd may then add up gradients, and see which optimizers step."""
        training = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(training)
        handle = register_optimizer_step_post_hook(self._note)
        try:
            with torch.cuda.stream(self._stream):
                loss = self._step(*inputs)
        finally:
            handle.remove()
        training.wait_stream(self._stream)
        return loss

    def _note(self, optimizer: Optimizer, *_: object) -> None:
        if optimizer not in self._optimizers:
            self._optimizers.append(optimizer)

    def _record(self, inputs: Sequence[torch.Tensor]) -> None:
        """Record a step, without training. It reads the rates from the device; in the groups they stay numbers of the host."""
        self._inputs = [tensor.clone() for tensor in inputs]
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        numbers = [group["lr"] for group in groups]
        self._rates = [(group, torch.tensor(float(group["lr"]), device=self._device)) for group in groups]
        try:
            for group, rate in self._rates:
                group["lr"] = rate
            with torch.cuda.graph(self._graph, stream=self._stream, capture_error_mode="thread_local"):
                self._loss = self._step(*self._inputs)
        finally:
            for group, number in zip(groups, numbers):
                group["lr"] = number

    def _replay(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        for read, tensor in zip(self._inputs, inputs):
            read.copy_(tensor)
        for group, rate in self._rates:
            rate.fill_(group["lr"])
        self._graph.replay()
        return self._loss.clone()  # the next replay overwrites it

    def _call_hooks(self) -> None:
        """Call what torch calls after a step of an optimizer: a replay has none of Python's part of it."""
        for optimizer in self._optimizers:
            for hook in chain(optimizer._optimizer_step_post_hooks.values(), _global_optimizer_post_hooks.values()):
                hook(optimizer, (), {})
