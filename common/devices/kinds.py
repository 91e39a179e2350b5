"""A table of the kinds of device, and the number of accelerators that this process sees.

The table holds most differences between the kinds, so that other packages need not compare names of devices.
The entry for NPUs follows the vendor's pages and was tested on a stand-in only. Those for XPUs and MPS follow
torch's pages and are untested.
"""

import dataclasses
import importlib.util
import os
from collections.abc import Mapping
from typing import Any, Optional

import torch

from common.errors import UserError
from common.packages import major_minor

TORCH = major_minor(torch.__version__)  # (2, 1) or later, for calls that differ between versions

if TORCH < (2, 5) and importlib.util.find_spec("torch_npu"):  # a newer torch imports it by itself
    importlib.import_module("torch_npu")

# Features that a job may need of its device.
DATA_PARALLEL = "DataParallel"
DALI = "DALI"
COMPILE = "--compile"
CHANNELS_LAST = "the channels-last layout"

DDP_INSTEAD = "take train_ddp.py"
NCHW_INSTEAD = "take train.py, or --memory_format nchw where the job has it"
TORCH_INSTEAD = "take train_ddp.py, or --data_backend pytorch where the job has it"


@dataclasses.dataclass(frozen=True)
class Kind:
    """What differs between the kinds of device; an entry of KINDS."""

    noun: str  # what users call such a device
    backend: Optional[str]  # of torch.distributed; None: it has none
    # memory layout in which its convolutions are fastest, or work at all
    layout: torch.memory_format = torch.channels_last
    has_streams: bool = False  # whether it has streams, with events that measure time
    has_fused_optimizers: bool = True  # whether torch has optimizers that update all weights in one kernel
    has_sync_batch_norm: bool = False  # whether torch has the kernels of SyncBatchNorm for it
    half_dtype: torch.dtype = torch.bfloat16  # for half precision, unless the device itself lacks it
    widest_dtype: torch.dtype = torch.float64  # for sums that are to be exact
    profiler_activity: Optional[str] = None  # its name in torch's profiler
    # Environment variables that it needs, besides torch's own switch, to give the same bits in every run.
    deterministic: Mapping[str, str] = dataclasses.field(default_factory=dict)
    reduced_precision_switch: Optional[str] = (
        None  # path below torch of the switch that lets convolutions be less exact than float32
    )
    # {what it cannot do: what to do instead}
    unsupported: Mapping[str, str] = dataclasses.field(default_factory=dict)


KINDS = {
    "cuda": Kind(
        "GPU",
        "nccl",
        has_streams=True,
        has_sync_batch_norm=True,
        profiler_activity="CUDA",
        reduced_precision_switch="backends.cudnn.allow_tf32",
        deterministic={"CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
    ),
    "npu": Kind(
        "NPU",
        "hccl",
        torch.contiguous_format,
        has_streams=True,
        has_fused_optimizers=False,
        reduced_precision_switch="npu.conv.allow_hf32",
        deterministic={"HCCL_DETERMINISTIC": "true"},
        unsupported={
            DATA_PARALLEL: DDP_INSTEAD,
            DALI: TORCH_INSTEAD,
            COMPILE: "leave it out",
            CHANNELS_LAST: NCHW_INSTEAD,
        },
    ),
    "xpu": Kind(
        "XPU",
        "xccl",
        has_streams=True,
        profiler_activity="XPU",
        unsupported={DATA_PARALLEL: DDP_INSTEAD, DALI: TORCH_INSTEAD},
    ),
    "mps": Kind(
        "GPU",
        None,
        half_dtype=torch.float16,
        widest_dtype=torch.float32,
        unsupported={DATA_PARALLEL: "take train.py", DALI: "take train.py"},
    ),
    "cpu": Kind("CPU", "gloo"),
}

BACKENDS = tuple(kind.backend for kind in KINDS.values() if kind.backend)


def kind_of(device: torch.device) -> Kind:
    """Return the entry of KINDS for a device's kind."""
    return KINDS[device.type]


def accelerator() -> str:
    """Return the kind of accelerator, a key of KINDS, that torch is built for, present or not;
    "cuda" if it cannot tell."""
    if TORCH < (2, 6):  # before torch.accelerator
        return "npu" if hasattr(torch, "npu") else "cuda"
    current = torch.accelerator.current_accelerator()
    return current.type if current and current.type in KINDS else "cuda"


def noun() -> str:
    """Return what users call the accelerators of this machine, e.g. GPU."""
    return KINDS[accelerator()].noun


def is_ascend() -> bool:
    """Whether this machine's accelerators are NPUs, which have a driver and collectives of their own."""
    return accelerator() == "npu"


def module() -> Any:
    """Return torch's module for the accelerator: torch.cuda, torch.npu, ..."""
    return getattr(torch, accelerator())


def mig_slices() -> list[str]:
    """Return the slices (MIG) of GPUs that CUDA_VISIBLE_DEVICES names.

    CUDA shows a process only the first.
    """
    names = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    return [name for name in names if name.startswith("MIG-")]


def count() -> int:
    """Return the number of accelerators that this process may use; each slice of a GPU counts as one."""
    return len(mig_slices()) or module().device_count()


def available() -> bool:
    """Whether this process may use an accelerator."""
    return module().is_available() and count() > 0


def is_accelerator(device: torch.device) -> bool:
    return device.type != "cpu"


def is_nvidia(device: torch.device) -> bool:
    return device.type == "cuda"


def toolkit_major() -> int:
    """Return the version of CUDA by which NVIDIA names packages beside this torch: 13, or 12,
    also for a torch without CUDA."""
    return 13 if (torch.version.cuda or "").startswith("13.") else 12


def widest(device: torch.device) -> torch.dtype:
    """Return the dtype for sums over many batches: float64, or float32 if the device lacks that."""
    return kind_of(device).widest_dtype


def has_streams(device: torch.device) -> bool:
    """Whether the device has streams, with events that measure time."""
    return kind_of(device).has_streams


def backend() -> str:
    """Return torch.distributed's backend for this machine's accelerators; gloo if there are none,
    or they have no backend."""
    return KINDS[accelerator()].backend or "gloo" if available() else "gloo"


def collective_backend(device: torch.device) -> str:
    """Return the backend of torch.distributed for tensors on this device; UserError if there is none."""
    if name := kind_of(device).backend:
        return name
    raise UserError(f"torch has no collectives for {device.type}: take train.py, or give --device cpu")


def require_feature(device: torch.device, feature: str) -> None:
    """Raise UserError if a device of this kind lacks a feature that a job needs, e.g. DALI."""
    kind = kind_of(device)
    if feature in kind.unsupported:
        raise UserError(f"{feature} does not work on {kind.noun}s: {kind.unsupported[feature]}")
