"""Pairs through DALI for a script of your own, in the form of the Template repository:
an input iterator and a pipeline.

    pairs = ExternalInputIterator("/data/deblur", batch_size=8, shuffle=True)
    pipe = externalSourcePipeline(
        batch_size=8, num_threads=4, device_id=0, seed=1234, external_data=pairs, resize=256, crop=224
    )
    loader = DALIGenericIterator(
        pipe, ["imgs", "gts"], last_batch_policy=LastBatchPolicy.PARTIAL, auto_reset=True
    )

With shuffle=True the order differs from epoch to epoch. The last batch of an epoch has the remaining pairs.
"""

import os
from typing import Any

import numpy as np

from datasets.dali.pipeline import decoded
from datasets.photos.pairs import Pairs


class ExternalInputIterator:
    """Gives (blurry files, sharp files) of each batch of this rank's training pairs,
    each file as its bytes."""

    def __init__(
        self,
        data_source: str,
        batch_size: int,
        shuffle: bool,
        seed: int = 1234,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.rank = rank
        self.world_size = world_size
        self._pairs = Pairs(os.path.join(data_source, "train"), resize=0, crop=1, train=True, seed=seed)
        self._generator = np.random.default_rng(seed)

    def __iter__(self) -> "ExternalInputIterator":
        order = np.arange(len(self))
        if self.shuffle:
            # as many on each rank
            order = self._generator.permutation(order)[: len(self) // self.world_size * self.world_size]
        self._rank_ids = order[self.rank :: self.world_size]
        self._position = 0
        return self

    def __next__(self) -> tuple[list[np.ndarray], list[np.ndarray]]:
        ids = self._rank_ids[self._position : self._position + self.batch_size]
        if not len(ids):
            iter(self)  # DALI goes on with the next epoch without asking for a new iterator
            raise StopIteration
        self._position += len(ids)
        pairs = [[np.frombuffer(content, np.uint8) for content in self._pairs.read(number)] for number in ids]
        return [blurry for blurry, _ in pairs], [sharp for _, sharp in pairs]

    next = __next__

    def __len__(self) -> int:
        return len(self._pairs)


def externalSourcePipeline(
    external_data: ExternalInputIterator, resize: int, crop: int, **options: Any
) -> Any:
    """Return a pipeline that gives both pictures as float32 (3, crop, crop) in [-1, 1],
    cropped and flipped alike at random.

    `resize`: the height to which they are resized first; 0: their own. A picture too small for the crop is
    enlarged.
    `options`: DALI's batch_size, num_threads, seed, device_id (None: CPU).
    """
    from nvidia.dali import fn, math, types
    from nvidia.dali.pipeline import pipeline_def

    decoder = "cpu" if options.get("device_id") is None else "mixed"

    @pipeline_def(**options)
    def images_of_both():
        blurry, sharp = fn.external_source(source=external_data, num_outputs=2)
        # decoded() ignores the orientation, too
        shape = fn.peek_image_shape(blurry, adjust_orientation=False)
        own_height, own_width = (fn.cast(shape[axis], dtype=types.DALIDataType.FLOAT) for axis in range(2))
        fits = math.max(float(crop), crop * own_height / own_width)
        height = math.max(fits, resize or own_height)
        corner = [fn.random.uniform(range=(0.0, 1.0)) for _ in range(2)]
        flips = [fn.random.coin_flip() for _ in range(2)]

        def transformed(files: Any) -> Any:
            images: Any = fn.resize(decoded(files, decoder), resize_y=height)
            images = fn.crop(images, crop=(crop, crop), crop_pos_x=corner[0], crop_pos_y=corner[1])
            images = fn.flip(images, horizontal=flips[0], vertical=flips[1])
            return fn.transpose(images, perm=[2, 0, 1]) / 127.5 - 1  # pyright: ignore[reportOperatorIssue]

        return transformed(blurry), transformed(sharp)

    return images_of_both()
