"""Batches of photographs and pairs through NVIDIA DALI, on CPU or GPU: the same samples,
order and crops as other loaders.

Each epoch has its own pipeline: a resumed run may begin in the middle of an epoch, and between two epochs no
memory is held. If DALI cannot make a batch, or other decoders read a picture in it differently, the data set
makes it without DALI.
"""

import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable, NamedTuple, Union

import numpy as np
import torch

from common.errors import one_line
from common.machine import cores
from common.progress import warn
from datasets.dali.pipeline import (
    AHEAD,
    as_tensor,
    build,
    cut,
    decode_options,
    decoded,
    give_memory_back,
    need_dali,
    resized,
)
from datasets.photos import decode
from datasets.photos.labelled import Photos
from datasets.photos.pairs import Pairs
from datasets.sampler import Sampler

NARROW = 4  # pixels: a crop with fewer may be only one pixel wide


class PipelineBatches:
    """Gives (uint8 images, labels, ids) of each batch of the sampler, in its order.

    A subclass defines the pipeline.
    """

    def __init__(
        self, data_set: Union[Photos, Pairs], sampler: Sampler, device: torch.device, threads: int = 0,
        decode_on_gpu: bool = False,
    ) -> None:  # fmt: skip
        """`threads`: of DALI; 0: one for each core of this process."""
        need_dali(device if decode_on_gpu else None)
        self.sampler = sampler
        self.device = device
        self._data = data_set
        self._gpu = device if decode_on_gpu else None
        self._threads = threads or cores.count()

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        try:
            for images, labels, ids in self._batches(self.sampler.epoch, list(self.sampler)):
                yield images, labels, torch.from_numpy(ids)
        finally:
            give_memory_back()

    def _batches(self, epoch: int, batches: Sequence[np.ndarray]) -> Iterator[Any]:
        """Yield (images, labels, ids) of each batch: made by DALI, or by the data set if DALI cannot read a
        picture in it or would decode one to other pixels than Pillow."""
        suits_dali = [self._reads_alike(ids, epoch) for ids in batches]
        pipeline = None
        for number, ids in enumerate(batches):
            if suits_dali[number]:
                if pipeline is None:  # it gives its batches in order, so it gets all that it will make
                    remaining = [
                        batch for batch, suits in zip(batches[number:], suits_dali[number:]) if suits
                    ]
                    pipeline = self._pipeline(remaining, epoch)
                try:
                    yield *self._batch(pipeline.run(), ids, epoch), ids
                    continue
                except (RuntimeError, OSError) as error:  # OSError: of a file that is read in this process
                    if not is_fault_of_picture(error):
                        raise
                    reason = one_line(str(error).split("encountered:")[-1].strip())[:200]
                    warn(f"DALI cannot make a batch of epoch {epoch + 1}, so torch makes it: {reason}")
                    pipeline = None  # after an error it gives nothing more
            images, labels, _ = self._data[epoch, ids]
            yield images, labels, ids

    def _reads_alike(self, ids: np.ndarray, epoch: int) -> bool:
        """Return whether no picture of the batch needs Pillow:
        DALI would decode such a picture to other pixels than Pillow."""
        return not self._data.special[ids].any()

    def _pipeline(self, batches: Sequence[np.ndarray], epoch: int) -> Any:
        raise NotImplementedError

    def _batch(self, outputs: Any, ids: np.ndarray, epoch: int) -> tuple[torch.Tensor, torch.Tensor]:
        raise NotImplementedError


# Errors of the machine, which would recur with the next batch.
MACHINE_ERRORS = re.compile(
    r"out of memory|bad_alloc|memory allocation|cannot allocate|can't allocate|No space"
    r"|CUDA|NVJPEG_STATUS_ALLOCATOR",
    re.I,
)


def is_fault_of_picture(error: Exception) -> bool:
    """Return whether DALI's error may be a picture's fault:
    its text is not that of an error of the machine."""
    return not MACHINE_ERRORS.search(str(error))


class _Work(NamedTuple):
    """What DALI does with a photograph."""

    # (data, ids, epoch) -> numbers of each photograph
    plan: Callable[[Photos, np.ndarray, int], tuple[np.ndarray, ...]]
    # the operators that compute the outputs from the contents and these numbers
    graph: Callable[..., tuple[Any, ...]]
    num_arrays: int  # that `plan` returns


