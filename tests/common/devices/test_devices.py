"""What a process computes on: its GPU, the cores that are really its own, and what to do where there is no GPU."""

import argparse
import contextlib
import os
import re

import pytest
import torch

from common import arguments, devices, world
from common.devices import diagnosis
from common.devices.graphs import one_graph
from common.errors import UserError
from common.machine import drivers
from datasets.dali.batches import DaliBatches
from tests.tools.worlds import MPI, SRUN, TORCHRUN

MPIRUN = {**MPI, "MASTER_ADDR": "n0"}

ARGS = ("enable_gpu", "device", "deterministic", "init_method", "rank", "world_size", "local_rank", "nproc_per_node")


def chosen(env, gpus, monkeypatch, deterministic=False):
    args = argparse.Namespace(
        **{**dict.fromkeys(ARGS), "deterministic": deterministic, "needs": (), "compile": False, "input": arguments.Input()}
    )
    args.world = world.resolve(args, env, gpus, "host")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_90"])
    return devices.choose(args)


@pytest.mark.parametrize(
    "env, gpus, number",
    [(SRUN, 4, 1), (SRUN, 1, 0), (MPIRUN, 2, 1), (MPIRUN, 1, 0), (TORCHRUN, 2, 1)],
    ids=["srun", "srun, one GPU a task", "mpirun", "mpirun, one GPU a process", "torchrun"],
)
def test_the_gpu_of_a_process(env, gpus, number, monkeypatch):
    assert chosen(env, gpus, monkeypatch) == torch.device("cuda", number)


def test_a_step_on_a_cpu_has_no_graph():
    def step():
        return torch.zeros(())

    assert one_graph(torch.device("cpu"), step) is step


@pytest.mark.parametrize("asked", [False, True])
def test_a_gpu_takes_its_fastest_algorithms_or_those_with_the_same_bits(asked, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", asked)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    try:
        chosen(TORCHRUN, 2, monkeypatch, deterministic=asked)
        assert torch.are_deterministic_algorithms_enabled() == asked and torch.backends.cudnn.benchmark == (not asked)
        assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == (":4096:8" if asked else None)
    finally:
        torch.use_deterministic_algorithms(False)
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


@pytest.mark.parametrize(
    "cores, env, threads",
    [
        (2, {}, 2),
        (8, {}, 4),
        (2, TORCHRUN, 4),
        (2, {**TORCHRUN, "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}, 2),
        (2, {"OMP_NUM_THREADS": "4"}, 4),
    ],
    ids=["few cores", "more cores", "one of several processes", "one that was started alone", "told how many"],
)
def test_the_only_process_of_a_node_takes_no_more_threads_than_its_container_has_cores(cores, env, threads, monkeypatch):
    monkeypatch.setattr(devices.choice.cores, "count", lambda: cores)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if "OMP_NUM_THREADS" in env:
        monkeypatch.setenv("OMP_NUM_THREADS", env["OMP_NUM_THREADS"])
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        chosen(env, 2, monkeypatch)
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_one_slice_of_a_gpu_is_a_gpu(monkeypatch):
    """CUDA shows a process the first MIG slice that is named, and no other."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-a, MIG-b")
    assert devices.count() == 2
    assert chosen(TORCHRUN, 1, monkeypatch) == torch.device("cuda", 0)
    assert devices.mig_slices() == ["MIG-b"] and devices.identity(torch.device("cuda", 0)) == "MIG-b"


@pytest.mark.parametrize("gpus, name", [(1, ""), (8, "cuda:0")])
def test_a_gpu_without_a_name_of_its_own_is_taken_for_nobodys(gpus, name, monkeypatch):
    """As before torch 2.4: SLURM may show each rank one GPU alone, which is number 0 for all."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: argparse.Namespace(name="H100"))
    assert devices.identity(torch.device("cuda", 0)) == name


def test_more_processes_than_gpus_are_refused(monkeypatch):
    with pytest.raises(
        UserError, match="local rank 1 has no GPU: this process sees 1; start fewer processes, or give --enable_gpu false"
    ):
        chosen(TORCHRUN, 1, monkeypatch)


@pytest.mark.parametrize("asked, gpus, refused", [(None, 1, True), (None, 2, False), (None, 0, False), (False, 1, False)])
def test_the_parent_of_a_node_refuses_more_workers_than_gpus(asked, gpus, refused, monkeypatch):
    args = argparse.Namespace(**{**dict.fromkeys(ARGS), "nproc_per_node": 2, "enable_gpu": asked})
    args.world = world.resolve(args, {}, gpus, "host")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    said = pytest.raises(UserError, match="2 processes on a node with 1 GPU: give --nproc_per_node 1, or --enable_gpu false")
    with said if refused else contextlib.nullcontext():
        devices.require_enough_devices(args)


WHEEL = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100a", "sm_120"]


@pytest.mark.parametrize(
    "capability, known, words",
    [
        ((9, 0), WHEEL, None),
        ((8, 9), WHEEL, None),  # what is compiled for sm_86 runs on it
        ((7, 0), WHEEL, "of architecture sm_70, .* has kernels for sm_75, .*: install a torch built for an older CUDA"),
        ((6, 1), WHEEL, "older CUDA"),
        ((10, 3), WHEEL, "of architecture sm_103, .*: install a newer torch"),
        ((13, 0), WHEEL, "a newer torch"),
        ((13, 0), [*WHEEL, "compute_120"], None),  # which the driver compiles
        ((9, 0), ["gfx90a"], None),  # not of NVIDIA
        ((9, 0), [], None),
    ],
)
def test_a_gpu_for_which_torch_has_no_kernels(capability, known, words):
    wrong = diagnosis.unknown_architecture(capability, known)
    assert wrong is None if words is None else re.search(words, wrong)


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
    monkeypatch.setattr(drivers, "nvidia", lambda: driver)
    monkeypatch.setattr(drivers, "gpus", lambda: int(visible == "1"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert words in diagnosis.diagnosis()


def test_decoding_on_a_gpu_needs_one():
    with pytest.raises(UserError, match="dali-gpu decodes on a GPU, and this process has none: take dali-cpu"):
        DaliBatches(None, None, torch.device("cpu"), decode_on_gpu=True)
