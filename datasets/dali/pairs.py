"""Pairs of pictures through NVIDIA DALI, in the form of the Template repository: an external input iterator and a pipeline.

    pairs = ExternalInputIterator("/data/deblur", batch_size=8, shuffle=True)
    pipe = externalSourcePipeline(batch_size=8, num_threads=4, device_id=0, external_data=pairs, resize=256, crop=224)
    loader = DALIGenericIterator(pipe, ["imgs", "gts"], last_batch_policy=LastBatchPolicy.PARTIAL, auto_reset=True)

Both pictures of a pair get the same numbers from the iterator, so they cannot come apart; it shuffles anew in every epoch.
"""

import os

import numpy as np
import torch

from datasets.dali.batches import AHEAD, DaliBatches, as_tensor
from datasets.photos.pairs import Pairs
from datasets.sampler import EpochSampler, InOrder


class ExternalInputIterator:
    """(blurry files, sharp files, sizes, corners, flips) of each batch of a folder's training pairs, over and over."""

    def __init__(self, data_source, batch_size, shuffle, seed=1234, rank=0, world_size=1):
        self.data_source, self.seed = data_source, seed
        self._pairs = Pairs(os.path.join(data_source, "train"), 0, 8, shuffle, seed)
        make = EpochSampler if shuffle else InOrder
        self._sampler = make(len(self._pairs), batch_size, **({"seed": seed} if shuffle else {}))
        self._sampler.shard(rank, world_size)
        self._epoch = -1

    def cut(self, resize, crop):
        self._pairs.resize, self._pairs.crop = resize, crop
        return self

    def __iter__(self):
        self._epoch += 1
        if isinstance(self._sampler, EpochSampler):
            self._sampler.start_at(self._epoch, 0)
        self._batches = iter(self._sampler)
        return self

    def __next__(self):
        return inputs(self._pairs, next(self._batches), self._epoch)

    next = __next__

    def __len__(self):
        return len(self._pairs)


def inputs(pairs, ids, epoch):
    """What the pipeline needs of a batch."""
    blurry, sharp = zip(*([np.frombuffer(content, np.uint8) for content in pairs.read(number)] for number in ids))
    sizes, corners, flips = pairs.geometry(ids, epoch)
    return list(blurry), list(sharp), sizes.astype(np.float32), corners.astype(np.float32), flips.astype(np.int32)


def externalSourcePipeline(external_data, resize, crop, **how):
    """float32 (3, crop, crop) in [-1, 1] of both pictures. `how` is DALI's: batch_size, num_threads, device_id (None: CPU)."""
    from nvidia.dali import fn, pipeline_def

    @pipeline_def(**how)
    def build():
        found = fn.external_source(external_data.cut(resize, crop), num_outputs=5, cycle="raise")
        both = transform(*found, crop, "cpu" if how.get("device_id") is None else "mixed")
        return tuple(fn.transpose(images, perm=[2, 0, 1]) / 127.5 - 1 for images in both)

    return build()


def decoded(images, decoder):
    from nvidia.dali import fn, types

    return fn.decoders.image(images, device=decoder, output_type=types.RGB, adjust_orientation=False)


def transform(imgs, gts, sizes, corners, flips, crop, decoder):
    """The same of both: resized, cropped, flipped; uint8 (crop, crop, 3)."""
    from nvidia.dali import fn, types

    made = []
    for images in (imgs, gts):
        images = fn.resize(decoded(images, decoder), size=sizes, interp_type=types.INTERP_LINEAR, antialias=True)
        images = fn.slice(images, corners, [float(crop)] * 2, axis_names="HW", normalized_anchor=False, normalized_shape=False)
        made.append(fn.flip(images, vertical=flips[0], horizontal=flips[1]))
    return made


class PairBatches(DaliBatches):
    """The batches of datasets.pairs, in the sampler's order."""

    def _fits(self, ids):
        return not self._data.special[ids].any()

    def _batch(self, outputs, ids):
        if self._on_gpu:
            both = [as_tensor(images, self.device) for images in outputs]
            return torch.cat(both).permute(0, 3, 1, 2), torch.from_numpy(ids)
        *both, sizes, corners, flips = outputs
        images, numbers = self._data.room(len(ids)), [np.array(found.as_tensor()) for found in (sizes, corners, flips)]
        for place in range(2 * len(ids)):
            side, pair = divmod(place, len(ids))
            size, corner, flip = (found[pair] for found in numbers)
            picture = torch.from_numpy(both[side].at(pair)).permute(2, 0, 1)
            images[place] = self._data.cut(picture, size.astype(int), corner.astype(int), flip)
        return images, torch.from_numpy(ids)

    def _pipeline(self, batches, epoch):
        from nvidia.dali import fn, pipeline_def

        def source(batch):
            if batch == len(batches):  # DALI asks ahead
                raise StopIteration
            return inputs(self._data, batches[batch], epoch)

        @pipeline_def(
            batch_size=max(map(len, batches)), num_threads=self._threads, prefetch_queue_depth=AHEAD,
            device_id=self.device.index or 0 if self._on_gpu else None,
        )  # fmt: skip
        def build():
            blurry, sharp, *numbers = fn.external_source(source, num_outputs=5, batch_info=False)
            if self._on_gpu:
                return tuple(transform(blurry, sharp, *numbers, self._data.crop, "mixed"))
            return *(decoded(images, "cpu") for images in (blurry, sharp)), *numbers  # torch's resize is the faster one there

        made = build()
        made.build()
        return made
