"""Batches of images that are in memory: DALI pads, crops and flips them,
with the numbers of datasets.crops."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from common import arguments, devices
from datasets import cifar10
from datasets.crops import PADDING, draw_crops_and_flips
from datasets.dali.pipeline import as_tensor, build, cut, need_dali
from datasets.loader import DeviceLoader
from datasets.sampler import Sampler


class ArrayBatches:
    """Gives (uint8 images, labels, ids) of each batch of the sampler, in order.

    `augment`: crop and flip the images.
    """

    def __init__(
        self,
        data_set: cifar10.ImageArrays,
        sampler: Sampler,
        device: torch.device,
        augment: bool,
        seed: int,
        workers: int,
    ) -> None:
        need_dali()
        self._data = data_set
        self._sampler = sampler
        self._device = device
        self._augment = augment
        self._seed = seed
        self._threads = max(1, workers)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        epoch = self._sampler.epoch
        batches = list(self._sampler)
        if not batches:
            return
        pipeline = self._pipeline(epoch, batches)
        for numbers in batches:
            (output,) = pipeline.run()
            _, labels, ids = self._data[epoch, numbers]
            yield as_tensor(output, self._device).permute(0, 3, 1, 2), labels, ids

    def _pipeline(self, epoch: int, batches: Sequence[np.ndarray]) -> Any:
        """Build a pipeline that gives the images of these batches of ids,
        on a GPU of NVIDIA if that is the device."""
        from nvidia.dali import fn

        height, width = self._data.images.shape[2:]
        gpu = self._device if devices.is_nvidia(self._device) else None

        def source(numbers: np.ndarray) -> tuple[np.ndarray, ...]:
            images, _, ids = self._data[epoch, numbers]
            top, left, flip = draw_crops_and_flips(ids, self._seed, epoch)
            anchors = torch.stack([top, left], dim=1).to(torch.int32) - PADDING
            images = images.permute(0, 2, 3, 1).contiguous()
            return tuple(array.numpy() for array in (images, anchors, flip.to(torch.int32)))

        def graph(images: Any, anchors: Any, flip: Any) -> tuple[Any, ...]:
            images = images.gpu() if gpu else images
            if not self._augment:
                return (images,)
            images = cut(images, anchors, [height, width], out_of_bounds_policy="pad", fill_values=0)
            return (fn.flip(images, horizontal=flip),)

        return build(batches, source, 3, graph, self._threads, gpu, layout=["HWC", None, None])


def add_options(parser: arguments.Parser) -> None:
    """Adapt a CIFAR job's options: --workers are threads of DALI,
    and accelerators that DALI does not support are refused."""
    arguments.explain(parser, workers="threads of DALI; at least one works")
    parser.reads = functools.partial(cifar10.reads, needs=(devices.DALI,))


def cifar_loader(
    data_set: cifar10.ImageArrays,
    sampler: Sampler,
    device: torch.device,
    augment: bool,
    seed: int,
    workers: int = 0,
) -> DeviceLoader:
    """Return a loader whose batches DALI makes in `workers` threads, at least one.

    `augment`: crop and flip the images.
    """
    batches = ArrayBatches(data_set, sampler, device, augment, seed, workers)
    return DeviceLoader(batches, sampler, device, cifar10.MEAN, cifar10.STD)
