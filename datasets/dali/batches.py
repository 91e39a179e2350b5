"""The batches of the jobs through NVIDIA DALI, on the CPU or on the GPU: the same samples in the same order, cropped alike.

The sampler's order is handed to DALI, and so is every crop and flip. So a pipeline is made for each epoch (which takes
milliseconds) and a resume begins in its middle; between two epochs it holds no memory. A batch of photographs that DALI cannot
make, or with a picture that other decoders read differently, comes from Pillow and torch instead, and it goes on behind it.
"""

import ctypes
import functools
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from common import arguments, cores
from common.errors import UserError, one_line
from datasets import cifar10
from datasets.crops import PADDING, crops_and_flips
from datasets.loader import DeviceLoader
from datasets.photos import decode

AHEAD = 2  # batches that DALI prepares while the network computes


class DaliBatches:
    """(uint8 images, labels, ids) of each of the sampler's batches, in its order."""

    def __init__(self, data_set, sampler, device, workers=0, decode_on_gpu=False):
        _need_dali(device if decode_on_gpu else None)
        self.sampler, self.device = sampler, device
        self._data, self._on_gpu = data_set, decode_on_gpu
        self._threads = workers or cores.count()

    def __iter__(self):
        try:
            for images, labels, ids in self._batches(self.sampler.epoch, list(self.sampler)):
                yield images, labels, torch.from_numpy(ids)
        finally:
            give_memory_back()

    def _batches(self, epoch, batches):
        ours = [self._fits(ids) for ids in batches]
        pipeline = None
        for number, ids in enumerate(batches):
            if ours[number]:
                if pipeline is None:
                    rest = [batch for batch, fits in zip(batches[number:], ours[number:]) if fits]
                    pipeline = self._pipeline(rest, epoch)
                try:
                    yield *self._batch(pipeline.run(), ids), ids
                    continue
                except (RuntimeError, OSError) as error:  # the second is of a file that is read here
                    reason = one_line(str(error).split("encountered:")[-1].strip())[:200]
                    print(f"warning: DALI cannot make a batch of epoch {epoch + 1}: {reason}", flush=True)
                    pipeline = None
            images, labels, _ = self._data[epoch, ids]
            yield images, labels, ids

    def _fits(self, ids):
        """Whether DALI reads all of these as other decoders do."""
        return not self._data.tree.special[ids].any()

    def _batch(self, outputs, ids):
        labels = torch.from_numpy(self._data.tree.labels[ids])
        if self._on_gpu:
            return as_tensor(outputs[0], self.device)[: len(ids)].permute(0, 3, 1, 2), labels
        return self._resized_here(*outputs, len(ids)), labels

    def _resized_here(self, pictures, numbers, count):
        """On a CPU DALI only decodes: its antialiased resize takes eight times as long as torch's."""
        data, numbers = self._data, np.array(numbers.as_tensor())
        images = torch.empty((count, 3, data.size, data.size), dtype=torch.uint8, memory_format=torch.channels_last)
        for place in range(count):
            picture = torch.from_numpy(pictures.at(place)).permute(2, 0, 1)
            if data.train:
                images[place] = decode.train_cut(picture, numbers[place], data.size)
            else:
                images[place] = decode.test_cut(picture, data.size, data.short)
        return images

    def _pipeline(self, batches, epoch):
        from nvidia.dali import fn, pipeline_def

        data, largest = self._data, max(map(len, batches))
        if data.train:
            plan, graph, plans = _train_plan, _train_graph, 3
        else:
            plan, graph, plans = (_test_plan, _test_graph, 2) if self._on_gpu else (_whole_plan, _whole_graph, 1)
        readers = None if data.tree.in_files else ThreadPoolExecutor(self._threads)

        def source(batch):
            if batch == len(batches):  # DALI asks ahead
                raise StopIteration
            ids = _padded(batches[batch], largest)
            numbers = plan(data, ids, epoch)
            data.tree.expect(batches[batch])
            return (list(readers.map(encoded, ids)), *numbers) if readers else numbers

        def encoded(number):
            return np.frombuffer(data.tree.read(number), np.uint8)

        @pipeline_def(
            batch_size=largest, num_threads=self._threads, device_id=self.device.index or 0 if self._on_gpu else None,
            prefetch_queue_depth=AHEAD,
        )  # fmt: skip
        def build():
            if readers:
                jpegs, *numbers = fn.external_source(source, num_outputs=1 + plans, batch_info=False)
            else:
                files = [data.tree.path(number) for ids in batches for number in _padded(ids, largest)]
                jpegs, _ = fn.readers.file(files=files, random_shuffle=False, prefetch_queue_depth=AHEAD)
                numbers = fn.external_source(source, num_outputs=plans, batch_info=False)
            return graph(jpegs, *numbers, data.size, "mixed" if self._on_gpu else "cpu")

        made = build()
        made.build()
        return made


# What is done to a batch of photographs, and the numbers that it needs of each: torchvision ignores EXIF orientation, and so
# do these.


def _train_plan(data, ids, epoch):
    """Where the window begins, how large it is, and whether it is flipped."""
    windows, flips = data.windows(ids, epoch)
    return windows[:, :2].astype(np.float32), windows[:, 2:].astype(np.float32), flips.astype(np.int32)


