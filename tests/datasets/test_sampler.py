"""The order of the samples, and what is done to their images."""

import types

import numpy as np
import pytest
import torch

from common.errors import UserError
from datasets import cifar10, crops, synthetic
from datasets.sampler import EpochSampler, EverySample, InOrder

# --- Order -------------------------------------------------------------------------------------------------------------


def batches(sampler):
    return [ids.tolist() for ids in sampler]


def test_the_order_is_a_function_of_seed_and_epoch():
    sampler = EpochSampler(100, 10, seed=3)
    sampler.start_at(epoch=2, consumed=0)
    assert np.array_equal(np.concatenate(list(sampler)), np.random.default_rng(5).permutation(100))


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_equal_global_batches_are_the_same_sets_at_every_world_size(world_size):
    """And rank r takes its r-th contiguous slice; together every sample that fills a step exactly once."""
    reference = EpochSampler(103, 20, seed=0)
    shards = []
    for rank in range(world_size):
        shard = EpochSampler(103, 20 // world_size, seed=0)
        shard.shard(rank, world_size)
        shards.append(batches(shard))
    joined = [sum(step, []) for step in zip(*shards)]
    assert joined == batches(reference)
    assert len(set(sum(joined, []))) == 100 == reference.samples_per_epoch


def test_resuming_in_mid_epoch_goes_on_with_the_next_sample_also_at_another_global_batch():
    whole, rest = EpochSampler(100, 10, seed=0), EpochSampler(100, 10, seed=0)
    rest.start_at(epoch=0, consumed=30)
    assert batches(rest) == batches(whole)[3:] and len(rest) == 7
    rest.set_global_batch(20)
    assert sum(batches(rest), []) == sum(batches(whole), [])[30:90] and rest.samples_per_epoch == 90


@pytest.mark.parametrize("count, ranks", [(n, w) for n in range(97, 104) for w in (1, 2, 3, 4)])
def test_evaluation_counts_every_sample_once(count, ranks):
    seen = []
    for rank in range(ranks):
        sampler = InOrder(count, 10)
        sampler.shard(rank, ranks)
        assert len(batches(sampler)) == len(sampler)
        seen += sum(batches(sampler), [])
    assert sorted(seen) == list(range(count))


def test_impossible_batches_are_refused_saying_what_is_possible():
    with pytest.raises(UserError, match=r"100 samples are fewer than one global batch of 128; lower --batch_size$"):
        EpochSampler(100, 128, seed=0)
    sampler = EpochSampler(1000, 10, seed=0)
    sampler.shard(0, 3)
    with pytest.raises(UserError, match=r"\[1, 2, 4, 8, 16, 32\] ranks"):
        sampler.set_global_batch(32)
    with pytest.raises(UserError, match=r"batch of 1002 \(334 x 3 ranks\); lower --batch_size or use fewer ranks$"):
        sampler.set_global_batch(1002)


@pytest.mark.parametrize("rank, ranks", [(3, 3), (-1, 3), (4, 3), (0, 0)])
def test_a_rank_that_there_is_not_is_refused(rank, ranks):
    for sampler in (EpochSampler(100, 10, seed=0), EverySample(100, 10, seed=0), InOrder(100, 10)):
        before = batches(sampler)
        with pytest.raises(UserError, match=f"there is no rank {rank} of {ranks} ranks"):
            sampler.shard(rank, ranks)
        assert batches(sampler) == before
    with pytest.raises(UserError, match="there is no share 2 to 4 of 4 shares, which are counted from 0"):
        EpochSampler(100, 20, seed=0).deal(range(2, 5), 4, 20)


@pytest.mark.parametrize("count", [1, 3, 59, 60, 61, 64, 65])
def test_every_sample_is_in_an_epoch_and_ranks_have_equally_many(count):
    orders = []
    for ranks in (1, 2, 4):
        shards = []
        for rank in range(ranks):
            sampler = EverySample(count, 16 // ranks, seed=5)
            sampler.shard(rank, ranks)
            sampler.start_at(2, 0)
            shards.append(batches(sampler))
            assert len(shards[-1]) == len(sampler) and sampler.samples_per_epoch == count
        assert all(list(map(len, shard)) == list(map(len, shards[0])) for shard in shards)
        orders.append(sum((sum(step, []) for step in zip(*shards)), []))
        assert orders[-1][:count] == orders[0][:count] and len(orders[-1]) - count < ranks
        assert orders[-1][count:] == (orders[0] * ranks)[: len(orders[-1]) - count]
    assert sorted(orders[0]) == list(range(count))
    if count > 16:  # whole batches are those of the other sampler
        other = EpochSampler(count, 16, seed=5)
        other.start_at(2, 0)
        assert sum(batches(other), []) == orders[0][: count // 16 * 16]


# --- Augmentation ------------------------------------------------------------------------------------------------------


def pictures(count):
    return torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)).contiguous(
        memory_format=torch.channels_last
    )


def test_a_picture_looks_the_same_in_every_batch():
    images, ids = pictures(16), torch.arange(100, 116)
    whole = crops.crop_and_flip(images, ids, seed=1, epoch=2)
    order = torch.randperm(16, generator=torch.Generator().manual_seed(1))
    parts = [crops.crop_and_flip(images[part], ids[part], seed=1, epoch=2) for part in order.split(5)]
    assert torch.equal(torch.cat(parts), whole[order])
    assert not torch.equal(whole, crops.crop_and_flip(images, ids, seed=1, epoch=3))
    assert not torch.equal(whole, crops.crop_and_flip(images, ids, seed=2, epoch=2))


def test_every_result_is_a_crop_of_the_padded_image_flipped_or_not_and_all_162_occur_alike():
    image = pictures(1)
    padded = torch.nn.functional.pad(image, (4, 4, 4, 4))[0]
    counts = {}
    for top in range(9):
        for left in range(9):
            crop = padded[:, top : top + 32, left : left + 32]
            counts[crop.numpy().tobytes()], counts[crop.flip(2).contiguous().numpy().tobytes()] = 0, 0
    count = 162 * 50
    for image_out in crops.crop_and_flip(image.expand(count, -1, -1, -1), torch.arange(count), seed=0, epoch=0):
        counts[image_out.contiguous().numpy().tobytes()] += 1  # a KeyError is a picture that is no crop
    assert len(counts) == 162 and min(counts.values()) > 20 and max(counts.values()) < 90


def test_the_loader_gives_normalised_channels_last_batches_and_knows_their_ids():
    images, labels = synthetic.cifar_like(64, "train")
    data = cifar10.ImageArrays(images, labels, classes=[])
    for workers in (0, 2):
        loader = cifar10.loader(data, EpochSampler(64, 16, seed=0), torch.device("cpu"), workers=workers)
        for batch, targets in loader:
            mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in (cifar10.MEAN, cifar10.STD))
            expected = (torch.from_numpy(images[loader.ids]).float() / 255 - mean) / std
            assert torch.allclose(batch, expected, atol=1e-5) and batch.is_contiguous(memory_format=torch.channels_last)
            assert torch.equal(targets, torch.from_numpy(labels[loader.ids]))
        assert len(loader) == 4


def test_synthetic_images_have_the_promised_shapes_and_are_the_same_every_time():
    args = types.SimpleNamespace(custom_data=True, max_samples=None)
    train, test = cifar10.load(args)
    assert (train.images.shape, test.images.shape) == ((5000, 3, 32, 32), (1000, 3, 32, 32))
    assert train.images.dtype == torch.uint8 and sorted(set(train.labels.tolist())) == list(range(10))
    again, _ = cifar10.load(args)
    few, _ = cifar10.load(types.SimpleNamespace(custom_data=True, max_samples=100))
    assert torch.equal(train.images[:100], few.images) and torch.equal(train.labels[:100], few.labels)
    assert torch.equal(train.images, again.images) and not torch.equal(train.images[:1000], test.images)
