"""Half precision: the same bits after a restart, and bfloat16 where the hardware has it."""

import types

import pytest
import torch

from common import devices
from common.run import Scaler
from tests.gpu import judge
from tests.tools.jobs import TINY, assert_same_bits, final_state, run_job
from tests.tools.overflow import overflowing


@pytest.mark.parametrize("dtype", [pytest.param("bfloat16", marks=pytest.mark.rehearsal), "float16"])
def test_amp_resumed_in_mid_epoch_equals_the_uninterrupted_run(dtype, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for folder, steps in ((whole, []), (parts, ["--max_steps", 2]), (parts, [])):
        folder.mkdir(exist_ok=True)
        run_job(
            "train_amp", folder, *TINY, "--max_samples", 64, "--batch_size", 16, "--epochs", 1, "--amp_dtype", dtype, *steps
        )
    assert_same_bits(final_state(whole), final_state(parts))


@pytest.mark.parametrize(
    "gpu, capability, expected",
    [
        ("V100", (7, 0), torch.float16),
        ("T4", (7, 5), torch.float16),
        ("P100", (6, 0), torch.float16),
        ("A100", (8, 0), torch.bfloat16),
        ("H200", (9, 0), torch.bfloat16),
        ("L4", (8, 9), torch.bfloat16),
    ],
)
def test_bfloat16_where_the_hardware_has_it(monkeypatch, gpu, capability, expected):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    args = types.SimpleNamespace(amp_dtype=None)
    assert devices.half_precision(args, torch.device("cuda")) == expected
    assert devices.half_precision(types.SimpleNamespace(amp_dtype="float16"), torch.device("cuda")) == torch.float16
    assert devices.half_precision(args, torch.device("cpu")) == torch.bfloat16


def test_steps_that_are_left_out_are_counted_and_a_restart_knows_them():
    scales, moved, scaler = overflowing("cpu", scale=2.0**20)
    assert judge.scale_fell_and_steps_were_skipped(scales, moved, scaler.skipped()) is None
    again = Scaler("cpu")
    again.load_state_dict(scaler.state_dict())
    assert again.skipped() == scaler.skipped() > 0
    assert Scaler("cpu", enabled=False).state_dict() == {}
