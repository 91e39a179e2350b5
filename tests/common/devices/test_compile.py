"""--compile true: the same training, by kernels that torch makes for it. The first steps of a run take a minute."""

import argparse

import pytest
import torch

from common import devices
from common.errors import UserError
from tests.tools import packages
from tests.tools.jobs import PATIENCE, TINY, final_state, run_job

SMALL = [*TINY, "--width", "4", "--lr", "0.01", "--augment", "false"]


def test_with_data_parallel_it_is_refused():
    with pytest.raises(UserError, match=r"--compile does not go with DataParallel.*train_ddp\.py"):
        devices.compile_network(argparse.Namespace(compile=True), torch.nn.DataParallel(torch.nn.Linear(1, 1)))


def test_without_a_compiler_it_is_refused(monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError, match="--compile true needs a compiler: install g\\+\\+, or leave the option out"):
        devices.compile_network(argparse.Namespace(compile=True), torch.nn.Linear(1, 1))


@pytest.mark.parametrize("version, cut", [((2, 8), False), ((2, 9), True)])
def test_an_older_torch_does_not_cut_the_network_into_parts_whose_gradients_get_mixed_up(monkeypatch, version, cut):
    from torch import _dynamo

    monkeypatch.setattr(devices.kinds, "TORCH", version)
    monkeypatch.setenv("CXX", "g++")
    with _dynamo.config.patch(optimize_ddp=True):
        devices.compile_network(argparse.Namespace(compile=True), torch.nn.Linear(1, 1))
        assert _dynamo.config.optimize_ddp is cut


def test_the_loss_is_compiled_with_the_network(monkeypatch):
    monkeypatch.setenv("CXX", "g++")
    compiled = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module, mode=None: compiled.append((module, mode)))
    network = torch.nn.Linear(1, 1)
    loss_fn = torch.nn.L1Loss()
    devices.compile_network(argparse.Namespace(compile=False), network, loss_fn=loss_fn)
    assert compiled == []
    devices.compile_network(argparse.Namespace(compile=True), network, loss_fn=loss_fn)
    assert compiled == [(network, None), (loss_fn, None)]


@pytest.mark.rehearsal  # two minutes
@pytest.mark.parametrize(("job", "options"), [("train", []), ("train_ddp", ["--nproc_per_node", "2", "--batch_size", "8"])])
def test_the_weights_are_nearly_those_without_it_and_a_run_goes_on_with_it(tmp_path, job, options):
    packages.program("g++")
    for name in ("plain", "compiled"):
        (tmp_path / name).mkdir()
    run_job(job, tmp_path / "plain", *SMALL, *options, "--epochs", 2)
    run_job(job, tmp_path / "compiled", *SMALL, *options, "--epochs", 2, "--max_steps", 4)
    printed = run_job(job, tmp_path / "compiled", *SMALL, *options, "--epochs", 2, "--compile", "true", timeout=PATIENCE).stdout
    assert "going on from" in printed
    plain, compiled = (final_state(tmp_path / name)["model"] for name in ("plain", "compiled"))
    assert plain.keys() == compiled.keys() and any(not torch.equal(plain[name], compiled[name]) for name in plain)
    for name, weights in plain.items():
        assert torch.allclose(weights.float(), compiled[name].float(), rtol=1e-2, atol=1e-3), name
