"""The names and options of other programs, for scripts and commands that were written for them."""

import importlib
from typing import Any

# Modules are imported on first use of a name: few scripts have the packages that all of them need.
NAMES = {
    "Dataset": "datasets.facade",
    "HybridTrainPipe": "datasets.drop_in.article",
    "HybridValPipe": "datasets.drop_in.article",
    "DaliIterator": "datasets.drop_in.article",
    "DaliIteratorCPU": "datasets.drop_in.article",
    "DaliIteratorCPUNoPrefetch": "datasets.drop_in.article",
    "DaliIteratorGPU": "datasets.drop_in.article",
}

NVIDIA = (
    "DATA_BACKEND_CHOICES", "get_dali_kspeed_train_loader", "get_dali_kspeed_val_loader",
    "get_dali_train_loader", "get_dali_val_loader", "get_kspeed_train_loader", "get_kspeed_val_loader",
    "get_pytorch_train_loader", "get_pytorch_val_loader", "get_synthetic_loader",
    "get_synthetic_train_loader", "get_synthetic_val_loader", "get_syntetic_loader",
)  # fmt: skip
NAMES |= dict.fromkeys(NVIDIA, "datasets.drop_in.nvidia")

__all__ = [*NAMES, "spellings"]


def __getattr__(name: str) -> Any:
    if name in NAMES:
        return getattr(importlib.import_module(NAMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
