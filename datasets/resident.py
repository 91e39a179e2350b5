"""Batches of small images that lie on a GPU: a step sends nothing to it,
and the host launches four kernels for a batch.

Where the crops of an epoch lie is computed when the epoch begins. The pictures are those of
crops.crop_and_flip().
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from datasets import crops
from datasets.loader import DeviceLoader
from datasets.sampler import Sampler

Batch = tuple[torch.Tensor, torch.Tensor]  # images, labels


class ResidentLoader(DeviceLoader):
    """Yields (images, labels), ready for the network, of a copy of all `images` (uint8 N, C, H, W) and their
    `labels`."""

    def __init__(
        self,
        images: torch.Tensor,
        labels: torch.Tensor,
        sampler: Sampler,
        device: torch.device,
        mean: Sequence[float],
        std: Sequence[float],
    ) -> None:
        """`mean`, `std`: of pixels from 0 to 1."""
        super().__init__((), sampler, device, mean, std)
        self.beside = False  # a thread would cost the host more than the launches
        self._size = images.shape[2:]
        self._pixels = self._to_pixels(images.to(device))
        self._labels = labels.to(device)

    def _device_batches(self) -> Iterator[tuple[Batch, torch.Tensor, None]]:
        """Yield (batch, ids, None) of the epoch, whose crops are placed before the first batch."""
        batches = list(self.sampler)
        if not batches:
            return
        ids = torch.from_numpy(np.concatenate(batches))
        ids_on_device = self._move(ids)
        parts = [ids, self._labels[ids_on_device], *self._pixel_indices(ids, ids_on_device)]
        sizes = [len(ids_of_batch) for ids_of_batch in batches]
        for ids_of_batch, labels, *indices in zip(*(part.split(sizes) for part in parts)):
            yield (self._normalised(self._images_at(*indices)), labels), ids_of_batch, None

    def _to_pixels(self, images: torch.Tensor) -> torch.Tensor:
        """Return the images in the form that _images_at() reads."""
        return images

    def _pixel_indices(self, _ids: torch.Tensor, ids_on_device: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return, for all samples of the epoch, what _images_at() takes for those of a batch."""
        return (ids_on_device,)

    def _images_at(self, ids: torch.Tensor) -> torch.Tensor:
        return self._pixels[ids]

    def _normalised(self, images: torch.Tensor) -> torch.Tensor:
        normalised = (images * self._scale).add_(self._shift)
        return normalised.contiguous(memory_format=self._layout)


class ResidentCrops(ResidentLoader):
    """A ResidentLoader whose images are cropped and flipped at random, anew in each epoch."""

    seed = 0  # of the crops

    def _to_pixels(self, images: torch.Tensor) -> torch.Tensor:
        return crops.pixels_with_border(images)

    def _pixel_indices(self, ids: torch.Tensor, ids_on_device: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return crops.rows_and_columns(ids_on_device, ids, self._size, self.seed, self.sampler.epoch)

    def _images_at(self, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        return self._pixels[rows + columns].permute(0, 3, 1, 2)
