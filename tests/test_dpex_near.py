"""Batches that a worker hands to the training process's own machine past Ray's object store: the two ends of the way, without Ray."""

import contextlib
import gc
import os

import pytest
import torch
from torch.utils.data import default_collate
from torch.utils.data._utils import worker as torch_worker

from datasets.dpex import near, wire


@pytest.fixture
def ends(tmp_path):
    there = near.Near(str(tmp_path))
    sender = near.Sender(there.path)
    yield there, sender
    there.close()


@pytest.fixture
def as_a_worker(monkeypatch):
    """torch then puts batches together in shared memory."""
    about = torch_worker.WorkerInfo(id=0, num_workers=1, seed=0, dataset=None)
    monkeypatch.setattr(torch_worker, "_worker_info", about)


def made(value=1.0):
    """A large tensor, and a small one that is copied."""
    return default_collate([(torch.full((3, 224, 224), value), number) for number in range(4)])


def arrived(batch):
    return wire.unpack(batch.header, wire.map_buffers(batch.descriptors, batch.places))


def inodes(batch):
    return [os.fstat(descriptor).st_ino for descriptor in batch.descriptors]


def open_batches():
    """Descriptors of batches that this process holds."""
    gc.collect()
    names = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            names.append(os.readlink(f"/proc/self/fd/{number}"))
    return sum("/torch_" in name or "memfd:batch" in name for name in names)


@pytest.mark.parametrize("room", [True, False])
def test_a_batch_that_torch_has_put_into_shared_memory_is_not_copied_while_there_is_room(ends, as_a_worker, monkeypatch, room):
    there, sender = ends
    monkeypatch.setattr(near, "_has_room", lambda: room)
    images, numbers = made()
    there.expect(7)
    packed = wire.pack((images, numbers))
    assert list(packed.shared) == [images.data_ptr()] and sender.send(7, packed)
    batch = there.take(7)
    storage = os.fstat(images.untyped_storage()._share_fd_cpu_()[0]).st_ino
    assert (storage in inodes(batch)) is room
    found, labels = arrived(batch)
    assert torch.equal(found, images) and torch.equal(labels, numbers)
    found[0, 0, 0, 0] = 5
    assert (images[0, 0, 0, 0] == 5).item() is room


def test_a_part_of_shared_memory_and_what_has_another_order_are_copied():
    whole = torch.arange(2_000_000.0).view(2, 1000, 1000).share_memory_()
    for tensor in (whole[1], whole.transpose(1, 2)[:, :999], whole[:, ::2]):
        packed = wire.pack(tensor)
        descriptors, places = wire.lay_out(packed.buffers, packed.shared)
        assert not packed.shared and torch.equal(wire.unpack(packed.header, wire.map_buffers(descriptors, places)), tensor)
    turned = whole.transpose(0, 1)  # of the same bytes: how they are read is in the pickle
    packed = wire.pack(turned)
    descriptors, places = wire.lay_out(packed.buffers, packed.shared)
    assert packed.shared and torch.equal(wire.unpack(packed.header, wire.map_buffers(descriptors, places)), turned)


def test_what_nobody_waits_for_is_dropped(ends, as_a_worker):
    there, sender = ends
    assert open_batches() == 0
    there.expect(2)
    for key in (1, 2):
        assert sender.send(key, wire.pack(made(key)))
    there.take(2).close()
    assert open_batches() == 0, "that of 1 came before, and is closed"
    there.expect(3)
    assert sender.send(3, wire.pack(made()))
    there.expect(4)
    assert sender.send(4, wire.pack(made()))
    there.take(4).close()
    assert open_batches() == 2
    there.forget()
    assert open_batches() == 0, "3 was here, and is forgotten"


def test_a_batch_that_does_not_come_is_missing(ends, monkeypatch):
    there, _ = ends
    monkeypatch.setattr(near, "SECONDS", 0.05)
    there.expect(1)
    with pytest.raises(near.Missing):
        there.take(1)


def test_a_worker_that_cannot_get_there_gives_its_batch_to_ray(tmp_path, ends, as_a_worker):
    assert not near.Sender(None).send(1, wire.pack(made()))
    assert not near.Sender(str(tmp_path / "elsewhere")).send(1, wire.pack(made()))
    there, sender = ends
    there.expect(1)
    assert sender.send(1, wire.pack(made()))
    there.take(1).close()
    sender._connection.close()
    assert not sender.send(2, wire.pack(made())) and not sender.send(3, wire.pack(made()))
