"""Read a file of weights: of an epoch (common/weights/files.py), of a checkpoint, or of another program.

It is verified by a digest wherever there is one: its own, that in a name of torchvision's, or a checkpoint's
manifest.
"""

import contextlib
import hashlib
import json
import os
import re
from typing import Any, Callable

import torch

from common import progress
from common.address import is_bucket, local_folder
from common.checkpoints import checkpoint, names
from common.errors import UserError, one_line
from common.files import MIB, contents, open_regular
from common.models import classifiers
from common.ranks import collectives
from common.weights.files import (
    DIGEST,
    METADATA_FIELDS,
    TORCHVISION_DIGEST,
    beside,
    evaluated_weights,
    plain_name,
)

# torchvision's files of DenseNet have an old name: "norm.1.weight" for "norm1.weight".
OLD_KEY = re.compile(r"(denselayer\d+\.(?:norm|conv))\.([12]\.)")


def load_weights(network: torch.nn.Module, path: str, new_head: bool = True) -> list[str]:
    """Load a file of weights.

    If `new_head`, the last layer may be of other classes or missing; return the names left out.
    """
    return fit(network, read_weights(path), path, new_head)


def read_weights(path: str) -> dict[str, torch.Tensor]:
    """Read the weights of a plain file or a checkpoint; if its SHA-256 is known, verify it,
    else log that it is unverified."""
    from common.weights import tensors

    content, is_verified = _read_and_verify(path)
    try:
        state = tensors.read(content, is_verified)
        if not isinstance(state, dict):
            raise ValueError(f"it holds a {type(state).__name__}")
        state = evaluated_weights(state) if "model" in state else state
        state = {OLD_KEY.sub(r"\1\2", name): tensor for name, tensor in state.items()}
        if not all(isinstance(tensor, torch.Tensor) for tensor in state.values()):
            raise ValueError("it holds more than tensors")
    except tensors.LegacyFormat:
        raise UserError(
            f"{path} is in the form before torch 1.6, in which no damage is noticed: save it again with "
            f"torch.save, or make {path}{DIGEST} with sha256sum"
        ) from None
    except Exception as error:  # a file of another kind can raise anything
        raise UserError(
            f"{path} holds no weights: {one_line(str(error)[:200])}; give a .pth, .pt or .safetensors "
            "file of this network"
        ) from None
    return state


def _read_and_verify(path: str) -> tuple[Any, bool]:
    """Return (bytes of a file of weights, whether a digest verified them); UserError if they are damaged."""
    try:
        parsed = names.parse(os.path.basename(path))
        if parsed and parsed.ending == "pt" and os.path.exists(re.sub(r"pt$", "json", path)):
            return checkpoint.read_verified(path)[1], True
        content = _read_bytes(path)
        if not os.path.exists(path + DIGEST):
            match = TORCHVISION_DIGEST.search(path)
            if match and hashlib.sha256(content).hexdigest().startswith(match[1]):
                return content, True
            if match and not match[1].isdigit():  # digits alone may be a date
                raise UserError(
                    f"{path} is damaged, or not the file of that name: its SHA-256 does not begin with "
                    f"{match[1]}"
                )
            if collectives.rank_and_size()[0] == 0:
                progress.say(f"{path} is unverified: there is no {path}{DIGEST}")
            return content, False
        expected = contents(path + DIGEST)
    except OSError as error:
        raise UserError(
            f"{path} cannot be read: {one_line(error.strerror)}; give a .pth, .pt or .safetensors file "
            "of this network"
        ) from None
    if expected.split()[:1] != [hashlib.sha256(content).hexdigest().encode()]:
        raise UserError(
            f"{path} is damaged: its bytes are not those that {path}{DIGEST} names; take another copy of both"
        )
    return content, True


def _read_bytes(path: str) -> bytes:
    """Return the bytes of a file of weights; of any other file, which may have gigabytes,
    only the first 100."""
    from common.weights.tensors import has_known_header

    with open_regular(path) as file:
        head = file.read(100)
        return head + file.read() if has_known_header(head) else head


