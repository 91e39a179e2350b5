"""Batches of torch's loader processes: the same as without a process, through /dev/shm or, where that is small, through pipes."""

import os
import shlex
import subprocess

import pytest
import torch

from common.errors import UserError
from datasets import loader, processes
from datasets.sampler import InOrder
from tests.chaos.victims import digest
from tests.tools.jobs import PATIENCE, TINY, command, environment, final_state, run_job
from tests.tools.packages import namespaces


class Everything:
    """A batch of every kind, some large and some small. One that is conjugated is left out: torch forgets that it is."""

    def __getitem__(self, place):
        _, ids = place
        generator = torch.Generator().manual_seed(int(ids[0]))
        images = torch.randint(0, 256, (len(ids), 3, 200, 200), dtype=torch.uint8, generator=generator)
        return {
            "large": images,
            "channels last": images.to(memory_format=torch.channels_last),
            "a part": images[:, :, 50:150],
            "turned": images.transpose(2, 3),
            "halves": images.bfloat16(),
            "flags": images > 100,
            "complex": torch.complex(images.float(), images.float()),
            "eight bits": images.to(torch.float8_e4m3fn),
            "sparse": (images[0, 0] > 250).to_sparse(),
            "nested": torch.nested.nested_tensor([images[0, 0].float(), images[0, 0, :7].float()]),
            "parameter": torch.nn.Parameter(images.float()),
            "small": (ids, torch.tensor(3.5), torch.zeros(0, 4)),
            "text": "of nothing",
        }


def batches(data, workers=1, count=12):
    return loader.torch_batches(data, InOrder(count, 1), workers)


def same(one, other):
    if isinstance(one, torch.Tensor) and one.is_nested:
        same(one.unbind(), other.unbind())
    elif isinstance(one, torch.Tensor):
        parts = [(of.to_dense(), of.dtype, of.shape, of.layout, of.requires_grad, type(of)) for of in (one, other)]
        if one.dtype == torch.float8_e4m3fn:
            parts = [(dense.view(torch.uint8), *rest) for dense, *rest in parts]
        assert torch.equal(parts[0][0], parts[1][0]) and parts[0][1:] == parts[1][1:]
        if one.layout == torch.strided:
            assert one.stride() == other.stride()
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for name in one:
            same(one[name], other[name])
    elif isinstance(one, (tuple, list)):
        assert len(one) == len(other)
        for pair in zip(one, other):
            same(*pair)
    else:
        assert one == other


def in_shared_memory(tensor):
    with open("/proc/self/maps") as file:
        for line in file:
            area, _, _, _, _, *name = line.split()
            begin, end = (int(address, 16) for address in area.split("-"))
            if begin <= tensor.data_ptr() < end:
                return name[:1] != [] and name[0].startswith("/dev/shm/torch_")
    raise AssertionError("the tensor is nowhere")


@pytest.mark.parametrize("little", [False, True], ids=["shared memory", "pipes"])
def test_every_kind_of_tensor_comes_as_without_a_process(monkeypatch, little):
    monkeypatch.setattr(processes, "has_little_shared_memory", lambda: little)
    alone, handed = (list(batches(Everything(), workers, count=3)) for workers in (0, 2))
    assert len(handed) == 3
    same(alone, handed)
    assert in_shared_memory(handed[0]["large"]) != little


def test_little_is_less_than_a_gibibyte_for_each_rank(monkeypatch):
    def of(size):
        monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result([4096, 4096, size // 4096, 0, 0, 0, 0, 0, 0, 255]))
        return processes.has_little_shared_memory()

    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert of(64 << 20) and not of(1 << 30)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert of(1 << 30) and not of(2 << 30)


def test_loader_processes_without_a_place_for_their_locks_are_refused(monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, _: path != "/dev/shm")
    with pytest.raises(UserError, match="/dev/shm cannot be written to, and loader processes keep their locks there: mount it"):
        processes.worker_batches(Everything(), 1, 1)


@pytest.mark.rehearsal
def test_a_read_only_dev_shm_is_named(tmp_path):
    namespaces()
    words = command("train", *TINY, "--workers", 1, "--output_dir", tmp_path / "out")
    script = f"mount -t tmpfs -o ro none /dev/shm\nexec {shlex.join(map(str, words))}"
    done = subprocess.run(
        ["unshare", "-m", "sh", "-ec", script], cwd=tmp_path, env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert "error: /dev/shm cannot be written to" in done.stderr


@pytest.mark.rehearsal
def test_a_job_needs_no_room_in_dev_shm(tmp_path):
    namespaces()
    options = [*TINY, "--max_samples", 256, "--batch_size", 128]  # 384 KiB
    for name in ("alone", "processes"):
        (tmp_path / name).mkdir()
    run_job("train", tmp_path / "alone", *options, "--workers", 0)
    words = command("train", *options, "--workers", 2, "--output_dir", tmp_path / "processes" / "out")
    script = f"mount -t tmpfs -o size=64k none /dev/shm\nexec {shlex.join(map(str, words))}"
    done = subprocess.run(
        ["unshare", "-m", "sh", "-ec", script],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("warning: /dev/shm has less than 1 GiB") == 1, done.stdout
    assert digest(final_state(tmp_path / "processes")) == digest(final_state(tmp_path / "alone"))
