"""Two loaders over a folder of photographs for a script of your own, under the names of the DALI article that they come from.

    data = Dataset("/data/imagenet", batch_size=256, use_dali=True, dali_cpu=False, fp16=True)
    for epoch in range(90):
        for images, labels in data.get_train_loader(): ...
        data.prep_for_val()
        for images, labels in data.get_val_loader(): ...
        data.reset()

With and without DALI the same pictures come in the same order. A pipeline of DALI lives for one epoch, so that for validation
takes no GPU memory while training, and none can grow.
"""

import gc
import os

import torch

from datasets import imagenet
from datasets.dali import give_memory_back
from datasets.photos import tree
from datasets.sampler import EpochSampler, InOrder

GROWTH = 1.25  # resident memory, against the first epoch's, from which reset() gives memory back


class Dataset:
    def __init__(
        self, data_dir, batch_size, size=224, val_batch_size=None, val_size=256, min_crop_size=0.08, workers=4,
        world_size=1, cuda=True, use_dali=False, dali_cpu=True, fp16=False, mean=None, std=None, pin_memory=True,
        pin_memory_dali=False, seed=0,
    ):  # fmt: skip
        """`mean` and `std` are of pixels from 0 to 255; unset, ImageNet's. With world_size > 1 torch.distributed is running."""
        rank = torch.distributed.get_rank() if world_size > 1 else 0
        self.device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        self.backend = ("dali-cpu" if dali_cpu else "dali-gpu") if use_dali else "pytorch"
        self._rank, self._world_size, self._workers, self._seed = rank, world_size, workers, seed
        self._how = {
            "dtype": torch.float16 if fp16 else torch.float32,
            "mean": [value / 255 for value in mean] if mean else imagenet.MEAN,
            "std": [value / 255 for value in std] if std else imagenet.STD,
            "pin_memory": pin_memory_dali if use_dali else pin_memory,
        }
        files = [tree.load(os.path.join(data_dir, split)) for split in ("train", "val")]
        self._train = imagenet.Photos(files[0], size, True, seed, area=(min_crop_size, 1.0))
        self._val = imagenet.Photos(files[1], size, False, seed, short=val_size)
        self._val_batch_size, self._epoch, self._resident = val_batch_size or batch_size, 0, None
        self.set_train_batch_size(batch_size)

    def get_train_loader(self):
        return self._train_loader

    def get_val_loader(self):
        sampler = InOrder(len(self._val), self._val_batch_size)
        sampler.shard(self._rank, self._world_size)
        return self._loader(self._val, sampler)

    def set_train_batch_size(self, batch_size):
        self._sampler = EpochSampler(len(self._train), batch_size, self._seed)
        self._sampler.shard(self._rank, self._world_size)
        self._sampler.start_at(self._epoch, 0)
        self._train_loader = self._loader(self._train, self._sampler)

    def reset(self):
        """On to the next epoch and its order; memory is given back where it is seen to have grown."""
        self._epoch += 1
        self._sampler.start_at(self._epoch, 0)
        self._resident = self._resident or resident_bytes()
        if resident_bytes() > GROWTH * self._resident:
            self.clear_memory()

    def prep_for_val(self):
        """Room on the GPU for the validation: what the training's pipeline had is given back first."""
        self.clear_memory()

    def clear_memory(self, verbose=False):
        before = resident_bytes()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        if self.backend != "pytorch":
            from nvidia.dali import backend

            backend.ReleaseUnusedMemory()
            give_memory_back()
        if verbose:
            print(f"{(before - resident_bytes()) / 2**20:.0f} MiB given back, {resident_bytes() / 2**20:.0f} MiB resident")

    def get_nb_train(self):
        return len(self._train)

    def get_nb_val(self):
        return len(self._val)

    def get_nb_classes(self):
        return len(self._train.classes)

    def _loader(self, data_set, sampler):
        return imagenet.loader(data_set, sampler, self.device, self._workers, self.backend, **self._how)


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")