def _train_graph(jpegs, window, extent, flip, size, decoder):
    from nvidia.dali import fn, types

    images = fn.decoders.image_slice(
        jpegs, window, extent, device=decoder, axis_names="HW", output_type=types.RGB, normalized_anchor=False,
        normalized_shape=False, adjust_orientation=False,
    )  # fmt: skip
    if decoder == "cpu":
        return images, flip
    images = fn.resize(images, size=(size, size), interp_type=types.INTERP_LINEAR, antialias=True)
    return fn.flip(images, horizontal=flip)


def _whole_plan(data, ids, _epoch):
    return (ids.astype(np.int64),)


def _whole_graph(jpegs, ids, _size, decoder):
    from nvidia.dali import fn, types

    return fn.decoders.image(jpegs, device=decoder, output_type=types.RGB, adjust_orientation=False), ids


def _test_plan(data, ids, _epoch):
    """Its size when resized, and where its middle begins in that."""
    heights, widths = data.tree.heights[ids].astype(np.int64), data.tree.widths[ids].astype(np.int64)
    resized = np.array([decode.resized(height, width, data.short) for height, width in zip(heights, widths)])
    middle = np.array([decode.middle(height, width, data.size) for height, width in resized])
    return resized.astype(np.float32), middle.astype(np.float32)


def _test_graph(jpegs, resized, middle, size, decoder):
    from nvidia.dali import fn, types

    images, _ = _whole_graph(jpegs, None, size, decoder)
    images = fn.resize(images, size=resized, interp_type=types.INTERP_LINEAR, antialias=True)
    return fn.slice(images, middle, [float(size)] * 2, axis_names="HW", normalized_anchor=False, normalized_shape=False)


class ArrayBatches:
    """The same for images that are in memory already: DALI pads, crops and flips them, with the numbers of crops.py."""

    def __init__(self, data_set, sampler, device, augment, seed, workers):
        _need_dali()
        self._data, self._sampler, self.device = data_set, sampler, device
        self._augment, self._seed, self._threads = augment, seed, max(1, workers)

    def __iter__(self):
        epoch, batches = self._sampler.epoch, list(self._sampler)
        pipeline = self._pipeline(epoch, batches) if batches else None
        for ids in batches:
            (found,) = pipeline.run()
            _, labels, ids = self._data[epoch, ids]
            yield as_tensor(found, self.device).permute(0, 3, 1, 2), labels, ids

    def _pipeline(self, epoch, batches):
        from nvidia.dali import fn, pipeline_def

        height, width = self._data.images.shape[2:]
        on_gpu = self.device.type == "cuda"

        def source(batch):
            if batch == len(batches):  # DALI asks ahead
                raise StopIteration
            images, _, ids = self._data[epoch, batches[batch]]
            top, left, flip = crops_and_flips(ids, self._seed, epoch)
            anchors = torch.stack([top, left], dim=1).to(torch.int32) - PADDING
            images = images.permute(0, 2, 3, 1).contiguous()
            return tuple(array.numpy() for array in (images, anchors, flip.to(torch.int32)))

        @pipeline_def(
            batch_size=max(map(len, batches)), num_threads=self._threads, device_id=self.device.index or 0 if on_gpu else None,
            prefetch_queue_depth=AHEAD,
        )  # fmt: skip
        def build():
            images, anchors, flip = fn.external_source(source, num_outputs=3, batch_info=False, layout=["HWC", None, None])
            images = images.gpu() if on_gpu else images
            if not self._augment:
                return images
            images = fn.slice(
                images, anchors, [height, width], axis_names="HW", normalized_anchor=False, normalized_shape=False,
                out_of_bounds_policy="pad", fill_values=0,
            )  # fmt: skip
            return fn.flip(images, horizontal=flip)

        made = build()
        made.build()
        return made


def add_options(parser):
    """For a CIFAR job: its --workers are threads here."""
    arguments.explain(parser, workers="threads of DALI; at least one works")
    parser.reads = functools.partial(cifar10.reads, shared=False)


def cifar_loader(data_set, sampler, device, augment, seed, workers=0):
    """The loader of datasets.cifar10, with DALI at work in it: on a GPU the pictures are cut and flipped there."""
    batches = ArrayBatches(data_set, sampler, device, augment, seed, workers)
    return DeviceLoader(batches, sampler, device, cifar10.MEAN, cifar10.STD)


def give_memory_back():
    """What the threads of a pipeline have freed, the C library keeps for them, and the next pipeline has other threads."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim:
        trim(0)


def _need_dali(gpu=None):
    """`gpu`: the device, where one has to decode."""
    if gpu is not None and gpu.type != "cuda":
        raise UserError("--data_backend dali-gpu decodes on a GPU, and this process has none: take dali-cpu")
    try:
        import nvidia.dali  # noqa: F401
    except ImportError:
        raise UserError("NVIDIA's DALI is missing: pip install nvidia-dali-cuda120, or take a job or backend without") from None


def as_tensor(found, device):
    """A batch's own memory, which DALI uses again after the next but one, copied."""
    from nvidia.dali.tensors import TensorListGPU

    dense = found.as_tensor()
    if not isinstance(found, TensorListGPU):
        return torch.from_numpy(np.array(dense))
    import nvidia.dali.plugin.pytorch as plugin

    images = torch.empty(dense.shape(), dtype=torch.uint8, device=device)
    plugin.feed_ndarray(dense, images, cuda_stream=torch.cuda.current_stream(device))
    return images


def _padded(ids, count):
    """As many as every batch of a pipeline has; the last one is repeated."""
    return np.concatenate([ids, np.repeat(ids[-1:], count - len(ids))])
