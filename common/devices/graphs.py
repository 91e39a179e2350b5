"""A training step as one CUDA graph: the host launches it at once, whatever it consists of."""

import contextlib
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Callable

import torch
from torch.optim.optimizer import (
    Optimizer,
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
    register_optimizer_step_post_hook,
)

from common.devices import kinds

WARM_UP = 3  # steps before the recording, in which torch allocates, compiles and chooses what it keeps

Step = Callable[..., torch.Tensor]


def one_graph(device: torch.device, step: Step) -> Step:
    """Return `step`; on an NVIDIA GPU a graph of it, which is recorded after a few steps and then replayed.

    `step` takes tensors on the device, trains on them from the forward pass to the optimizers' steps, and
    returns the loss. It neither waits for the device nor looks at values: a replay repeats what the device
    did, not what Python did. Optimizers are fused SGD, or have capturable=True. Their rates may be changed
    between the steps, and their hooks are called, which may count steps, but not change gradients. Inputs of
    other sizes than those of the recording are trained on without it.
    """
    has_fused_optimizers = kinds.TORCH >= (2, 3)
    return GraphedStep(device, step) if kinds.is_nvidia(device) and has_fused_optimizers else step


class GraphedStep:
    """A training step that is recorded at its fourth call, and the optimizers that step in it."""

    def __init__(self, device: torch.device, step: Step) -> None:
        self._device = device
        self._step = step
        self._stream = torch.cuda.Stream(device)
        self._graph = torch.cuda.CUDAGraph()
        self._warm_up_steps = 0
        self._is_recorded = False
        self._inputs: Sequence[torch.Tensor] = ()  # what a replay reads
        self._loss = torch.zeros((), device=device)  # what it writes
        self._optimizers: list[Optimizer] = []
        # parameter groups, and what a replay reads as their rates
        self._rates: list[tuple[dict, torch.Tensor]] = []

    def __call__(self, *inputs: torch.Tensor) -> torch.Tensor:
        if self._warm_up_steps < WARM_UP:
            self._warm_up_steps += 1
            return self._warm_up(inputs)
        if not self._is_recorded:
            self._record(inputs)
        if _shapes_and_dtypes(inputs) != _shapes_and_dtypes(self._inputs):
            return self._step(*inputs)
        return self._replay(inputs)

    def _warm_up(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Train on the stream of the recording, where autograd may then add up gradients,
        and see which optimizers step."""
        training_stream = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(training_stream)
        handle = register_optimizer_step_post_hook(self._add_optimizer)
        try:
            with torch.cuda.stream(self._stream):
                loss = self._step(*inputs)
        finally:
            handle.remove()
        training_stream.wait_stream(self._stream)
        return loss

    def _add_optimizer(self, optimizer: Optimizer, *_: object) -> None:
        if optimizer not in self._optimizers:
            self._optimizers.append(optimizer)

    def _record(self, inputs: Sequence[torch.Tensor]) -> None:
        """Record a step, without training.

        It reads the rates from the device; in the groups they stay numbers of the host.
        """
        static_inputs = [tensor.clone() for tensor in inputs]
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        learning_rates = [group["lr"] for group in groups]
        self._rates = [(group, torch.tensor(float(group["lr"]), device=self._device)) for group in groups]
        try:
            for group, rate in self._rates:
                group["lr"] = rate
            with (
                self._without_hooks(),
                torch.cuda.graph(self._graph, stream=self._stream, capture_error_mode="thread_local"),
            ):
                self._loss = self._step(*static_inputs)
        finally:
            for group, learning_rate in zip(groups, learning_rates):
                group["lr"] = learning_rate
        self._inputs = static_inputs
        self._is_recorded = True

    @contextlib.contextmanager
    def _without_hooks(self) -> Iterator[None]:
        """Call no hooks of optimizers inside `with`: what they do on the device would be recorded,
        and done twice."""
        hooks: list[dict] = [_global_optimizer_pre_hooks, _global_optimizer_post_hooks]
        for optimizer in self._optimizers:
            hooks += [optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks]
        saved_hooks = [dict(hook_dict) for hook_dict in hooks]
        for hook_dict in hooks:
            hook_dict.clear()
        try:
            yield
        finally:
            for hook_dict, saved in zip(hooks, saved_hooks):
                hook_dict.update(saved)

    def _replay(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Copy inputs and rates to where the graph reads them, replay it, and return a copy of the loss."""
        for static_input, tensor in zip(self._inputs, inputs):
            static_input.copy_(tensor)
        for group, rate in self._rates:
            rate.fill_(group["lr"])
        for optimizer in self._optimizers:
            _call_hooks(optimizer, _global_optimizer_pre_hooks, optimizer._optimizer_step_pre_hooks)
        self._graph.replay()
        for optimizer in self._optimizers:
            _call_hooks(optimizer, optimizer._optimizer_step_post_hooks, _global_optimizer_post_hooks)
        return self._loss.clone()  # the next replay overwrites it


def _shapes_and_dtypes(tensors: Sequence[torch.Tensor]) -> list[tuple[torch.Size, torch.dtype]]:
    return [(tensor.shape, tensor.dtype) for tensor in tensors]


def _call_hooks(optimizer: Optimizer, *hooks: dict) -> None:
    for hook in chain.from_iterable(hook_dict.values() for hook_dict in hooks):
        hook(optimizer, (), {})
