"""The pipelines and iterators of the DALI article, with its arguments,
for a script that has its own training loop.

    pipe = HybridTrainPipe(batch_size=256, num_threads=8, device_id=0, data_dir="/data/imagenet/train",
                           crop=224, mean=MEAN, std=STD, dali_cpu=True)
    pipe.build()
    loader = DaliIteratorCPU(pipelines=pipe, size=pipe.epoch_size("Reader"), mean=MEAN, std=STD)
    for images, labels in loader: ...

`mean` and `std` are of pixels from 0 to 255. Without an NVIDIA GPU, or with device_id=None, a pipeline runs
the same operators on the CPU and leaves the labels there. DaliIteratorCPU moves batches to the accelerator,
if there is one. The last batch of an epoch has the remaining samples. next() raises the errors of the thread
that loads.
"""

import functools
import math
from collections.abc import Generator, Sequence
from typing import Any, Optional

import torch

from common import devices
from datasets.dali import need_dali
from datasets.loader import read_ahead

READER = "Reader"  # the name that the article's scripts ask for: pipe.epoch_size("Reader")
# Bytes that nvJPEG needs for the largest photographs of ImageNet.
DEVICE_PADDING = 211025920
HOST_PADDING = 140544512
# Of the random crop.
ATTEMPTS = 100
RATIO = [0.8, 1.25]
AHEAD = 5  # batches that DaliIteratorCPU prepares ahead, at most


def __getattr__(name: str) -> Any:
    """Create the pipeline classes on first use: they are subclasses of a class of DALI,
    which is imported then."""
    if name in ("HybridTrainPipe", "HybridValPipe"):
        return _pipelines()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def compute_device() -> torch.device:
    """Return this process's accelerator, or the CPU if there is none."""
    return devices.current() if devices.available() else torch.device("cpu")


class _Place:
    """Where a pipeline decodes and where it runs the other operators. Prints the choice."""

    def __init__(self, device_id: Optional[int], dali_cpu: bool) -> None:
        self.device_id = device_id if devices.is_nvidia(compute_device()) else None
        has_gpu = self.device_id is not None
        self.rest = "gpu" if has_gpu and not dali_cpu else "cpu"
        decodes_on_gpu = self.rest == "gpu"
        self.decoder: dict[str, Any] = {"device": "mixed" if decodes_on_gpu else "cpu"}
        padding = (DEVICE_PADDING, HOST_PADDING) if decodes_on_gpu else (0, 0)
        self.padding: dict[str, Any] = dict(zip(("device_memory_padding", "host_memory_padding"), padding))
        variant = "cpu" if dali_cpu else "gpu"
        note = ""
        if not has_gpu and not dali_cpu:
            reason = "device_id is None" if device_id is None else "there is no GPU"
            note = f", on the CPU, as {reason}"
        print(f'DALI "{variant}" variant{note}')


@functools.cache
def _pipelines() -> dict[str, type]:
    """Return {name: class} of both pipelines; UserError if DALI is missing."""
    need_dali()
    from nvidia.dali import fn, types
    from nvidia.dali.pipeline import Pipeline

    class Pipe(Pipeline):
        """Base of both pipelines.

        A subclass may resize faster: interp_type, antialias = types.INTERP_LINEAR, False
        """

        interp_type: Any = types.DALIInterpType.INTERP_TRIANGULAR  # as torchvision resizes
        antialias = True

        def _resized(self, images: Any, **size: Any) -> Any:
            return fn.resize(images, interp_type=self.interp_type, antialias=self.antialias, **size)

    pipelines = {"HybridTrainPipe": _train_pipeline(Pipe), "HybridValPipe": _val_pipeline(Pipe)}
    for name, pipeline in pipelines.items():  # pickle and help() look them up under these names
        pipeline.__module__ = __name__
        pipeline.__qualname__ = name
    return pipelines


