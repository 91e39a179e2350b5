"""Pairs through DALI for a script of your own, in the form of the Template repository: an input iterator and a pipeline.

    pairs = ExternalInputIterator("/data/deblur", batch_size=8, shuffle=True)
    pipe = externalSourcePipeline(batch_size=8, num_threads=4, device_id=0, external_data=pairs, resize=256, crop=224)
    loader = DALIGenericIterator(pipe, ["imgs", "gts"], last_batch_policy=LastBatchPolicy.PARTIAL, auto_reset=True)

The iterator shuffles anew in every epoch.
"""

import os
from typing import Any

import numpy as np

from datasets.dali.batches import inputs, transformed
from datasets.photos.pairs import Pairs
from datasets.sampler import EpochSampler, InOrder


class ExternalInputIterator:
    """(blurry files, sharp files, sizes, corners, flips) of each batch of a folder's training pairs, over and over."""

    def __init__(
        self, data_source: str, batch_size: int, shuffle: bool, seed: int = 1234, rank: int = 0, world_size: int = 1
    ) -> None:
        self.data_source, self.seed = data_source, seed
        self._pairs = Pairs(os.path.join(data_source, "train"), 0, 8, shuffle, seed)
        count = len(self._pairs)
        self._sampler = EpochSampler(count, batch_size, seed) if shuffle else InOrder(count, batch_size)
        self._sampler.shard(rank, world_size)
        self._epoch = -1

    def cut(self, resize: int, crop: int) -> "ExternalInputIterator":
        self._pairs.resize, self._pairs.crop = resize, crop
        return self

    def __iter__(self) -> "ExternalInputIterator":
        self._epoch += 1
        if isinstance(self._sampler, EpochSampler):
            self._sampler.start_at(self._epoch, 0)
        self._batches = iter(self._sampler)
        return self

    def __next__(self) -> tuple[list, list, np.ndarray, np.ndarray, np.ndarray]:
        return inputs(self._pairs, next(self._batches), self._epoch)

    next = __next__

    def __len__(self) -> int:
        return len(self._pairs)


def externalSourcePipeline(external_data: ExternalInputIterator, resize: int, crop: int, **how: Any) -> Any:
    """float32 (3, crop, crop) in [-1, 1] of both pictures. `how` is DALI's: batch_size, num_threads, device_id (None: CPU)."""
    from nvidia.dali import fn
    from nvidia.dali.pipeline import pipeline_def

    @pipeline_def(**how)
    def images_of_both():
        arrays = fn.external_source(external_data.cut(resize, crop), num_outputs=5, cycle="raise")
        both = transformed(*arrays, crop=crop, decoder="cpu" if how.get("device_id") is None else "mixed")
        # Of one input DALI makes one output, not a list.
        return tuple(fn.transpose(images, perm=[2, 0, 1]) / 127.5 - 1 for images in both)  # pyright: ignore[reportOperatorIssue]

    return images_of_both()
