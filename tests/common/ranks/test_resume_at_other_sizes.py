"""The DDP job trains on the same samples at every size and after every stop, with the gradients of one process."""

import argparse
import signal

import pytest
import torch

from common.ranks import norms
from tests.tools import gradients
from tests.tools.jobs import (
    PATIENCE,
    ROOT,
    TINY,
    Popen,
    assert_same_bits,
    command,
    environment,
    final_state,
    run_job,
    saved,
    start,
    wait_for,
)
from tests.tools.objectstore import free_port
from tests.tools.ranks import TORCHRUN, TWO, check_ledger, fork_ranks, run_ranks


def test_resumed_at_another_size_no_sample_is_lost_or_repeated(tmp_path):
    """4 ranks, killed in mid-epoch; 1 rank, stopped; 2 ranks to the end. The global batch stays that of the first start."""
    four = [*TINY[:4], "--batch_size", "4", *TINY[6:], "--ledger", "true", "--save_steps", "1"]
    process = start(tmp_path, *four, "--nproc_per_node", 4, job="train_ddp")
    wait_for(saved(tmp_path, 16), process, "a checkpoint in mid-epoch")
    process.kill()
    process.wait()
    done = run_job("train_ddp", tmp_path, *four, "--max_steps", 7)
    assert "going on from" in done.stdout
    assert "learning rate 0.4 for a global batch of 16" in done.stdout
    run_ranks(tmp_path, *four)
    check_ledger(tmp_path / "out")
    refused = run_job("train_ddp", tmp_path, *four, "--epochs", 3, "--nproc_per_node", 3, check=2)
    assert "a global batch of 16 does not divide among 3 ranks; use one of [1, 2, 4, 8, 16] ranks" in refused.stderr


@pytest.mark.rehearsal
def test_killed_and_resumed_at_the_same_size_the_bits_are_the_same(two_ranks, tmp_path):
    process = start(tmp_path, *TWO, "--save_steps", 1, "--nproc_per_node", 2, job="train_ddp")
    wait_for(saved(tmp_path, 48), process, "a checkpoint in mid-epoch")
    process.kill()
    process.wait()
    assert "going on from" in run_ranks(tmp_path, *TWO).stdout
    assert_same_bits(final_state(tmp_path), final_state(two_ranks[0]))
    check_ledger(tmp_path / "out")


def test_sigterm_saves_a_step_that_all_ranks_have_done(two_ranks, tmp_path):
    process = start(tmp_path, *TWO, "--save_steps", 1, "--nproc_per_node", 2, job="train_ddp")
    wait_for(saved(tmp_path, 16), process, "the first checkpoint")
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE) == 143, (tmp_path / "log").read_text()
    assert "stopped by SIGTERM; saved after step" in (tmp_path / "log").read_text()
    run_ranks(tmp_path, *TWO)
    assert_same_bits(final_state(tmp_path), final_state(two_ranks[0]))
    check_ledger(tmp_path / "out")


@pytest.mark.rehearsal
def test_sigterm_under_the_users_own_torchrun_saves_too(two_ranks, tmp_path):
    log = open(tmp_path / "log", "w")  # noqa: SIM115
    script = [*TORCHRUN, str(free_port()), *command("train_ddp", *TWO, "--save_steps", 1, "--output_dir", tmp_path / "out")[1:]]
    process = Popen(script, cwd=tmp_path, env=environment(), stdout=log, stderr=log)
    wait_for(saved(tmp_path, 16), process, "the first checkpoint")
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE) == 1  # torchrun's own
    assert "stopped by SIGTERM; saved after step" in (tmp_path / "log").read_text()
    run_ranks(tmp_path, *TWO)
    assert_same_bits(final_state(tmp_path), final_state(two_ranks[0]))


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.rehearsal)])
def test_the_gradients_of_w_ranks_are_those_of_one_process(world_size, tmp_path):
    """float64, to 1e-10: with BatchNorm in eval mode or over all ranks the whole batch at once, in train mode its slices averaged."""
    done = fork_ranks(ROOT / "tests" / "tools" / "gradients.py", tmp_path, tmp_path / "ranks", ranks=world_size)
    assert done.returncode == 0, done.stderr
    ranks = torch.load(tmp_path / "ranks", weights_only=True)
    for mode in gradients.MODES:
        (ours, statistics), (theirs, expected) = ranks[mode], gradients.alone(mode, world_size)
        assert (len(ours), len(statistics)) == ((8, 9) if mode == "kinds" else (62, 60))
        for one, other in zip(ours, theirs):
            assert one.dtype == torch.float64 and torch.allclose(one, other, rtol=0, atol=1e-10)
        if mode in ("synchronised", "kinds"):
            assert all(torch.allclose(one, other, rtol=0, atol=1e-10) for one, other in zip(statistics, expected))


def test_a_norm_alone_is_over_all_ranks_and_an_own_kind_is_named(monkeypatch, capsys):
    class Own(torch.nn.BatchNorm2d):
        pass

    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    alone = torch.nn.BatchNorm1d(3)
    made = norms.synchronised(alone)
    assert type(made) is norms.SynchronisedNorm1d and made.weight is alone.weight and made.running_var is alone.running_var
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    with pytest.raises(ValueError, match="more than one value for each channel"):
        made(torch.zeros(1, 3))
    assert not capsys.readouterr().out
    shared = torch.nn.BatchNorm2d(3)
    both = norms.synchronised(torch.nn.Sequential(shared, shared))
    assert both[0] is both[1] and type(both[0]) is norms.SynchronisedNorm2d and not capsys.readouterr().out
    network = norms.synchronised(torch.nn.Sequential(torch.nn.BatchNorm2d(3), Own(3)))
    assert [type(norm) for norm in network] == [norms.SynchronisedNorm2d, Own]
    assert "warning: Own: norms of this kind have the statistics of their own process alone" in capsys.readouterr().out


def test_with_norms_over_all_ranks_two_train_the_network_of_one(tmp_path):
    """--batch_size 8 on two ranks, and 16 on one: after a step the same statistics and weights, but for rounding."""

    def weights(folder):
        return torch.cat([value.flatten().double() for value in final_state(folder)["model"].values()])

    (one := tmp_path / "one").mkdir()
    run_job("train", one, *TINY, "--max_steps", 1)
    distances = []
    for asked in ("true", "false"):
        (folder := tmp_path / asked).mkdir()
        run_ranks(folder, *TWO, "--lr", "0.05", "--sync_bn", asked, "--max_steps", 1)  # 0.1 for both together
        distances.append((weights(folder) - weights(one)).norm() / weights(one).norm())
    assert distances[0] < 2e-4 < distances[1]


@pytest.mark.parametrize(
    ("asked", "batch_size", "ranks", "expected"),
    [(None, 15, 2, True), (None, 16, 2, False), (None, 8, 1, False), (False, 8, 2, False), (True, 64, 2, True)],
)
def test_norms_over_all_ranks_where_they_are_asked_for_or_each_has_few_samples(monkeypatch, asked, batch_size, ranks, expected):
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: ranks)
    assert norms.over_all_ranks(argparse.Namespace(sync_bn=asked, batch_size=batch_size)) is expected
