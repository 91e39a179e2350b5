"""The gradients that a checkpoint has to hold: all but those that the loop discards before the next step uses
them.

Most loops discard the gradients of a step before they compute the next ones. Others accumulate them over
several steps, keep them, or zero them in place, which is not the same as None to an optimizer. What a loop
does with the gradient of each weight is seen in the first steps of a start; until it is known, the gradient
is saved.
"""

import functools
import weakref
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

import torch
from torch.optim import Optimizer

from common.ranks import collectives

MOST_WAITED = 100  # steps in a row that accumulate gradients, after which a save or a stop waits no longer
USES_SEEN = 8  # uses of an old gradient of a weight that are looked at

Saved = dict[str, Any]  # {name of a weight: its gradient, a tensor, or the parts of a sparse one}


class Gradients:
    """Decides which gradients a checkpoint holds, and whether a save should wait for a step after which it
    holds fewer."""

    def __init__(self, weights: Mapping[str, torch.nn.Parameter], optimizers: Mapping[str, Optimizer]):
        """`weights`: those of all networks that the run saves. `optimizers`: all of the run's."""
        self._weights = weights
        self._optimizers = optimizers
        self._discarded = Discarded(weights, optimizers)
        # optimizers that have got gradients in a step without stepping in it
        self._accumulating: set[str] = set()
        self._stepped: set[str] = set()  # optimizers that have stepped in this step of the run
        # those worth waiting for; some step in ways of their own, which nobody sees
        self._expected_to_step = set(optimizers)
        # of the gradients, after the step before
        self._versions = {name: self._versions_of(name) for name in optimizers}
        self._steps_waited = 0
        # elements of accumulated gradients after any step, since this was set anew
        self._fewest = float("inf")
        self._stepped_meanwhile: set[str] = set()  # optimizers that have stepped since that was set anew
        self._gradients_of_other_ranks: list[Saved] = []  # on rank 0, if they are not the same as its own
        self._is_collected = False  # whether the line above is up to date
        # Whether gradients waited for an update after an epoch that was resumed in its middle.
        self._waited_after_resumed = False
        self._whole_epochs_in_a_row = 0  # after which none waited
        for name, optimizer in optimizers.items():
            optimizer.register_step_post_hook(functools.partial(self._after_step_of, name))

    # --- The course of a step ---

    def observe(self) -> None:
        """See in the next steps what the loop does with gradients that have not been seen often enough."""
        self._discarded.observe()

    def begin_step(self) -> None:
        """Choose the gradients to watch in this step, before it begins."""
        self._stepped.clear()
        self._discarded.begin_step(self._accumulated_weights())

    def end_step(self) -> None:
        """Note which optimizers accumulate. Called when the run has counted a step."""
        self.invalidate_collected()
        for name in self._optimizers:
            if name not in self._stepped and self._may_have_new_gradients(name):
                self._accumulating.add(name)
            if len(self._optimizers) > 1:
                self._versions[name] = self._versions_of(name)

    def _after_step_of(self, name: str, *_: object) -> None:
        self._accumulating.discard(name)
        self._stepped.add(name)
        self._expected_to_step.add(name)
        self._stepped_meanwhile.add(name)

    def _may_have_new_gradients(self, name: str) -> bool:
        """Whether an optimizer has got gradients in this step.

        Those of a single optimizer are not compared, to save time.
        """
        if len(self._optimizers) > 1:
            return self._versions_of(name) != self._versions[name]
        return any(weight.grad is not None for weight in weights_of(self._optimizers[name]))

    def _versions_of(self, name: str) -> list[tuple[Any, int]]:
        """Return references to an optimizer's gradients, and their versions,
        which differ later if it has got new ones."""
        gradients = [weight.grad for weight in weights_of(self._optimizers[name])]
        return [(IdentityRef(gradient), gradient._version) for gradient in gradients if gradient is not None]

    def _accumulated_weights(self) -> set[torch.Tensor]:
        return {
            weight
            for name in self._accumulating
            for weight in weights_of(self._optimizers[name])
            if weight.grad is not None
        }

    def should_wait(self) -> bool:
        """Return whether a save or a stop should wait for a later step,
        after which fewer gradients are accumulated.

        It has to be called once after each step, as it counts them: after MOST_WAITED, it waits no longer,
        and no longer expects those optimizers to step that have not."""
        some_never_step = not self._accumulating <= self._expected_to_step
        if some_never_step:
            return False
        accumulated = sum(weight.numel() for weight in self._accumulated_weights())
        self._fewest = min(self._fewest, accumulated)
        fewest_is_known = self._accumulating <= self._stepped_meanwhile
        is_at_minimum = fewest_is_known and accumulated == self._fewest
        if accumulated == 0 or is_at_minimum:
            self._steps_waited = 0
            return False
        self._steps_waited += 1
        if self._steps_waited > MOST_WAITED:
            self._give_up_waiting()
            return False
        return True

    def _give_up_waiting(self) -> None:
        """No longer expect the optimizers to step that have not stepped meanwhile,
        and look anew for the fewest gradients."""
        have_not_stepped = self._accumulating - self._stepped_meanwhile
        self._expected_to_step -= have_not_stepped
        self._steps_waited = 0
        self._fewest = float("inf")
        self._stepped_meanwhile.clear()

    def note_end_of_epoch(self, is_fully_seen: bool) -> bool:
        """Return True once if gradients waited for an update after an epoch that was resumed in its middle,
        but not after the next two: then the script counts batches from where it resumes.

        `is_fully_seen`: this start has taken all steps of the epoch."""
        is_waiting = bool(self._accumulated_weights())
        if not is_fully_seen:
            self._waited_after_resumed = is_waiting
        if is_fully_seen and not is_waiting:
            self._whole_epochs_in_a_row += 1
        else:
            self._whole_epochs_in_a_row = 0
        return self._waited_after_resumed and self._whole_epochs_in_a_row == 2

    # --- What a checkpoint holds ---

    def collect(self) -> None:
        """Bring the gradients of the other ranks to rank 0 if they are not the same, as under no_sync().

        All ranks call it before a save. Further calls do nothing until invalidate_collected(), so rank 0 may
        save alone in an evaluation."""
        if not self._is_collected and collectives.rank_and_size()[1] > 1:
            from common.ranks import differing

            self._gradients_of_other_ranks = differing.gather_differing(self._to_save())
        self._is_collected = True

    def invalidate_collected(self) -> None:
        """Let the next collect() bring the other ranks' gradients again."""
        self._gradients_of_other_ranks = []
        self._is_collected = False

    def _to_save(self) -> Saved:
        """Return the gradients that are accumulated or that the loop is not known to discard."""
        accumulated = self._accumulated_weights()
        return {
            name: to_storable(weight.grad)
            for name, weight in self._weights.items()
            if weight.grad is not None and (weight in accumulated or name not in self._discarded.names)
        }

    def state_dict(self) -> dict[str, Any]:
        return {
            "gradients": self._to_save(),
            "gradients_of_other_ranks": self._gradients_of_other_ranks,
            "gradients_accumulating": sorted(self._accumulating),
            "gradients_kept": sorted(self._weights.keys() - self._discarded.names),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        gradients = of_this_rank([state.get("gradients", {}), *state.get("gradients_of_other_ranks", [])])
        for name, weight in self._weights.items():
            weight.grad = from_storable(gradients[name], weight.device) if name in gradients else None
        # 0.3.0 did not save it
        accumulating = state.get("gradients_accumulating", self._optimizers if gradients else ())
        self._accumulating = self._optimizers.keys() & set(accumulating)
        self._discarded.names = self._weights.keys() - set(state.get("gradients_kept", self._weights))
        self._versions = {name: self._versions_of(name) for name in self._optimizers}


class Discarded:
    """Sees which weights' gradients a loop discards before it uses them again.

    Its hooks of weights end after some uses.
    """

    def __init__(self, weights: Mapping[str, torch.nn.Parameter], optimizers: Mapping[str, Optimizer]):
        self.names: set[str] = set()  # of these weights
        self._weights = weights
        self._name_of: dict[torch.Tensor, str] = {weight: name for name, weight in weights.items()}
        self._uses_left = dict.fromkeys(weights, USES_SEEN)
        self._seen: set[str] = set()  # weights of which this start has seen a use
        self._hooks: dict[str, Any] = {}
        self._got_gradient: set[str] = set()  # weights that have got a gradient in this step
        # weights with a gradient of an earlier step that this step has not used so far
        self._unused: set[str] = set()
        for optimizer in optimizers.values():
            optimizer.register_step_pre_hook(self._before_optimizer_step)

    def observe(self) -> None:
        """Add hooks to the weights whose gradients have not been seen often enough."""
        for name, weight in self._weights.items():
            if weight.requires_grad and self._uses_left[name] and name not in self._hooks:
                self._hooks[name] = weight.register_hook(functools.partial(self._before_gradient, name))

    def _before_gradient(self, name: str, _gradient: torch.Tensor) -> None:
        """Hook, called before a gradient is added to the old one."""
        self._got_gradient.add(name)
        if name in self._unused:
            self._note_use(name)

    def _before_optimizer_step(self, optimizer: Optimizer, *_: object) -> None:
        """Hook, called before an optimizer steps, which uses the old gradients of weights that have got no
        new ones, unless it has a closure that discards them."""
        if self._unused:
            for weight in weights_of(optimizer):
                name = self._name_of.get(weight, "")
                if name in self._unused and weight.grad is not None:
                    self._note_use(name)

    def _note_use(self, name: str) -> None:
        """Note whether the old gradient of this weight is still there.

        If it was there once, it is one that the loop keeps.
        """
        is_kept = self._weights[name].grad is not None
        self._unused.discard(name)
        if is_kept:
            self.names.discard(name)
            self._uses_left[name] = 0
        else:
            self._uses_left[name] -= 1
            if name not in self._seen:
                self.names.add(name)
        self._seen.add(name)

    def begin_step(self, accumulated: Set[torch.Tensor]) -> None:
        """Choose the gradients to watch: old ones that their optimizer has already applied.

        Remove the hooks that have seen enough. `accumulated`: weights whose old gradient their optimizer
        still has to apply."""
        self._unused.clear()
        for name in list(self._hooks):
            weight = self._weights[name]
            if weight.grad is None and name in self._got_gradient:
                self._note_use(name)  # discarded within the step
            if self._uses_left[name] <= 0:
                self._hooks.pop(name).remove()
            elif weight.grad is not None and weight not in accumulated:
                self._unused.add(name)
        self._got_gradient.clear()


class IdentityRef(weakref.ref):
    """A weak reference, equal to another one only while both refer to the same object:
    equal tensors are not the same."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, IdentityRef) and self() is not None and self() is other()

    __hash__ = None  # type: ignore[assignment]


def weights_of(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """Yield the weights in the parameter groups of an optimizer."""
    for group in optimizer.param_groups:
        yield from group["params"]


def to_storable(gradient: torch.Tensor) -> Any:
    """Return a gradient as a checkpoint can hold it."""
    if not gradient.is_sparse:
        return gradient
    return {"indices": gradient._indices(), "values": gradient._values(), "size": list(gradient.shape)}


def from_storable(saved: Any, device: torch.device) -> torch.Tensor:
    """Return a copy of a gradient that to_storable() made; a copy, as the checkpoint may be loaded again."""
    if isinstance(saved, torch.Tensor):
        return saved.to(device, copy=True)
    indices, values = (saved[part].to(device, copy=True) for part in ("indices", "values"))
    return torch.sparse_coo_tensor(indices, values, saved["size"])


def of_this_rank(per_rank: Sequence[Saved]) -> Saved:
    """Return this rank's gradients. `per_rank`: the saved ones, or a single entry if all are the same.

    If the number of ranks has changed, each gets the mean, which DistributedDataParallel takes, too."""
    rank, size = collectives.rank_and_size()
    if len(per_rank) == 1:
        return per_rank[0]
    if len(per_rank) == size:
        return per_rank[rank]
    means: Saved = {}
    for name in {name for gradients in per_rank for name in gradients}:
        present = [
            from_storable(gradients[name], torch.device("cpu")) for gradients in per_rank if name in gradients
        ]
        means[name] = to_storable(sum(present[1:], start=present[0]) / len(per_rank))
    return means