def _train_pipeline(base: type) -> type:
    """Return the class HybridTrainPipe, a subclass of `base`."""
    from nvidia.dali import fn, types

    class HybridTrainPipe(base):
        """Crops and flips at random.

        Gives normalised (3, H, W), or with dali_cpu=True uint8 (H, W, 3) for DaliIteratorCPU.
        """

        def __init__(
            self, batch_size: int, num_threads: int, device_id: Optional[int], data_dir: str, crop: int,
            mean: Sequence[float], std: Sequence[float], local_rank: int = 0, world_size: int = 1,
            dali_cpu: bool = False, shuffle: bool = True, fp16: bool = False, min_crop_size: float = 0.08,
        ) -> None:  # fmt: skip
            self._place = _Place(device_id, dali_cpu)
            # no seed: another order in each run
            super().__init__(batch_size, num_threads, self._place.device_id)
            self._files = _reader_options(data_dir, local_rank, world_size, random_shuffle=shuffle)
            self._crop = crop
            self._area = [min_crop_size, 1.0]
            self._normalise = None if dali_cpu else _normalisation(mean, std, crop, fp16)

        def define_graph(self) -> tuple:
            contents, labels = fn.readers.file(name=READER, **self._files)
            images = fn.decoders.image_random_crop(
                contents, output_type=types.DALIImageType.RGB, random_aspect_ratio=RATIO,
                random_area=self._area, num_attempts=ATTEMPTS, **self._place.decoder, **self._place.padding,
            )  # fmt: skip
            images = self._resized(images, resize_x=self._crop, resize_y=self._crop)
            coin = fn.random.coin_flip(probability=0.5)
            if self._normalise:
                return fn.crop_mirror_normalize(images, mirror=coin, **self._normalise), _labels_on_device(
                    labels, self._place
                )
            return fn.flip(images, horizontal=coin), _labels_on_device(labels, self._place)

    return HybridTrainPipe


def _val_pipeline(base: type) -> type:
    """Return the class HybridValPipe, a subclass of `base`."""
    from nvidia.dali import fn, types

    class HybridValPipe(base):
        """Gives the middle of each photograph, its short side resized to `size`,
        in the formats of HybridTrainPipe."""

        def __init__(
            self, batch_size: int, num_threads: int, device_id: Optional[int], data_dir: str, crop: int,
            size: int, mean: Sequence[float], std: Sequence[float], local_rank: int = 0, world_size: int = 1,
            dali_cpu: bool = False, shuffle: bool = False, fp16: bool = False,
        ) -> None:  # fmt: skip
            self._place = _Place(device_id, dali_cpu)
            super().__init__(batch_size, num_threads, self._place.device_id)
            self._files = _reader_options(
                data_dir, local_rank, world_size, random_shuffle=shuffle, initial_fill=1
            )
            self._crop = crop
            self._size = size
            self._normalise = None if dali_cpu else _normalisation(mean, std, crop, fp16)

        def define_graph(self) -> tuple:
            contents, labels = fn.readers.file(name=READER, **self._files)
            images = fn.decoders.image(contents, output_type=types.DALIImageType.RGB, **self._place.decoder)
            images = self._resized(images, resize_shorter=self._size)
            if self._normalise:
                return fn.crop_mirror_normalize(images, **self._normalise), _labels_on_device(
                    labels, self._place
                )
            return fn.crop(images, crop=(self._crop, self._crop)), _labels_on_device(labels, self._place)

    return HybridValPipe


def _reader_options(data_dir: str, local_rank: int, world_size: int, **options: Any) -> dict[str, Any]:
    """Return options of DALI's file reader.

    It fills up a shard with copies of the last sample; our iterators drop them.
    """
    return {
        "file_root": data_dir,
        "shard_id": local_rank,
        "num_shards": world_size,
        "pad_last_batch": True,
        **options,
    }


def _normalisation(mean: Sequence[float], std: Sequence[float], crop: int, fp16: bool) -> dict[str, Any]:
    from nvidia.dali import types

    dtype = types.DALIDataType.FLOAT16 if fp16 else types.DALIDataType.FLOAT
    return {
        "dtype": dtype,
        "output_layout": "CHW",
        "crop": (crop, crop),
        "mean": list(mean),
        "std": list(std),
    }


def _labels_on_device(labels: Any, place: Any) -> Any:
    return labels if place.device_id is None else labels.gpu()