def local_weights(path: str, inputs: str, say: Callable) -> str:
    """Return `path`, or the local path of weights in a bucket: one process per node fetches them,
    their .sha256 and .json."""
    if not is_bucket(path):
        if not os.path.exists(path):
            raise UserError(
                f"--weights {path} does not exist: give a .pth, .pt or .safetensors file of this network, or "
                "a name as ResNet50_Weights.DEFAULT"
            )
        return path
    from common.storage import bucket, download, index, once

    url, name = os.path.split(path)
    folder = local_folder(url, inputs)

    def fetch(lease: once.Lease) -> None:
        remote = bucket.Bucket(url, say)
        items = {
            remote.relative(item.key): item
            for item in remote.items(remote.key_prefix() + name.removesuffix(".pth"))
        }
        needed = {
            file_name: items[file_name]
            for file_name in (name, name + DIGEST, beside(name))
            if file_name in items
        }
        if name not in needed:
            raise UserError(f"--weights {path}: there is no {name} in {url}")
        os.makedirs(folder, exist_ok=True)
        download.fetch_items(remote, needed, folder, keeps_index=True, tell=lease.tell)

    once.once_per_node(os.path.join(index.make_records_folder(folder), name), fetch)
    return os.path.join(folder, name)


def about_weights(path: str) -> dict[str, Any]:
    """Return the fields of METADATA_FIELDS in the JSON file beside a file of weights;
    {} if that file is missing or unreadable."""
    with (
        contextlib.suppress(OSError, ValueError, RecursionError, AttributeError),
        open_regular(beside(path)) as file,
    ):
        fields = json.loads(file.read(MIB))
        return {
            name: value
            for name, value in fields.items()
            if type(value) is METADATA_FIELDS.get(name) and _is_valid(name, value)
        }
    return {}


def _is_valid(name: str, value: Any) -> bool:
    if name == "crop_pct":
        return 0 < value <= 1
    if name not in ("mean", "std"):
        return True
    lower_bound = -1 if name == "mean" else 0
    return len(value) == 3 and all(type(number) is float and number > lower_bound for number in value)


def fit(network: torch.nn.Module, state: dict, path: str, new_head: bool) -> list[str]:
    """Load `state`, which was read from `path`; return the names of those that are not loaded.

    With `new_head`, weights of the last layers may have other shapes, as for other classes, or all of them be
    missing, as where a network learnt without classes. Other mismatches raise UserError, but for
    num_batches_tracked.
    """
    network_state = network.state_dict()
    state = {plain_name(name, network_state): tensor for name, tensor in state.items()}
    if "cls_token" in state and "class_token" in network_state:
        from common.models import of_timm

        state = {of_timm.name_in_torchvision(name): tensor for name, tensor in state.items()}
    other_shapes = [
        name for name in network_state if name in state and network_state[name].shape != state[name].shape
    ]
    unmatched = sorted(
        name for name in network_state.keys() ^ state.keys() if not name.endswith("num_batches_tracked")
    )
    prefixes = tuple(f"{name}." for name in classifiers.last_layers(network))
    last_names = sorted(
        name
        for name in network_state
        if name.startswith(prefixes) and not name.endswith("num_batches_tracked")
    )
    if new_head and state and not other_shapes and unmatched == last_names:
        network.load_state_dict(state, strict=False)
        return unmatched[::-1]
    same_rows = all(network_state[name].shape[1:] == state[name].shape[1:] for name in other_shapes)
    has_other_classes = bool(other_shapes) and same_rows
    if has_other_classes and not unmatched and not new_head:
        last_name = other_shapes[-1]
        raise UserError(
            f"{path} is for {len(state[last_name])} classes, and here are {len(network_state[last_name])}: "
            "give --data_url with the classes that it was trained on, or --num_classes"
        )
    if (
        unmatched
        or (other_shapes and not (new_head and has_other_classes))
        or not {*other_shapes} <= {*last_names}
    ):
        examples = one_line(", ".join(name[:80] for name in (unmatched + other_shapes)[:3]))
        raise UserError(
            f"{path} is of another network than this {type(network).__name__}: {examples} and so on do not "
            "fit; give the options of its run, such as --arch, --width or --image_size"
        )
    network.load_state_dict(
        {name: tensor for name, tensor in state.items() if name not in other_shapes}, strict=False
    )
    return other_shapes
