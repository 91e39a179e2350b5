"""Export a network as a file that needs no code of ours: uint8 pictures in, one number for each class out."""

import contextlib
import importlib.util
import io
import os
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Optional

import torch

from common import devices
from common.checkpoints.pretrained import fit
from common.errors import TrainingFailed, UserError, one_line
from common.models import classifiers, resnet18

OPSET = 17  # of ONNX; every runtime of the last years supports it
TOLERANCE = 1e-3  # the largest difference between the outputs of the network and of its file
OWN_RESNET_KEY = "dense_layer.weight"  # a weight of the CIFAR jobs' ResNet-18 that no network of torchvision has


def required_arch(weights: dict, arch: Optional[str], path: str) -> Optional[str]:
    """Return None for the CIFAR jobs' own ResNet-18, else `arch`, torchvision's name of the network; UserError without one."""
    if OWN_RESNET_KEY in weights:
        return None
    if arch is None:
        raise UserError(
            f"{one_line(path)} does not say of which network it is: give --arch NAME if it is torchvision's; one of your own "
            "is exported by your own program (docs/your_own.md)"
        )
    return arch


def build(weights: dict, path: str, arch: Optional[str], size: int, num_classes: int) -> torch.nn.Module:
    """Return torchvision's `arch`, or the CIFAR jobs' ResNet-18 if it is None, with these weights, in evaluation mode."""
    if arch is None:
        network = resnet18(num_classes=len(weights[OWN_RESNET_KEY]), width=len(weights["conv1.0.weight"]))
    else:
        network = classifiers.classifier(arch, num_classes, size)
    fit(network, weights, path, new_head=False)
    return network.train(False)


class FromBytes(torch.nn.Module):
    """A network that takes uint8 (N, 3, H, W) and normalises it as the evaluation did."""

    def __init__(self, network: torch.nn.Module, mean: tuple, std: tuple) -> None:
        super().__init__()
        self.network = network
        shift, scale = (torch.tensor(value).view(1, -1, 1, 1) for value in (mean, std))
        self.register_buffer("scale", 1 / (255 * scale))
        self.register_buffer("shift", -shift / scale)

    def forward(self, images):
        return self.network(images.to(torch.float32) * self.scale + self.shift)


def as_torchscript(network: FromBytes, size: int) -> bytes:
    """Return a file for torch.jit.load, in Python or C++; TrainingFailed if its outputs are not those of the network."""
    with _quietly(), torch.no_grad():
        program: Any = torch.jit.trace(network, _pictures(2, size), check_trace=False)
        others = _pictures(3, size)  # another batch size than the traced one
        apart = (program(others) - network(others)).abs().max().item()
        buffer = io.BytesIO()
        torch.jit.save(program, buffer)
    if not apart < TOLERANCE:
        raise TrainingFailed(f"the exported program answers otherwise than the network, by {apart}: take --format onnx")
    return buffer.getvalue()


def need_onnx() -> None:
    if not importlib.util.find_spec("onnx"):
        raise UserError("--format onnx needs the package onnx: pip install onnx, or take --format torch")


def as_onnx(network: FromBytes, size: int) -> bytes:
    """Return the network as an ONNX file, from the older exporter: the newer one needs onnxscript besides onnx."""
    onnx: Any = importlib.import_module("onnx")
    older: dict[str, Any] = {"dynamo": False} if devices.TORCH >= (2, 5) else {}  # before 2.5, it was the only one here
    batch = {0: "batch"}
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "network.onnx")
        try:
            with _quietly():
                torch.onnx.export(
                    network, (_pictures(2, size),), path, **older, opset_version=OPSET, input_names=["images"],
                    output_names=["logits"], dynamic_axes={"images": batch, "logits": batch},
                )  # fmt: skip
        except torch.onnx.errors.OnnxExporterError as error:
            raise UserError(f"--format onnx cannot hold this network: {one_line(error)[:200]}; take --format torch") from None
        onnx.checker.check_model(path, full_check=True)
        return Path(path).read_bytes()


def _pictures(count, size):
    return torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(count))


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Silence warnings, as both exporters are deprecated, and turn off attention's fast path, which they cannot export."""
    attention: Any = getattr(torch.backends, "mha", None)  # since torch 2.2
    fast = attention and attention.get_fastpath_enabled()
    if attention:
        attention.set_fastpath_enabled(False)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        if attention:
            attention.set_fastpath_enabled(fast)
