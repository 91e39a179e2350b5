"""Error messages for a missing device and for full memory: the reason, and what to change."""

import importlib.metadata
import os
import re
from typing import Optional

import torch

from common.devices import kinds
from common.errors import TrainingFailed
from common.machine import drivers
from common.packages import first_two

KILLED = "a loader process was killed, perhaps for want of memory: lower --workers or --batch_size, or ask for more memory"

OF_THE_DEVICE = re.compile(
    r"(CUDA|NPU|XPU|MPS) out of memory\. Tried to allocate \S+ \w+|CUDA error: out of memory|MPS backend out of memory"
    r"|\w+_STATUS_ALLOC_FAILED|cudaErrorMemoryAllocation|CUDA driver error: out of memory|Triton Error \[CUDA\]: out of memory"
    r"|Can't allocate \d+ bytes on device"
)
NO_MEMORY = {  # of the node: {pattern of an error: the text to show}
    r"DataLoader worker .* Bus error|insufficient shared memory": (
        "/dev/shm is full: start the container with more (--shm-size), or lower --workers"
    ),
    r"DataLoader worker .* killed by signal: Killed": KILLED,
    r"^MemoryError|can't allocate memory|Cannot allocate memory|bad_alloc": (
        "this node's memory is full: lower --workers or --batch_size, or ask for more memory"
    ),
}


def no_memory(error: Exception) -> Optional[TrainingFailed]:
    """Return the error to end with if a device, /dev/shm or the node has run out of memory; else None."""
    if full := full_device(error):
        return TrainingFailed(f"{full}; lower --batch_size (--find_max_batch true finds the largest that fits)")
    message = f"{type(error).__name__}: {error}"
    lines = (text for pattern, text in NO_MEMORY.items() if re.search(pattern, message))
    return next(map(TrainingFailed, lines), None)


def full_device(error: Exception) -> Optional[str]:
    """Return that the memory of the device is full, in its own words, with the sizes; None if the error is another."""
    found = OF_THE_DEVICE.search(f"{type(error).__name__}: {error}")
    return f"{found[0]}: the {kinds.noun()}'s memory is full" if found else None


def unknown_architecture(capability: tuple[int, int], known: list[str]) -> Optional[str]:
    """Return the end of "this GPU is ..." if torch has no kernels for it, with what to install; else None.

    `known`: e.g. sm_86, which runs on 8.6 and 8.9; sm_90a, on 9.0 alone; compute_90, which the driver compiles for 9.0 and up.
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


def build() -> str:
    """Return a text with the versions of torch and CUDA, or of torch_npu and CANN."""
    if kinds.is_ascend():
        return f"torch_npu {_version('torch_npu')}, CANN {drivers.cann() or 'unknown'}"
    return f"torch {torch.__version__} was built for CUDA {torch.version.cuda}"


def diagnosis(kind: str = "") -> str:
    """Return why torch sees no device of this kind (empty: that of this machine), and what to change."""
    kind = kind or ("npu" if drivers.npus() else kinds.accelerator())
    if kind == "npu":
        return _of_npus()
    if kind != "cuda":
        return f"torch {torch.__version__} was not built for {kind}, or this machine has none; leave --device out"
    return _of_gpus()


def _of_gpus():
    loaded = drivers.nvidia()
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a CPU build; install one for CUDA"
    remedy = "choose a GPU flavor or start the container with its GPUs"
    if loaded is None:
        return f"{build()} but no NVIDIA driver is loaded; {remedy}"
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and hidden.strip() in ("", "-1"):
        return f"CUDA_VISIBLE_DEVICES is {hidden!r}, which hides every GPU; unset it, or ask the scheduler for a GPU"
    if not drivers.gpus():
        return f"this machine has an NVIDIA driver, {loaded}, but no GPU was given to this process; {remedy}"
    remedy = "update the driver, or install a torch built for an older CUDA"
    return f"{build()} and the driver is {loaded}; {remedy}"


def _of_npus():
    wanted = torch.__version__.split("+")[0]
    if not (installed := _version("torch_npu")):
        return f"torch_npu is not installed; install torch_npu {wanted}, or choose an image that has it"
    if wrong := misfit(wanted, installed, drivers.cann()):
        return wrong
    if not drivers.npus():
        return "no NPU was given to this process; choose an Ascend flavor or start the container with its /dev/davinci devices"
    return f"{build()}, driver {drivers.ascend() or 'unknown'}; look at npu-smi info, and update the driver or CANN"


def versions_apart() -> Optional[str]:
    """Return why the installed torch, torch_npu and CANN do not go together; None if they do, or where no NPUs are used."""
    if not kinds.is_ascend():
        return None
    return misfit(torch.__version__.split("+")[0], _version("torch_npu"), drivers.cann())


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


# {torch_npu: the oldest CANN for it}, from the vendor's table of versions that go together.
OLDEST_CANN: dict[tuple[int, ...], tuple[int, int]] = {
    (2, 6): (8, 2),
    (2, 7): (8, 3),
    (2, 8): (8, 3),
    (2, 9): (8, 5),
    (2, 10): (9, 0),
    (2, 11): (9, 1),
    (2, 12): (9, 1),
}


def misfit(torch_version: str, torch_npu: str, cann: Optional[str]) -> Optional[str]:
    """Return why versions of torch, torch_npu and CANN, such as 2.7.1, 2.7.1.post2 and 8.5.0, do not go together, or None."""
    mine = first_two(torch_npu)
    if first_two(torch_version) != mine:
        return f"torch_npu {torch_npu} is for another torch than {torch_version}; install the torch_npu of that version"
    needed = OLDEST_CANN.get(mine)
    if cann and needed and first_two(cann) < needed:
        return f"torch_npu {torch_npu} needs CANN {needed[0]}.{needed[1]} or later, and this is {cann}; choose a newer image"
    return None


def is_its_own_fault(text: str) -> bool:
    """Whether an error text is about the device or its connection to others, so that it may not occur on another device."""
    return any(words in text for words in ("CUDA error", "NCCL error", "NPU error", "HCCL error"))
