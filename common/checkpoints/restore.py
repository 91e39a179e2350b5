"""Restore a run from its folder: which checkpoint to load,
and which options may differ from those of the run."""

import argparse
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, Callable, Optional

import torch

from common.address import is_bucket
from common.checkpoints import checkpoint
from common.checkpoints.parts import Checkpoint, SavedParts
from common.errors import UserError, one_line
from common.ranks.barrier import from_rank_0

CLASSES = "list of classes"  # in an identity


def identity(
    args: argparse.Namespace, num_samples: int, parts: SavedParts, classes: Sequence[str]
) -> dict[str, Any]:
    """Return what two starts must have in common to belong to one run, as values that an error can quote."""
    network = parts.network
    optimizer = parts.by_name.get("optimizer")
    tensors = [(name, tuple(tensor.shape)) for name, tensor in network.state_dict().items()]
    parameters = sum(parameter.numel() for parameter in network.parameters())
    digest = hashlib.sha256(repr(tensors).encode()).hexdigest()[:8]
    source = "synthetic" if args.input.synthetic else "real"
    facts = {
        "model": f"{type(network).__name__} of {parameters:,} parameters ({digest})",
        "data set": f"{source}, {num_samples} samples",
        "seed": args.seed,
        "optimizer": type(optimizer).__name__ if optimizer is not None else None,
    }
    if classes:
        facts[CLASSES] = describe_classes(classes)
    return facts


def describe_classes(names: Sequence[str]) -> str:
    """Return a short text for an error: the first three names of classes, their number, a digest of all."""
    digest = hashlib.sha256(json.dumps([*names]).encode()).hexdigest()[:8]
    first_names = ", ".join(one_line(name)[:40] for name in names[:3])
    if len(names) > 3:
        first_names += " and so on"
    return f"{first_names} ({len(names)}, {digest})"


def create_momentum_buffers(optimizer: object) -> None:
    """Create the momentum buffers of SGD as zeros.

    Torch's fused SGD needs one for all weights or none, but in the first step, some may have no gradient; and
    if a scaler skips that step, the buffers would be uninitialised memory."""
    if isinstance(optimizer, torch.optim.SGD):
        for group in optimizer.param_groups:
            if not group["momentum"]:
                continue
            for parameter in group["params"]:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def find_checkpoint(
    args: argparse.Namespace, places: list, own_identity: dict, say: Callable
) -> Optional[Checkpoint]:
    """Return the checkpoint to go on from, or None to begin anew.

    UserError if another run or the options forbid it.

    `places`: the run's RunFolder, and its RunBucket if it has one. `own_identity`: its identity().
    """
    folder = args.checkpoint_dir
    world = args.world
    starts_anew = args.resume == "never" and not world.restart_count
    have_checkpoints = [place.fetch_newest(check_only=starts_anew) for place in places]
    has_run = any(have_checkpoints)
    if has_run and world.restart_count:
        # a restart of the same command: the first start has obeyed --resume and --overwrite
        chosen = checkpoint.newest(folder, say)
        # With --resume never, a checkpoint of another job means that the first start ended before it wrote
        # one.
        if chosen and (args.resume != "never" or chosen[1].get("job", "") == world.job_id):
            refuse_another_run(chosen[1], own_identity, f"checkpoint {chosen[2]}")
            return chosen
    if args.resume == "never":
        if has_run and not args.overwrite:
            raise UserError(
                f"{args.output_url or args.output_dir} holds a run and --resume is never: "
                "give another --output_dir, or --overwrite true to delete that run"
            )
        return None
    if args.resume == "auto":
        chosen = checkpoint.newest(folder, say)
    else:
        chosen = _from_path(args, say)
        newest = checkpoint.newest(folder, say) if has_run and not _is_inside(chosen[2], folder) else None
        if newest and newest[1]["run"] == chosen[1]["run"]:
            # an earlier start of this command has gone on from there
            say(f"{args.output_dir} already went on from --resume {args.resume}")
            chosen = newest
        elif newest:
            raise UserError(
                f"{args.output_dir} holds another run than --resume {args.resume}: give another "
                "--output_dir, or first delete that run with --resume never --overwrite true"
            )
    if chosen:
        refuse_another_run(chosen[1], own_identity, f"checkpoint {chosen[2]}")
    return chosen


