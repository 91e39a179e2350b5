"""Today's recipe: what is erased and mixed is torchvision's, and depends on nothing but what it should; classes that count alike."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import transforms
from torchvision.transforms import v2

from datasets import augment, crops, imagenet, mixing
from datasets.sampler import EpochSampler
from datasets.synthetic import ColouredNoise


def pictures(count=6, size=24, seed=0):
    return torch.rand(count, 3, size, size + 8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("kind", "theirs"),
    [
        ("autoaugment", transforms.AutoAugment()),
        ("randaugment", transforms.RandAugment()),
        ("trivialaugment", transforms.TrivialAugmentWide()),
    ],
)
def test_a_changed_picture_is_torchvisions_with_the_same_numbers(kind, theirs):
    picture = (pictures(1)[0] * 255).to(torch.uint8)
    changed = 0
    for number in range(20):
        ours = augment.augmented(kind, picture, 3, 1, number)
        torch.manual_seed(int(crops.uniform(np.array([number]), 3, 1, [augment.DRAW])[0, 0] * 2**53))
        expected = np.array(theirs(Image.fromarray(picture.permute(1, 2, 0).numpy())))
        assert np.array_equal(ours.permute(1, 2, 0).numpy(), expected)
        changed += not torch.equal(ours, picture)
    assert changed > 10


# --- Random erasing ------------------------------------------------------------------------------------------------------


def torchvisions_rectangle(monkeypatch, picture, number, seed, epoch):
    """RandomErasing's, drawn from our numbers in place of torch's generator."""
    from torchvision.transforms import transforms as module

    draws = iter(crops.uniform(np.array([number]), seed, epoch, range(mixing.DRAW + 1, mixing.DRAW + 41))[:, 0].reshape(-1, 4))
    now = iter(())

    class Drawn:
        def __init__(self, first):
            self.first = first

        def uniform_(self, low, high):
            nonlocal now
            now = iter(next(draws)) if self.first else now
            return torch.tensor(float(low) + next(now) * (float(high) - float(low)), dtype=torch.float64)

    turns = iter(range(100))
    shim = SimpleNamespace(
        log=torch.log, exp=torch.exp, tensor=lambda values: torch.tensor(values, dtype=torch.float64),
        empty=lambda _: Drawn(next(turns) % 2 == 0),
        randint=lambda low, high, size: torch.tensor(int(low + next(now) * (high - low))),
    )  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setattr(module, "torch", shim)
        top, left, high, wide, value = transforms.RandomErasing.get_params(picture, mixing.AREA, (0.3, 3.3), [0.0])
    return (top, left, high, wide) if value.numel() == 1 else (0, 0, 0, 0)


def test_what_is_erased_is_torchvisions_rectangle_with_the_same_numbers(monkeypatch):
    picture = pictures(1)[0]
    found = mixing.rectangles(np.arange(200), *picture.shape[1:], seed=3, epoch=1, share=1.0)
    for number, ours in enumerate(found.tolist()):
        assert tuple(ours) == torchvisions_rectangle(monkeypatch, picture, number, 3, 1)
    assert len(np.unique(found, axis=0)) > 150


def test_what_is_erased_depends_on_seed_epoch_and_sample_alone():
    images, ids = pictures(40) + 1, torch.arange(40)
    whole = mixing.erase_rectangles(images.clone(), ids, seed=0, epoch=2, share=0.5)
    touched = (whole != images).flatten(1).any(dim=1)
    assert 8 < int(touched.sum()) < 32 and set(whole[whole != images].tolist()) == {0.0}
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    parts = [mixing.erase_rectangles(images[some].clone(), some, seed=0, epoch=2, share=0.5) for some in order.split(7)]
    assert torch.equal(torch.cat(parts), whole[order])
    for other in ({"seed": 1, "epoch": 2}, {"seed": 0, "epoch": 3}):
        assert not torch.equal(mixing.erase_rectangles(images.clone(), ids, share=0.5, **other), whole)
    assert torch.equal(mixing.erase_rectangles(images.clone(), ids, 0, 2, share=0.0), images)


def test_the_loader_erases_what_is_not_zero_otherwise():
    data = ColouredNoise(8, 16, 3, seed=0)

    def batch(**how):
        (found,) = [images for images, _ in imagenet.loader(data, EpochSampler(8, 8, seed=0), torch.device("cpu"), **how)]
        return found

    plain, erased = batch(), batch(erasing=1.0)
    assert all((erased[number] != plain[number]).any() for number in range(8)) and set(erased[erased != plain].tolist()) == {
        0.0
    }


# --- Mixup and CutMix ----------------------------------------------------------------------------------------------------


def as_if_rolled(monkeypatch):
    """The other image is the one before, as torchvision has it; ours are in a random order."""
    monkeypatch.setattr(torch, "randperm", lambda count: torch.arange(count).roll(1))


@pytest.mark.parametrize(("strengths", "theirs"), [((0.0, 0.7), v2.CutMix), ((0.4, 0.0), v2.MixUp)])
def test_a_mixed_batch_is_torchvisions_with_the_same_numbers(monkeypatch, strengths, theirs):
    as_if_rolled(monkeypatch)
    images, labels = pictures(), torch.arange(6)
    for seed in range(20):
        torch.manual_seed(seed)
        ours, same, others, weight = imagenet.mix(images, labels, *strengths)
        torch.manual_seed(seed)
        expected, both = theirs(alpha=sum(strengths), num_classes=6)(images, labels)
        one_hot = torch.nn.functional.one_hot
        assert torch.allclose(ours, expected) and (strengths[0] or torch.equal(ours, expected))
        assert torch.allclose(weight * one_hot(same, 6) + (1 - weight) * one_hot(others, 6), both, atol=1e-6)


def test_with_both_one_of_them_is_drawn():
    torch.manual_seed(0)
    images, labels = pictures(), torch.arange(6)
    cut = 0
    for _ in range(60):
        mixed, _, others, _ = imagenet.mix(images, labels, 0.5, 0.5)
        cut += bool(((mixed == images) | (mixed == images[others])).all())
    assert 15 < cut < 45
    assert imagenet.mix(images, labels, 0, 0) == (images, labels, labels, 1.0)


# --- Weights of classes --------------------------------------------------------------------------------------------------


def test_classes_that_are_weighted_count_alike_in_any_portions():
    labels = torch.tensor([0] * 12 + [1] * 3 + [3])
    weights = mixing.balanced_weights(labels.numpy(), 4)
    assert [float(weights[number] * (labels == number).sum()) for number in (0, 1, 3)] == pytest.approx([16 / 3] * 3)
    assert weights[2] == 0 and float(weights[labels].mean()) == pytest.approx(1)
    loss_fn, output = mixing.WeightedLoss(weights, 0.1), torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
    whole = loss_fn(output, labels)
    parts = sum(loss_fn(output[some], labels[some]) * len(some) / 16 for some in torch.randperm(16).split(5))
    assert float(parts) == pytest.approx(float(whole))
    plain = torch.nn.functional.cross_entropy(output, labels, label_smoothing=0.1, reduction="none")
    assert float(whole) == pytest.approx(float((plain * weights[labels]).mean()))
    assert mixing.describe_weights(weights, ["a", "b", "c", "d"]) == "--class_weights balanced: from 0.444 for a to 5.33 for d"
