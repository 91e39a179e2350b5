"""Pairs of pictures through NVIDIA DALI: both pictures of a pair get the same numbers, so they cannot come apart."""

from typing import Any

import numpy as np
import torch

from datasets.dali.batches import Batches
from datasets.dali.pipeline import as_tensor, build, cut, decoded, resized
from datasets.photos.pairs import Pairs


class PairBatches(Batches):
    """Of datasets.pairs: the blurry pictures first, then the sharp ones."""

    _data: Pairs

    def _batch(self, outputs, ids):
        if self._gpu:
            both = [as_tensor(images, self._gpu) for images in outputs]
            return torch.cat(both).permute(0, 3, 1, 2), torch.from_numpy(ids)
        *both, sizes, corners, flips = outputs
        images = self._data.empty_batch(len(ids))
        sizes, corners, flips = (np.array(numbers.as_tensor()) for numbers in (sizes, corners, flips))
        for place in range(2 * len(ids)):
            side, pair = divmod(place, len(ids))
            picture = torch.from_numpy(both[side].at(pair)).permute(2, 0, 1)
            images[place] = self._data.cut(picture, sizes[pair].astype(int), corners[pair].astype(int), flips[pair])
        return images, torch.from_numpy(ids)

    def _pipeline(self, batches, epoch):
        def graph(blurry, sharp, *numbers):
            if self._gpu:
                return transformed(blurry, sharp, *numbers, crop=self._data.crop, decoder="mixed")
            return decoded(blurry, "cpu"), decoded(sharp, "cpu"), *numbers  # torch's resize is the faster one there

        return build(batches, lambda ids: inputs(self._data, ids, epoch), 5, graph, self._threads, self._gpu)


def inputs(pairs: Pairs, ids: np.ndarray, epoch: int) -> tuple[list, list, np.ndarray, np.ndarray, np.ndarray]:
    """What a pipeline needs of a batch: (blurry files, sharp files, sizes, corners, flips)."""
    blurry, sharp = zip(*([np.frombuffer(content, np.uint8) for content in pairs.read(number)] for number in ids))
    sizes, corners, flips = pairs.geometry(ids, epoch)
    return list(blurry), list(sharp), sizes.astype(np.float32), corners.astype(np.float32), flips.astype(np.int32)


def transformed(blurry: Any, sharp: Any, sizes: Any, corners: Any, flips: Any, crop: int, decoder: str) -> tuple[Any, Any]:
    """Both decoded, resized, cropped and flipped alike: uint8 (crop, crop, 3)."""
    from nvidia.dali import fn

    def picture(files):
        images = cut(resized(decoded(files, decoder), sizes), corners, [float(crop)] * 2)
        return fn.flip(images, vertical=flips[0], horizontal=flips[1])

    return picture(blurry), picture(sharp)
