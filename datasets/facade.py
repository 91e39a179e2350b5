"""Loaders of a folder of photographs for a script of your own, with the names of the DALI article.

    data = Dataset("/data/imagenet", batch_size, val_batch_size, workers, use_dali, dali_cpu, fp16)
    for epoch in range(90):
        for images, labels in data.get_train_loader(): ...
        data.prep_for_val()
        for images, labels in data.get_val_loader(): ...
        data.reset()

With and without DALI, the same pictures come in the same order. Each epoch has all pictures, so the last
batch may be smaller. A DALI pipeline exists for one epoch, so the one for validation takes no GPU memory
during training.
"""

import gc
import os
from collections.abc import Sequence
from typing import Any, Optional

import torch

from common import devices
from common.devices.diagnosis import diagnosis
from common.errors import UserError
from datasets import imagenet
from datasets.dali import give_memory_back
from datasets.loader import Loader
from datasets.photos import tree
from datasets.photos.files import MEGAPIXELS
from datasets.photos.labelled import Photos
from datasets.sampler import EverySample, InOrder

GROWTH = 1.25  # reset() gives memory back above this multiple of the resident memory after the first epoch


class Dataset:
    """The photographs of a folder with train and val, their loaders, and the memory that these hold."""

    def __init__(
        self, data_dir: str, batch_size: int, val_batch_size: Optional[int] = None, workers: int = 4,
        use_dali: bool = False, dali_cpu: bool = True, fp16: bool = False, *, size: int = 224,
        val_size: int = 256, min_crop_size: float = 0.08, world_size: int = 1, cuda: bool = True,
        mean: Optional[Sequence[float]] = None, std: Optional[Sequence[float]] = None,
        pin_memory: bool = True, pin_memory_dali: bool = False, seed: int = 0,
    ) -> None:  # fmt: skip
        """The first seven arguments are in the order of the article's own call, which passes them by
        position, and not of the article's repository, where size is third. The others are keyword-only.

        `mean` and `std` are of pixels from 0 to 255; unset: ImageNet's. `world_size` > 1 needs a process
        group.
        """
        rank = torch.distributed.get_rank() if world_size > 1 else 0
        if cuda and not devices.available():
            noun = devices.noun()
            raise UserError(
                f"cuda=True, but torch sees no {noun}: {diagnosis()}; or give cuda=False to use the CPU"
            )
        self.device = devices.current() if cuda else torch.device("cpu")
        self.backend = "pytorch"
        if use_dali:
            self.backend = "dali-cpu" if dali_cpu else "dali-gpu"
        self._rank = rank
        self._world_size = world_size
        self._workers = workers
        self._seed = seed
        self._loader_options = {
            "dtype": torch.float16 if fp16 else torch.float32,
            "mean": [value / 255 for value in mean] if mean else imagenet.MEAN,
            "std": [value / 255 for value in std] if std else imagenet.STD,
            "pin_memory": pin_memory_dali if use_dali else pin_memory,
        }
        files = [
            tree.load(os.path.join(data_dir, split)).without_larger(MEGAPIXELS) for split in ("train", "val")
        ]
        self._train = Photos(files[0], size, True, seed, area=(min_crop_size, 1.0))
        self._val = Photos(files[1], size, False, seed, short=val_size)
        self._val_batch_size = val_batch_size or batch_size
        self._epoch = 0
        self._first_resident = None
        self.set_train_batch_size(batch_size)

    def get_train_loader(self) -> Loader:
        """Return the training loader. Each loop over it is an epoch; reset() begins the next one."""
        return self._train_loader

    def get_val_loader(self) -> Loader:
        """Return a new loader of the validation pictures, in order."""
        sampler = InOrder(len(self._val), self._val_batch_size)
        sampler.shard(self._rank, self._world_size)
        return self._loader(self._val, sampler)

    def set_train_batch_size(self, batch_size: int) -> None:
        """Make a training loader with this batch size for each rank, at the start of the current epoch."""
        self._sampler = EverySample(len(self._train), batch_size, self._seed)
        self._sampler.shard(self._rank, self._world_size)
        self._sampler.start_at(self._epoch, 0)
        self._train_loader = self._loader(self._train, self._sampler)

    def reset(self) -> None:
        """Start the next epoch, in a new order.

        Free unused memory if the process grew by a quarter since the first reset().
        """
        self._epoch += 1
        self._sampler.start_at(self._epoch, 0)
        self._first_resident = self._first_resident or resident_bytes()
        if resident_bytes() > GROWTH * self._first_resident:
            self.clear_memory()

    def prep_for_val(self) -> None:
        """Free unused memory, such as that of the training pipeline, before the validation."""
        self.clear_memory()

    def clear_memory(self, verbose: bool = False) -> None:
        """Give unused memory back to the device and the system. `verbose`: print how much."""
        resident_before = resident_bytes()
        gc.collect()
        devices.empty_cache(self.device)
        if self.backend != "pytorch":
            from nvidia.dali import backend

            backend.ReleaseUnusedMemory()  # pyright: ignore[reportAttributeAccessIssue] - its stubs lack it
            give_memory_back()
        if verbose:
            print(
                f"{(resident_before - resident_bytes()) / 2**20:.0f} MiB given back, "
                f"{resident_bytes() / 2**20:.0f} MiB resident"
            )

    def get_nb_train(self) -> int:
        """Return the number of training pictures, of all ranks together."""
        return len(self._train)

    def get_nb_val(self) -> int:
        """Return the number of validation pictures, of all ranks together."""
        return len(self._val)

    def get_nb_classes(self) -> int:
        """Return the number of classes."""
        return len(self._train.classes)

    def _loader(self, data_set: Any, sampler: Any) -> Any:
        return imagenet.loader(
            data_set, sampler, self.device, self._workers, self.backend, **self._loader_options
        )


def resident_bytes() -> int:
    """Return the bytes of RAM that this process takes, as Linux counts them."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")
