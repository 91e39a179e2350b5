"""Weights by name, as torchvision and timm call them: what file it is,
and how the pictures were made that they have seen.

    --weights ResNet50_Weights.DEFAULT     of torchvision; IMAGENET1K_V2 or DEFAULT for that of --arch
    --arch timm/NAME --weights pretrained  of timm, from Hugging Face's hub or its mirror HF_ENDPOINT
"""

import argparse
import contextlib
import dataclasses
import difflib
import importlib
import os
import re
import types
from pathlib import Path
from typing import Any, Callable, Optional

from common import arguments, files
from common.address import local_folder
from common.errors import UserError, one_line
from common.models import classifiers
from common.storage import https, index, once
from common.weights.files import TORCHVISION_DIGEST

NAME = re.compile(r"pretrained|(\w+_Weights\.)?[A-Z][A-Z0-9_]*")
PRETRAINED = "pretrained"  # what torchvision calls DEFAULT
LESS_THAN_A_PIXEL = 0.5
# where launch bundle --weights has put them, beside common
BUNDLED = Path(__file__).resolve().parents[2] / "weights"


@dataclasses.dataclass
class NamedWeights:
    """Weights by name: where their file is, and the options of the job that go with them."""

    arch: str
    url: str
    file: str  # its name here, which other weights do not have
    cached: list[str]  # where torch or Hugging Face's hub may have left the file
    options: dict[str, Any]  # of the job, for the pictures; {} where timm's configuration has them


def is_name(text: str) -> bool:
    """Whether the text is a name of weights, of torchvision or timm, and not the path of a file."""
    return NAME.fullmatch(text) is not None and not os.path.isfile(text)


def resolved(args: argparse.Namespace, say: Callable[[str], object]) -> arguments.Arguments:
    """Return the arguments with the path of the file in place of the name, and with its options,
    unless given."""
    weights = find(args.weights, args.arch)
    if "arch" in args.given and args.arch.replace("-", "_") != weights.arch.replace("-", "_"):
        raise UserError(
            f"--weights {args.weights} is of {weights.arch}, and --arch is {args.arch}: give one of them"
        )
    if line := describe(weights):
        say(line)
    options = {name: value for name, value in weights.options.items() if name not in args.given}
    # before a large file is fetched
    classifiers.require(weights.arch, options.get("image_size", args.image_size))
    path = fetch(weights, args.input_dir)
    return arguments.replaced(args, **options, weights=path, given={**args.given, **options})


def find(text: str, arch: str) -> NamedWeights:
    """Return the weights of this name. `arch`: the network, for a name without one."""
    if arch.startswith("timm/"):
        return _find_timm(text, arch)
    return _find_torchvision(text, arch)


def find_by_full_name(text: str) -> NamedWeights:
    """Return the weights of a name that says the network, too: KIND_Weights.NAME or timm/NAME."""
    if text.startswith("timm/"):
        return find(PRETRAINED, text)
    if "_Weights." not in text:
        raise UserError(
            f"{one_line(text)} is no name of weights: give one as ResNet50_Weights.DEFAULT or timm/resnet50"
        )
    return find(text, "")


def fetch(weights: NamedWeights, inputs: str) -> str:
    """Return the path of the file: as it came with the job, in a cache,
    or fetched once per node to a subfolder of `inputs`."""
    for path in [str(BUNDLED / weights.file), *weights.cached]:
        if is_complete(path):
            return path
    return fetch_into(weights, local_folder(os.path.dirname(weights.url), inputs))


def fetch_into(weights: NamedWeights, folder: str) -> str:
    """Fetch the file to the folder, once per node; return its path."""
    path = os.path.join(folder, weights.file)
    if is_complete(path):
        return path

    def download(lease: once.Lease) -> None:
        if is_complete(path):  # another process has fetched it
            return
        if weights.arch.startswith("timm/") and os.environ.get("HF_HUB_OFFLINE", "0").lower() in (
            "1",
            "true",
            "yes",
            "on",
        ):
            raise UserError(f"HF_HUB_OFFLINE is set, so {weights.url} is not fetched: put the file to {path}")
        https.download(weights.url, path, tell=lease.tell)
        if not is_complete(path):
            os.unlink(path)
            raise UserError(
                f"{weights.url} was damaged on the way: its SHA-256 is not that in its name; start again"
            )

    os.makedirs(folder, exist_ok=True)
    once.once_per_node(os.path.join(index.make_records_folder(folder), weights.file), download)
    return path


