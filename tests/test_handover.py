"""Batches of torch's loader processes: the same as without a process, in memory that is used again, and past /dev/shm."""

import errno
import os
import shlex
import subprocess

import pytest
import torch

from datasets import handover
from datasets.loader import torch_batches
from datasets.sampler import InOrder
from tests.chaos.victims import digest
from tests.jobs import PATIENCE, TINY, command, environment, final_state, run_job
from tests.packages import namespaces


class Everything:
    """A batch of every kind, some large and some small."""

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
            "conjugated": torch.complex(images.float(), images.float()).conj(),
            "sparse": (images[0, 0] > 250).to_sparse(),
            "parameter": torch.nn.Parameter(images.float()),
            "small": (ids, torch.tensor(3.5), torch.zeros(0, 4)),
            "text": "of nothing",
        }


class Large:
    def __getitem__(self, place):
        return torch.full((2, 1000, 1000), float(place[1][0]))


def batches(data, workers=1, count=12):
    return torch_batches(data, InOrder(count, 1), workers)


def same(one, other):
    if isinstance(one, torch.Tensor):
        parts = [(of.to_dense(), of.dtype, of.shape, of.layout, of.requires_grad, type(of)) for of in (one, other)]
        assert torch.equal(parts[0][0], parts[1][0]) and parts[0][1:] == parts[1][1:]
        if one.layout == torch.strided:  # how it lies in memory
            orders = [sorted(range(of.ndim), key=of.stride, reverse=True) for of in (one, other)]
            assert orders[0] == orders[1]
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


def test_every_kind_of_tensor_comes_as_without_a_process():
    alone, handed = (list(batches(Everything(), workers, count=3)) for workers in (0, 2))
    assert len(handed) == 3
    same(alone, handed)


def inode(tensor):
    with open("/proc/self/maps") as file:
        for line in file:
            area, _, _, _, number, *name = line.split()
            begin, end = (int(address, 16) for address in area.split("-"))
            if begin <= tensor.data_ptr() < end:
                assert name[:1] == ["/memfd:batch"], line
                return int(number)


def test_memory_is_used_again_when_a_batch_is_no_longer_kept():
    loader, used, kept = batches(Large(), count=30), [], []
    for number, batch in enumerate(loader):
        used.append(inode(batch))
        assert (batch == number).all()
        batch.add_(1000)  # it is the reader's own
        if number < 8:
            kept.append(batch)
    assert len(set(used[:8])) == 8, "none that is kept is written over"
    assert all((batch == 1000 + number).all() for number, batch in enumerate(kept))
    assert len(set(used[8:])) <= 8
    for number, batch in enumerate(loader):  # the same process goes on
        assert (batch == number).all()
        if number == 3:
            break
    assert [int(batch[0, 0, 0]) for batch in loader] == list(range(30))


class Refused(Large):
    def __getitem__(self, place):
        os.memfd_create = refuse  # in the loader's process
        return super().__getitem__(place)


def refuse(*_):
    raise OSError(errno.ENOSYS, "no such memory")


def test_where_there_is_no_such_memory_torch_does_it_in_its_own_way():
    assert [int(batch[0, 0, 0]) for batch in batches(Refused())] == list(range(12))


def test_where_python_does_not_know_such_memory_torch_does_it_too(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr(handover, "HAS_MEMFD", False)
    assert [int(batch[0, 0, 0]) for batch in batches(Large())] == list(range(12))


class Unusual:
    """Tensors that are no arrays of numpy's."""

    def __getitem__(self, _):
        large = torch.arange(100_000.0).remainder(16)
        return {"eight bits": large.to(torch.float8_e4m3fn), "nested": torch.nested.nested_tensor([large, large[:7]])}


def test_tensors_that_numpy_does_not_know_come_too():
    for batch in batches(Unusual(), count=2):
        for large in (batch["eight bits"].float(), batch["nested"].unbind()[0]):
            assert torch.equal(large, torch.arange(100_000.0).remainder(16))
        assert len(batch["nested"].unbind()[1]) == 7


@pytest.mark.rehearsal
def test_a_job_needs_no_room_in_dev_shm(tmp_path):
    namespaces()
    options = [*TINY, "--batch_size", 128]  # 384 KiB
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
    assert digest(final_state(tmp_path / "processes")) == digest(final_state(tmp_path / "alone"))
