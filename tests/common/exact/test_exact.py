"""Exact training: the same bits on any number of ranks, also when that changes between two starts of a run."""

import argparse
import types

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common import exact
from common.exact import sums
from common.ranks import collectives
from datasets.sampler import EpochSampler, InOrder
from launch import blocks
from tests.tools.jobs import ROOT, assert_same_bits, final_state, in_rehearsal, run_forked, run_job
from tests.tools.ranks import fork_ranks

SHARES = 5
SMALL = ["--custom_data", "true", "--max_samples", "160", "--batch_size", "8", "--width", "2", "--epochs", "2"]
EXACT = [*SMALL, "--shares", str(SHARES)]
STEPS = 4  # of an epoch


# --- The tree ----------------------------------------------------------------------------------------------------------


def add(left, right):
    return left + right


@given(st.data())
def test_the_sum_has_the_same_bits_for_any_number_of_shares_and_any_split_of_them(data):
    shares = data.draw(st.integers(1, 64))
    values = np.random.default_rng(shares).standard_normal(shares).astype(np.float32) * np.float32(10) ** np.arange(shares)
    alone = []
    for share, value in enumerate(values):
        sums.grow(alone, (0, share, value), shares, add)
    cuts = sorted(data.draw(st.lists(st.integers(0, shares), max_size=shares)))
    together = []
    for first, end in zip([0, *cuts], [*cuts, shares]):
        own = []
        for share in range(first, end):
            sums.grow(own, (0, share, values[share]), shares, add)
        assert [root[:2] for root in own] == sums.subtree_positions(range(first, end), shares)
        for root in own:
            sums.grow(together, root, shares, add)
    assert len(alone) == len(together) == 1 and alone == together


@given(st.integers(1, 64), st.data())
def test_every_share_is_computed_once_and_every_rank_computes_about_as_many(shares, data):
    ranks = data.draw(st.integers(1, shares))
    own = [sums.shares_of(rank, ranks, shares) for rank in range(ranks)]
    assert [share for part in own for share in part] == list(range(shares))
    assert max(map(len, own)) - min(map(len, own)) <= 1


# --- Runs --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    run_job("train_exact", folder, *EXACT)
    return final_state(folder)


def run_on(ranks, folder, *options):
    return run_job("train_ddp_exact", folder, *options, "--nproc_per_node", ranks)


@pytest.mark.parametrize("ranks", in_rehearsal([1, 2, SHARES], lambda ranks: ranks < SHARES))
def test_a_run_ends_with_the_same_bits_on_any_number_of_ranks(one_process, tmp_path, ranks):
    printed = run_on(ranks, tmp_path, *EXACT, "--workers", ranks % 2).stdout
    assert_same_bits(final_state(tmp_path), one_process)
    assert "exact: 5 shares of 8 samples, the same bits on 1 to 5 ranks, each with one thread" in printed
    assert "for the most ranks" in printed


@pytest.mark.rehearsal
@pytest.mark.parametrize("ranks", [3, 4, 8])
def test_and_on_others(tmp_path, ranks):
    for folder, job, words in (("one", "train_exact", []), ("more", "train_ddp_exact", ["--nproc_per_node", ranks])):
        (tmp_path / folder).mkdir()
        run_job(job, tmp_path / folder, *SMALL, "--shares", 8, *words)
    assert_same_bits(final_state(tmp_path / "more"), final_state(tmp_path / "one"))


def test_a_run_goes_on_with_other_numbers_of_ranks_to_the_same_bits(one_process, tmp_path):
    """Stopped within both epochs; the checkpoint knows the number of shares."""
    run_on(2, tmp_path, *EXACT, "--max_steps", 1)
    assert "exact: 5 shares" in run_on(3, tmp_path, *SMALL, "--max_steps", STEPS + 2).stdout
    run_job("train_exact", tmp_path, *SMALL)
    assert_same_bits(final_state(tmp_path), one_process)


def test_unset_there_are_as_many_shares_as_ranks_at_the_first_start(tmp_path):
    assert "exact: 2 shares of 8 samples" in run_on(2, tmp_path, *SMALL, "--max_steps", 1).stdout
    assert "exact: 2 shares of 8 samples" in run_job("train_exact", tmp_path, *SMALL, "--max_steps", 2).stdout


def test_what_cannot_be_is_a_sentence(tmp_path):
    def error(code, job, *options):
        return run_job(job, tmp_path, *SMALL, *options, check=code).stderr

    two = ("--nproc_per_node", 2)
    assert "2 ranks for 1 shares: each rank computes one or more" in error(2, "train_ddp_exact", "--shares", 1, *two)
    assert "--sync_bn true has one statistic" in error(2, "train_ddp_exact", "--sync_bn", "true", *two)
    run_job("train_exact", tmp_path, *SMALL, "--shares", 1, "--max_steps", 1)
    assert "--shares 4, but the run has 1: leave the option out" in error(2, "train_exact", "--shares", 4)
    assert "2 ranks for 1 shares" in error(2, "train_ddp_exact", *two)


