"""The batches of the photo jobs through NVIDIA DALI, on the CPU or with the GPU's own decoder: the same order, the same crops.

The sampler's order is the order of the reader's file list, and every crop and flip is handed in, so a pipeline is made for each
epoch (which takes milliseconds) and a resume begins in its middle. A batch that DALI cannot make, or that holds a picture
which other decoders read differently, comes from Pillow and torch instead, and the pipeline goes on behind it.
"""

import os

import numpy as np
import torch

from common.errors import UserError, one_line
from datasets import photos

AHEAD = 2  # batches that DALI prepares while the network computes


class DaliBatches:
    """(uint8 images, labels, ids) of each of the sampler's batches, in its order."""

    def __init__(self, data_set, sampler, device, workers=0, decode_on_gpu=False):
        try:
            import nvidia.dali  # noqa: F401
        except ImportError:
            raise UserError("--data_backend dali needs DALI: pip install nvidia-dali-cuda120, or use pytorch") from None
        self.sampler, self.device = sampler, device
        self._data, self._on_gpu = data_set, decode_on_gpu
        self._threads = workers or len(os.sched_getaffinity(0))

    def __iter__(self):
        for images, labels, ids in self._batches(self.sampler.epoch, list(self.sampler)):
            yield images, labels, torch.from_numpy(ids)

    def _batches(self, epoch, batches):
        ours = [not self._data.tree.special[ids].any() for ids in batches]
        pipeline = None
        for number, ids in enumerate(batches):
            if ours[number]:
                try:
                    if pipeline is None:
                        rest = [batch for batch, fits in zip(batches[number:], ours[number:]) if fits]
                        pipeline = self._pipeline(rest, epoch)
                    (found,) = pipeline.run()
                    yield self._as_tensor(found, len(ids)), torch.from_numpy(self._data.tree.labels[ids]), ids
                    continue
                except RuntimeError as error:
                    reason = one_line(str(error).split("encountered:")[-1].strip())[:200]
                    print(f"warning: DALI cannot make a batch of epoch {epoch + 1}: {reason}", flush=True)
                    pipeline = None
            images, labels, _ = self._data[epoch, ids]
            yield images, labels, ids

    def _as_tensor(self, found, count):
        """The batch's own memory, which DALI uses again after the next but one: copied, and without its padding."""
        size = self._data.size
        if self._on_gpu:
            import nvidia.dali.plugin.pytorch as plugin

            images = torch.empty((len(found), size, size, 3), dtype=torch.uint8, device=self.device)
            plugin.feed_ndarray(found.as_tensor(), images, cuda_stream=torch.cuda.current_stream(self.device))
        else:
            images = torch.from_numpy(np.array(found.as_tensor()))
        return images[:count].permute(0, 3, 1, 2)

    def _pipeline(self, batches, epoch):
        from nvidia.dali import fn, pipeline_def, types

        data, largest = self._data, max(map(len, batches))
        files = [data.tree.path(number) for ids in batches for number in _padded(ids, largest)]
        plan = _train_plan if data.train else _test_plan

        def numbers(batch):
            if batch == len(batches):  # DALI asks ahead
                raise StopIteration
            return plan(data, _padded(batches[batch], largest), epoch)

        @pipeline_def(
            batch_size=largest, num_threads=self._threads, device_id=self.device.index or 0 if self._on_gpu else None,
            prefetch_queue_depth=AHEAD,
        )  # fmt: skip
        def build():
            encoded, _ = fn.readers.file(files=files, random_shuffle=False, prefetch_queue_depth=AHEAD)
            window, extent, resized, offset, flip = fn.external_source(numbers, num_outputs=5, batch_info=False)
            images = fn.decoders.image_slice(
                encoded, window, extent, device="mixed" if self._on_gpu else "cpu", axis_names="HW", output_type=types.RGB,
                normalized_anchor=False, normalized_shape=False, adjust_orientation=False,
            )  # fmt: skip
            images = fn.resize(images, size=resized, interp_type=types.INTERP_LINEAR, antialias=True)
            images = fn.slice(
                images, offset, [float(data.size)] * 2, axis_names="HW", normalized_anchor=False, normalized_shape=False
            )
            return fn.flip(images, horizontal=flip)

        made = build()
        made.build()
        return made


def _padded(ids, count):
    """As many as every batch of a pipeline has; the last one is repeated."""
    return np.concatenate([ids, np.repeat(ids[-1:], count - len(ids))])


def _train_plan(data, ids, epoch):
    """Per sample: where the window begins, how large it is, its size when resized, what is cut out of that, and the flip."""
    windows, flips = data.windows(ids, epoch)
    size = np.full((len(ids), 2), data.size, np.float32)
    return (
        windows[:, :2].astype(np.float32),
        windows[:, 2:].astype(np.float32),
        size,
        np.zeros_like(size),
        flips.astype(np.int32),
    )


def _test_plan(data, ids, _):
    heights, widths = data.tree.heights[ids].astype(np.int64), data.tree.widths[ids].astype(np.int64)
    whole = np.stack([heights, widths], axis=1).astype(np.float32)
    resized = np.array([photos.resized(height, width, data.size) for height, width in zip(heights, widths)], np.float32)
    offset = np.array([photos.middle(height, width, data.size) for height, width in resized.astype(int)], np.float32)
    return np.zeros_like(whole), whole, resized, offset, np.zeros(len(ids), np.int32)
