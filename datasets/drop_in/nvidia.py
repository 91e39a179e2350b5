"""The loaders of NVIDIA's ResNet-50 script, and those of Alibaba's KSpeed patch for it,
with the same signatures.

    train_loader, steps = get_kspeed_train_loader("/data/imagenet", 224, 256, 1000, one_hot=False)
    for images, targets in train_loader: ...  # on the GPU if there is one, normalised; anew in each epoch

All but the synthetic loaders give the same pictures in the same order. If there is a process group, the
pictures are divided among its ranks. Seeds are not taken from numpy or torch, so `_worker_init_fn` is not
called.
"""

import os
from collections.abc import Iterator
from typing import Any, Callable, Optional

import torch

from common import devices
from datasets import imagenet, kspeed
from datasets.drop_in.article import compute_device
from datasets.loader import Loader
from datasets.photos import tree
from datasets.photos.files import MEGAPIXELS
from datasets.photos.labelled import Photos
from datasets.sampler import EpochSampler, InOrder, Sampler
from datasets.synthetic import ColouredNoise

# The five of Alibaba's document, then those of NVIDIA's script that it patches.
DATA_BACKEND_CHOICES = [
    "pytorch",
    "syntetic",
    "kspeed",
    "dali-kspeed",
    "dali",
    "synthetic",
    "dali-gpu",
    "dali-cpu",
]

GetLoader = Callable[..., tuple["EpochLoader", int]]


class EpochLoader:
    """Gives (images, targets) of each batch, one epoch per loop.

    Targets are class numbers, or with `one_hot` float vectors.
    """

    def __init__(
        self, loader: Any, sampler: Any, num_classes: int, one_hot: bool, start_epoch: int = 0
    ) -> None:
        self._loader = loader
        self._sampler = sampler
        self._num_classes = num_classes
        self._one_hot = one_hot
        self.epoch = start_epoch

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        if isinstance(self._sampler, EpochSampler):
            self._sampler.start_at(self.epoch, 0)
        for images, targets in self._loader:
            if self._one_hot:
                targets = torch.nn.functional.one_hot(targets, self._num_classes).float()
            yield images, targets
        self.epoch += 1


def _train_loader_getter(backend: str, decode_on_gpu: Optional[bool] = None) -> GetLoader:
    """Return a function with the signature of NVIDIA's get_*_train_loader() for this --data_backend."""

    def get(
        data_path: str, image_size: int, batch_size: int, num_classes: int, one_hot: bool,
        interpolation: str = "bilinear", augmentation: Optional[str] = None, start_epoch: int = 0,
        workers: int = 5, _worker_init_fn: Optional[Callable] = None, prefetch_factor: int = 2,
        memory_format: torch.memory_format = torch.contiguous_format,
    ) -> tuple[EpochLoader, int]:  # fmt: skip
        mode = _mode(interpolation)
        augmentation = "autoaugment" if augmentation == "autoaugment" else "none"
        photos = Photos(
            _files(data_path, "train", backend), image_size, True, 0, mode=mode, augmentation=augmentation
        )
        sampler = EpochSampler(len(photos), batch_size, seed=0)
        loader = _sharded(photos, sampler, workers, backend, prefetch_factor, memory_format, decode_on_gpu)
        return EpochLoader(loader, sampler, num_classes, one_hot, start_epoch), len(sampler)

    return get


def _val_loader_getter(backend: str, decode_on_gpu: Optional[bool] = None) -> GetLoader:
    """Return a function with the signature of NVIDIA's get_*_val_loader() for this --data_backend."""

    def get(
        data_path: str, image_size: int, batch_size: int, num_classes: int, one_hot: bool,
        interpolation: str = "bilinear", workers: int = 5, _worker_init_fn: Optional[Callable] = None,
        crop_padding: int = 32, memory_format: torch.memory_format = torch.contiguous_format,
        prefetch_factor: int = 2,
    ) -> tuple[EpochLoader, int]:  # fmt: skip
        short = image_size + crop_padding
        mode = _mode(interpolation)
        photos = Photos(_files(data_path, "val", backend), image_size, False, 0, short=short, mode=mode)
        sampler = InOrder(len(photos), batch_size)
        loader = _sharded(photos, sampler, workers, backend, prefetch_factor, memory_format, decode_on_gpu)
        return EpochLoader(loader, sampler, num_classes, one_hot), len(sampler)

    return get


