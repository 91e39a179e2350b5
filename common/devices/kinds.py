"""A table of the kinds of device, and the number of accelerators that this process sees.

The table defines all differences between kinds; no other module compares names of devices. The entry for NPUs follows the
vendor's pages and was tested on a stand-in only. The entries for XPUs and MPS follow torch's pages and are untested.
"""

import dataclasses
import importlib.util
import os
from collections.abc import Mapping
from typing import Any, Optional

import torch

from common.errors import UserError
from common.packages import first_two

TORCH = first_two(torch.__version__)  # (2, 1) and up, for what is called differently in an older one

if TORCH < (2, 5) and importlib.util.find_spec("torch_npu"):  # a newer torch imports it by itself
    importlib.import_module("torch_npu")

# What a job may need of its device.
DATA_PARALLEL, DALI, COMPILE, CHANNELS_LAST = "DataParallel", "DALI", "--compile", "the channels-last layout"

DDP_INSTEAD = "take train_ddp.py"
NCHW_INSTEAD = "take train.py, or --memory_format nchw where the job has it"
TORCH_INSTEAD = "take train_ddp.py, or --data_backend pytorch where the job has it"


@dataclasses.dataclass(frozen=True)
class Kind:
    noun: str  # what a user calls one
    backend: Optional[str]  # of torch.distributed; None: it has none
    layout: torch.memory_format = torch.channels_last  # in which its convolutions are fastest, or work at all
    queues: bool = False  # work goes to queues beside the program (streams), in which events are timed
    fused: bool = True  # whether torch has optimizers that update all weights in one kernel
    norm_kernels: bool = False  # whether torch has kernels for the parts of a norm over several processes
    half: torch.dtype = torch.bfloat16  # that it computes in, unless the device itself says otherwise
    widest: torch.dtype = torch.float64  # for sums that are to be exact
    activity: Optional[str] = None  # its name in torch's profiler
    # Variables with which it gives the same bits in every run, where torch has not got its own switch for that.
    deterministic: Mapping[str, str] = dataclasses.field(default_factory=dict)
    exact: Optional[str] = None  # path below torch of the switch that lets convolutions be less exact than float32
    cannot: Mapping[str, str] = dataclasses.field(default_factory=dict)  # {what it cannot do: what to do instead}


KINDS = {
    "cuda": Kind(
        "GPU", "nccl", queues=True, norm_kernels=True, activity="CUDA", exact="backends.cudnn.allow_tf32",
        deterministic={"CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
    ),
    "npu": Kind(
        "NPU", "hccl", torch.contiguous_format, queues=True, fused=False, exact="npu.conv.allow_hf32",
        deterministic={"HCCL_DETERMINISTIC": "true"},
        cannot={DATA_PARALLEL: DDP_INSTEAD, DALI: TORCH_INSTEAD, COMPILE: "leave it out", CHANNELS_LAST: NCHW_INSTEAD},
    ),
    "xpu": Kind("XPU", "xccl", queues=True, activity="XPU", cannot={DATA_PARALLEL: DDP_INSTEAD, DALI: TORCH_INSTEAD}),
    "mps": Kind(
        "GPU", None, half=torch.float16, widest=torch.float32, cannot={DATA_PARALLEL: "take train.py", DALI: "take train.py"},
    ),
    "cpu": Kind("CPU", "gloo"),
}  # fmt: skip

BACKENDS = tuple(kind.backend for kind in KINDS.values() if kind.backend)


def of(device: torch.device) -> Kind:
    return KINDS[device.type]


def accelerator() -> str:
    """Return the kind of device for which this torch is made, whether or not there is one; it knows one in a process."""
    if TORCH < (2, 6):  # before torch.accelerator
        return "npu" if hasattr(torch, "npu") else "cuda"
    found = torch.accelerator.current_accelerator()
    return found.type if found and found.type in KINDS else "cuda"


def noun() -> str:
    """What this machine's accelerators are called."""
    return KINDS[accelerator()].noun


def is_ascend() -> bool:
    """Whether this machine's accelerators are NPUs, which have a driver and collectives of their own."""
    return accelerator() == "npu"


def module() -> Any:
    """What torch offers for the accelerator: torch.cuda, torch.npu, ..."""
    return getattr(torch, accelerator())


def slices() -> list[str]:
    """Return the slices (MIG) of GPUs that CUDA_VISIBLE_DEVICES names. CUDA shows a process only the first."""
    names = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    return [name for name in names if name.startswith("MIG-")]


def count() -> int:
    """Return the number of accelerators that this process may use; a slice of a GPU is one."""
    return len(slices()) or module().device_count()


def available() -> bool:
    return module().is_available() and count() > 0


def is_accelerator(device: torch.device) -> bool:
    return device.type != "cpu"


def is_nvidia(device: torch.device) -> bool:
    """Whether it is one of NVIDIA's: some things exist there alone."""
    return device.type == "cuda"


def widest(device: torch.device) -> torch.dtype:
    """Return the type for sums over many batches."""
    return of(device).widest


def has_queues(device: torch.device) -> bool:
    return of(device).queues


def backend() -> str:
    """Return the backend of torch.distributed for the devices that this process would take by itself."""
    return KINDS[accelerator()].backend or "gloo" if available() else "gloo"


def collectives_of(device: torch.device) -> str:
    """Return the backend of torch.distributed for tensors on it."""
    if name := of(device).backend:
        return name
    raise UserError(f"torch has no collectives for {device.type}: take train.py, or give --device cpu")


def refuse(device: torch.device, need: str) -> None:
    """Raise UserError where a device of this kind cannot do what a job needs of it."""
    kind = of(device)
    if need in kind.cannot:
        raise UserError(f"{need} does not work on {kind.noun}s: {kind.cannot[need]}")
