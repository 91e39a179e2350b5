"""Export a trained network as a folder: the network, its weights, the preprocessing of a photograph,
and the classes.

    python -m launch export output_dir/train --format onnx         dist/export/network.onnx and so on
    python -m launch export output_dir/train --format torch        network.pt2, for torch.export.load
    python -m launch export output_dir/train --format safetensors  model.safetensors and config.json, for timm
    python -m launch export output_dir/train --format modelarts    dist/export/model, a package of ModelArts

RUN is the output folder of a run (its best checkpoint that is kept), one checkpoint, or an epoch_N.pth.
README.md in the folder has a program that classifies a picture: preprocess.py makes uint8 pixels as the
evaluation made them, network.* normalises.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import re
from pathlib import Path
from typing import Any, Optional

import torch

from common.address import is_address
from common.arguments import number
from common.checkpoints import checkpoint, names
from common.checkpoints.pretrained import about_weights, read_weights
from common.errors import UserError, one_line
from common.files import write_atomically
from common.weights.files import evaluated_weights, write_weights
from datasets import cifar10, imagenet
from datasets.photos import decode
from launch.export import modelarts, network, readme, safetensors
from launch.options import new_parser, run_for_exit_code

FORMATS = ("onnx", "torch", "safetensors", "modelarts")
CIFAR_SIZE = 32
PREPROCESS = Path(__file__).parent / "preprocess.py"


def main(argv: list[str]) -> int:
    parser = new_parser("export", __doc__)
    parser.add_argument(
        "run", metavar="RUN", help="the output folder of a run, a checkpoint of it, or an epoch_N.pth"
    )
    parser.add_argument(
        "--format",
        required=True,
        choices=FORMATS,
        help="what reads it: any runtime of ONNX, torch, timm, ModelArts",
    )
    parser.add_argument(
        "--output", default="dist/export", metavar="FOLDER", help="where to (default: dist/export)"
    )
    parser.add_argument("--arch", help="the network of torchvision, where RUN does not say it")
    parser.add_argument(
        "--image_size", type=number(int, at_least=8), help="height and width, where RUN does not say it"
    )
    parser.add_argument(
        "--classes", metavar="FILE", help="names of the classes, one a line, where RUN does not say them"
    )
    engine = f"modelarts: the engine, as the console's list has it (default: {modelarts.RUNTIME})"
    parser.add_argument("--runtime", default=modelarts.RUNTIME, metavar="ENGINE", help=engine)
    options = parser.parse_args(argv)
    return run_for_exit_code(lambda: export(options), options.output)


@dataclasses.dataclass(frozen=True)
class ExportedRun:
    """The weights to export, and the arguments and classes of their run,
    as far as the files beside them say."""

    path: str
    weights: dict[str, torch.Tensor]
    arguments: dict[str, Any]
    classes: list[str]
    accuracy: Optional[float]
    epoch: Optional[int]  # after which the accuracy was measured


def find(run: str) -> ExportedRun:
    """Return the weights at RUN and what the files beside them say; UserError if there are none."""
    if is_address(run):
        raise UserError(f"{one_line(run)} is in a bucket: fetch it first, and give the folder")
    if os.path.isdir(run):
        return _from_checkpoint(*_best(run))
    if not os.path.isfile(run):
        raise UserError(
            f"{one_line(run)} does not exist: give the output folder of a run, a checkpoint or an epoch_N.pth"
        )
    if os.path.exists(re.sub(r"\.pt$", "", run) + ".json"):
        return _from_checkpoint(*checkpoint.read(run), run)
    epoch = names.epoch_of(os.path.basename(run)) if run.endswith(".pth") else None
    weights = read_weights(run)
    if about := about_weights(run):
        accuracy = about.get("metrics", {}).get("accuracy")
        return ExportedRun(run, weights, about, about.get("classes", []), accuracy, about.get("epoch"))
    newest = None
    if epoch is not None:
        # all checkpoints are damaged; they would only say more about the weights
        with contextlib.suppress(UserError):
            newest = checkpoint.newest(os.path.join(os.path.dirname(run), "checkpoints"))
    if not newest:
        return ExportedRun(run, weights, {}, [], None, None)
    state, about, _ = newest
    accuracy = next((row.get("accuracy") for row in _history(state) if row["epoch"] == epoch), None)
    return ExportedRun(run, weights, about["arguments"], about.get("classes", []), accuracy, epoch)


def _best(run: str) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Return the best checkpoint of a run if it is kept, else the newest, as (state, manifest, path);
    UserError if none."""
    inner = os.path.join(run, "checkpoints")
    folder = inner if os.path.isdir(inner) else run
    newest = checkpoint.newest(
        folder, remedy="give an epoch_N.pth of the run, which is verified by its own digest"
    )
    if not newest:
        raise UserError(
            f"{one_line(run)} holds no checkpoint: give the output folder of a run, a checkpoint or an "
            "epoch_N.pth"
        )
    best = (newest[1].get("best") or {}).get("samples_seen")
    if best in checkpoint.numbers(folder):
        path = checkpoint.path_of(folder, best)
        return (*checkpoint.read(path), path)
    return newest


