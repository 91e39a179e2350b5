"""The files of weights that a run writes: the network of an epoch.

Those to begin with or to evaluate: checkpoints.pretrained.

epoch_3.pth           tensors by name, as torch.save() writes them
epoch_3.pth.sha256    its digest, for the program sha256sum
epoch_3.json          the epoch, its metrics, the classes, and what is needed to make the network again
"""

import hashlib
import io
import json
import os
import re
from collections.abc import Collection
from typing import Any, Optional

import torch

from common.files import remove, write_atomically

WRAPPERS = (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)
# torchvision's file names end with the beginning of the SHA-256
TORCHVISION_DIGEST = re.compile(r"-([0-9a-f]{8,64})\.pth$")
DIGEST = ".sha256"  # the ending of the file beside a file of weights
# Fields, with their types, of the JSON file beside the weights of an epoch; OPTIONS are the run's options
# among them.
OPTIONS = {
    "arch": str, "width": int, "image_size": int, "resize": str, "interpolation": str, "seed": int,
    "crop_pct": float, "mean": list, "std": list,
}  # fmt: skip
METADATA_FIELDS = {"epoch": int, "metrics": dict, "classes": list, **OPTIONS}


def encode(state: dict) -> memoryview:
    """Return the bytes of a file of torch.save()."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getbuffer()


def plain_name(name: str, names: Collection[str]) -> str:
    """Strip the prefixes of wrappers (DataParallel, DDP, compile, averages) from a name until it is one of
    `names`."""
    while name not in names and (bare := re.sub(r"^(module|_orig_mod)\.", "", name)) != name:
        name = bare
    return name


def unwrapped(model: Any) -> torch.nn.Module:
    """Return the network itself, inside DataParallel, DistributedDataParallel or torch.compile."""
    while isinstance(model, WRAPPERS) or hasattr(model, "_orig_mod"):
        model = model.module if isinstance(model, WRAPPERS) else model._orig_mod
    return model


def beside(path: str) -> str:
    """Return the path of the JSON file that belongs to a .pth file of weights."""
    return re.sub(r"\.pth$", "", path) + ".json"


def write_weights(path: str, weights: dict, metadata: Optional[dict] = None) -> None:
    """Write a file of weights, a .sha256 file for the program sha256sum and, if given,
    `metadata` as the .json beside it."""
    content = encode(weights)
    if metadata:
        write_atomically(
            beside(path), json.dumps(metadata, indent=1, ensure_ascii=False).encode(errors="backslashreplace")
        )
    remove(path + DIGEST)  # the digest of the weights that are replaced
    write_atomically(path, content)
    write_atomically(
        path + DIGEST, f"{hashlib.sha256(content).hexdigest()}  {os.path.basename(path)}\n".encode()
    )


def evaluated_weights(state: dict) -> dict[str, torch.Tensor]:
    """Return the weights to evaluate: the averaged ones if the checkpoint has them."""
    weights = state.get("ema", state["model"])
    return {
        plain_name(name, state["model"]): tensor for name, tensor in weights.items() if name != "n_averaged"
    }
