"""Error messages for a missing device and for full memory: the reason, and what to change."""

import importlib.metadata
import os
import re
from typing import Optional

import torch

from common.devices import kinds
from common.errors import TrainingFailed
from common.machine import drivers
from common.packages import major_minor

KILLED = (
    "a loader process was killed, perhaps for want of memory: lower --workers or --batch_size, or ask for "
    "more memory"
)

DEVICE_OUT_OF_MEMORY = re.compile(
    r"(CUDA|NPU|XPU|MPS) out of memory\. Tried to allocate \S+ \w+"
    r"|CUDA error: out of memory|CUDA driver error: out of memory|MPS backend out of memory"
    r"|\w+_STATUS_ALLOC_FAILED|cudaErrorMemoryAllocation|Triton Error \[CUDA\]: out of memory"
    r"|Can't allocate \d+ bytes on device"
)
HOST_OUT_OF_MEMORY = {  # of the node: {pattern of an error: the text to show}
    r"DataLoader worker .* Bus error|insufficient shared memory": (
        "/dev/shm is full: start the container with more (--shm-size), or lower --workers"
    ),
    r"DataLoader worker .* killed by signal: Killed": KILLED,
    r"^MemoryError|can't allocate memory|Cannot allocate memory|bad_alloc": (
        "this node's memory is full: lower --workers or --batch_size, or ask for more memory"
    ),
}


def out_of_memory_error(error: Exception) -> Optional[TrainingFailed]:
    """Return the error to end with if a device, /dev/shm or the node has run out of memory; else None."""
    if device_message := out_of_memory_message(error):
        return TrainingFailed(
            f"{device_message}; lower --batch_size (--find_max_batch true finds the largest that fits)"
        )
    message = f"{type(error).__name__}: {error}"
    for pattern, text in HOST_OUT_OF_MEMORY.items():
        if re.search(pattern, message):
            return TrainingFailed(text)
    return None


def out_of_memory_message(error: Exception) -> Optional[str]:
    """Return a message if the error says that the device's memory is full, with its sizes; else None."""
    match = DEVICE_OUT_OF_MEMORY.search(f"{type(error).__name__}: {error}")
    return f"{match[0]}: the {kinds.noun()}'s memory is full" if match else None


def unknown_architecture(capability: tuple[int, int], arch_list: list[str]) -> Optional[str]:
    """Return the end of "this GPU is ..." if torch has no kernels for it, with what to install; else None.

    `arch_list`: e.g. sm_86, which runs on 8.6 and 8.9; sm_90a, on 9.0 alone; compute_90, which the driver
    compiles for 9.0 and up.
    """
    architecture = 10 * capability[0] + capability[1]
    kernels = [
        (match[1], int(match[2]), match[3])
        for name in arch_list
        if (match := re.fullmatch(r"(sm|compute)_(\d+)(\w?)", name))
    ]
    matches = [
        number == architecture
        or (number < architecture and (kind == "compute" or (number // 10 == capability[0] and not suffix)))
        for kind, number, suffix in kernels
    ]
    if any(matches) or not kernels:
        return None
    remedy = (
        "a torch built for an older CUDA"
        if architecture < min(number for _, number, _ in kernels)
        else "a newer torch"
    )
    return (
        f"of architecture sm_{architecture}, and torch {torch.__version__} has kernels for "
        f"{', '.join(arch_list)}: install {remedy}"
    )


def describe_build() -> str:
    """Return a text with the versions of torch and CUDA, or of torch_npu and CANN."""
    if kinds.is_ascend():
        return f"torch_npu {_version('torch_npu')}, CANN {drivers.cann() or 'unknown'}"
    return f"torch {torch.__version__} was built for CUDA {torch.version.cuda}"


def diagnosis(kind: str = "") -> str:
    """Return why torch sees no device of this kind (empty: that of this machine), and what to change."""
    kind = kind or ("npu" if drivers.npus() else kinds.accelerator())
    if kind == "npu":
        return _diagnose_npus()
    if kind != "cuda":
        return (
            f"torch {torch.__version__} was not built for {kind}, or this machine has none; leave --device "
            "out"
        )
    return _diagnose_gpus()


def _diagnose_gpus():
    """Return why torch sees no NVIDIA GPU, and what to change."""
    driver = drivers.nvidia()
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a CPU build; install one for CUDA"
    remedy = "choose a GPU flavor or start the container with its GPUs"
    if driver is None:
        return f"{describe_build()} but no NVIDIA driver is loaded; {remedy}"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return (
            f"CUDA_VISIBLE_DEVICES is {visible!r}, which hides every GPU; unset it, or ask the scheduler "
            "for a GPU"
        )
    if not drivers.gpus():
        return f"this machine has an NVIDIA driver, {driver}, but no GPU was given to this process; {remedy}"
    remedy = "update the driver, or install a torch built for an older CUDA"
    return f"{describe_build()} and the driver is {driver}; {remedy}"


def _diagnose_npus():
    """Return why torch sees no NPU, and what to change."""
    torch_version = torch.__version__.split("+")[0]
    if not (installed := _version("torch_npu")):
        return (
            f"torch_npu is not installed; install torch_npu {torch_version}, or choose an image that has it"
        )
    if mismatch := version_mismatch(torch_version, installed, drivers.cann()):
        return mismatch
    if not drivers.npus():
        return (
            "no NPU was given to this process; choose an Ascend flavor or start the container with its "
            "/dev/davinci devices"
        )
    return (
        f"{describe_build()}, driver {drivers.ascend() or 'unknown'}; look at npu-smi info, and update the "
        "driver or CANN"
    )


def installed_mismatch() -> Optional[str]:
    """Return why the installed torch, torch_npu and CANN do not go together; None if they do,
    or where no NPUs are used."""
    if not kinds.is_ascend():
        return None
    return version_mismatch(torch.__version__.split("+")[0], _version("torch_npu"), drivers.cann())


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


def version_mismatch(torch_version: str, torch_npu: str, cann: Optional[str]) -> Optional[str]:
    """Return why versions of torch, torch_npu and CANN, such as 2.7.1, 2.7.1.post2 and 8.5.0,
    do not go together, or None."""
    npu_version = major_minor(torch_npu)
    if major_minor(torch_version) != npu_version:
        return (
            f"torch_npu {torch_npu} is for another torch than {torch_version}; install the torch_npu of "
            "that version"
        )
    oldest_cann = OLDEST_CANN.get(npu_version)
    if cann and oldest_cann and major_minor(cann) < oldest_cann:
        return (
            f"torch_npu {torch_npu} needs CANN {oldest_cann[0]}.{oldest_cann[1]} or later, and this is "
            f"{cann}; choose a newer image"
        )
    return None


def is_device_error(text: str) -> bool:
    """Whether an error text is about the device or its connection to others,
    so that it may not occur on another device."""
    return any(marker in text for marker in ("CUDA error", "NCCL error", "NPU error", "HCCL error"))
