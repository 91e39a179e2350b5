"""Where a run stands, what is left of it and what came of it: Position, Plan and Results, without a training."""

import argparse
import dataclasses
import math

import pytest
import torch

from common import devices
from common.checkpoints.position import Position
from common.errors import TrainingFailed
from common.run.losses import Losses
from common.run.plan import Plan, Results
from datasets.sampler import EpochSampler


def plan(resumed_at=None, patience=None, samples=100, batch=30, **options):
    """Of three epochs of three steps of 30 samples, unless the options say otherwise."""
    args = argparse.Namespace(**{"epochs": 3, "max_steps": None, "run_epochs": None, **options})
    sampler = EpochSampler(samples, batch, seed=0)
    resumed_at = resumed_at or Position()
    sampler.start_at(resumed_at.epoch, resumed_at.consumed)
    return Plan(args, sampler, patience, resumed_at)


def after(steps, epochs=0, batch=30, best=None):
    """The position after so many epochs of three steps, and so many steps more."""
    at = Position()
    for _ in range(epochs):
        for _ in range(3):
            at = at.after_step(batch)
        at = at.after_epoch(best)
    for _ in range(steps):
        at = at.after_step(batch)
    return at


def test_a_position_moves_by_steps_and_epochs_and_stays_as_it_was_for_who_keeps_it():
    begin = Position()
    at = begin.after_step(30).after_step(30)
    assert (at.samples_seen, at.total_steps, at.epoch, at.consumed) == (60, 2, 0, 60) and begin == Position()
    closed = at.after_epoch({"epoch": 1, "samples_seen": 60, "accuracy": 0.5})
    assert (closed.samples_seen, closed.total_steps, closed.epoch, closed.consumed) == (60, 2, 1, 0)
    assert closed.row(7) == {"epoch": 7, "steps": 2, "samples": 60}
    with pytest.raises(dataclasses.FrozenInstanceError):
        at.epoch = 3


def test_a_checkpoint_names_the_position_and_gives_it_back():
    at = after(2, epochs=1, best={"epoch": 1, "samples_seen": 90, "accuracy": 0.5})
    assert set(vars(at)) == {"samples_seen", "total_steps", "epoch", "consumed", "best"}
    assert Position.of({**vars(at), "run": "1", "global_batch": 30}) == at


@pytest.mark.parametrize(
    "options, at, limit, cut_short, finished",
    [
        ({}, after(0), None, False, False),
        ({}, after(2, epochs=2), None, False, False),
        ({}, after(0, epochs=3), "--epochs 3", False, True),
        ({"epochs": 2}, after(0, epochs=3), "--epochs 2", False, True),  # it was begun with more
        ({"max_steps": 5}, after(1, epochs=1), None, False, False),
        ({"max_steps": 5}, after(2, epochs=1), "--max_steps 5", True, True),
        ({"max_steps": 9}, after(0, epochs=3), "--epochs 3", False, True),
        ({"run_epochs": 1}, after(2), None, False, False),
        ({"run_epochs": 1}, after(0, epochs=1), "--run_epochs 1", True, False),
        ({"run_epochs": 3}, after(0, epochs=3), "--epochs 3", False, True),
        ({"run_epochs": 1, "resumed_at": after(0, epochs=1)}, after(2, epochs=1), None, False, False),  # of this start
        ({"run_epochs": 1, "resumed_at": after(0, epochs=1)}, after(0, epochs=2), "--run_epochs 1", True, False),
        ({"patience": 1}, after(0, epochs=2), None, False, False),  # nothing is known of any epoch
        ({"patience": 1}, after(0, epochs=1, best={"epoch": 1}), None, False, False),
        ({"patience": 1}, after(0, epochs=2, best={"epoch": 1}), "the present --early_stopping_patience", False, True),
    ],
)
def test_what_ends_a_run_and_whether_the_same_command_goes_on(options, at, limit, cut_short, finished):
    asked = plan(**options)
    assert (asked.limit(at), asked.is_cut_short(at), asked.is_finished(at)) == (limit, cut_short, finished)


def test_what_is_left():
    assert [plan().samples_left(at) for at in (after(0), after(1), after(0, epochs=1), after(0, epochs=3))] == [
        270,
        240,
        180,
        0,
    ]
    assert [plan().evaluations_left(at) for at in (after(0), after(1), after(0, epochs=2), after(0, epochs=3))] == [3, 3, 1, 0]
    few = plan(max_steps=4)
    assert [few.samples_left(at) for at in (after(0), after(3), after(1, epochs=1))] == [120, 30, 0]
    assert [few.evaluations_left(at) for at in (after(0), after(0, epochs=1))] == [2, 1]
    assert [plan().epoch_is_over(at) for at in (after(2), after(3), after(0, epochs=1))] == [False, True, False]


