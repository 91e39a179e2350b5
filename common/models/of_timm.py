"""The networks of timm, and how each wants its pictures. Its weights come by --weights (common/weights/by_name.py)."""

import argparse
import difflib
import functools
import importlib
import re
from collections.abc import Mapping
from typing import Any, Callable

import torch

from common.errors import UserError, one_line

# The names of a vision transformer here and in torchvision. Other networks that both have, as ResNet, have the same names.
OF_TORCHVISION = {
    r"cls_token": "class_token", r"pos_embed": "encoder.pos_embedding", r"patch_embed\.proj\.(.*)": r"conv_proj.\1",
    r"blocks\.(\d+)\.norm([12])\.(.*)": r"encoder.layers.encoder_layer_\1.ln_\2.\3",
    r"blocks\.(\d+)\.attn\.qkv\.(.*)": r"encoder.layers.encoder_layer_\1.self_attention.in_proj_\2",
    r"blocks\.(\d+)\.attn\.proj\.(.*)": r"encoder.layers.encoder_layer_\1.self_attention.out_proj.\2",
    r"blocks\.(\d+)\.mlp\.fc1\.(.*)": r"encoder.layers.encoder_layer_\1.mlp.0.\2",
    r"blocks\.(\d+)\.mlp\.fc2\.(.*)": r"encoder.layers.encoder_layer_\1.mlp.3.\2",
    r"norm\.(.*)": r"encoder.ln.\1", r"head\.(.*)": r"heads.head.\1",
}  # fmt: skip


def name_in_torchvision(name: str) -> str:
    return next((found.expand(other) for own, other in OF_TORCHVISION.items() if (found := re.fullmatch(own, name))), name)


def maker(arch: str, image_size: int, shallow: bool) -> Callable[..., torch.nn.Module]:
    """Return what makes the network of `arch`, "timm/NAME", from num_classes. `shallow`: as classifiers.classifier has it."""
    name = arch.partition("/")[2]
    sized = {"img_size": image_size} if config(arch).fixed_input_size else {}
    residual = {"zero_init_last": False} if name.startswith(("resne", "wide_resnet")) and not shallow else {}
    return functools.partial(_timm().create_model, name, pretrained=False, **sized, **residual)


def pictures(args: argparse.Namespace, before: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Return the values of --image_size, mean and so on that its pictures have, unless given, and a line for the log.

    `before`: the arguments of the run that goes on, whose values stay, or {}.
    """
    its = config(args.arch)
    values = {
        "image_size": its.input_size[-1],
        "interpolation": "bicubic" if its.interpolation == "bicubic" else "bilinear",
        "resize": "whole" if its.crop_mode == "squash" else "short",
        "crop_pct": min(1.0, its.crop_pct),
        "mean": tuple(its.mean),
        "std": tuple(its.std),
    }
    kept = before if before.get("arch") == args.arch else {}
    values = {name: vars(args)[name] if name in args.given else kept.get(name) or value for name, value in values.items()}
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    mean, std = (" ".join(f"{value:g}" for value in values[name]) for name in ("mean", "std"))
    size, mode, share = (values[name] for name in ("image_size", "interpolation", "crop_pct"))
    shown = " --resize whole" if values["resize"] == "whole" else f", with --resize short {share:g} of the short side"
    return values, (
        f"{args.arch}: --image_size {size} --interpolation {mode}{shown}; mean {mean}, standard deviation {std} "
        f"(timm {_timm().__version__})"
    )


def config(arch: str) -> Any:
    """Return timm's configuration of "timm/NAME"; UserError if there is no such network."""
    timm = _timm()
    name = arch.partition("/")[2].replace("-", "_")
    try:
        found = timm.get_pretrained_cfg(name) if timm.is_model(name) else None
    except RuntimeError:  # no such tag behind the point
        found = None
    if not found:
        names = timm.list_models()
        near = difflib.get_close_matches(name, names, n=3, cutoff=0)
        raise UserError(
            f"--arch timm/{one_line(name)} is none of the {len(names)} networks of timm {timm.__version__}; the nearest: "
            f"{', '.join(near)}"
        )
    return found


def _timm() -> Any:
    try:
        return importlib.import_module("timm")
    except ImportError as error:
        raise UserError(f"--arch timm/NAME needs timm: pip install .[timm] ({one_line(error)})") from None