# A network with all that could depend on who computes what, in the place of ResNet.
OWN = """
import os, runpy, sys, torch
sys.path.insert(0, ROOT)
import common.models

class Own(torch.nn.Module):
    def __init__(self, num_classes, width):
        super().__init__()
        self.first = torch.nn.Conv2d(3, 8, 3)
        self.norm = torch.nn.BatchNorm2d(8, momentum=None)
        self.last = torch.nn.Linear(8, num_classes)
        self.unused = torch.nn.Parameter(torch.ones(3))
        self.frozen = torch.nn.Parameter(torch.full((8, 1, 1), 0.1), requires_grad=False)
        self.register_buffer("constant", torch.full((8, 1, 1), 0.1))
        self.wide = torch.nn.Parameter(torch.ones(8, dtype=torch.float64))

    def forward(self, images):
        seen = torch.nn.functional.dropout(self.norm(self.first(images)) * self.frozen + self.constant, 0.5, self.training)
        return self.last(seen.mean(dim=(2, 3)) * self.wide.float())

common.models.resnet18 = Own
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.rehearsal
def test_dropout_and_running_statistics_and_unused_parameters_do_not_tell_how_many_ranks_there_were(tmp_path):
    states = []
    for ranks in (1, 3):
        (folder := tmp_path / str(ranks)).mkdir()
        (folder / "own.py").write_text(OWN.replace("ROOT", repr(str(ROOT))))
        job = ROOT / "jobs" / "train_ddp_exact.py"
        done = fork_ranks(folder / "own.py", folder, job, *SMALL, "--shares", 6, ranks=ranks)
        assert done.returncode == 0, done.stderr
        states.append(final_state(folder))
    assert_same_bits(states[1], states[0])
    model = states[0]["model"]
    assert torch.equal(model["constant"], torch.full((8, 1, 1), 0.1)) and model["norm.num_batches_tracked"] == 2 * 3
    assert not torch.equal(model["first.weight"], torch.zeros_like(model["first.weight"]))


def test_more_backward_passes_than_were_announced_are_an_error():
    args = argparse.Namespace(shares=2, batch_size=1, seed=0, lr=0.1)
    model, sampler = torch.nn.Linear(1, 1), EpochSampler(4, 1, seed=0)
    shares = exact.Shares(args, model, sampler, InOrder(4, 1))
    assert sampler.global_batch == 2
    loop = shares.of((torch.ones(2, 1),), samples_seen=0)
    (images,) = next(loop)
    model(images).sum().backward()
    assert shares.mean(torch.zeros(())) is None
    (images,) = next(loop)
    model(images).sum().backward()
    with pytest.raises(RuntimeError, match=r"more backward passes than shares\.passes, which is 1"):
        model(images).sum().backward()


@pytest.mark.rehearsal
@pytest.mark.parametrize(
    "tags, options",
    [
        (["AMP"], ["--amp_dtype", "bfloat16"]),
        (["AMP"], ["--amp_dtype", "float16"]),
        (["DALI"], []),
        (["DPEX"], []),
    ],
)
def test_composed_with_other_features_too(tmp_path, tags, options):
    (tmp_path / "jobs").mkdir()
    for name in ("common", "datasets"):
        (tmp_path / name).symlink_to(ROOT / name)
    states = []
    for ranks in (1, 2, 3):
        together = ["DDP", "EXACT", *tags] if ranks > 1 else ["EXACT", *tags]
        (job := tmp_path / "jobs" / f"composed{ranks}.py").write_text("\n".join(blocks.compose(together)))
        words = [job, *EXACT, *options, *(["--nproc_per_node", ranks] if ranks > 1 else [])]
        run_forked([*words, "--output_dir", tmp_path / str(ranks)], tmp_path)
        states.append(final_state(tmp_path, str(ranks)))
    assert_same_bits(states[1], states[0])
    assert_same_bits(states[2], states[0])


FLAGSHIP = ["--custom_data", "true", "--max_samples", 64, "--arch", "resnet18", "--image_size", 32, "--epochs", 2, "--mixup", 0.2,
            "--cutmix", 1, "--random_erasing", 0.5, "--clip_grad", 1, "--class_weights", "balanced", "--ema", 0.9, "--exact", "true", "--total_batch", 24, "--batch_size", 4]  # fmt: skip


@pytest.mark.rehearsal
def test_the_flagship_too_with_portions_of_a_share_and_a_restart(tmp_path):
    (one := tmp_path / "one").mkdir()
    said = run_job("train_imagenet", one, *FLAGSHIP, "--shares", 4).stdout
    assert "exact: 4 shares of 6 samples" in said and "in portions of 4" in said
    run_job("train_imagenet", tmp_path, *FLAGSHIP, "--shares", 4, "--nproc_per_node", 3, "--max_steps", 1)
    run_job("train_imagenet", tmp_path, *FLAGSHIP, "--nproc_per_node", 2)
    assert_same_bits(final_state(tmp_path), final_state(one))


def test_shares_that_are_not_asked_for_are_a_mistake(tmp_path):
    assert (
        "--shares 4 is for --exact true, or for --min_nodes"
        in run_job("train_imagenet", tmp_path, "--shares", 4, check=2).stderr
    )


def test_a_share_begins_without_gradients_and_a_cpu_computes_with_one_thread():
    args = argparse.Namespace(shares=2, batch_size=1, seed=0, lr=0.1)
    model, before = torch.nn.Linear(1, 1, bias=False), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        shares = exact.Shares(args, model, EpochSampler(4, 1, seed=0), InOrder(4, 1))
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
    for (images,) in shares.of((torch.tensor([[1.0], [3.0]]),), samples_seen=0):
        model(images).sum().backward()  # nobody sets the gradients to zero
        mean = shares.mean(torch.zeros(()))
    assert mean is not None and model.weight.grad.item() == 2.0


def test_a_missing_gradient_is_zero_also_in_memory_that_was_used_before():
    part = sums.Part([torch.zeros(1)], shares=2, group=collectives.AllRanks())
    for values, mean in (((3.0, 5.0), 4.0), ((None, None), 0.0)):
        for share, value in enumerate(values):
            part.add(share, [None if value is None else torch.tensor([value])])
        part.finish()
        assert part.means()[0].item() == mean


def test_without_an_order_the_mean_is_the_same_but_for_its_last_bits():
    values = [[torch.tensor([2.0**share, share])] for share in range(5)]
    means = []
    for kind in (sums.Part, sums.AnyOrder):
        part = kind([torch.zeros(2)], 5, collectives.AllRanks())
        for _ in range(2):  # memory is used again
            for share, value in enumerate(values):
                part.add(share, value)
            part.send()
            part.finish()
            means.append(part.means()[0].clone())
    assert all(torch.equal(mean, torch.tensor([31 / 5, 2.0])) for mean in means)


class FirstOfTwo:
    """The first of two ranks, as collectives.AllRanks; the other one sends zeros. `sent`: how many values at a time."""

    rank, size, work = 0, 2, types.SimpleNamespace(wait=lambda: None)

    def __init__(self, changed=False):
        self.sent, self.has_changed = [], lambda: changed

    def all_to_all(self, taken, given, taken_sizes, given_sizes):
        self.sent.append(len(given))
        return self.work

    def all_gather(self, everything, own):
        return self.work


def one_share_of_two(model, images, ranks, monkeypatch):
    """The Shares of one of two ranks with a share each, and the mean loss that it gets in a step."""
    monkeypatch.setattr(collectives.GROUP, "members", ranks)
    args = argparse.Namespace(shares=2, batch_size=len(images), seed=0, lr=0.1)
    shares = exact.Shares(args, model, EpochSampler(8, 1, seed=0), InOrder(8, 1))
    for (share,) in shares.of((images,), samples_seen=0):
        model(share).sum().backward()
        mean = shares.mean(torch.zeros(()))
    return shares, mean


def test_small_gradients_are_exchanged_together(monkeypatch):
    model, ranks = torch.nn.Sequential(*(torch.nn.Linear(1, 1) for _ in range(10))), FirstOfTwo()
    _, mean = one_share_of_two(model, torch.ones(1, 1), ranks, monkeypatch)
    assert mean is not None and ranks.sent == [20, 2]  # all gradients; then the loss, with one value to divide it


def test_a_step_in_which_the_ranks_have_changed_has_no_result_and_changes_nothing(monkeypatch):
    norm = torch.nn.BatchNorm1d(1)
    shares, mean = one_share_of_two(norm, torch.tensor([[1.0], [3.0]]), FirstOfTwo(changed=True), monkeypatch)
    assert mean is None and shares.was_interrupted
    assert norm.running_mean.item() == 0.0 and norm.num_batches_tracked.item() == 0


def test_the_means_are_where_the_gradients_are():
    part = sums.Part([torch.zeros(2, device="meta")], shares=2, group=collectives.AllRanks())
    for share in range(2):
        part.add(share, [torch.zeros(2, device="meta")])
    part.finish()
    assert part.means()[0].device.type == "meta"


@pytest.mark.parametrize("asked, same_bits, taken", [(False, True, True), (False, False, False), (True, False, True)])
def test_for_the_same_bits_the_flagship_takes_algorithms_that_give_them(asked, same_bits, taken):
    args = exact.settled(argparse.Namespace(deterministic=asked, sync_bn=None), same_bits)
    assert (args.deterministic, args.sync_bn) == (taken, False)
