"""The networks of timm, and how each wants its pictures.

Its weights come by --weights (common/weights/by_name.py).
"""

import argparse
import difflib
import functools
import importlib
import re
from collections.abc import Mapping
from typing import Any, Callable

import torch

from common.errors import UserError, one_line

# The names of a vision transformer here and in torchvision. Other networks that both have, as ResNet, have
# the same names.
TORCHVISION_NAMES = {
    r"cls_token": "class_token", r"pos_embed": "encoder.pos_embedding",
    r"patch_embed\.proj\.(.*)": r"conv_proj.\1",
    r"blocks\.(\d+)\.norm([12])\.(.*)": r"encoder.layers.encoder_layer_\1.ln_\2.\3",
    r"blocks\.(\d+)\.attn\.qkv\.(.*)": r"encoder.layers.encoder_layer_\1.self_attention.in_proj_\2",
    r"blocks\.(\d+)\.attn\.proj\.(.*)": r"encoder.layers.encoder_layer_\1.self_attention.out_proj.\2",
    r"blocks\.(\d+)\.mlp\.fc1\.(.*)": r"encoder.layers.encoder_layer_\1.mlp.0.\2",
    r"blocks\.(\d+)\.mlp\.fc2\.(.*)": r"encoder.layers.encoder_layer_\1.mlp.3.\2",
    r"norm\.(.*)": r"encoder.ln.\1", r"head\.(.*)": r"heads.head.\1",
}  # fmt: skip


def name_in_torchvision(name: str) -> str:
    """Return torchvision's name for a weight of timm's vision transformer; any other name unchanged."""
    for pattern, template in TORCHVISION_NAMES.items():
        if match := re.fullmatch(pattern, name):
            return match.expand(template)
    return name


def constructor(arch: str, image_size: int, shallow: bool) -> Callable[..., torch.nn.Module]:
    """Return a function that makes the network "timm/NAME" from num_classes.

    `shallow`: as in classifier().
    """
    name = arch.partition("/")[2]
    sized = {"img_size": image_size} if config(arch).fixed_input_size else {}
    residual = {"zero_init_last": False} if name.startswith(("resne", "wide_resnet")) and not shallow else {}
    return functools.partial(_timm().create_model, name, pretrained=False, **sized, **residual)


def image_options(args: argparse.Namespace, previous: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Return the picture options of --arch, such as image_size, unless given, and a line for the log.

    `previous`: the arguments of the run that goes on, whose values stay, or {}.
    """
    timm_config = config(args.arch)
    values = {
        "image_size": timm_config.input_size[-1],
        "interpolation": "bicubic" if timm_config.interpolation == "bicubic" else "bilinear",
        "resize": "whole" if timm_config.crop_mode == "squash" else "short",
        "crop_pct": min(1.0, timm_config.crop_pct),
        "mean": tuple(timm_config.mean),
        "std": tuple(timm_config.std),
    }
    saved = previous if previous.get("arch") == args.arch else {}
    for name, value in values.items():
        chosen = vars(args)[name] if name in args.given else saved.get(name) or value
        values[name] = tuple(chosen) if isinstance(chosen, list) else chosen
    mean, std = (" ".join(f"{value:g}" for value in values[name]) for name in ("mean", "std"))
    size, mode, share = (values[name] for name in ("image_size", "interpolation", "crop_pct"))
    resize_text = (
        " --resize whole"
        if values["resize"] == "whole"
        else f", with --resize short {share:g} of the short side"
    )
    return values, (
        f"{args.arch}: --image_size {size} --interpolation {mode}{resize_text}; mean {mean}, standard "
        f"deviation {std} (timm {_timm().__version__})"
    )


def config(arch: str) -> Any:
    """Return timm's configuration of "timm/NAME"; UserError if there is no such network."""
    timm = _timm()
    name = arch.partition("/")[2].replace("-", "_")
    try:
        pretrained_cfg = timm.get_pretrained_cfg(name) if timm.is_model(name) else None
    except RuntimeError:  # no such tag behind the point
        pretrained_cfg = None
    if not pretrained_cfg:
        names = timm.list_models()
        close_matches = difflib.get_close_matches(name, names, n=3, cutoff=0)
        raise UserError(
            f"--arch timm/{one_line(name)} is none of the {len(names)} networks of timm {timm.__version__}; "
            f"the nearest: {', '.join(close_matches)}"
        )
    return pretrained_cfg


def _timm() -> Any:
    try:
        return importlib.import_module("timm")
    except ImportError as error:
        raise UserError(f"--arch timm/NAME needs timm: pip install .[timm] ({one_line(error)})") from None
