"""What recent recipes do to batches: random erasing, mixup and CutMix, and weights of classes in the loss.

What is erased is a pure function of seed, epoch and sample, as crops are; what is mixed comes from torch's
generator, which is seeded for each step. The rectangles are torchvision's.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from common import devices
from datasets import crops
from datasets.loader import DeviceLoader

# --- Random erasing -----------------------------------------------------------------------------------------

ATTEMPTS = 10
AREA = (0.02, 0.33)
LOG_RATIO = (math.log(0.3), math.log(3.3))
# index of the first random number of a sample that neither its crop nor its colours use
DRAW = 4 * crops.ATTEMPTS + 2


def rectangles(ids: object, height: int, width: int, seed: int, epoch: int, share: float) -> np.ndarray:
    """Return (top, left, height, width) of what is erased, int64 (N, 4):
    something in a `share` of the pictures."""
    ids = np.asarray(ids)
    boxes = np.zeros((len(ids), 4), np.int64)
    pending = np.flatnonzero(crops.uniform(ids, seed, epoch, [DRAW])[0] < share)
    for attempt in range(ATTEMPTS):
        draws = crops.uniform(
            ids[pending], seed, epoch, range(DRAW + 1 + 4 * attempt, DRAW + 5 + 4 * attempt)
        )
        pixels = height * width * (AREA[0] + draws[0] * (AREA[1] - AREA[0]))
        ratio = np.exp(LOG_RATIO[0] + draws[1] * (LOG_RATIO[1] - LOG_RATIO[0]))
        high = np.rint(np.sqrt(pixels * ratio)).astype(np.int64)
        wide = np.rint(np.sqrt(pixels / ratio)).astype(np.int64)
        top = (draws[2] * (height - high + 1)).astype(np.int64)
        left = (draws[3] * (width - wide + 1)).astype(np.int64)
        fits = (high < height) & (wide < width)
        boxes[pending[fits]] = np.stack([top, left, high, wide], axis=1)[fits]
        pending = pending[~fits]
    return boxes


def erase_rectangles(images: torch.Tensor, ids: object, seed: int, epoch: int, share: float) -> torch.Tensor:
    """Set a rectangle of a `share` of the normalised images (N, C, H, W) to 0, the mean colour, in place."""
    height, width = images.shape[2:]
    edges = torch.from_numpy(rectangles(ids, height, width, seed, epoch, share).T.copy())
    top, left, high, wide = devices.to_device(edges, images.device)[:, :, None]
    rows, columns = (torch.arange(size, device=images.device) for size in (height, width))
    in_rows = (rows >= top) & (rows < top + high)
    in_columns = (columns >= left) & (columns < left + wide)
    return images.masked_fill_(in_rows[:, None, :, None] & in_columns[:, None, None, :], 0)


class ErasingLoader(DeviceLoader):
    """A DeviceLoader that erases a rectangle in a `share` of the images."""

    seed = 0
    share = 0.0

    def _prepare(self, batch: Any, ids: torch.Tensor, epoch: int) -> tuple[torch.Tensor, Any]:
        images, labels = super()._prepare(batch, ids, epoch)
        return erase_rectangles(images, ids, self.seed, epoch, self.share), labels


# --- Mixup and CutMix ---------------------------------------------------------------------------------------


def mix(
    images: torch.Tensor, labels: torch.Tensor, mixup: float, cutmix: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
    """Return (images, labels, other labels, weight of `labels`): each image is blended with another of the
    batch (mixup), or a rectangle of it is replaced by that of another (CutMix).

    `mixup`, `cutmix`: the parameter of the Beta distribution from which the weight is drawn; at least one is
    above 0. If both are, one of the two is drawn.
    """
    uses_cutmix = cutmix > 0 and (mixup == 0 or bool(torch.rand(()) < 0.5))
    strength = cutmix if uses_cutmix else mixup
    weight = float(torch.distributions.Beta(strength, strength).sample())
    if uses_cutmix:
        top, left, bottom, right = rectangle(images.shape[2], images.shape[3], weight)
        weight = 1 - (bottom - top) * (right - left) / images[0, 0].numel()
    order = devices.to_device(torch.randperm(len(images)), images.device)
    if not uses_cutmix:
        return images.lerp(images[order], 1 - weight), labels, labels[order], weight
    mixed = images.clone()
    mixed[..., top:bottom, left:right] = images[..., top:bottom, left:right][order]
    return mixed, labels, labels[order], weight


def rectangle(height: int, width: int, weight: float) -> tuple[int, int, int, int]:
    """Return (top, left, bottom, right) around a random middle, cut off at the edges,
    of at most 1 - `weight` of the pixels."""
    middle_x = int(torch.randint(width, size=(1,)))
    middle_y = int(torch.randint(height, size=(1,)))
    half_side = 0.5 * math.sqrt(1 - weight)  # as a fraction of the picture's
    half_width = int(half_side * width)
    half_height = int(half_side * height)
    top = max(middle_y - half_height, 0)
    left = max(middle_x - half_width, 0)
    bottom = min(middle_y + half_height, height)
    right = min(middle_x + half_width, width)
    return top, left, bottom, right


# --- Weights of classes -------------------------------------------------------------------------------------


def balanced_weights(labels: Any, num_classes: int) -> torch.Tensor:
    """Return a float32 weight for each class, inverse to its number of samples: all classes weigh alike in
    sum, and a sample 1 in the mean. A class without samples has 0."""
    counts = np.bincount(labels, minlength=num_classes)
    mean_count = len(labels) / max(1, np.count_nonzero(counts))
    weights = np.divide(mean_count, counts, out=np.zeros(num_classes), where=counts > 0)
    return torch.from_numpy(weights).float()


def describe_weights(weights: torch.Tensor, classes: Sequence[str]) -> str:
    """Return the weights for the log: the smallest and the largest."""
    low = int(weights.where(weights > 0, torch.inf).argmin())
    high = int(weights.argmax())
    return (
        f"--class_weights balanced: from {weights[low]:.3g} for {classes[low]} to {weights[high]:.3g} for "
        f"{classes[high]}"
    )


class WeightedLoss(torch.nn.Module):
    """Cross-entropy, each sample times the weight of its class, divided by the number of samples.

    torch's divides by the sum of their weights: a sample of a rare class would count less in a micro-batch
    with more of them.
    """

    def __init__(self, weights: torch.Tensor, label_smoothing: float) -> None:
        super().__init__()
        self._weights = weights
        self._label_smoothing = label_smoothing

    def forward(self, output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        losses = torch.nn.functional.cross_entropy(
            output, labels, label_smoothing=self._label_smoothing, reduction="none"
        )
        return (losses * self._weights[labels]).mean()
