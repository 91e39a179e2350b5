"""Synthetic images, to try a job without a data set and without Internet (--custom_data true).

The accuracy means nothing.
"""

import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from common.alive.stops import STOPS
from datasets.loader import Loader
from datasets.sampler import Sampler

MOTION = 7  # pixels that the camera moves while it takes a blurred picture
CHUNK_SIZE = 100  # images that are made at once: they fit into the processor's cache
SEED = 20210901  # of the pictures themselves, so that every run sees the same ones


def blurry_and_sharp(number: int, split: str, size: int) -> list[bytes]:
    """Return two PNG files with a picture of coloured shapes: as a moving camera takes it, and sharp."""
    from PIL import Image

    generator = np.random.default_rng([SEED, {"train": 1, "test": 2}[split], number])
    padded_size = size + 2 * MOTION
    rows, columns = np.mgrid[:padded_size, :padded_size]
    picture = np.empty((3, padded_size, padded_size), np.float32)
    picture[:] = generator.uniform(0, 255, (3, 1, 1))
    for _ in range(14):
        top, left = generator.integers(0, padded_size, 2)
        height, width = generator.integers(4, padded_size // 2, 2)
        if generator.random() < 0.5:
            inside = (rows >= top) & (rows < top + height) & (columns >= left) & (columns < left + width)
        else:
            inside = ((rows - top) / height) ** 2 + ((columns - left) / width) ** 2 < 0.25
        picture[:, inside] = generator.uniform(0, 255, (3, 1))
    steps = range(-(MOTION // 2), MOTION // 2 + 1)
    moved = np.mean([np.roll(picture, (step // 2, step), axis=(1, 2)) for step in steps], axis=0)
    middle = slice(MOTION, MOTION + size)
    files = [io.BytesIO() for _ in range(2)]
    for file, side in zip(files, (moved, picture)):
        Image.fromarray(side[:, middle, middle].round().astype(np.uint8).transpose(1, 2, 0)).save(file, "PNG")
    return [file.getvalue() for file in files]


def cifar_like(count: int, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Return uint8 images (count, 3, 32, 32) and their labels;
    those of a smaller count are the first of a larger count."""
    split_number = {"train": 1, "test": 2}[split]
    patterns = np.random.default_rng(SEED).uniform(-1, 1, (10, 3, 8, 8)).repeat(4, axis=2).repeat(4, axis=3)
    labels = np.random.default_rng([SEED, split_number, 1]).integers(0, 10, count)
    shifts = np.random.default_rng([SEED, split_number, 2]).integers(-4, 5, (count, 2))
    noise = np.random.default_rng([SEED, split_number, 3])
    padded = np.pad(patterns, ((0, 0), (0, 0), (4, 4), (4, 4)), mode="wrap")
    moved = np.lib.stride_tricks.sliding_window_view(padded, (32, 32), axis=(2, 3))
    images = np.empty((count, 3, 32, 32), np.uint8)
    for start in range(0, count, CHUNK_SIZE):
        chunk = slice(start, start + CHUNK_SIZE)
        clean = moved[labels[chunk], :, 4 - shifts[chunk, 0], 4 - shifts[chunk, 1]]
        noisy = 128 + 32 * clean + 64 * noise.standard_normal(clean.shape, dtype=np.float32)
        images[chunk] = np.clip(noisy, 0, 255)
    return images, labels.astype(np.int64)


class ColouredNoise:
    """Noise with a colour for each class: a picture is a function of its id, whatever the batch."""

    def __init__(self, count: int, size: int, num_classes: int, seed: int) -> None:
        self.size = size
        self.seed = seed
        self.classes = [f"colour {number}" for number in range(num_classes)]
        self.labels = torch.from_numpy(np.random.default_rng(seed).integers(0, num_classes, count))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(
        self, epoch_and_ids: tuple[int, np.ndarray]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ids = torch.from_numpy(epoch_and_ids[1])
        generator = torch.Generator()
        pixels = torch.empty((len(ids), self.size, self.size, 3), dtype=torch.uint8)
        for picture, number in zip(pixels, ids.tolist()):
            picture.random_(0, 64, generator=generator.manual_seed(self.seed + number))
        pixels += torch.stack([(self.labels[ids] * prime) % 192 for prime in (37, 59, 83)], dim=1).to(
            torch.uint8
        )[:, None, None]
        return pixels.permute(0, 3, 1, 2), self.labels[ids], ids


class Resident(Loader):
    """A loader without cost: it yields the same noise, which stays on the device,
    for every batch of the sampler."""

    file_of = None
    unit = "images"

    def __init__(
        self, data_set: Any, sampler: Sampler, device: torch.device, layout: torch.memory_format
    ) -> None:
        super().__init__(None, sampler, device)
        self.beside = False
        self._layout = layout
        self._size = data_set.size
        self._classes = len(data_set.classes)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        images = None
        for ids in STOPS.each(self.sampler):
            if images is None or len(ids) > len(images):
                generator = torch.Generator(self.device).manual_seed(0)
                images = torch.randn(
                    (len(ids), 3, self._size, self._size), device=self.device, generator=generator
                )
                images = images.contiguous(memory_format=self._layout)
                labels = torch.randint(0, self._classes, (len(ids),), device=self.device, generator=generator)
            self.ids = torch.from_numpy(ids)
            yield images[: len(ids)], labels[: len(ids)]