def to_evaluate(args: argparse.Namespace, say: Callable) -> Optional[Checkpoint]:
    """Return the checkpoint of --resume PATH, else the newest in the output folder or its bucket;
    None if there is none."""
    if args.resume not in ("auto", "never"):
        return _read_resume_path(args, say)
    if args.output_url:
        from common.checkpoints.run_bucket import RunBucket

        RunBucket(args, say).fetch_newest()
    return checkpoint.newest(args.checkpoint_dir, say)


def previous_arguments(args: argparse.Namespace, say: Callable) -> dict:
    """Return on every rank the arguments of the run to resume; {} for a new run or with --doctor."""
    if args.doctor or (args.resume == "never" and not args.world.restart_count):
        return {}

    def find():
        chosen = to_evaluate(args, say)
        return ({}, {"arguments": chosen[1]["arguments"]}, chosen[2]) if chosen else None

    chosen = from_rank_0(find, "settings")
    return chosen[1]["arguments"] if chosen else {}


def _from_path(args: argparse.Namespace, say: Callable[[str], None]) -> Checkpoint:
    """Return the checkpoint of --resume PATH; UserError if this run's folder has it and later ones,
    without --overwrite."""
    state, about, path = _read_resume_path(args, say)
    newer = [number for number in checkpoint.numbers(args.checkpoint_dir) if number > about["samples_seen"]]
    if newer and not args.overwrite and _is_inside(path, args.checkpoint_dir):
        raise UserError(
            f"--resume {path} has {len(newer)} later checkpoints in its folder: "
            "give --overwrite true to delete those, or another --output_dir"
        )
    return state, about, path


def _read_resume_path(args: argparse.Namespace, say: Callable[[str], None]) -> Checkpoint:
    """Return the checkpoint of --resume PATH: a file, or the newest in a folder."""
    path = args.resume
    if is_bucket(path):
        from common.checkpoints.run_bucket import fetch_resume_path

        path = fetch_resume_path(path, args.input_dir, say)
    if os.path.isdir(path):
        inner = os.path.join(path, "checkpoints")
        newest = checkpoint.newest(inner if os.path.isdir(inner) else path, say)
        if not newest:
            raise UserError(
                f"--resume {path} holds no checkpoint: "
                "give a .pt file that has its .json next to it, or the output folder of a run"
            )
        return newest
    if not os.path.isfile(path):
        raise UserError(f"--resume {path} does not exist: give auto, never, or the path of a checkpoint")
    if not path.endswith(".pt") and not os.path.exists(f"{path}.json"):
        raise UserError(
            f"--resume {path} is no checkpoint: give a .pt file that has its .json next to it; with weights "
            "alone, as a .pth file has them, a run of train_imagenet.py begins by --weights"
        )
    return (*checkpoint.read(path), path)


def _is_inside(path: str, folder: str) -> bool:
    return os.path.dirname(os.path.realpath(path)) == os.path.realpath(folder)


def refuse_another_run(about: Mapping[str, Any], own_identity: Mapping[str, Any], path: str) -> None:
    """Raise UserError unless the checkpoint with manifest `about` is of a run with `own_identity`."""
    saved_identity = dict(about["identity"])
    if about.get("classes"):  # before 0.4.0 they were not in the identity
        saved_identity[CLASSES] = describe_classes(about["classes"])
    compared = [
        name for name in own_identity if name in saved_identity or name != CLASSES
    ]  # a script may name its classes later
    differences = [
        f"{name} is {own_identity[name]} here but {saved_identity.get(name)} there"
        for name in compared
        if own_identity[name] != saved_identity.get(name)
    ]
    if differences:
        raise UserError(
            f"{path} belongs to another run: {'; '.join(differences)}; "
            "give another --output_dir, or --resume never --overwrite true"
        )


def refuse_other_classes(saved_classes: Sequence[str], classes: Sequence[str], path: str) -> None:
    """Raise UserError if the `saved_classes` of weights do not begin with `classes`, those of the data."""
    if saved_classes and [*saved_classes[: len(classes)]] != [*classes]:
        saved = describe_classes(saved_classes)
        current = describe_classes(classes)
        raise UserError(
            f"{path} was trained on other classes: {saved} there, and {current} here: give --data_url with "
            "the classes of before or, if the names alone differ, correct them in its .json"
        )
