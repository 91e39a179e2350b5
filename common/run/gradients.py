"""The gradients that a checkpoint has to hold: all but those that the next step makes anew.

Most loops discard the gradients of a step before they compute the next ones. Others accumulate them over several steps, keep
them, or zero them in place, which is not the same as None to an optimizer. What a loop does with the gradient of each weight is
looked at in the first steps of a start; until it is known, the gradient is saved.
"""

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

MOST_WAITED = 100  # steps in which a save or a stop waits for a moment with fewer accumulated gradients


class Gradients:
    """Knows which optimizers have gradients of earlier steps, and which weights still have one when the next step uses it."""

    def __init__(self, weights: Mapping[str, torch.nn.Parameter], optimizers: Mapping[str, Optimizer]):
        """`weights`: those of all networks that the run saves. `optimizers`: all of the run's."""
        self._weights = weights
        self._optimizers = optimizers
        self._waiting: set[str] = set()  # optimizers with gradients that came after their last step
        self._stepped: set[str] = set()  # optimizers that have stepped in this step of the run
        self._versions = {name: self._version(name) for name in optimizers}  # of their gradients, after the step before

        self._made_anew: set[str] = set()  # weights whose gradient is discarded before it is used again
        self._hooks: dict[str, Any] = {}  # of the weights that are looked at
        self._known: set[str] = set()  # weights of which this start has seen what the loop does
        self._unused: set[str] = set()  # weights with a gradient of the step before that was not used again so far
        self._came: set[str] = set()  # weights that have got a gradient in this step

        self._steps_waited = 0
        self._fewest = float("inf")  # gradients that were waiting after a step, lately
        self._not_yet_stepped = set(optimizers)  # since that is counted

        for name, optimizer in optimizers.items():
            optimizer.register_step_pre_hook(functools.partial(self._before_step_of, name))
            optimizer.register_step_post_hook(functools.partial(self._after_step_of, name))

    # --- What a checkpoint holds ---

    def state_dict(self) -> dict[str, Any]:
        waiting = {weight for name in self._waiting for weight in self._weights_of(name)}
        return {
            "gradients": {
                name: weight.grad
                for name, weight in self._weights.items()
                if weight.grad is not None and (weight in waiting or name not in self._made_anew)
            },
            "gradients_waiting": sorted(self._waiting),
            "gradients_kept": sorted(self._weights.keys() - self._made_anew),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        gradients = state.get("gradients", {})
        for name, weight in self._weights.items():
            weight.grad = gradients[name].to(weight.device) if name in gradients else None
        self._waiting = set(state.get("gradients_waiting", self._optimizers if gradients else ()))  # 0.3.0 did not save it
        self._made_anew = self._weights.keys() - set(state.get("gradients_kept", self._weights))
        self._versions = {name: self._version(name) for name in self._optimizers}

    # --- When to save ---

    def should_wait(self) -> bool:
        """Whether a save or a stop should wait for a later step, after which fewer gradients wait for their optimizer; after
        MOST_WAITED steps it should not. Called once after each step."""
        waiting = sum(
            weight.grad.numel() for name in self._waiting for weight in self._weights_of(name) if weight.grad is not None
        )
        self._fewest = min(self._fewest, waiting)
        self._steps_waited += 1
        if self._steps_waited > MOST_WAITED:
            self._fewest = float("inf")
            self._not_yet_stepped = set(self._optimizers)
        elif waiting and (self._not_yet_stepped & self._waiting or waiting > self._fewest):
            return True
        self._steps_waited = 0
        return False

    # --- What the loop does ---

    def look(self) -> None:
        """Look in the next steps at what the loop does with the gradients of the weights that were not yet looked at."""
        for name, weight in self._weights.items():
            if weight.requires_grad and name not in self._hooks and name not in self._known:
                self._hooks[name] = weight.register_hook(functools.partial(self._before_gradient_of, name))

    def count_step(self) -> None:
        """Take note of a step that the run has counted."""
        for name in self._optimizers:
            if name in self._stepped:
                self._waiting.discard(name)
            elif self._has_changed(name):
                self._waiting.add(name)
            if len(self._optimizers) > 1:
                self._versions[name] = self._version(name)
        self._stepped.clear()
        if self._hooks:
            self._choose_what_to_look_at()

    def _choose_what_to_look_at(self) -> None:
        waiting = {weight for name in self._waiting for weight in self._weights_of(name)}
        self._unused.clear()
        for name in list(self._hooks):
            weight = self._weights[name]
            if weight.grad is None and name in self._came:  # discarded already
                self._note_use(name)
            if name in self._known:
                self._hooks.pop(name).remove()
            elif weight.grad is not None and weight not in waiting:
                self._unused.add(name)
        self._came.clear()

    def _has_changed(self, name: str) -> bool:
        """Whether the optimizer has got gradients in this step. Those of a single optimizer are not compared, to save time."""
        if len(self._optimizers) > 1:
            return self._version(name) != self._versions[name]
        return any(weight.grad is not None for weight in self._weights_of(name))

    def _version(self, name: str) -> list[tuple[int, int]]:
        gradients = [weight.grad for weight in self._weights_of(name)]
        return [(id(gradient), gradient._version) for gradient in gradients if gradient is not None]

    def _weights_of(self, name: str) -> Iterator[torch.Tensor]:
        for group in self._optimizers[name].param_groups:
            yield from group["params"]

    def _before_gradient_of(self, name: str, _gradient: torch.Tensor) -> None:
        self._came.add(name)
        if name in self._unused:
            self._note_use(name)

    def _before_step_of(self, name: str, *_: Any) -> None:
        if self._unused:
            of_this_optimizer = set(self._weights_of(name))
            for unused in [unused for unused in self._unused if self._weights[unused] in of_this_optimizer]:
                if self._weights[unused].grad is not None:
                    self._note_use(unused)

    def _note_use(self, name: str) -> None:
        """Take note whether the gradient of the step before is there, now that it is used or another one is added to it."""
        self._unused.discard(name)
        self._known.add(name)
        if self._weights[name].grad is None:
            self._made_anew.add(name)
        else:
            self._made_anew.discard(name)

    def _after_step_of(self, name: str, *_: Any) -> None:
        self._stepped.add(name)
        self._not_yet_stepped.discard(name)
