"""What a process computes on: its GPU, the cores that are really its own, and what to do where there is no GPU."""

import argparse

import pytest
import torch

from common import cores, devices, world
from common.errors import UserError
from datasets.dali.batches import DaliBatches
from tests.test_world import MPI, SRUN, TORCHRUN

MPIRUN = {**MPI, "MASTER_ADDR": "n0"}

ARGS = ("enable_gpu", "init_method", "rank", "world_size", "local_rank", "nproc_per_node")


def chosen(env, gpus, monkeypatch):
    args = argparse.Namespace(**dict.fromkeys(ARGS))
    args.world = world.resolve(args, env, gpus, "host")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    return devices.choose(args)


@pytest.mark.parametrize(
    "env, gpus, number",
    [(SRUN, 4, 1), (SRUN, 1, 0), (MPIRUN, 2, 1), (MPIRUN, 1, 0), (TORCHRUN, 2, 1)],
    ids=["srun", "srun, one GPU a task", "mpirun", "mpirun, one GPU a process", "torchrun"],
)
def test_the_gpu_of_a_process(env, gpus, number, monkeypatch):
    assert chosen(env, gpus, monkeypatch) == torch.device("cuda", number)


def test_more_processes_than_gpus_are_refused(monkeypatch):
    with pytest.raises(UserError, match="local rank 1 has no GPU: this process sees 1; start fewer processes"):
        chosen(TORCHRUN, 1, monkeypatch)


@pytest.mark.parametrize(
    "files, allowed",
    [
        ({"cpu.max": "400000 100000\n"}, 4),
        ({"cpu.max": "150000 100000\n"}, 2),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "50000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({}, None),
    ],
)
def test_a_container_may_have_fewer_cores_than_it_sees(files, allowed, tmp_path, monkeypatch):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cores.quota(tmp_path) == allowed
    seen = cores.count()
    monkeypatch.setattr(cores, "quota", lambda: allowed)
    assert cores.count() == min(seen, allowed or seen)


@pytest.mark.parametrize(
    "driver, visible, words",
    [
        (None, None, "no NVIDIA driver is loaded; choose a GPU flavor"),
        ("550.1", "", "CUDA_VISIBLE_DEVICES is '', which hides every GPU"),
        ("550.1", "-1", "CUDA_VISIBLE_DEVICES is '-1', which hides every GPU"),
        ("550.1", None, "no GPU was given to this process; choose a GPU flavor or start the container with its GPUs"),
        ("550.1", "1", "update the driver"),
    ],
)
def test_why_torch_sees_no_gpu(driver, visible, words, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(devices, "driver", lambda: driver)
    monkeypatch.setattr(devices.glob, "glob", lambda _: ["/dev/nvidia0"] if visible == "1" else [])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert words in devices.diagnosis()


def test_decoding_on_a_gpu_needs_one():
    with pytest.raises(UserError, match="dali-gpu decodes on a GPU, and this process has none: take dali-cpu"):
        DaliBatches(None, None, torch.device("cpu"), decode_on_gpu=True)
