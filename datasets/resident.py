"""Batches of small images that lie on the device: a step sends nothing to it, and the host launches four kernels for a batch.

Where the crops of an epoch lie is computed when the epoch begins. The pictures are those of crops.crop_and_flip().
"""

from collections.abc import Iterator, Sequence
from typing import Optional

import numpy as np
import torch

from common import devices
from datasets import crops
from datasets.loader import DeviceLoader
from datasets.sampler import Sampler

Batch = tuple[torch.Tensor, torch.Tensor]  # images, labels


class ResidentLoader(DeviceLoader):
    """Yields (images, labels), ready for the network, of all `images` (uint8 N, C, H, W) and their `labels`."""

    def __init__(
        self,
        images: torch.Tensor,
        labels: torch.Tensor,
        sampler: Sampler,
        device: torch.device,
        mean: Sequence[float],
        std: Sequence[float],
        augment_seed: Optional[int] = None,
    ) -> None:
        """`mean`, `std`: of pixels from 0 to 1; `augment_seed`: of the random crops and flips, None: the images as they are."""
        super().__init__((), sampler, device, mean, std)
        self.beside = False  # a thread would cost the host more than the launches
        images = devices.to_device(images, device, pin=False)
        self._size = images.shape[2:]
        self._images_or_pixels = images if augment_seed is None else crops.pixels_with_border(images)
        self._labels = labels.to(device)
        self._augment_seed = augment_seed

    def _moved(self) -> Iterator[tuple[Batch, torch.Tensor, None]]:
        batches = list(self.sampler)
        if not batches:
            return
        ids = torch.from_numpy(np.concatenate(batches))
        ids_on_device = self._move(ids)
        parts = [ids, self._labels[ids_on_device], *self._places(ids, ids_on_device)]
        sizes = [len(ids_of_batch) for ids_of_batch in batches]
        for ids_of_batch, labels, *places in zip(*(part.split(sizes) for part in parts)):
            yield (self._normalised(self._images_at(*places)), labels), ids_of_batch, None

    def _places(self, ids: torch.Tensor, ids_on_device: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return what _images_at() needs for all samples of the epoch."""
        if self._augment_seed is None:
            return (ids_on_device,)
        return crops.rows_and_columns(ids_on_device, ids, self._size, self._augment_seed, self.sampler.epoch)

    def _images_at(self, first: torch.Tensor, columns: Optional[torch.Tensor] = None) -> torch.Tensor:
        if columns is None:
            return self._images_or_pixels[first]
        return self._images_or_pixels[first + columns].permute(0, 3, 1, 2)

    def _normalised(self, images: torch.Tensor) -> torch.Tensor:
        normalised = (images * self._scale).add_(self._shift)
        return normalised.contiguous(memory_format=self._layout)
