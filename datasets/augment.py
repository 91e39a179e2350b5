"""torchvision's AutoAugment, RandAugment and TrivialAugment,
as pure functions of (seed, epoch, sample id) and the picture.

torchvision draws from torch's generator, which is seeded for each picture and restored afterwards. A picture
therefore looks the same on every rank, in every loader and after any restart. Pillow is used because it is
four times as fast as torch.
"""

import functools
from typing import Any

import numpy as np
import torch
from PIL import Image

from datasets import crops

# index of the first random number of a sample that its crop and flip do not use
DRAW = 4 * crops.ATTEMPTS + 1


@functools.cache
def _augmentation(kind: str) -> Any:
    from torchvision import transforms

    factories = {
        "autoaugment": lambda: transforms.AutoAugment(transforms.AutoAugmentPolicy.IMAGENET),
        "randaugment": transforms.RandAugment,
        "trivialaugment": transforms.TrivialAugmentWide,
    }
    return factories[kind]()


def augmented(kind: str, picture: torch.Tensor, seed: int, epoch: int, sample_id: int) -> torch.Tensor:
    """Return a uint8 (3, H, W) picture changed at random, by seed, epoch and sample.

    `kind`: autoaugment, randaugment or trivialaugment."""
    (draw,) = crops.uniform(np.array([sample_id]), seed, epoch, [DRAW])[0]
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int(draw * 2**53))
        changed = _augmentation(kind)(Image.fromarray(picture.permute(1, 2, 0).numpy()))
    return torch.from_numpy(np.array(changed)).permute(2, 0, 1)
