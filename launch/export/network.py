"""Export a network as a file that needs no code of ours: uint8 pictures in, one number for each class out."""

import contextlib
import importlib.util
import io
import os
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable, Optional

import torch

from common import devices
from common.checkpoints.pretrained import fit
from common.errors import TrainingFailed, UserError, one_line
from common.models import classifiers, resnet18

# Of ONNX; every runtime of the last years supports them.
OPSET = 18
OLDER_OPSET = 17  # the highest of the older exporter
# the first torch whose programs take any number of pictures, and whose newer exporter of ONNX is whole
FOR_PROGRAMS = (2, 6)
TOLERANCE = 1e-3  # the largest difference between the outputs of the network and of its file
# a weight of the CIFAR jobs' ResNet-18 that no network of torchvision has
OWN_RESNET_KEY = "dense_layer.weight"


def required_arch(weights: dict, arch: Optional[str], path: str) -> Optional[str]:
    """Return None for the CIFAR jobs' own ResNet-18, else `arch`, torchvision's name of the network;
    UserError without one."""
    if OWN_RESNET_KEY in weights:
        return None
    if arch is None:
        raise UserError(
            f"{one_line(path)} does not say of which network it is: give --arch NAME if it is torchvision's; "
            "one of your own is exported by your own program (docs/export.md)"
        )
    return arch


def build(weights: dict, path: str, arch: Optional[str], size: int, num_classes: int) -> torch.nn.Module:
    """Return torchvision's `arch`, or the CIFAR jobs' ResNet-18 if it is None, with these weights,
    in evaluation mode."""
    if arch is None:
        network = resnet18(num_classes=len(weights[OWN_RESNET_KEY]), width=len(weights["conv1.0.weight"]))
    else:
        network = classifiers.classifier(arch, num_classes, size)
    fit(network, weights, path, new_head=False)
    return network.train(False)


class FromBytes(torch.nn.Module):
    """A network that takes uint8 (N, 3, H, W) and normalises it as the evaluation did."""

    scale: torch.Tensor
    shift: torch.Tensor

    def __init__(self, network: torch.nn.Module, mean: tuple, std: tuple) -> None:
        super().__init__()
        self.network = network
        shift, scale = (torch.tensor(value).view(1, -1, 1, 1) for value in (mean, std))
        self.register_buffer("scale", 1 / (255 * scale))
        self.register_buffer("shift", -shift / scale)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.network(images.to(torch.float32) * self.scale + self.shift)


def as_program(network: FromBytes, size: int) -> bytes:
    """Return a file for torch.export.load; TrainingFailed if its outputs differ from the network's."""
    if devices.TORCH < FOR_PROGRAMS:
        raise UserError(
            f"--format torch needs torch 2.6 or later, and this is {torch.__version__}: take --format onnx"
        )
    with _without_fast_attention():
        torch.export.save(_exported(network, size), file := io.BytesIO())
    program = torch.export.load(io.BytesIO(file.getvalue())).module()
    _compare(network, size, program)
    return file.getvalue()


def as_torchscript(network: FromBytes, size: int) -> bytes:
    """Return a file for torch.jit.load, for ModelArts' engines; TrainingFailed if its outputs differ."""
    with _without_fast_attention(), warnings.catch_warnings(), torch.no_grad():
        warnings.filterwarnings("ignore", message=".*torch.jit")  # deprecated, and what those engines read
        program: Any = torch.jit.trace(network, _pictures(2, size), check_trace=False)
        torch.jit.save(program, file := io.BytesIO())
    _compare(network, size, program)
    return file.getvalue()


def _exported(network: torch.nn.Module, size: int) -> torch.export.ExportedProgram:
    """Return the program of the network for any number of pictures."""
    batch = torch.export.Dim("batch", min=1)
    try:
        return torch.export.export(network, (_pictures(2, size),), dynamic_shapes=({0: batch},))
    except Exception as error:  # of many kinds
        raise UserError(
            f"torch.export cannot hold this network: {one_line(error)[:200]}; take --format safetensors"
        ) from None
    finally:
        network.train(False)  # which ends what some networks keep of their last pictures


def _compare(network: torch.nn.Module, size: int, program: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Raise TrainingFailed if the program's outputs for one picture or three differ from the network's."""
    with torch.no_grad():
        difference = max(
            (program(images) - network(images)).abs().max().item()
            for images in (_pictures(1, size), _pictures(3, size))
        )
    if not difference < TOLERANCE:
        raise TrainingFailed(
            f"the exported program answers otherwise than the network, by {difference}: take another --format"
        )


def require_onnx() -> None:
    """Raise UserError if a package that --format onnx needs is not installed."""
    needed = ("onnx", "onnxscript") if devices.TORCH >= FOR_PROGRAMS else ("onnx",)
    if missing := [name for name in needed if not importlib.util.find_spec(name)]:
        raise UserError(
            f"--format onnx needs {' and '.join(missing)}: pip install {' '.join(missing)}, or take "
            "--format torch"
        )


def as_onnx(network: FromBytes, size: int) -> bytes:
    """Return the network as an ONNX file; where onnxruntime is installed, its outputs are compared."""
    onnx: Any = importlib.import_module("onnx")
    names: dict[str, Any] = {"input_names": ["images"], "output_names": ["logits"]}
    with tempfile.TemporaryDirectory() as folder, _without_fast_attention():
        path = os.path.join(folder, "network.onnx")
        try:
            if devices.TORCH >= FOR_PROGRAMS:
                program: Any = torch.onnx.export(
                    _exported(network, size), (), dynamo=True, opset_version=OPSET, verbose=False, **names
                )
                program.save(path, external_data=False)
                if os.listdir(folder) != ["network.onnx"]:
                    raise UserError(
                        "--format onnx cannot hold so large a network in one file: take --format torch"
                    )
            else:
                batch = {"images": {0: "batch"}, "logits": {0: "batch"}}
                torch.onnx.export(
                    network,
                    (_pictures(2, size),),
                    path,
                    dynamic_axes=batch,
                    opset_version=OLDER_OPSET,
                    **names,
                )
        except torch.onnx.errors.OnnxExporterError as error:
            raise UserError(
                f"--format onnx cannot hold this network: {one_line(error)[:200]}; take --format torch"
            ) from None
        onnx.checker.check_model(path, full_check=True)
        if importlib.util.find_spec("onnxruntime"):
            session = importlib.import_module("onnxruntime").InferenceSession(path)
            _compare(
                network,
                size,
                lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0]),
            )
        return Path(path).read_bytes()


def _pictures(count: int, size: int) -> torch.Tensor:
    return torch.randint(
        0, 256, (count, 3, size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(count)
    )


@contextlib.contextmanager
def _without_fast_attention() -> Iterator[None]:
    """Turn off attention's fast path, which no format can hold."""
    attention: Any = getattr(torch.backends, "mha", None)  # since torch 2.2
    was_enabled = attention and attention.get_fastpath_enabled()
    if attention:
        attention.set_fastpath_enabled(False)
    try:
        yield
    finally:
        if attention:
            attention.set_fastpath_enabled(was_enabled)
