"""Images that lie on the device: the same batches as those that the host makes, to the bit."""

import numpy as np
import pytest
import torch

from datasets import cifar10
from datasets.loader import DeviceLoader
from datasets.resident import ResidentCrops, ResidentLoader
from datasets.sampler import EpochSampler, InOrder

CPU = torch.device("cpu")


def data_set(kind=cifar10.ImageArrays):
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (200, 3, 32, 32), dtype=np.uint8)
    return kind(images, random.integers(0, 10, 200), classes=[])


def resident_loader(sampler, seed=None):
    data = data_set()
    kind = ResidentLoader if seed is None else ResidentCrops
    loader = kind(data.images, data.labels, sampler, CPU, cifar10.MEAN, cifar10.STD)
    loader.seed = seed
    return loader


@pytest.fixture
def gpu(monkeypatch):
    """The CPU as a GPU."""
    monkeypatch.setattr(cifar10.devices, "is_nvidia", lambda _: True)


@pytest.mark.parametrize("augment", [True, False])
@pytest.mark.parametrize("epoch, consumed", [(0, 0), (1, 48), (2, 192)])
def test_the_batches_are_those_of_the_host(augment, epoch, consumed):
    samplers = [EpochSampler(200, 16, seed=3) for _ in range(2)]
    for sampler in samplers:
        sampler.shard(1, 2)
        sampler.start_at(epoch, consumed)
    on_host = cifar10.loader(data_set(), samplers[0], CPU, augment, seed=7)
    resident = resident_loader(samplers[1], 7 if augment else None)
    count = 0
    for (images, labels), (same_images, same_labels) in zip(on_host, resident, strict=True):
        assert torch.equal(images, same_images) and images.stride() == same_images.stride()
        assert torch.equal(labels, same_labels)
        assert torch.equal(on_host.ids, resident.ids)
        count += 1
    assert count == len(samplers[0]) == (200 - consumed) // 32


def test_an_evaluation_has_a_shorter_last_batch():
    loader = resident_loader(InOrder(200, 64))
    assert [len(labels) for _, labels in loader] == [64, 64, 64, 8]


@pytest.mark.parametrize("augment, kind", [(True, ResidentCrops), (False, ResidentLoader)])
def test_cifar_lies_on_a_gpu(gpu, augment, kind):
    loader = cifar10.loader(data_set(), EpochSampler(200, 16, seed=3), CPU, augment, seed=7)
    assert type(loader) is kind
    assert getattr(loader, "seed", None) == (7 if augment else None)
    assert not loader.beside


class Noisy(cifar10.ImageArrays):
    """Samples that are not what its arrays hold."""


@pytest.mark.parametrize(
    "kind, workers, most", [(Noisy, 0, 2**28), (cifar10.ImageArrays, 1, 2**28), (cifar10.ImageArrays, 0, 1000)]
)
def test_other_data_stay_on_the_host(gpu, monkeypatch, kind, workers, most):
    monkeypatch.setattr(cifar10, "MAX_RESIDENT_BYTES", most)
    assert type(cifar10.loader(data_set(kind), EpochSampler(200, 16, seed=3), CPU, workers=workers)) is DeviceLoader
