"""Which gradients a checkpoint holds, for each thing that a loop may do with them (common/run/gradients.py)."""

import pytest
import torch

from common.checkpoints import checkpoint
from common.ranks import collectives
from common.run.gradients import MOST_WAITED, USES_SEEN, Gradients, of_this_rank
from common.weights.tensors import read


class Loop:
    """A network of two layers, of which a step may leave out the second, with an optimizer for each layer or one for both."""

    def __init__(self, optimizers=1):
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleDict({"first": torch.nn.Linear(2, 2), "second": torch.nn.Linear(2, 2)})
        groups = [self.layers.parameters()] if optimizers == 1 else [layer.parameters() for layer in self.layers.values()]
        self.optimizers = {f"optimizer {number}": torch.optim.SGD(group, lr=0.1) for number, group in enumerate(groups)}
        self.gradients = Gradients(dict(self.layers.named_parameters()), self.optimizers)
        self.gradients.observe()

    def backward(self, second=True):
        layers = self.layers.values() if second else [self.layers["first"]]
        images = torch.ones(1, 2)
        for layer in layers:
            images = layer(images)
        images.sum().backward()

    def update(self, number=0):
        self.optimizers[f"optimizer {number}"].step()

    def zero(self, number=0, to_none=True):
        self.optimizers[f"optimizer {number}"].zero_grad(set_to_none=to_none)

    def saved(self):
        """Of which layers a checkpoint that is made now has the gradients."""
        return sorted({name.partition(".")[0] for name in self.gradients.state_dict()["gradients"]})

    def of_each_step(self, step, steps=6, after_it=lambda number: None):
        """(the layers whose gradients a checkpoint has, whether it is made) after each step; `after_it`: what follows run.step()"""
        found = []
        for number in range(steps):
            self.gradients.begin_step()
            step(number)
            self.gradients.end_step()
            after_it(number)
            found.append((self.saved(), not self.gradients.should_wait()))
        return found

    def hooks(self):
        """Those that the next step will call."""
        self.gradients.begin_step()
        return sum(len(weight._backward_hooks or ()) for weight in self.layers.parameters())


BOTH = ["first", "second"]


def test_an_ordinary_loop_saves_none_once_it_is_known_and_is_no_longer_looked_at():
    loop = Loop()

    def step(_):
        loop.zero()
        loop.backward()
        loop.update()

    assert loop.of_each_step(step, USES_SEEN + 1) == [(BOTH, True), *[([], True)] * USES_SEEN]
    assert loop.hooks() == 0


def test_a_loop_that_discards_them_after_its_update_saves_none():
    loop = Loop()

    def step(_):
        loop.backward()
        loop.update()
        loop.zero()

    assert loop.of_each_step(step, USES_SEEN) == [([], True)] * USES_SEEN
    assert loop.hooks() == 0


@pytest.mark.parametrize("zeroed_first", [True, False])
def test_accumulated_ones_are_saved_and_a_save_waits_for_the_update(zeroed_first):
    loop = Loop()

    def step(number):
        if zeroed_first and number % 3 == 0:
            loop.zero()
        loop.backward()
        if number % 3 == 2:
            loop.update()
            if not zeroed_first:
                loop.zero()

    first, second = loop.of_each_step(step, 3), loop.of_each_step(step, 3)
    assert first == [(BOTH, False), (BOTH, False), (BOTH if zeroed_first else [], True)]
    assert second == [(BOTH, False), (BOTH, False), ([], True)]


def test_a_loop_that_discards_them_only_now_and_then_keeps_them():
    loop = Loop()

    def step(number):
        if number % 2:
            loop.zero()
        loop.backward()
        loop.update()

    assert loop.of_each_step(step) == [(BOTH, True), ([], True), *[(BOTH, True)] * 4]


def test_an_update_after_the_step_was_counted_is_one():
    loop = Loop()

    def update(_):
        loop.update()
        loop.zero()

    assert loop.of_each_step(lambda _: loop.backward(), USES_SEEN, after_it=update) == [([], True)] * USES_SEEN
    assert loop.hooks() == 0


def test_an_update_between_two_steps_does_not_hide_that_the_next_one_accumulates():
    loop = Loop()

    def step(number):
        if number % 2 == 0:
            loop.zero()
        loop.backward()
        if number % 2:
            loop.update()

    loop.of_each_step(step, 4)
    loop.update()  # as after the loop over run.steps()
    assert loop.of_each_step(step, 2)[0] == (BOTH, False)


def test_an_optimizer_that_nobody_sees_step_keeps_a_save_waiting_once():
    loop = Loop()
    found = loop.of_each_step(lambda _: loop.backward(), 3 * MOST_WAITED)
    assert [number for number, (_, made) in enumerate(found) if not made] == list(range(MOST_WAITED))


def test_those_that_are_zeroed_in_place_are_saved_also_of_a_weight_that_a_step_does_not_use():
    loop = Loop()

    def step(number):
        loop.zero(to_none=False)
        loop.backward(second=number == 0)
        loop.update()

    assert loop.of_each_step(step) == [(BOTH, True)] * 6
    assert not loop.layers["second"].weight.grad.any()


