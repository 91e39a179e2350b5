"""An older torch: what it lacks is bridged or refused, and a page has what ran on it. The jobs run there by make engine."""

import io
import types

import pytest
import torch

from common import devices
from common.devices import kinds
from common.errors import UserError
from common.processes import members
from common.run import checkpoint
from launch.__main__ import VERBS
from tests import engine
from tests.jobs import ROOT

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def older(monkeypatch):
    def pretend(*version):
        for module in (kinds, devices):
            monkeypatch.setattr(module, "TORCH", version)

    return pretend


def test_the_page_has_the_table_and_the_table_has_every_job_and_verb():
    assert engine.table() in (ROOT / "docs" / "platforms.md").read_text()
    assert {path.name for path in (ROOT / "jobs").glob("*.py")} == set(engine.JOBS)
    assert set(engine.VERBS) == set(VERBS)


def test_an_optimizer_is_fused_where_torch_has_such_a_kernel(older):
    weight = torch.nn.Parameter(torch.zeros(1))
    for version, on_cpu, on_gpu in (((2, 1), False, False), ((2, 3), False, True), ((2, 4), True, True)):
        older(*version)
        assert devices.fused(CPU) == ({"fused": True} if on_cpu else {})
        assert devices.fused(GPU) == ({"fused": True} if on_gpu else {})
        torch.optim.SGD([weight], lr=1, **devices.fused(CPU))


def test_half_precision_that_an_older_torch_has_not_got_is_refused(older):
    args = types.SimpleNamespace(amp_dtype="float16")
    assert devices.half_precision(args, CPU) == torch.float16
    older(2, 3)
    with pytest.raises(UserError, match=r"float16 on a CPU needs torch 2\.4 or later, .* give --amp_dtype bfloat16"):
        devices.half_precision(args, CPU)
    assert devices.half_precision(args, GPU) == torch.float16


@pytest.mark.filterwarnings("ignore:.*GradScaler:FutureWarning", "ignore:.*GradScaler:UserWarning")
def test_the_scaler_of_an_older_torch_is_told_its_device_all_the_same(older):
    older(2, 1)
    scaler = devices.grad_scaler()("cuda", enabled=False, init_scale=8.0)
    assert isinstance(scaler, torch.cuda.amp.GradScaler) and not scaler.is_enabled()


def test_without_torch_accelerator_the_device_is_a_gpu_or_an_npu(older, monkeypatch):
    older(2, 5)
    monkeypatch.delattr(torch, "accelerator")
    assert (kinds.accelerator(), kinds.module()) == ("cuda", torch.cuda)
    monkeypatch.setattr(torch, "npu", types.SimpleNamespace(), raising=False)
    assert kinds.accelerator() == "npu"


@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning")
def test_a_program_in_place_of_weights_is_refused_before_torch_looks_at_it(older, monkeypatch, tmp_path):
    program = io.BytesIO()
    torch.jit.save(torch.jit.trace(torch.nn.Linear(2, 2), torch.zeros(1, 2)), program)
    path = tmp_path / "weights.pth"
    path.write_bytes(program.getvalue())
    older(2, 1)
    with monkeypatch.context() as patched:
        patched.setattr(torch, "load", lambda *_, **__: {"taken": torch.zeros(1)})
        with pytest.raises(UserError, match="holds no weights: it is a program of TorchScript"):
            checkpoint.read_weights(str(path))
    torch.save({"weight": torch.ones(2)}, path)
    assert torch.equal(checkpoint.read_weights(str(path))["weight"], torch.ones(2))


def test_nodes_that_come_and_go_need_a_torch_that_torchft_takes(older):
    older(2, 6)
    with pytest.raises(UserError, match=r"--min_nodes needs torchft, and that torch 2\.7 or later; this is .*: leave it out"):
        members.torchft()