def test_an_epoch_that_goes_on_with_another_batch_ends_where_whole_batches_end():
    """After 30 of 100 samples, in steps of 40: one more step fits, and 30 samples are left out."""
    asked = plan(resumed_at=after(1), batch=40)
    assert asked.samples_left(after(1)) == 40 + 2 * 70 and not asked.epoch_is_over(after(1))
    assert asked.epoch_is_over(after(1).after_step(40))


def test_the_progress_is_that_of_the_middle_of_the_coming_step():
    assert plan().progress(after(0)) == pytest.approx(15 / 270) and plan().progress(after(1, epochs=2)) == pytest.approx(
        225 / 270
    )
    assert plan().progress(after(0, epochs=3)) == 1.0


def closed(results, *scores, name="accuracy"):
    at = Position()
    for score in scores:
        at = results.close_epoch(at.after_step(10), 2.0 - at.epoch, {name: score, "loss": 1.0})
    return at


@pytest.mark.parametrize(
    "best_by, best_is, scores, best",
    [
        ("accuracy", None, (0.1, 0.3, 0.2), 2),
        ("accuracy", None, (0.3, 0.3), 1),  # the first of equal ones
        ("accuracy", None, (0.0,), 1),
        ("accuracy", None, (math.nan, 0.1, 0.2, math.nan), 3),
        ("error", "lowest", (0.3, 0.1, 0.2), 2),
        ("error", "highest", (0.3, 0.1, 0.2), 1),
    ],
)
def test_the_best_epoch(best_by, best_is, scores, best):
    results = Results(best_by, best_is)
    at = closed(results, *scores, name=best_by)
    assert at.best == {"epoch": best, "samples_seen": 10 * best, best_by: scores[best - 1]} and at.epoch == len(scores)
    assert [row[best_by] for row in results.history] == list(scores)
    assert results.history[0] == {"epoch": 1, "steps": 1, "samples": 10, "train_loss": 2.0, best_by: scores[0], "loss": 1.0}


def test_without_the_metric_no_epoch_is_the_best():
    results = Results("psnr", "highest")
    at = closed(results, 0.1, 0.2)
    assert at.best is None and results.comparison(at) == "" and results.summary(at) == "" and len(results.history) == 2


def test_what_an_epoch_has_made_better_or_worse():
    results = Results("accuracy")
    assert results.comparison(closed(results, 0.5)) == " (the best so far)"
    results = Results("accuracy")
    at = closed(results, 0.5, 0.75)
    assert results.comparison(at) == " (the best so far, accuracy +0.2500, loss +0.0000, train_loss -1.0000)"
    at = results.close_epoch(at.after_step(10), 0.0, {"accuracy": 0.625})
    assert results.comparison(at) == " (best 0.7500 in epoch 2, accuracy -0.1250, train_loss -1.0000)"
    assert results.summary(at) == "best accuracy 0.7500 in epoch 2. "
    lowest = Results("mae", "lowest")
    assert lowest.summary(closed(lowest, 3, 1, name="mae")) == "lowest mae 1.0000 in epoch 2. "


def test_a_loss_that_is_no_number_names_its_step_its_samples_and_the_rate_that_was_given():
    losses = Losses(torch.device("cpu"), 0, 1)
    for step, loss in enumerate((1.0, float("inf"), float("nan")), 1):
        losses.add(torch.tensor(loss), step, torch.tensor([step, 7]))
    said = r"the loss is inf at step 2, sample ids \[2, 7\]; lower --lr, which was 0\.5, or look at these samples; none yet"
    with pytest.raises(TrainingFailed, match=said):
        losses.check(0.5, lambda: "none yet")
    losses.check(0.5, lambda: "none yet")  # those before are done with


def test_a_loss_that_another_thread_looks_at_is_looked_at_once_more():
    losses = Losses(torch.device("cpu"), 0, 1)
    losses.add(torch.tensor(float("nan")), 1, torch.tensor([7]))
    taken = losses.hand_over()
    losses.hand_over().check(0.5, lambda: "none yet")  # which has none
    losses.add(torch.tensor(float("nan")), 2, torch.tensor([8]))
    for check in (losses.check, taken.check):
        with pytest.raises(TrainingFailed, match="the loss is nan at step 1, sample ids"):
            check(0.5, lambda: "none yet")
    losses.check(0.5, lambda: "none yet")  # those before are done with


def test_a_loss_that_another_thread_finds_finite_meanwhile_is_finite(monkeypatch):
    losses = Losses(torch.device("cpu"), 0, 1)
    losses.add(torch.tensor(1.0), 1, torch.tensor([7]))
    taken = losses.hand_over()
    monkeypatch.setattr(devices.AsyncScalar, "read", lambda _: setattr(taken, "losses", []))
    losses.check(0.5, lambda: "none yet")