class DaliBatches(PipelineBatches):
    """Batches of photographs with labels. On a GPU DALI makes the whole image.

    On a CPU it decodes pictures or, in training, windows of them, and torch does the rest, which it does
    faster there."""

    _data: Photos

    def _reads_alike(self, ids: np.ndarray, epoch: int) -> bool:
        """Return whether DALI would give the pixels of Pillow.

        It would not for a crop that is only one pixel wide.
        """
        data = self._data
        smallest = data.area[0] * data.tree.widths[ids] * data.tree.heights[ids]  # pixels of a crop
        small = ids[smallest < NARROW] if data.train else ids[:0]
        has_narrow = False
        if len(small):
            windows, _ = data.windows(small, epoch)
            has_narrow = any(map(decode.is_narrow, windows[:, 3]))
        return not has_narrow and super()._reads_alike(ids, epoch)

    def _batch(
        self, outputs: Sequence[Any], ids: np.ndarray, epoch: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        labels = torch.from_numpy(self._data.tree.labels[ids])
        if self._gpu:
            return as_tensor(outputs[0], self._gpu)[: len(ids)].permute(0, 3, 1, 2), labels
        pictures, flips = outputs
        return self._resize_with_torch(pictures, flips, ids, epoch), labels

    def _resize_with_torch(self, pictures: Any, flips: Any, ids: np.ndarray, epoch: int) -> torch.Tensor:
        """Make the images from what DALI decoded, with torch: it resizes faster on a CPU.

        `flips`: used in training.
        """
        data = self._data
        flips = np.array(flips.as_tensor())
        images = torch.empty(
            (len(ids), 3, data.size, data.size), dtype=torch.uint8, memory_format=torch.channels_last
        )
        for place, sample_id in enumerate(ids):
            picture = torch.from_numpy(pictures.at(place)).permute(2, 0, 1)
            if data.train:
                picture = decode.train_cut(picture, flips[place], data.size, data.mode)
                images[place] = data.augmented(picture, int(sample_id), epoch)
            else:
                images[place] = decode.eval_cut(picture, data.size, data.short, mode=data.mode)
        return images

    def _pipeline(self, batches: Sequence[np.ndarray], epoch: int) -> Any:
        """Build a pipeline for these batches.

        DALI reads the files, unless the tree has to, as from a pack or cache.
        """
        if self._data.tree.has_sample_files:
            return self._pipeline_of_files(batches, epoch)
        return self._pipeline_of_contents(batches, epoch)

    def _work(self) -> _Work:
        if self._data.train:
            return _Work(_train_plan, _train_graph, num_arrays=3)
        if self._gpu:
            return _Work(_test_plan, _test_graph, num_arrays=2)
        return _Work(_whole_plan, _whole_graph, num_arrays=1)

    def _graph_options(self) -> dict[str, Any]:
        return {"size": self._data.size, "decoder": "mixed" if self._gpu else "cpu"}

    def _pipeline_of_files(self, batches: Sequence[np.ndarray], epoch: int) -> Any:
        """Build a pipeline that reads each photograph's file."""
        from nvidia.dali import fn

        tree = self._data.tree
        work = self._work()
        options = self._graph_options()
        largest = max(map(len, batches))
        paths = [tree.path(sample) for ids in batches for sample in _padded(ids, largest)]

        def plan(ids: np.ndarray) -> tuple[np.ndarray, ...]:
            tree.prefetch(ids)
            return work.plan(self._data, _padded(ids, largest), epoch)

        def graph(*numbers: Any) -> tuple[Any, ...]:
            contents, _ = fn.readers.file(files=paths, random_shuffle=False, prefetch_queue_depth=AHEAD)
            return work.graph(contents, *numbers, **options)

        return build(batches, plan, work.num_arrays, graph, self._threads, self._gpu)

    def _pipeline_of_contents(self, batches: Sequence[np.ndarray], epoch: int) -> Any:
        """Build a pipeline that is given each photograph's bytes, which threads read from the tree."""
        tree = self._data.tree
        work = self._work()
        options = self._graph_options()
        largest = max(map(len, batches))
        readers = ThreadPoolExecutor(self._threads)

        def read_photo(sample: int) -> np.ndarray:
            return np.frombuffer(tree.read(sample), np.uint8)

        def read_and_plan(ids: np.ndarray) -> tuple[Any, ...]:
            tree.prefetch(ids)
            numbers = work.plan(self._data, _padded(ids, largest), epoch)
            return list(readers.map(read_photo, _padded(ids, largest))), *numbers

        def graph(*arrays: Any) -> tuple[Any, ...]:
            return work.graph(*arrays, **options)

        return build(batches, read_and_plan, 1 + work.num_arrays, graph, self._threads, self._gpu)


# DALI's operators for a batch of photographs (graph), and the arrays of numbers that they need (plan).


def _train_plan(data: Photos, ids: np.ndarray, epoch: int) -> tuple[np.ndarray, ...]:
    """Return (top, left) and (height, width) of the window that each picture is cropped to,
    and whether it is flipped."""
    windows, flips = data.windows(ids, epoch)
    return windows[:, :2].astype(np.float32), windows[:, 2:].astype(np.float32), flips.astype(np.int32)


def _train_graph(
    contents: Any, window: Any, extent: Any, flip: Any, size: int, decoder: str
) -> tuple[Any, ...]:
    from nvidia.dali import fn

    images = fn.decoders.image_slice(
        contents, window, extent, device=decoder, axis_names="HW", normalized_anchor=False,
        normalized_shape=False, **decode_options(),
    )  # fmt: skip
    if decoder == "cpu":
        return images, flip
    return (fn.flip(resized(images, (size, size)), horizontal=flip),)


def _whole_plan(data: Photos, ids: np.ndarray, _epoch: int) -> tuple[np.ndarray, ...]:
    return (ids.astype(np.int64),)


def _whole_graph(contents: Any, ids: Any, size: int, decoder: str) -> tuple[Any, ...]:
    return decoded(contents, decoder), ids


def _test_plan(data: Photos, ids: np.ndarray, _epoch: int) -> tuple[np.ndarray, ...]:
    """Return (height, width) that each picture is resized to,
    and (top, left) of the middle that is then cut out."""
    heights = data.tree.heights[ids].astype(np.int64)
    widths = data.tree.widths[ids].astype(np.int64)
    sizes = np.array(
        [decode.resized_size(height, width, data.short, data.size) for height, width in zip(heights, widths)]
    )
    middle = np.array([decode.middle(height, width, data.size) for height, width in sizes])
    return sizes.astype(np.float32), middle.astype(np.float32)


def _test_graph(contents: Any, sizes: Any, middle: Any, size: int, decoder: str) -> tuple[Any, ...]:
    return (cut(resized(decoded(contents, decoder), sizes), middle, [float(size)] * 2),)


def _padded(ids: np.ndarray, count: int) -> np.ndarray:
    """Return `count` ids: the last one is repeated, because all batches of a pipeline have the same size."""
    return np.concatenate([ids, np.repeat(ids[-1:], count - len(ids))])


# Pairs of pictures.


class PairBatches(PipelineBatches):
    """Batches of pairs: the blurry pictures first, then the sharp ones,
    each cropped and flipped like its partner."""

    _data: Pairs

    def _batch(
        self, outputs: Sequence[Any], ids: np.ndarray, _epoch: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (blurry pictures and then sharp ones, ids).

        Without a GPU, torch resizes and crops them here.
        """
        if self._gpu:
            pictures = [as_tensor(images, self._gpu) for images in outputs]
            return torch.cat(pictures).permute(0, 3, 1, 2), torch.from_numpy(ids)
        *pictures, sizes, corners, flips = outputs
        images = self._data.empty_batch(len(ids))
        sizes, corners, flips = (np.array(numbers.as_tensor()) for numbers in (sizes, corners, flips))
        for place in range(2 * len(ids)):
            side, pair = divmod(place, len(ids))
            picture = torch.from_numpy(pictures[side].at(pair)).permute(2, 0, 1)
            images[place] = self._data.cut(
                picture, sizes[pair].astype(int), corners[pair].astype(int), flips[pair]
            )
        return images, torch.from_numpy(ids)

    def _pipeline(self, batches: Sequence[np.ndarray], epoch: int) -> Any:
        def graph(blurry: Any, sharp: Any, *numbers: Any) -> tuple[Any, ...]:
            if self._gpu:
                return transformed(blurry, sharp, *numbers, crop=self._data.crop, decoder="mixed")
            # on a CPU torch's resize is faster
            return decoded(blurry, "cpu"), decoded(sharp, "cpu"), *numbers

        return build(batches, lambda ids: inputs(self._data, ids, epoch), 5, graph, self._threads, self._gpu)


def inputs(
    pairs: Pairs, ids: np.ndarray, epoch: int
) -> tuple[list, list, np.ndarray, np.ndarray, np.ndarray]:
    """Return (bytes of the blurry files, bytes of the sharp ones, sizes to resize to, crop corners, flips) of
    these pairs."""
    blurry, sharp = zip(
        *([np.frombuffer(content, np.uint8) for content in pairs.read(number)] for number in ids)
    )
    sizes, corners, flips = pairs.geometry(ids, epoch)
    return (
        list(blurry),
        list(sharp),
        sizes.astype(np.float32),
        corners.astype(np.float32),
        flips.astype(np.int32),
    )


def transformed(
    blurry: Any, sharp: Any, sizes: Any, corners: Any, flips: Any, crop: int, decoder: str
) -> tuple[Any, Any]:
    """Return DALI operators that decode, resize, crop and flip both pictures alike.

    `decoder`: cpu, or mixed for the GPU.
    """
    from nvidia.dali import fn

    def picture(files: Any) -> Any:
        images = cut(resized(decoded(files, decoder), sizes), corners, [float(crop)] * 2)
        return fn.flip(images, vertical=flips[0], horizontal=flips[1])

    return picture(blurry), picture(sharp)
