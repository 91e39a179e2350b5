"""The device that this process computes on; where it is not available, an error with a remedy.

What torch calls differently for each kind of device is called here, and nowhere else.
"""

import argparse
import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from typing import Any, Optional

import torch

from common import cores, errors, nvml
from common.errors import UserError


def choose(args: argparse.Namespace) -> torch.device:
    """The GPU of this process's local rank, or the CPU. --enable_gpu decides; unset, the GPU if there is one."""
    here, cut = args.world, slices()
    if here.local_rank < len(cut):
        os.environ["CUDA_VISIBLE_DEVICES"] = cut[here.local_rank]
    usable = args.enable_gpu is not False and available()
    if args.enable_gpu is not False and not usable and (args.enable_gpu or here.gpus_promised):
        promised = f"the platform reports {errors.count(here.gpus_promised, 'GPU')} ({here.platform})"
        given = "--enable_gpu true" if args.enable_gpu else promised
        raise UserError(f"{given}, but torch sees no GPU: {diagnosis()}; or give --enable_gpu false to train on the CPU")
    if args.enable_gpu is False:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # so that no other code in this process uses one
    if args.enable_gpu is False or not usable:
        return torch.device("cpu")
    number = 0 if here.local_rank < len(cut) or here.owns_the_only(count()) else here.local_rank
    if number >= count():
        raise UserError(
            f"local rank {here.local_rank} has no GPU: this process sees {count()}; start fewer processes, "
            "or give --enable_gpu false to train on the CPU"
        )
    device = torch.device("cuda", number)
    wrong = unknown_architecture(torch.cuda.get_device_capability(device), torch.cuda.get_arch_list())
    if wrong:
        raise UserError(f"{torch.cuda.get_device_name(device)} is {wrong}; or give --enable_gpu false to train on the CPU")
    torch.cuda.set_device(device)
    _choose_algorithms(args.deterministic)
    return device


def _choose_algorithms(deterministic):
    """Those that always give the same bits, or an error where there is none; else the fastest, found in the first steps."""
    torch.backends.cudnn.benchmark = not deterministic
    if deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # what cuBLAS wants for it, before its first use
        torch.use_deterministic_algorithms(True)
        # Slow, and for finding mistakes; pyright does not see that the module has it.
        torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]


def slices() -> list[str]:
    """Of GPUs that are cut into slices (MIG), those that CUDA_VISIBLE_DEVICES names. CUDA shows a process only the first."""
    names = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    return [name for name in names if name.startswith("MIG-")]


def count() -> int:
    """The GPUs that this process may use; a slice of one is one."""
    return len(slices()) or torch.cuda.device_count()


def available() -> bool:
    return torch.cuda.is_available() and count() > 0


def is_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


def require_one_each(args: argparse.Namespace) -> None:
    """In the parent of a node, before it starts workers that would find no GPU."""
    gpus = count()
    if args.enable_gpu is not False and 0 < gpus < args.world.local_world_size:
        raise UserError(
            f"{args.world.local_world_size} processes on a node with {errors.count(gpus, 'GPU')}: "
            f"give --nproc_per_node {gpus}, or --enable_gpu false to train on the CPU"
        )


def identity(device: torch.device) -> str:
    """A name that no other device on this machine has; empty for a CPU, which may be shared."""
    if not is_gpu(device):
        return ""
    return next(iter(slices()), "") or str(getattr(torch.cuda.get_device_properties(device), "uuid", device))


