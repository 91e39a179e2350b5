"""Device operations, with the calls of each kind of device: streams and events, memory, precision, layout,
kernels."""

import argparse
import contextlib
import operator
import os
import resource
import shutil
import sys
from collections.abc import Iterator
from typing import Any, Optional

import torch

from common.devices import kinds
from common.errors import UserError
from common.machine import cores

# --- How it computes ----------------------------------------------------------------------------------------


def layout(device: torch.device) -> torch.memory_format:
    """Return the memory layout of images and convolutions.

    Channels last is faster on GPUs and CPUs; NPUs do not know it.
    """
    return kinds.kind_of(device).layout


def fused(device: torch.device) -> dict[str, Any]:
    """Return {'fused': whether torch has fused optimizers for the device}; empty before torch 2.3,
    on a CPU before 2.4."""
    since = (2, 3) if kinds.is_accelerator(device) else (2, 4)
    return {"fused": kinds.kind_of(device).has_fused_optimizers} if since <= kinds.TORCH else {}


def autocast(device: torch.device, dtype: torch.dtype) -> contextlib.AbstractContextManager:
    """Return an autocast to this dtype; for float32, which CPUs refuse before torch 2.4,
    a context that does nothing."""
    return contextlib.nullcontext() if dtype is torch.float32 else torch.autocast(device.type, dtype=dtype)


def grad_scaler() -> Any:
    """Return torch.amp.GradScaler; before torch 2.3, the accelerator's GradScaler,
    made to take a device as first argument."""
    if kinds.TORCH >= (2, 3):
        return torch.amp.GradScaler
    base: Any = kinds.module().amp.GradScaler

    class GradScaler(base):
        def __init__(self, device: str, enabled: bool = True, **options: Any):
            super().__init__(enabled=enabled, **options)
            self._device = device

    return GradScaler


def compile_network(
    args: argparse.Namespace,
    model: torch.nn.Module,
    accumulates: bool = False,
    loss_fn: Optional[torch.nn.Module] = None,
) -> None:
    """With --compile true, compile the network and the loss in place;
    an NVIDIA GPU replays the network's kernels as a graph.

    `accumulates`: gradients of several batches are added up. A graph would overwrite them, so there is none.
    """
    if not args.compile:
        return
    if isinstance(model, torch.nn.DataParallel):
        raise UserError(
            "--compile does not go with DataParallel, which copies the network in every step: take "
            "train_ddp.py"
        )
    on_gpu = any(kinds.is_nvidia(parameter.device) for parameter in model.parameters())
    if missing := _missing_compiler(on_gpu):
        raise UserError(f"--compile true needs a compiler: install {missing}, or leave the option out")
    if kinds.TORCH < (2, 9):
        # The pieces into which the graph is cut for DistributedDataParallel may overwrite each other's
        # gradients.
        from torch import _dynamo

        _dynamo.config.optimize_ddp = False
    model.compile(mode="reduce-overhead" if on_gpu and not accumulates else None)
    if loss_fn is not None:
        loss_fn.compile()  # without a graph, which would overwrite the losses that the run keeps


def can_compile(device: torch.device) -> bool:
    """Whether --compile true works on this GPU of NVIDIA's: Triton knows none before Volta,
    and needs a compiler."""
    return torch.cuda.get_device_capability(device) >= (7, 0) and not _missing_compiler(on_gpu=True)


def _missing_compiler(on_gpu: bool) -> str:
    """Return the name of a compiler to be installed, empty if there is one."""
    variable, programs = ("CC", ("gcc", "clang", "cc")) if on_gpu else ("CXX", ("g++", "clang++", "c++"))
    return "" if os.environ.get(variable) or any(map(shutil.which, programs)) else programs[0]


def half_precision(args: argparse.Namespace, device: torch.device) -> torch.dtype:
    """Return --amp_dtype; unset: float16 on MPS and devices without bfloat16 (V100, T4, P100, Ascend 910A),
    else bfloat16."""
    if args.amp_dtype == "float16" and not kinds.is_accelerator(device) and kinds.TORCH < (2, 4):
        raise UserError(
            f"float16 on a CPU needs torch 2.4 or later, this is {torch.__version__}: give --amp_dtype "
            "bfloat16"
        )
    if args.amp_dtype:
        return getattr(torch, args.amp_dtype)
    if kinds.is_nvidia(device):
        return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16
    if kinds.has_streams(device) and not getattr(kinds.module(), "is_bf16_supported", lambda: True)():
        return torch.float16
    return kinds.kind_of(device).half_dtype


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """Compute convolutions inside `with` in full float32;
    by default torch lets a GPU or NPU use TF32 or HF32, of ten bits."""
    path, _, name = (
        kinds.KINDS[kinds.accelerator()].reduced_precision_switch or "backends.cudnn.allow_tf32"
    ).rpartition(".")
    switches = operator.attrgetter(path)(torch)
    previous = getattr(switches, name)
    setattr(switches, name, False)
    try:
        yield
    finally:
        setattr(switches, name, previous)


