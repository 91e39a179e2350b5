"""Build a pipeline of NVIDIA DALI, with operators that several pipelines use,
and convert its outputs to torch tensors."""

import ctypes
from collections.abc import Sequence
from typing import Any, Callable, Optional

import numpy as np
import torch

from common import devices
from common.errors import UserError

AHEAD = 2  # batches that DALI prepares while the network computes


def need_dali(gpu: Optional[torch.device] = None) -> None:
    """Raise UserError if DALI is not installed, or if `gpu`, the device that is to decode,
    is not one of NVIDIA's."""
    if gpu is not None and not devices.is_nvidia(gpu):
        raise UserError("--data_backend dali-gpu decodes on a GPU, and this process has none: take dali-cpu")
    try:
        import nvidia.dali  # noqa: F401
    except ImportError:
        raise UserError(
            f"NVIDIA's DALI is missing: pip install nvidia-dali-cuda{devices.toolkit_major()}0, or take a "
            "job or --data_backend that works without it"
        ) from None


def build(
    batches: Sequence[np.ndarray], source: Callable[[np.ndarray], Sequence[Any]], num_arrays: int,
    graph: Callable[..., tuple], threads: int, gpu: Optional[torch.device] = None,
    layout: Optional[list] = None,
) -> Any:  # fmt: skip
    """Build a pipeline over these batches of ids: `source(ids)` gives `num_arrays` arrays, and `graph` turns
    them into outputs. `gpu` None: on the CPU. `layout`: for each array DALI's name of its layout, or None."""
    from nvidia.dali import fn
    from nvidia.dali.pipeline import Pipeline

    def arrays_of(number: int) -> Any:
        if number == len(batches):  # DALI prefetches beyond the last batch
            raise StopIteration
        return source(batches[number])

    device_id = gpu.index or 0 if gpu else None
    pipeline = Pipeline(max(map(len, batches)), threads, device_id, prefetch_queue_depth=AHEAD)
    with pipeline:
        pipeline.set_outputs(
            *graph(*fn.external_source(arrays_of, num_arrays, batch_info=False, layout=layout))
        )
    pipeline.build()
    return pipeline


def decoded(files: Any, decoder: str) -> Any:
    """Decode whole pictures. `decoder`: cpu, or mixed for the GPU."""
    from nvidia.dali import fn

    return fn.decoders.image(files, device=decoder, **decode_options())


def decode_options() -> dict[str, Any]:
    """Return options with which DALI decodes as torchvision does:
    it ignores EXIF orientation and interpolates the chroma."""
    from nvidia.dali import types

    return {
        "output_type": types.DALIImageType.RGB,
        "adjust_orientation": False,
        "jpeg_fancy_upsampling": True,
    }


def resized(images: Any, size: Any) -> Any:
    """Return images resized to `size` (height, width) as the other loaders do: bilinear,
    with antialiasing."""
    from nvidia.dali import fn, types

    return fn.resize(images, size=size, interp_type=types.DALIInterpType.INTERP_LINEAR, antialias=True)


def cut(images: Any, corner: Any, size: Sequence[float], **options: Any) -> Any:
    """Cut out the window of `size` (height, width) that begins at `corner` (top, left).

    `options`: more of fn.slice.
    """
    from nvidia.dali import fn

    return fn.slice(
        images, corner, size, axis_names="HW", normalized_anchor=False, normalized_shape=False, **options
    )


def as_tensor(output: Any, device: torch.device) -> torch.Tensor:
    """Return a copy of a pipeline's output, because DALI reuses the memory.

    `device`: the GPU on which an output is, which then has to be uint8; not used for one on the CPU."""
    from nvidia.dali.tensors import TensorListGPU

    dense = output.as_tensor()
    if not isinstance(output, TensorListGPU):
        return torch.from_numpy(np.array(dense))
    import nvidia.dali.plugin.pytorch as plugin

    images = torch.empty(dense.shape(), dtype=torch.uint8, device=device)
    stream = devices.current_stream(device)
    plugin.feed_ndarray(dense, images, cuda_stream=stream)  # pyright: ignore[reportPrivateImportUsage] - DALI documents it
    return images


def give_memory_back() -> None:
    """Give freed memory back to the system if glibc is in use: glibc keeps it for threads,
    and each pipeline has new ones."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only glibc has it
    if trim:
        trim(0)
