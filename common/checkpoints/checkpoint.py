"""A checkpoint: a file of tensors, and a manifest that is written last and states the file's digest and size.

    checkpoints/000000012800.pt    model, optimizer, what else was registered, and a copy of the manifest
    checkpoints/000000012800.json  SHA-256, size, epoch, position in it, global batch, arguments, versions

Without a manifest there is no checkpoint. Both files are complete under temporary names before the first is
renamed. If the same number is saved again, one of the two checkpoints therefore exists at every moment. The
digest is verified before parsing, and parsing makes only tensors and plain values
(common/weights/tensors.py).
"""

import collections
import contextlib
import hashlib
import json
import os
import re
from collections.abc import Collection, Iterable, Iterator
from typing import Any, Callable, Optional

import numpy as np
import torch

from common import devices
from common.checkpoints import names
from common.errors import UserError, one_line
from common.files import (
    TEMPORARY,
    contents,
    give_name,
    raising_taken_over,
    remove,
    temporary_path,
    unfinished_files,
    write_aside,
)
from common.weights.files import encode
from common.weights.plain import Refused, check

DEFAULT_REMEDY = (
    "start afresh in another output folder, or here with --resume never --overwrite true, which deletes "
    "the rest"
)


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def _on_its_device(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()


def snapshot(value: Any, copy: Callable[[torch.Tensor], torch.Tensor] = _on_host) -> Any:
    """Return nested dicts and lists with a `copy` of each tensor, by default on the CPU,
    where no step changes it."""
    if isinstance(value, torch.Tensor):
        return copy(value)
    if type(value) in (dict, collections.OrderedDict):
        return {key: snapshot(item, copy) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(snapshot(item, copy) for item in value)
    return value.item() if isinstance(value, np.generic) else value


class Snapshot:
    """A copy of a state, which no step changes.

    From an NVIDIA GPU it comes to the host when it is asked for, and the training waits only until copies are
    queued there; for all of it if the state is on several GPUs, or one has hardly room for two."""

    def __init__(self, state: dict) -> None:
        gpus = {tensor.device for tensor in tensors(state) if devices.is_nvidia(tensor.device)}
        self._gpu = gpus.pop() if len(gpus) == 1 else None
        copy = None
        if self._gpu is not None:
            copy = _copy_on_gpu(self._gpu, state)
            self._copy_event = devices.record_event(devices.current_stream(self._gpu))
        self._is_on_gpu = copy is not None
        self._state = snapshot(state) if copy is None else copy

    def on_host(self) -> dict:
        """Return the copy, with all tensors on the CPU. It is called once, in the thread that writes it."""
        state = self._state
        self._state = {}
        if self._gpu is None or not self._is_on_gpu:
            return state
        devices.use(self._gpu)
        stream = devices.side_stream(self._gpu)
        stream.wait_event(self._copy_event)
        with devices.on_stream(stream):
            return snapshot(state)


def _copy_on_gpu(gpu: torch.device, state: dict) -> Optional[dict]:
    """Return a copy of the state on its GPU; None if that has hardly room, for the next step may need it."""
    if devices.free_memory(gpu) < 2 * size_of(state):
        return None
    try:
        return snapshot(state, _on_its_device)
    except RuntimeError:  # another program has taken the memory meanwhile
        return None


def tensors(value: object) -> Iterator[torch.Tensor]:
    """Yield all tensors in nested dicts, lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors(item)


def is_finite(value: object) -> bool:
    """Return whether all values of all tensors in nested dicts and lists are finite."""
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors(value))


def size_of(value: object) -> int:
    """Return the size in bytes of all tensors in nested dicts and lists."""
    return sum(tensor.nbytes for tensor in tensors(value))


def estimated_size(state: dict) -> int:
    """Estimate the bytes of a checkpoint and its file of weights,
    with room for optimizer state as large as the weights."""
    return 2 * size_of(state["model"]) + size_of(state)


def _encode_manifest(manifest: object) -> bytes:
    return json.dumps(manifest, indent=1).encode()


def require_plain(state: dict) -> None:
    """Raise UserError if `state` holds more than tensors and plain values,
    as the next start could not read it."""
    for name in state:
        try:
            check(state[name])
        except Refused as error:
            raise UserError(f"a checkpoint cannot hold the state of {name}: {error}") from None


def write(folder: str, state: dict, about: dict) -> None:
    """Write a checkpoint of `state`, with `about` as its manifest; its number is about["samples_seen"]."""
    # plain types only, or common/weights/tensors.py would refuse them at the next start
    about = json.loads(json.dumps(about))
    number = about["samples_seen"]
    path = os.path.join(folder, names.of_checkpoint(number, "pt"))
    manifest_path = os.path.join(folder, names.of_checkpoint(number, "json"))
    require_plain(state)
    content = encode({**state, "about": about})
    manifest = {**about, "sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}
    write_aside(path, content)
    write_aside(manifest_path, _encode_manifest(manifest))
    try:
        give_name(path)  # from here on the manifest counts, although it still has its temporary name
    except OSError:
        for target in (path, manifest_path):
            with contextlib.suppress(OSError):
                os.unlink(temporary_path(target))
        raise
    give_name(manifest_path)


def _manifests(folder: str) -> list[tuple[int, int, str]]:
    """Return sorted [(start's number, samples seen, name)] of the manifests.

    Only names from a bucket have numbers above 1.
    """
    parsed_names = [(names.parse(name), name) for name in os.listdir(folder)] if os.path.isdir(folder) else []
    return sorted(
        (parsed.start, parsed.samples, name)
        for parsed, name in parsed_names
        if parsed and parsed.ending == "json"
    )


def numbers(folder: str) -> list[int]:
    """Return the numbers (samples seen) of the checkpoints that have a manifest, in ascending order."""
    return sorted({number for _, number, _ in _manifests(folder)})


def path_of(folder: str, number: int) -> str:
    """Return the path of the .pt file of checkpoint `number`; if several starts have saved it,
    of the latest start's file."""
    starts = [start for start, samples, _ in _manifests(folder) if samples == number] or [1]
    return os.path.join(folder, names.of_checkpoint(number, "pt", starts[-1]))


def read(path: str) -> tuple[dict, dict]:
    """Return (state, manifest without digest and size) of a .pt file with its .json next to it;
    UserError if it is damaged."""
    manifest, content = read_verified(path)
    return parse(content, manifest, path)


def read_verified(path: str) -> tuple[dict, bytes]:
    """Return (manifest, bytes) of a checkpoint, without parsing the bytes; UserError if they do not agree."""
    manifest_path = re.sub(r"\.pt$", "", path) + ".json"
    try:
        content = contents(path)
        try:
            return _read_manifest(manifest_path, content), content
        except _DAMAGE as error:
            for temporary_path in unfinished_files(manifest_path):
                with contextlib.suppress(*_DAMAGE):
                    return _read_manifest(temporary_path, content), content
            raise error from None
    except _DAMAGE as error:
        raise UserError(f"checkpoint {path} is damaged: {one_line(error)}") from None


_DAMAGE = (OSError, ValueError, KeyError, TypeError, RecursionError)


def _read_manifest(path: str, content: bytes) -> dict[str, Any]:
    """Return the manifest in `path`; raise one of _DAMAGE unless it describes `content`."""
    encoded = contents(path)
    manifest = json.loads(encoded)
    if encoded != _encode_manifest(manifest):
        raise ValueError("its manifest was changed")
    if len(content) != manifest["size"]:
        raise ValueError(f"it has {len(content)} bytes, its manifest says {manifest['size']}")
    if hashlib.sha256(content).hexdigest() != manifest["sha256"]:
        raise ValueError("its bytes are not those that were written (SHA-256 differs)")
    parsed = names.parse(os.path.basename(path))
    if parsed and parsed.samples != manifest["samples_seen"]:
        raise ValueError(f"it is that after {manifest['samples_seen']} samples")
    return manifest


def parse(content: bytes, manifest: dict, path: str) -> tuple[dict, dict]:
    """Return (state, about) in verified bytes; UserError if they are no checkpoint or hold a manifest other
    than `manifest`."""
    from common.weights.tensors import read as read_tensors

    try:
        state = read_tensors(content, verified=True)
    except Refused as error:
        reason = "it holds something other than tensors and plain values"
        raise UserError(f"checkpoint {path} is refused: {reason}: {one_line(str(error)[:200])}") from None
    except Exception as error:  # an undamaged file of another kind can raise anything
        raise UserError(
            f"checkpoint {path} is damaged: it is no archive of torch: {one_line(error)[:200]}"
        ) from None
    about = state.pop("about", None) if isinstance(state, dict) else None
    if not isinstance(about, dict) or not _are_alike(
        {**about, "sha256": manifest["sha256"], "size": manifest["size"]}, manifest
    ):
        raise UserError(f"checkpoint {path} is damaged: its manifest was changed")
    return state, about


def _are_alike(about: object, manifest: object) -> bool:
    try:
        return _encode_manifest(about) == _encode_manifest(manifest)
    except (TypeError, ValueError, RecursionError):  # there is a tensor in it, for instance
        return False


def newest(
    folder: str, say: Callable = print, remedy: str = DEFAULT_REMEDY
) -> Optional[tuple[dict, dict, str]]:
    """Return (state, about, path) of the newest valid checkpoint, or None if there is none; warn of newer
    ones if damaged. If all are damaged, raise UserError with `remedy`, which says what to do."""
    existing = _manifests(folder)
    for _, _, manifest_name in reversed(existing):
        path = os.path.join(folder, re.sub(r"json$", "pt", manifest_name))
        try:
            return (*read(path), path)
        except UserError as error:
            say(f"warning: {error}; trying the one before it")
    if existing:
        raise UserError(f"all {len(existing)} checkpoints in {folder} are damaged; {remedy}")
    return None


def delete(folder: str, number: int) -> None:
    """Delete the two files of checkpoint `number`, as far as they exist."""
    for ending in ("json", "pt"):  # the manifest first: no manifest, no checkpoint
        remove(os.path.join(folder, names.of_checkpoint(number, ending)))


def sweep(folder: str, unfinished_paths: Iterable[str] = ()) -> None:
    """Complete a save that was killed between its two renames, and remove the other unfinished files.

    `unfinished_paths`: files of earlier starts. Names in a copied bucket lose the start's number.
    No process may be writing.
    """
    temporary_paths = [os.path.join(folder, name) for name in os.listdir(folder) if name.endswith(TEMPORARY)]
    with raising_taken_over(os.path.join(folder, "any")):
        for source in (*temporary_paths, *unfinished_paths):
            path = os.path.join(folder, os.path.basename(source).removesuffix(TEMPORARY))
            parsed = names.parse(os.path.basename(path))
            checkpoint_path = re.sub(r"json$", "pt", path)
            if (
                parsed
                and parsed.ending == "json"
                and _describes(source, checkpoint_path)
                and not _describes(path, checkpoint_path)
            ):
                os.replace(source, path)
            else:
                os.unlink(source)
        for start, number, name in _manifests(folder):
            if start <= 1:
                continue
            manifest = os.path.join(folder, name)  # in a copy of a bucket
            numbered = os.path.join(folder, names.of_checkpoint(number, "pt", start))
            plain = os.path.join(folder, names.of_checkpoint(number, "pt"))
            if _describes(manifest, numbered):
                os.replace(numbered, plain)
            if _describes(manifest, plain):  # also if a kill came between the two
                os.replace(manifest, re.sub(r"pt$", "json", plain))


def _describes(manifest: str, path: str) -> bool:
    try:
        return bool(_read_manifest(manifest, contents(path)))
    except _DAMAGE:
        return False


def surplus(file_names: Iterable[str], keep: int, about: dict, damaged: Collection[int] = ()) -> list[str]:
    """Return which of a run's files need not be kept: all checkpoints and weight files but the last `keep`
    and the best.

    `about`: the manifest of the checkpoint just written or restored. Higher numbers stay unless they are in
    `damaged`.
    """
    best = about["best"] or {}
    samples_seen = about["samples_seen"]
    file_names = list(file_names)
    checkpoint_files = [
        (name, parsed)
        for name in file_names
        if (parsed := names.parse(name.removeprefix(names.FOLDER))) and parsed.start == 1
    ]
    numbers = sorted(
        {parsed.samples for _, parsed in checkpoint_files if parsed.ending == "json"} - {*damaged}
    )
    kept_numbers = {
        *[number for number in numbers if number <= samples_seen][-keep:],
        best.get("samples_seen"),
    } & {*numbers}
    old_files = [
        name
        for name, parsed in checkpoint_files
        if parsed.samples not in kept_numbers and (parsed.samples in damaged or parsed.samples < samples_seen)
    ]
    weights = [(epoch, name) for name in file_names if (epoch := names.epoch_of(name)) is not None]
    weights = [(epoch, name) for epoch, name in weights if epoch <= about.get("epoch", epoch)]
    kept_epochs = {*sorted({epoch for epoch, _ in weights})[-keep:], best.get("epoch")}
    old_weights = [name for epoch, name in sorted(weights) if epoch not in kept_epochs]
    return sorted(old_files) + old_weights  # each manifest before its file: no manifest, no checkpoint


def prune(folder: str, output_dir: str, keep: int, about: dict, damaged: Collection[int] = ()) -> None:
    """Delete from both folders the files that surplus() names."""
    parent_of = {name: parent for parent in (folder, output_dir) for name in os.listdir(parent)}
    for name in surplus(parent_of, keep, about, damaged):
        remove(os.path.join(parent_of[name], name))