def unknown_architecture(capability: tuple[int, int], known: list[str]) -> Optional[str]:
    """What to do where torch has no kernels for a GPU, or None.

    `known`: sm_86 runs on 8.6 and 8.9, sm_90a on 9.0 alone; the driver compiles compute_90 for whatever is newer.
    """
    wanted = 10 * capability[0] + capability[1]
    named = [(match[1], int(match[2]), match[3]) for name in known if (match := re.fullmatch(r"(sm|compute)_(\d+)(\w?)", name))]
    fits = [
        number == wanted or (number < wanted and (kind == "compute" or (number // 10 == capability[0] and not only_this)))
        for kind, number, only_this in named
    ]
    if any(fits) or not named:
        return None
    remedy = "a torch built for an older CUDA" if wanted < min(number for _, number, _ in named) else "a newer torch"
    return f"of architecture sm_{wanted}, and torch {torch.__version__} has kernels for {', '.join(known)}: install {remedy}"


def compile_network(args: argparse.Namespace, model: torch.nn.Module) -> None:
    """With --compile true, in place: kernels of several operations each, which a GPU replays as one graph."""
    if not args.compile:
        return
    if isinstance(model, torch.nn.DataParallel):
        raise UserError("--compile does not go with DataParallel, which copies the network in every step: take train_ddp.py")
    on_gpu = any(is_gpu(parameter.device) for parameter in model.parameters())
    variable, programs = ("CC", ("gcc", "clang", "cc")) if on_gpu else ("CXX", ("g++", "clang++", "c++"))
    if not os.environ.get(variable) and not any(map(shutil.which, programs)):
        raise UserError(f"--compile true needs a compiler: install {programs[0]}, or leave the option out")
    model.compile(mode="reduce-overhead" if on_gpu else None)


def half_precision(args: argparse.Namespace, device: torch.device) -> torch.dtype:
    """--amp_dtype, or bfloat16 where the hardware computes in it and float16 elsewhere (V100, T4, P100)."""
    if args.amp_dtype:
        return getattr(torch, args.amp_dtype)
    if is_gpu(device) and not torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.float16
    return torch.bfloat16


def loader_workers(args: argparse.Namespace) -> int:
    """--workers, or this node's cores divided among its ranks."""
    return cores_of_a_rank(args) if args.workers is None else args.workers


def cores_of_a_rank(args: argparse.Namespace) -> int:
    return max(1, cores.count() // args.world.local_world_size)


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has finished its work."""
    if is_gpu(device):
        torch.cuda.synchronize(device)


def collectives_of(device: torch.device) -> str:
    """The backend of torch.distributed for tensors on it."""
    return "nccl" if is_gpu(device) else "gloo"


def current() -> torch.device:
    """The GPU that this process uses."""
    return torch.device("cuda", torch.cuda.current_device())


def use(device: torch.device) -> None:
    """In a new thread, which would use the first GPU, and allocate memory there."""
    if is_gpu(device) and device.index is not None:
        torch.cuda.set_device(device)


def side_stream(device: torch.device) -> Any:
    """A queue of a GPU for work beside the training; None for a CPU."""
    return torch.cuda.Stream(device) if is_gpu(device) else None


def on_stream(stream: Any) -> contextlib.AbstractContextManager:
    """What is asked of the GPU inside `with` goes to this queue, if there is one."""
    return torch.cuda.stream(stream) if stream else contextlib.nullcontext()


def current_stream(device: torch.device) -> Any:
    return torch.cuda.current_stream(device)


def mark(stream: Any) -> Any:
    """An event at this place of a queue, with the time."""
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event


def seed_in_use(number: int) -> None:
    """Seed the generator of the GPU that this process uses, if it uses one. torch.manual_seed would take longer, for all."""
    if torch.cuda.is_initialized():
        torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(number)


def give_memory_back(device: torch.device) -> None:
    """What torch holds for tensors to come."""
    if is_gpu(device):
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def profiled() -> list:
    """What torch's profiler records."""
    from torch.profiler import ProfilerActivity

    return [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]


def moved(tensor: torch.Tensor, device: torch.device, pin: bool = True) -> torch.Tensor:
    """On the device, without making the host wait for a GPU: from pinned memory, which the GPU reads by itself."""
    if pin and is_gpu(device) and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """Convolutions in float32; by itself torch lets a GPU compute them in TF32, with ten bits."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


def describe(device: torch.device) -> str:
    if is_gpu(device):
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return f"cpu ({torch.get_num_threads()} threads)"


def build() -> str:
    return f"torch {torch.__version__} was built for CUDA {torch.version.cuda}"


def diagnosis() -> str:
    """torch's build and the driver, and which of the two to change."""
    loaded = nvml.driver()
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a CPU build; install one for CUDA"
    remedy = "choose a GPU flavor or start the container with its GPUs"
    if loaded is None:
        return f"{build()} but no NVIDIA driver is loaded; {remedy}"
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and hidden.strip() in ("", "-1"):
        return f"CUDA_VISIBLE_DEVICES is {hidden!r}, which hides every GPU; unset it, or ask the scheduler for a GPU"
    if not nvml.gpus():
        return f"this machine has an NVIDIA driver, {loaded}, but no GPU was given to this process; {remedy}"
    remedy = "update the driver, or install a torch built for an older CUDA"
    return f"{build()} and the driver is {loaded}; {remedy}"