def test_those_that_the_next_step_uses_before_it_discards_them_are_saved():
    loop = Loop()

    def step(_):
        loop.update()
        loop.zero()
        loop.backward()

    assert loop.of_each_step(step) == [(BOTH, True)] * 6


def test_each_optimizer_waits_for_itself():
    loop = Loop(optimizers=2)

    def step(number):
        loop.zero(0)
        loop.backward()
        loop.update(0)
        if number % 3 == 2:
            loop.update(1)
            loop.zero(1)

    loop.of_each_step(step, 3)
    assert loop.of_each_step(step, 3) == [(["second"], False), (["second"], False), ([], True)]


def test_optimizers_that_never_have_none_together_are_saved_when_fewest_wait():
    loop = Loop(optimizers=2)
    loop.layers["second"].weight.requires_grad_(False)  # leaves 2 gradients in the second, and 6 in the first

    def step(number):
        loop.backward()
        loop.update(number % 2)
        loop.zero(number % 2)

    found = loop.of_each_step(step, 8)
    assert [saved for saved, _ in found] == [["second"], ["first"]] * 4
    assert [made for _, made in found[4:]] == [True, False] * 2


def test_a_gradient_in_the_place_of_an_older_one_is_a_new_one():
    """Of two optimizers the gradients are compared; memory that was freed is used again."""
    loop = Loop(optimizers=2)

    def step(number):
        for optimizer in (0, 1):
            loop.zero(optimizer)
        loop.backward()
        loop.update(0)
        if number != USES_SEEN + 3:
            loop.update(1)

    found = loop.of_each_step(step, USES_SEEN + 5)
    assert [saved for saved, _ in found[-3:]] == [[], ["second"], []]


def test_an_optimizer_that_is_no_longer_used_keeps_nobody_waiting():
    loop = Loop(optimizers=2)

    def step(number):
        loop.zero(0)
        loop.backward(second=number == 0)
        loop.update(0)
        if number == 0:
            loop.update(1)

    assert [made for _, made in loop.of_each_step(step)] == [True] * 6


def test_what_a_loop_does_is_known_after_a_restart_and_seen_anew():
    def step(_):
        loop.zero()
        loop.backward()
        loop.update()

    loop = Loop()
    loop.of_each_step(step)
    state = loop.gradients.state_dict()
    assert not any(state.values())
    loop = Loop()
    loop.gradients.load_state_dict(state)
    assert loop.of_each_step(step) == [([], True)] * 6

    def changed(_):
        loop.zero(to_none=False)
        loop.backward()
        loop.update()

    loop = Loop()
    loop.gradients.load_state_dict(state)
    assert loop.of_each_step(changed) == [([], True), *[(BOTH, True)] * 5]


def test_none_and_0_come_back_as_they_were():
    loop, other = Loop(), Loop()
    loop.backward(second=False)
    loop.zero(to_none=False)
    other.backward()
    other.gradients.load_state_dict(loop.gradients.state_dict())
    assert not other.layers["first"].weight.grad.any() and other.layers["second"].weight.grad is None


def test_accumulated_ones_of_0_3_0_come_back():
    loop = Loop()
    saved = {"gradients": {"first.bias": torch.ones(2)}}
    loop.gradients.load_state_dict(saved)
    assert loop.layers["first"].bias.grad.tolist() == [1, 1] and loop.saved() == ["first"]
    loop.zero(to_none=False)
    loop.gradients.load_state_dict(saved)  # once more, as before the first step
    assert loop.layers["first"].bias.grad.tolist() == [1, 1]


def test_sparse_ones_come_back():
    def made():
        torch.manual_seed(0)
        layer = torch.nn.Embedding(5, 2, sparse=True)
        return layer, Gradients({"weight": layer.weight}, {"optimizer": torch.optim.SparseAdam(layer.parameters())})

    layer, gradients = made()
    layer(torch.tensor([3, 1, 3])).sum().backward()
    state = checkpoint.snapshot(gradients.state_dict())
    checkpoint.require_plain({"run": state})
    other, gradients = made()
    gradients.load_state_dict(read(bytes(checkpoint.encode(state)), verified=True))
    assert other.weight.grad.is_sparse and torch.equal(other.weight.grad.to_dense(), layer.weight.grad.to_dense())


def test_other_ranks_than_before_get_the_mean(monkeypatch):
    of_ranks = [{"weight": torch.tensor([number])} for number in (1.0, 2.0, 6.0)]
    for rank, size, expected in ((1, 3, 2.0), (0, 2, 3.0), (1, 2, 3.0)):
        monkeypatch.setattr(collectives, "rank_and_size", lambda rank=rank, size=size: (rank, size))
        assert of_this_rank(of_ranks)["weight"].item() == expected
        assert of_this_rank([{}, {}, *of_ranks[:2]])["weight"].item() == 0.75  # one that a rank has not is 0 there
        assert of_this_rank(of_ranks[:1])["weight"].item() == 1.0
