"""Batches that a worker hands to the training process's own machine past Ray's object store: the two ends of the way, without Ray."""

import functools
import os
import sys
import threading
from multiprocessing import Pipe, reduction

import pytest
import torch
from torch.utils.data import DataLoader, default_collate

from datasets import memory
from datasets.dpex import near, wire, worker
from datasets.dpex.worker import COLLATED
from datasets.memory import Memory
from tests.jobs import PATIENCE


@pytest.fixture
def ends(tmp_path, monkeypatch):
    """The bridge process's end, and a worker's, in which batches are put together as in a worker."""
    there, memory = near.Near(str(tmp_path)), Memory()
    monkeypatch.setitem(COLLATED, torch.Tensor, functools.partial(worker.stacked, memory))
    yield there, near.Sender(there.path, memory)
    there.close()


def made(value=1.0):
    """A large tensor, and a small one that is copied."""
    return default_collate([(torch.full((3, 224, 224), value), number) for number in range(4)])


def send(ends, key, value):
    there, sender = ends
    there.expect(key)
    assert sender.send(key, wire.pack(value))
    return there.take(key)


def arrived(batch):
    return wire.unpack(batch.header, wire.map_buffers(batch.descriptors, batch.places))


def test_a_batch_stays_where_the_worker_has_put_it_together(ends):
    images, numbers = made()
    found, labels = arrived(send(ends, 7, (images, numbers)))
    assert torch.equal(found, images) and torch.equal(labels, numbers)
    found[0, 0, 0, 0] = 5
    assert images[0, 0, 0, 0] == 5, "these are the same bytes"


def refused(*_):
    raise OSError("no leases here")


def test_what_the_reader_keeps_stays_as_it_is(ends):
    """Whole batches and a part of one, while memory of those that nobody has any more is used again."""
    kept = []
    for number in range(12):
        images, _ = arrived(send(ends, number, made(float(number))))
        kept += [images, images[1:2, :, 5]] if number % 3 else []
    assert [float(value) for images in kept for value in images.unique()] == [
        float(n) for n in range(12) if n % 3 for _ in "ab"
    ]


def test_what_has_another_order_or_is_a_part_comes_as_it_is(ends):
    whole = torch.arange(2_000_000.0).view(2, 1000, 1000)
    for tensor in (whole[1], whole.transpose(1, 2)[:, :999], whole[:, ::2], whole.transpose(0, 1), whole.bfloat16()):
        assert torch.equal(arrived(send(ends, 1, tensor)), tensor)
    images, _ = made()
    images[2] = 3
    later = images[2:]  # from within its block
    assert torch.equal(arrived(send(ends, 2, later)), later)


class Numbered:
    def __len__(self):
        return 200

    def __getitem__(self, number):
        return torch.full((500_000,), float(number))


def test_a_data_set_that_forks_and_puts_batches_together_there_gets_them_right(ends):
    """What a worker has is not used by the processes of its data set: to the kernel they would be one user."""
    kept = [ends[1]._memory.take(40 << 20) for _ in range(3)]
    del kept
    batches = list(DataLoader(Numbered(), batch_size=10, num_workers=2))
    for number, batch in enumerate(batches):
        assert torch.equal(batch, torch.arange(10.0 * number, 10.0 * number + 10)[:, None].expand(10, 500_000))
    assert len(batches) == 20


def test_two_threads_never_have_the_same_memory():
    memory_of_both, meeting, seen = Memory(), threading.Barrier(2, timeout=PATIENCE), [[], []]

    def work(mine):
        for _ in range(1000):
            meeting.wait()
            room = memory_of_both.take(1)
            room[:1] = bytes([mine])
            meeting.wait()
            seen[mine].append(room[0])
            meeting.wait()
            del room

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work, args=(mine,)) for mine in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert seen == [[0] * 1000, [1] * 1000]


