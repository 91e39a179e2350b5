"""AutoAugment with torchvision's policies for ImageNet, as a pure function of (seed, epoch, sample id) and the picture.

torchvision draws from torch's generator, which is seeded for each picture and restored afterwards. A picture therefore looks
the same on every rank, in every loader and after any restart. Pillow is used because it is four times as fast as torch.
"""

import functools
from typing import Any

import numpy as np
import torch
from PIL import Image

from datasets import crops

DRAW = 4 * crops.ATTEMPTS + 1  # index of the first random number of a sample that its crop and flip do not use


@functools.cache
def _policies() -> Any:
    from torchvision.transforms import AutoAugment, AutoAugmentPolicy

    return AutoAugment(AutoAugmentPolicy.IMAGENET)


def autoaugment(picture: torch.Tensor, seed: int, epoch: int, number: int) -> torch.Tensor:
    """Apply AutoAugment to a uint8 (3, H, W) picture, at random by seed, epoch and `number`, the id of the sample."""
    (draw,) = crops.uniform(np.array([number]), seed, epoch, [DRAW])[0]
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int(draw * 2**53))
        changed = _policies()(Image.fromarray(picture.permute(1, 2, 0).numpy()))
    return torch.from_numpy(np.array(changed)).permute(2, 0, 1)