class DaliIterator:
    """Gives (images, labels) of a pipeline, or of a list with one pipeline.

    A loop over it ends with the epoch.

    `size`: number of samples of this shard in an epoch. Other arguments, such as those of DaliIteratorCPU,
    are ignored.
    """

    def __init__(self, pipelines: Any, size: float, **_kwargs: Any) -> None:
        from nvidia.dali.plugin.base_iterator import LastBatchPolicy
        from nvidia.dali.plugin.pytorch import DALIClassificationIterator

        pipelines = list(pipelines) if isinstance(pipelines, (list, tuple)) else [pipelines]
        pipeline = pipelines[0]
        self._size = math.ceil(size)
        self._batch_size = pipeline.max_batch_size
        options: dict[str, Any] = {
            "last_batch_policy": LastBatchPolicy.PARTIAL,
            **_end_options(pipeline, self._size),
        }
        self._dali_iterator = DALIClassificationIterator(pipelines, **options)

    def __iter__(self) -> "DaliIterator":
        return self

    def __len__(self) -> int:
        return math.ceil(self._size / self._batch_size)

    def __next__(self) -> tuple[torch.Tensor, torch.Tensor]:
        return _next(self._dali_iterator)


def _end_options(pipeline: Any, size: int) -> dict[str, Any]:
    """Return the arguments that end an epoch of DALI's iterator: reader_name if its shard has `size` samples,
    else `size`."""
    reader = pipeline.reader_meta().get(READER)
    if reader and size == math.ceil(reader["epoch_size"] / reader["number_of_shards"]):
        return {"reader_name": READER}
    return {"size": size, "last_batch_padded": bool(reader and reader["pad_last_batch"])}


def _next(dali_iterator: Any) -> Any:
    try:
        (data,) = next(dali_iterator)
    except StopIteration:
        print("Resetting DALI loader")
        dali_iterator.reset()
        raise
    return data["data"], data["label"].squeeze(-1).long()


class DaliIteratorGPU(DaliIterator):
    """Iterates over a pipeline that normalises: HybridTrainPipe and HybridValPipe with dali_cpu=False."""


class DaliIteratorCPU(DaliIterator):
    """Iterates over a pipeline that gives uint8 (H, W, 3).

    A thread moves batches to the device and normalises them.
    """

    _has_thread = True

    def __init__(
        self, fp16: bool = False, mean: Sequence[float] = (0.0, 0.0, 0.0),
        std: Sequence[float] = (1.0, 1.0, 1.0), pin_memory: bool = True, **kwargs: Any,
    ) -> None:  # fmt: skip
        super().__init__(**kwargs)
        print("Using DALI CPU iterator")
        self._epoch_batches: Any = None  # the iterator over the present epoch's batches; None between epochs
        self._device = compute_device()
        self._preparation = (self._device, torch.float16 if fp16 else torch.float32, mean, std, pin_memory)

    def __next__(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self._epoch_batches is None:
            batches = _normalised(self._dali_iterator, *self._preparation)
            self._epoch_batches = read_ahead(batches, AHEAD) if self._has_thread else batches
        try:
            images, labels, event = next(self._epoch_batches)
        except BaseException:  # the end of the epoch, or an error of the thread, which has ended
            self._epoch_batches = None
            raise
        if event:
            stream = devices.current_stream(self._device)
            stream.wait_event(event)
            for tensor in (images, labels):
                tensor.record_stream(stream)
        return images, labels

    def close(self) -> None:
        """End the thread, as deleting the iterator does. Batches that it has loaded ahead are lost."""
        if self._epoch_batches is not None:
            self._epoch_batches.close()
            self._epoch_batches = None


class DaliIteratorCPUNoPrefetch(DaliIteratorCPU):
    """A DaliIteratorCPU without the thread: each batch is moved and normalised when the loop asks for it."""

    _has_thread = False


def _normalised(
    dali_iterator: object,
    device: torch.device,
    dtype: torch.dtype,
    mean: Sequence[float],
    std: Sequence[float],
    pin_memory: bool,
) -> Generator:
    """Yield (images, labels, event) until the epoch ends.

    The event follows the work on a side stream; None without a stream.

    As a method, it would keep its DaliIteratorCPU alive in the thread that runs it, so that it could not be
    deleted.
    """
    devices.use(device)
    stream = devices.side_stream(device)
    with devices.on_stream(stream):
        means, stds = (torch.tensor(value, dtype=dtype).view(1, 3, 1, 1).to(device) for value in (mean, std))
    while True:
        with devices.on_stream(stream):
            try:
                images, labels = _next(dali_iterator)
            except StopIteration:
                return
            images = devices.to_device(images, device, pin=pin_memory)
            images = images.permute(0, 3, 1, 2).to(dtype).sub_(means).div_(stds)
            labels = devices.to_device(labels, device, pin=pin_memory)
        yield images, labels, devices.record_event(stream) if stream else None
