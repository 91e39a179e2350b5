"""The networks that classify photographs, by name: torchvision's, timm/NAME,
and resnext101_32x4d of NVIDIA's script."""

import difflib
from typing import Any, Callable

import torch

from common.errors import UserError

# {a network of that script that torchvision lacks: what comes nearest}
NEAREST = {
    "se_resnext101_32x4d": "resnext101_32x4d, which lacks the squeeze-and-excitation",
    "efficientnet_widese_b0": "efficientnet_b0, whose squeeze-and-excitation is narrower",
    "efficientnet_widese_b4": "efficientnet_b4, whose squeeze-and-excitation is narrower",
    "efficientnet_quant_b0": "efficientnet_b0, which is not prepared for integers",
    "efficientnet_quant_b4": "efficientnet_b4, which is not prepared for integers",
}


def require(arch: str, image_size: int) -> None:
    """Raise UserError for an unknown network, or one that takes no images of this size.

    Jobs call it before they read data.
    """
    _constructor(arch.replace("-", "_"), image_size)
    # These need real tensors to compute widths; their size is checked later, if at all.
    if not arch.startswith(("regnet", "timm/")):
        with torch.device("meta"):
            classifier(arch, 1, image_size)


def classifier(arch: str, num_classes: int, image_size: int, shallow: bool = False) -> torch.nn.Module:
    """Return a new network in eval mode.

    `shallow`: set zero_init_residual, so ResNet blocks at first add 0 to their input.
    """
    arch = arch.replace("-", "_")
    residual = {"zero_init_residual": True} if shallow and arch.startswith(("resne", "wide_resnet")) else {}
    size_options = {"vit": {"image_size": image_size}, "maxvit": {"input_size": (image_size,) * 2}}
    options = {**residual, **size_options.get(arch.split("_")[0], {})}
    make = _constructor(arch, image_size, shallow)
    try:
        network = make(num_classes=num_classes, **options)
        with torch.no_grad():
            network.train(False)(torch.zeros(1, 3, image_size, image_size))
    except (RuntimeError, AssertionError, ValueError) as error:
        raise UserError(f"--arch {arch} takes no --image_size {image_size}: {error}") from None
    return network


def last_layers(network: Any) -> list[str]:
    """Return the names of the parts of a network that give a score for each class: one,
    or two in some networks of timm."""
    if not hasattr(network, "get_classifier"):  # it is not of timm
        return [[name for name, _ in network.named_parameters()][-1].rpartition(".")[0]]
    layers = network.get_classifier()
    heads = [*layers] if isinstance(layers, tuple) else [layers]
    heads.append(getattr(network, "aux_head", None))  # of VOLO, which does not name it
    return [name for name, module in network.named_modules() if any(module is head for head in heads)]


def _constructor(arch: str, image_size: int, shallow: bool = False) -> Callable[..., Any]:
    """Return a function that makes the network of this name from num_classes and options;
    UserError if there is none.

    `shallow`: as in classifier(), for timm's networks; torchvision's take zero_init_residual among the
    options."""
    if arch.startswith("timm/"):
        from common.models import of_timm

        return of_timm.constructor(arch, image_size, shallow)
    import torchvision
    from torchvision.models.resnet import Bottleneck, ResNet

    if arch == "resnext101_32x4d":
        return lambda **options: ResNet(Bottleneck, [3, 4, 23, 3], groups=32, width_per_group=4, **options)
    if arch in NEAREST:
        raise UserError(f"--arch {arch} is none of torchvision's networks; the nearest: {NEAREST[arch]}")
    # inception_v3 and googlenet return more than scores of the classes.
    names = set(torchvision.models.list_models(module=torchvision.models)) - {"inception_v3", "googlenet"}
    if arch not in names:
        close_matches = difflib.get_close_matches(arch, names, n=3, cutoff=0)
        raise UserError(
            f"--arch {arch} is none of torchvision's {len(names)} networks; the nearest: "
            f"{', '.join(close_matches)}"
        )
    return lambda **options: torchvision.models.get_model(arch, **options)