def _from_checkpoint(state: dict[str, Any], about: dict[str, Any], path: str) -> ExportedRun:
    accuracy = next(
        (row.get("accuracy") for row in _history(state) if row["samples"] == about["samples_seen"]), None
    )
    weights = evaluated_weights(state)
    return ExportedRun(
        path, weights, about["arguments"], about.get("classes", []), accuracy, about.get("epoch")
    )


def _history(state: dict[str, Any]) -> list[dict[str, Any]]:
    return state.get("run", {}).get("history", [])


def class_names(exported_run: ExportedRun, options: argparse.Namespace) -> list[str]:
    """Return the names of the classes from --classes, else from the run; UserError if neither has them."""
    if options.classes:
        return [
            line
            for line in map(str.strip, Path(options.classes).read_text(encoding="utf-8").splitlines())
            if line
        ]
    if not exported_run.classes:
        raise UserError(
            f"{one_line(exported_run.path)} does not say its classes: give --classes FILE, their names, "
            "one a line"
        )
    return exported_run.classes


def preprocessing(exported_run: ExportedRun, options: argparse.Namespace) -> dict[str, Any]:
    """Return how the evaluation of the run prepares a picture, as it is written to preprocessing.json."""
    has_photographs = network.OWN_RESNET_KEY not in exported_run.weights
    size = options.image_size or (exported_run.arguments.get("image_size") if has_photographs else CIFAR_SIZE)
    if not size:
        raise UserError(
            f"{one_line(exported_run.path)} does not say the size of its pictures: give --image_size"
        )
    is_squeezed = exported_run.arguments.get("resize") == "whole"
    mean, std = (imagenet.MEAN, imagenet.STD) if has_photographs else (cifar10.MEAN, cifar10.STD)
    mean = exported_run.arguments.get("mean", mean)
    std = exported_run.arguments.get("std", std)
    where = "before" if options.format == "safetensors" else "in"
    return {
        "size": size,
        "resize": decode.short_side(size, exported_run.arguments.get("crop_pct"))
        if has_photographs and not is_squeezed
        else size,
        "crop": "none" if is_squeezed else "center",
        "interpolation": "bicubic"
        if exported_run.arguments.get("interpolation") == "bicubic"
        else "bilinear",
        "antialiased": True,
        "colours": "RGB",
        "input": "uint8 (N, 3, size, size), 0 to 255",
        "mean": mean,
        "std": std,
        "normalised": f"{where} the network: (pixel / 255 - mean) / std",
    }


def export(options: argparse.Namespace) -> None:
    """Write the folder in the form of --format, and print what it has."""
    if options.format == "onnx":
        network.require_onnx()
    exported_run = find(options.run)
    arch = network.required_arch(
        exported_run.weights, options.arch or exported_run.arguments.get("arch"), exported_run.path
    )
    settings = preprocessing(exported_run, options)
    classes = class_names(exported_run, options)
    model = network.build(exported_run.weights, exported_run.path, arch, settings["size"], len(classes))
    from_bytes = network.FromBytes(model, settings["mean"], settings["std"]).train(False)
    files = {
        "preprocess.py": PREPROCESS.read_bytes(),
        "preprocessing.json": _json(settings),
        "classes.json": _json(classes),
    }
    folder = options.output
    program = options.format
    if options.format == "modelarts":
        folder = os.path.join(folder, "model")
        files["config.json"] = _json(modelarts.config(exported_run.accuracy, options.runtime))
        files["customize_service.py"] = modelarts.SERVICE.encode()
        files[modelarts.NETWORK] = network.as_torchscript(from_bytes, settings["size"])
    elif options.format == "onnx":
        files["network.onnx"] = network.as_onnx(from_bytes, settings["size"])
    elif options.format == "torch":
        files["network.pt2"] = network.as_program(from_bytes, settings["size"])
    else:
        files["model.safetensors"] = safetensors.content(model.state_dict())
        if timm_name := safetensors.name_in_timm(arch):
            files["config.json"] = _json(safetensors.config(timm_name, settings, classes, model))
            program = "timm"
    score = (
        ""
        if exported_run.accuracy is None
        else f", accuracy {exported_run.accuracy:.4f} after epoch {exported_run.epoch}"
    )
    title = f"{type(model).__name__} of {one_line(exported_run.path)}, {len(classes)} classes{score}"
    if program in readme.PROGRAMS:
        files["README.md"] = readme.page(title, program).encode()
    os.makedirs(folder, exist_ok=True)
    for name in {"README.md", "config.json"} - files.keys():  # of an earlier export of another network
        Path(folder, name).unlink(missing_ok=True)
    for name, content in files.items():
        write_atomically(os.path.join(folder, name), content)
    if options.format in ("onnx", "torch"):  # ModelArts takes one .pth file, and that is the network
        write_weights(os.path.join(folder, "weights.pth"), exported_run.weights)
    print(f"{one_line(folder)}: {title}")


def _json(value: object) -> bytes:
    # for names that are not UTF-8
    return json.dumps(value, indent=1, ensure_ascii=False).encode(errors="backslashreplace")