get_pytorch_train_loader = _train_loader_getter("pytorch")
get_pytorch_val_loader = _val_loader_getter("pytorch")
get_kspeed_train_loader = _train_loader_getter("kspeed")
get_kspeed_val_loader = _val_loader_getter("kspeed")


def get_dali_train_loader(dali_cpu: bool = False) -> GetLoader:
    """Return a function that makes a training loader of DALI, as NVIDIA's script has it."""
    return _train_loader_getter("dali-cpu" if dali_cpu else "dali-gpu")


def get_dali_val_loader(dali_cpu: bool = False) -> GetLoader:
    """Return a function that makes a validation loader of DALI, as NVIDIA's script has it."""
    return _val_loader_getter("dali-cpu" if dali_cpu else "dali-gpu")


def get_dali_kspeed_train_loader(dali_cpu: bool = False, kspeed: bool = True) -> GetLoader:
    """Return a function that makes a training loader of DALI, through the cache if `kspeed`."""
    return (
        _train_loader_getter("dali-kspeed", _decodes_on_gpu(dali_cpu))
        if kspeed
        else get_dali_train_loader(dali_cpu)
    )


def get_dali_kspeed_val_loader(dali_cpu: bool = False, kspeed: bool = True) -> GetLoader:
    """Return a function that makes a validation loader of DALI, through the cache if `kspeed`."""
    return (
        _val_loader_getter("dali-kspeed", _decodes_on_gpu(dali_cpu))
        if kspeed
        else get_dali_val_loader(dali_cpu)
    )


def _decodes_on_gpu(dali_cpu: bool) -> bool:
    return not dali_cpu and devices.is_nvidia(compute_device())


def get_synthetic_loader(
    data_path: Optional[str], image_size: int, batch_size: int, num_classes: int, one_hot: bool,
    interpolation: Optional[str] = None, augmentation: Optional[str] = None, start_epoch: int = 0,
    workers: Optional[int] = None, _worker_init_fn: Optional[Callable] = None,
    memory_format: torch.memory_format = torch.contiguous_format, prefetch_factor: int = 2,
) -> tuple[EpochLoader, int]:  # fmt: skip
    """Return (loader, steps per epoch).

    The loader repeats one batch of noise for an epoch of ImageNet; NVIDIA's never ends.
    """
    noise = ColouredNoise(imagenet.IMAGENET["train"], image_size, num_classes, seed=0)
    sampler = EpochSampler(len(noise), batch_size, seed=0)
    loader = _sharded(noise, sampler, 0, "synthetic", prefetch_factor, memory_format)
    return EpochLoader(loader, sampler, num_classes, one_hot, start_epoch), len(sampler)


get_synthetic_train_loader = get_synthetic_val_loader = get_syntetic_loader = get_synthetic_loader


def _files(data_path: str, split: str, backend: str) -> Any:
    files = tree.load(os.path.join(data_path, split)).without_larger(MEGAPIXELS)
    return kspeed.through_cache(files, None, None) if backend.endswith("kspeed") else files


def _mode(interpolation: str) -> str:
    return "bicubic" if interpolation == "bicubic" else "bilinear"


def _sharded(
    data_set: imagenet.DataSet, sampler: Sampler, workers: int, backend: str, prefetch: int,
    layout: torch.memory_format, decode_on_gpu: Optional[bool] = None,
) -> Loader:  # fmt: skip
    has_group = torch.distributed.is_available() and torch.distributed.is_initialized()
    if has_group:
        sampler.shard(torch.distributed.get_rank(), torch.distributed.get_world_size())
    return imagenet.loader(
        data_set,
        sampler,
        compute_device(),
        workers,
        backend,
        prefetch=prefetch,
        layout=layout,
        decode_on_gpu=decode_on_gpu,
    )