def is_complete(path: str) -> bool:
    """Whether the file exists and, if its name has the beginning of a SHA-256, is the file of that name."""
    if not os.path.exists(path):
        return False
    match = TORCHVISION_DIGEST.search(path)
    return match is None or files.sha256(path).startswith(match[1])


# --- torchvision ---


def _find_torchvision(text: str, arch: str) -> NamedWeights:
    """Return torchvision's weights of this name; UserError if there are none, or none that classify."""
    models = importlib.import_module("torchvision.models")
    kind, _, member = ("DEFAULT" if text == PRETRAINED else text).rpartition(".")
    arch = _arch_of(kind, models) if kind else arch.replace("-", "_")
    if arch not in models.list_models(module=models):
        raise UserError(
            f"--weights {one_line(text)} is a name of torchvision's, which has no network {one_line(arch)}"
        )
    members = models.get_model_weights(arch).__members__
    if member not in members:
        raise UserError(f"--weights {one_line(text)}: {arch} has {', '.join(members) or 'none'}")
    entry = members[member].value
    if entry.meta.get("categories") is None:
        raise UserError(
            f"--weights {one_line(text)} is for features alone, without the last layers: give another "
            f"of {arch}"
        )
    transforms = entry.transforms()
    size = transforms.crop_size[0]
    resize_size = transforms.resize_size[0]
    cache = os.path.join(
        importlib.import_module("torch.hub").get_dir(), "checkpoints", os.path.basename(entry.url)
    )
    return NamedWeights(
        arch,
        entry.url,
        os.path.basename(entry.url),
        [cache],
        {
            "arch": arch, "image_size": size,
            "resize": "short", "crop_pct": size / (resize_size + LESS_THAN_A_PIXEL),
            "interpolation": "bicubic" if transforms.interpolation.value == "bicubic" else "bilinear",
            "mean": tuple(transforms.mean), "std": tuple(transforms.std),
        },
    )  # fmt: skip


def _arch_of(kind: str, models: types.ModuleType) -> str:
    archs = {models.get_model_weights(name).__name__: name for name in models.list_models(module=models)}
    if kind not in archs:
        close_matches = difflib.get_close_matches(kind, archs, n=3, cutoff=0)
        raise UserError(
            f"--weights {one_line(kind)} is none of torchvision's; the nearest: {', '.join(close_matches)}"
        )
    return archs[kind]


# --- timm ---


def _find_timm(text: str, arch: str) -> NamedWeights:
    """Return timm's pretrained weights of a network; UserError if it has none."""
    from common.models import of_timm

    if text != PRETRAINED:
        raise UserError(
            f"--weights {one_line(text)} is a name of torchvision's: give --weights {PRETRAINED} for "
            f"--arch {arch}"
        )
    timm_config = of_timm.config(arch)
    if not timm_config.hf_hub_id:
        raise UserError(f"--weights {PRETRAINED}: timm has none for --arch {arch}; give a file")
    name = timm_config.hf_hub_filename or "model.safetensors"
    hub = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    home = os.environ.get("HF_HOME") or os.path.expanduser("~/.cache/huggingface")
    hub_cache = os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")
    url = f"{hub.rstrip('/')}/{timm_config.hf_hub_id}/resolve/main/{name}"
    file = os.path.basename(timm_config.hf_hub_id) + os.path.splitext(name)[1]
    return NamedWeights(
        arch,
        url,
        file,
        _cached_paths(os.path.join(hub_cache, f"models--{timm_config.hf_hub_id.replace('/', '--')}"), name),
        {},
    )


def _cached_paths(folder: str, name: str) -> list[str]:
    """Return the path that the file has in a repository of the hub's cache,
    as main was when it was fetched last."""
    with contextlib.suppress(OSError):
        commit = Path(folder, "refs", "main").read_text().strip()
        return [os.path.join(folder, "snapshots", commit, name)]
    return []


def describe(weights: NamedWeights) -> Optional[str]:
    """Return a line for the log about the pictures, or None where timm's configuration has them,
    which has its own."""
    options = weights.options
    if not options:
        return None
    mean, std = (" ".join(f"{value:g}" for value in options[name]) for name in ("mean", "std"))
    return (
        f"{os.path.basename(weights.url)}: --arch {options['arch']} --image_size {options['image_size']} "
        f"--interpolation {options['interpolation']}, {options['crop_pct']:.3g} of the short side; mean "
        f"{mean}, standard deviation {std}"
    )