def profiler_activities() -> list:
    """Return what torch's profiler is to record: the CPU,
    and the accelerator if there is one that the profiler knows."""
    from torch.profiler import ProfilerActivity

    activities = [ProfilerActivity.CPU]
    activity = kinds.KINDS[kinds.accelerator()].profiler_activity
    if activity and kinds.available():
        activities.append(getattr(ProfilerActivity, activity))
    return activities


# --- The host's part ----------------------------------------------------------------------------------------


def loader_workers(args: argparse.Namespace) -> int:
    """Return --workers; unset: this node's cores divided among its ranks."""
    return cores_per_rank(args) if args.workers is None else args.workers


def cores_per_rank(args: argparse.Namespace) -> int:
    """Return this node's cores divided among its ranks, at least 1."""
    return max(1, cores.count() // args.world.local_world_size)


def to_device(tensor: torch.Tensor, device: torch.device, pin: bool = True) -> torch.Tensor:
    """Move a tensor to the device; with `pin`, from pinned memory if the device has streams,
    so that the host does not wait."""
    if tensor.dim() == 4 and layout(device) is torch.contiguous_format:
        tensor = tensor.contiguous()
    if pin and kinds.has_streams(device) and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


# --- Queues and events --------------------------------------------------------------------------------------


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all work in its streams; on a CPU, do nothing."""
    if kinds.has_streams(device):
        kinds.module().synchronize(device)
    elif kinds.is_accelerator(device):
        kinds.module().synchronize()


def current() -> torch.device:
    """Return the accelerator that this process uses, with its number."""
    return torch.device(kinds.accelerator(), kinds.module().current_device())


def use(device: torch.device) -> None:
    """Make a numbered accelerator current in the calling thread, which would otherwise use the first;
    do nothing for others."""
    if kinds.has_streams(device) and device.index is not None:
        kinds.module().set_device(device)


def side_stream(device: torch.device) -> Any:
    """Return a new stream for work beside the training; None if the device has no streams."""
    return kinds.module().Stream(device) if kinds.has_streams(device) else None


def on_stream(stream: object) -> contextlib.AbstractContextManager:
    """Return a context in which the device's work goes to this stream; for None,
    a context that does nothing."""
    return kinds.module().stream(stream) if stream else contextlib.nullcontext()


def current_stream(device: torch.device) -> Any:
    """Return the stream into which the calling thread queues work; for devices that have streams only."""
    return kinds.module().current_stream(device)


def record_event(stream: object) -> Any:
    """Return a new event that measures time, recorded in this stream."""
    event = kinds.module().Event(enable_timing=True)
    event.record(stream)
    return event


class AsyncScalar:
    """A number that is copied from the device in the background. With streams, no method waits for it."""

    def __init__(self, device: torch.device):
        self._device = device
        self._host_scalar: Optional[torch.Tensor] = None  # until a number is asked for
        self._copy_event: Any = None

    def start_copy(self, number: torch.Tensor) -> None:
        """Start to copy a number from the device, in place of the number before."""
        if self._host_scalar is None:
            memory = torch.zeros((), dtype=torch.float32, device="cpu")
            self._host_scalar = memory.pin_memory() if kinds.has_streams(self._device) else memory
        self._host_scalar.copy_(number, non_blocking=True)
        if kinds.has_streams(self._device):
            self._copy_event = record_event(current_stream(self._device))

    def read(self) -> Optional[float]:
        """Return the number that was copied last; None if there is none, or the copy is not complete."""
        if self._host_scalar is None or (self._copy_event is not None and not self._copy_event.query()):
            return None
        return self._host_scalar.item()


# --- Numbers and memory -------------------------------------------------------------------------------------


def seed_current_device(number: int) -> None:
    """Seed the generator of the accelerator that this process uses, if any. torch.manual_seed() seeds all,
    and takes longer."""
    module = kinds.module()
    if kinds.KINDS[kinds.accelerator()].has_streams:
        if module.is_initialized():
            module.default_generators[module.current_device()].manual_seed(number)
    elif kinds.available():
        module.manual_seed(number)


def memory_in_use() -> list[tuple[int, int]]:
    """Return [(number, bytes in use by all programs)] of the accelerators that this process may use."""
    usage = []
    for number in range(kinds.count()):
        free, total = kinds.module().mem_get_info(number)
        usage.append((number, total - free))
    return usage


def free_memory(device: torch.device) -> int:
    """Return the bytes of the device that no program has taken."""
    return kinds.module().mem_get_info(device)[0]


def peak_memory(device: torch.device) -> int:
    """Return the most bytes that tensors have taken on the device; if torch does not count them,
    the peak of the process."""
    if kinds.is_accelerator(device) and (
        max_allocated := getattr(kinds.module(), "max_memory_allocated", None)
    ):
        return max_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024  # bytes on macOS, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def empty_cache(device: torch.device) -> None:
    """Free the device memory that torch keeps for later tensors; on a CPU, do nothing."""
    if kinds.is_accelerator(device):
        synchronize(device)
        kinds.module().empty_cache()