def test_where_there_is_no_more_memory_torch_puts_the_batch_together(ends, monkeypatch):
    monkeypatch.setattr(memory.Memory, "take", refused)
    assert torch.equal(made()[0], torch.ones(4, 3, 224, 224))


def test_where_python_does_not_know_such_memory_batches_go_over_ray(tmp_path, ends, monkeypatch):
    packed = wire.pack(made(3.0))
    monkeypatch.delattr(os, "memfd_create")
    for room in (near, wire):
        monkeypatch.setattr(room, "HAS_MEMFD", False)
    assert not near.Sender(ends[0].path, Memory()).connected
    descriptors, places = wire.lay_out(packed.buffers)
    images, numbers = wire.unpack(packed.header, wire.map_buffers(descriptors, places))
    assert (images == 3).all() and numbers.tolist() == [0, 1, 2, 3]


def test_no_descriptor_is_left_of_what_was_cut_off(tmp_path, monkeypatch):
    """The worker dies between two of them; it cannot lay a batch out; the bridge is gone."""
    there, memory_there = near.Near(str(tmp_path)), Memory()
    before = len(os.listdir("/proc/self/fd"))
    ours, other = Pipe()
    with other, open(os.devnull) as file:
        other.send((1, b"", [], 3))
        reduction.send_handle(other, file.fileno(), None)
        reduction.send_handle(other, file.fileno(), None)
    there._receive(ours)
    assert len(os.listdir("/proc/self/fd")) == before
    with monkeypatch.context() as patch:
        patch.setattr(Memory, "place", refused)
        with pytest.raises(OSError):
            wire.lay_out([memoryview(bytes(10)), memoryview(bytes(memory.LARGE))], memory_there)
    assert len(os.listdir("/proc/self/fd")) == before
    descriptors, _ = wire.lay_out([memoryview(bytes(10))])
    ours, other = Pipe()
    other.close()
    with ours, pytest.raises(OSError):
        wire.send_descriptors(ours, "a batch", descriptors)
    assert len(os.listdir("/proc/self/fd")) == before
    there.close()


@pytest.mark.parametrize(
    "batch",
    [
        [torch.ones(3, 500, 500), torch.ones(3, 500, 501)],
        [torch.ones(3, 500, 500), torch.ones(3, 500, 500, dtype=torch.float64)],
        [torch.ones(3, 500, 500, requires_grad=True)] * 2,
        [torch.ones(1000, 1000).to_sparse()] * 2,
        [torch.nn.Parameter(torch.ones(1000, 1000), requires_grad=False)] * 2,
        [torch.ones(())] * 2,
    ],
    ids=["shapes", "types", "gradients", "sparse", "parameters", "small"],
)
def test_what_torch_puts_together_in_its_own_way_it_still_does(ends, batch):
    found = []
    for function in (default_collate, worker.ORIGINAL):
        try:
            found.append(function(batch))
        except Exception as error:
            found.append(str(error))
    ours, torchs = found
    assert type(ours) is type(torchs)
    assert ours == torchs if isinstance(ours, str) else torch.equal(ours.to_dense(), torchs.to_dense())
    assert isinstance(ours, str) or (ours.dtype, ours.requires_grad) == (torchs.dtype, torchs.requires_grad)


def test_a_batch_that_does_not_come_is_missing(ends, monkeypatch):
    there, _ = ends
    monkeypatch.setattr(near, "SECONDS", 0.05)
    there.expect(1)
    with pytest.raises(near.Missing):
        there.take(1)


def test_a_worker_that_cannot_get_there_gives_its_batch_to_ray(tmp_path, ends):
    for path in (None, str(tmp_path / "elsewhere")):
        sender = near.Sender(path, Memory())
        assert not sender.connected and not sender.send(1, wire.pack(made()))
    there, sender = ends
    there.expect(1)
    assert sender.send(1, wire.pack(made()))
    there.take(1).close()
    sender._connection.close()
    assert not sender.send(2, wire.pack(made())) and not sender.send(3, wire.pack(made()))
