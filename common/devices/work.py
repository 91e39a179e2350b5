"""Device operations, with the calls of each kind of device: streams and events, memory, precision, layout, kernels."""

import argparse
import contextlib
import operator
import os
import resource
import shutil
from collections.abc import Iterator
from typing import Any

import torch

from common import cores
from common.devices import kinds
from common.errors import UserError

# --- How it computes ------------------------------------------------------------------------------------------------------


def layout(device: torch.device) -> torch.memory_format:
    """Return the memory layout of images and convolutions. Channels last is faster on GPUs and CPUs; NPUs do not know it."""
    return kinds.of(device).layout


def fused(device: torch.device) -> dict[str, Any]:
    """Return the option of an optimizer that updates all weights in one kernel: SGD since torch 2.3, on a CPU since 2.4."""
    since = (2, 3) if kinds.is_accelerator(device) else (2, 4)
    return {"fused": kinds.of(device).fused} if since <= kinds.TORCH else {}


def autocast(device: torch.device, dtype: torch.dtype) -> contextlib.AbstractContextManager:
    """What is computed inside `with` has this type. For float32, which a CPU refuses before torch 2.4, nothing is to do."""
    return contextlib.nullcontext() if dtype is torch.float32 else torch.autocast(device.type, dtype=dtype)


def grad_scaler() -> Any:
    """torch's class for scaled gradients. Before torch 2.3 each kind of device had its own, which was not told the kind."""
    if kinds.TORCH >= (2, 3):
        return torch.amp.GradScaler
    own: Any = kinds.module().amp.GradScaler

    class GradScaler(own):
        def __init__(self, device: str, enabled: bool = True, **options: Any):
            super().__init__(enabled=enabled, **options)
            self._device = device

    return GradScaler


def compile_network(args: argparse.Namespace, model: torch.nn.Module, accumulates: bool = False) -> None:
    """Compile the network in place with --compile true: kernels of several operations, which a GPU replays as a graph.

    `accumulates`: gradients of several batches are added up, which a graph would overwrite with those of the next batch.
    """
    if not args.compile:
        return
    if isinstance(model, torch.nn.DataParallel):
        raise UserError("--compile does not go with DataParallel, which copies the network in every step: take train_ddp.py")
    on_gpu = any(kinds.is_nvidia(parameter.device) for parameter in model.parameters())
    variable, programs = ("CC", ("gcc", "clang", "cc")) if on_gpu else ("CXX", ("g++", "clang++", "c++"))
    if not os.environ.get(variable) and not any(map(shutil.which, programs)):
        raise UserError(f"--compile true needs a compiler: install {programs[0]}, or leave the option out")
    if kinds.TORCH < (2, 9):  # there the parts into which DistributedDataParallel is cut may overwrite each other's gradients
        from torch import _dynamo

        _dynamo.config.optimize_ddp = False
    model.compile(mode="reduce-overhead" if on_gpu and not accumulates else None)


def half_precision(args: argparse.Namespace, device: torch.device) -> torch.dtype:
    """--amp_dtype, or bfloat16 where the hardware computes in it and float16 elsewhere (V100, T4, P100, Ascend 910A)."""
    if args.amp_dtype == "float16" and not kinds.is_accelerator(device) and kinds.TORCH < (2, 4):
        raise UserError(f"float16 on a CPU needs torch 2.4 or later, this is {torch.__version__}: give --amp_dtype bfloat16")
    if args.amp_dtype:
        return getattr(torch, args.amp_dtype)
    if kinds.is_nvidia(device):
        return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16
    if kinds.has_queues(device) and not getattr(kinds.module(), "is_bf16_supported", lambda: True)():
        return torch.float16
    return kinds.of(device).half


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """Convolutions in float32; by itself torch lets a GPU or an NPU compute them with ten bits (TF32, HF32)."""
    path, _, name = (kinds.KINDS[kinds.accelerator()].exact or "backends.cudnn.allow_tf32").rpartition(".")
    switches = operator.attrgetter(path)(torch)
    before = getattr(switches, name)
    setattr(switches, name, False)
    try:
        yield
    finally:
        setattr(switches, name, before)


def profiled() -> list:
    """What torch's profiler records."""
    from torch.profiler import ProfilerActivity

    activity = kinds.KINDS[kinds.accelerator()].activity
    return [ProfilerActivity.CPU, *([getattr(ProfilerActivity, activity)] if activity and kinds.available() else [])]


# --- The host's part --------------------------------------------------------------------------------------------------------


def loader_workers(args: argparse.Namespace) -> int:
    """--workers, or this node's cores divided among its ranks."""
    return cores_of_a_rank(args) if args.workers is None else args.workers


def cores_of_a_rank(args: argparse.Namespace) -> int:
    return max(1, cores.count() // args.world.local_world_size)


def to_device(tensor: torch.Tensor, device: torch.device, pin: bool = True) -> torch.Tensor:
    """Move it to the device without making the host wait: from pinned memory, which the device reads by itself.

    Images go in the device's layout, which the host gives them where the device has only one.
    """
    if tensor.dim() == 4 and layout(device) is torch.contiguous_format:
        tensor = tensor.contiguous()
    if pin and kinds.has_queues(device) and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


# --- Queues and events ------------------------------------------------------------------------------------------------------


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if kinds.has_queues(device):
        kinds.module().synchronize(device)
    elif kinds.is_accelerator(device):
        kinds.module().synchronize()


def current() -> torch.device:
    """Return the accelerator that this process uses."""
    return torch.device(kinds.accelerator(), kinds.module().current_device())


def use(device: torch.device) -> None:
    """Use this device in a new thread, which would allocate memory on the first one."""
    if kinds.has_queues(device) and device.index is not None:
        kinds.module().set_device(device)


def side_stream(device: torch.device) -> Any:
    """Return a queue of a device for work beside the training; None where there are no queues."""
    return kinds.module().Stream(device) if kinds.has_queues(device) else None


def on_stream(stream: Any) -> contextlib.AbstractContextManager:
    """What is asked of the device inside `with` goes to this queue, if there is one."""
    return kinds.module().stream(stream) if stream else contextlib.nullcontext()


def current_stream(device: torch.device) -> Any:
    return kinds.module().current_stream(device)


def mark(stream: Any) -> Any:
    """Return an event at this place of a queue, with the time."""
    event = kinds.module().Event(enable_timing=True)
    event.record(stream)
    return event


# --- Numbers and memory -----------------------------------------------------------------------------------------------------


def seed_in_use(number: int) -> None:
    """Seed the generator of the device that this process uses, if it uses one. torch.manual_seed would take longer, for all."""
    module = kinds.module()
    if kinds.KINDS[kinds.accelerator()].queues:
        if module.is_initialized():
            module.default_generators[module.current_device()].manual_seed(number)
    elif kinds.available():
        module.manual_seed(number)


def memory_in_use() -> list[tuple[int, int]]:
    """Return [(number, bytes in use by all programs)] of the accelerators that this process may use."""
    found = []
    for number in range(kinds.count()):
        free, total = kinds.module().mem_get_info(number)
        found.append((number, total - free))
    return found


def peak_memory(device: torch.device) -> int:
    """How many bytes tensors have taken on the device so far; on a CPU, what this process has."""
    most = getattr(kinds.module(), "max_memory_allocated", None) if kinds.is_accelerator(device) else None
    return most(device) if most else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def give_memory_back(device: torch.device) -> None:
    """What torch holds for tensors to come."""
    if kinds.is_accelerator(device):
        synchronize(device)
        kinds.module().empty_cache()
