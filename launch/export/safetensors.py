"""Weights as model.safetensors, with the config.json by which timm's create_model("local-dir:FOLDER") reads
them."""

import json
import re
import struct
from typing import Any, Optional

import torch

from common.weights.tensors import SAFE_TYPES

# torchvision's networks that have the same names in timm
IN_BOTH = re.compile(r"(resnet|resnext|wide_resnet|densenet)\d")


def name_in_timm(arch: Optional[str]) -> Optional[str]:
    """Return timm's name of the network, or None if it has none, or other names of weights."""
    arch = arch and arch.replace("-", "_")
    if arch and arch.startswith("timm/"):
        return arch.partition("/")[2].partition(".")[0]
    return arch if arch and IN_BOTH.match(arch) else None


def content(weights: dict[str, torch.Tensor]) -> bytes:
    """Return the bytes of a safetensors file with these weights, the widest types first."""
    names = {kind: name for name, kind in SAFE_TYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    bodies = []
    end = 0
    # so that each is aligned
    for name, tensor in sorted(weights.items(), key=lambda item: (-item[1].element_size(), item[0])):
        bodies.append(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        offsets = [end, end + len(bodies[-1])]
        header[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        end = offsets[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(bodies)


def config(
    name: str, settings: dict[str, Any], classes: list[str], network: torch.nn.Module
) -> dict[str, Any]:
    """Return the config.json of timm's network `name`; `settings`: the content of preprocessing.json."""
    size = settings["size"]
    timm_config = getattr(network, "pretrained_cfg", {})
    convolutions = [layer for layer, module in network.named_modules() if isinstance(module, torch.nn.Conv2d)]
    return {
        "architecture": name,
        "num_classes": len(classes),
        "label_names": classes,
        "pretrained_cfg": {
            "input_size": [3, size, size],
            "fixed_input_size": timm_config.get("fixed_input_size", False),
            "interpolation": settings["interpolation"],
            # of which timm takes the whole part of size / crop_pct
            "crop_pct": size / (settings["resize"] + 0.5),
            "crop_mode": "squash" if settings["crop"] == "none" else "center",
            "mean": settings["mean"],
            "std": settings["std"],
            "num_classes": len(classes),
            "first_conv": timm_config.get("first_conv") or (convolutions or [None])[0],
            "classifier": timm_config.get("classifier") or [*network.state_dict()][-1].rpartition(".")[0],
        },
    }
