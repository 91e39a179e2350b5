"""Restore a run from its folder: which checkpoint to load, and which options may differ from those of the run."""

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


def identity(args: argparse.Namespace, num_samples: int, parts: SavedParts, classes: Sequence[str]) -> dict[str, Any]:
    """Return what two starts must have in common to belong to one run, as values that an error can quote."""
    network = parts.network
    optimizer = parts.by_name.get("optimizer")
    tensors = [(name, tuple(tensor.shape)) for name, tensor in network.state_dict().items()]
    parameters = sum(parameter.numel() for parameter in network.parameters())
    digest = hashlib.sha256(repr(tensors).encode()).hexdigest()[:8]
    known = {
        "model": f"{type(network).__name__} of {parameters:,} parameters ({digest})",
        "data set": f"{'synthetic' if args.input.synthetic else 'real'}, {num_samples} samples",
        "seed": args.seed,
        "optimizer": type(optimizer).__name__ if optimizer is not None else None,
    }
    return {**known, CLASSES: describe_classes(classes)} if classes else known


def describe_classes(names: Sequence[str]) -> str:
    """Return a short text about the names of classes, for an error: the first three, and a digest that each name changes."""
    digest = hashlib.sha256(json.dumps([*names]).encode()).hexdigest()[:8]
    first = ", ".join(one_line(name)[:40] for name in names[:3])
    return f"{first}{' and so on' if len(names) > 3 else ''} ({len(names)}, {digest})"


def create_momentum_buffers(optimizer: object) -> None:
    """Create the momentum buffers of SGD as zeros. Torch's fused SGD needs one for all weights or none, but in the first step,
    some may have no gradient; and if a scaler skips that step, the buffers would be uninitialised memory."""
    if isinstance(optimizer, torch.optim.SGD):
        for group in optimizer.param_groups:
            for parameter in group["params"] if group["momentum"] else []:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def find_checkpoint(args: argparse.Namespace, places: list, ours: dict, say: Callable) -> Optional[Checkpoint]:
    """Return the checkpoint to go on from, or None to begin anew. UserError if another run or the options forbid it.

    `places`: its RunFolder, and a RunBucket if it has one. `ours`: its identity().
    """
    folder = args.checkpoint_dir
    here = args.world
    afresh = args.resume == "never" and not here.restart_count
    in_places = [place.bring_newest(only_look=afresh) for place in places]
    has_run = any(in_places)
    if has_run and here.restart_count:  # a restart of the same command: the first start has obeyed --resume and --overwrite
        found = checkpoint.newest(folder, say)
        # With --resume never, a checkpoint of another job means that the first start ended before it wrote one.
        if found and (args.resume != "never" or found[1].get("job", "") == here.job_id):
            refuse_another_run(found[1], ours, f"checkpoint {found[2]}")
            return found
    if args.resume == "never":
        if has_run and not args.overwrite:
            raise UserError(
                f"{args.output_url or args.output_dir} holds a run and --resume is never: "
                "give another --output_dir, or --overwrite true to delete that run"
            )
        return None
    if args.resume == "auto":
        found = checkpoint.newest(folder, say)
    else:
        found = _from_path(args, say)
        own = checkpoint.newest(folder, say) if has_run and not _inside(found[2], folder) else None
        if own and own[1]["run"] == found[1]["run"]:  # an earlier start of this command has gone on from there
            say(f"{args.output_dir} already went on from --resume {args.resume}")
            found = own
        elif own:
            raise UserError(
                f"{args.output_dir} holds another run than --resume {args.resume}: give another --output_dir, "
                "or first delete that run with --resume never --overwrite true"
            )
    if found:
        refuse_another_run(found[1], ours, f"checkpoint {found[2]}")
    return found


def to_evaluate(args: argparse.Namespace, say: Callable) -> Optional[Checkpoint]:
    """Return the checkpoint of --resume PATH, else the newest in the output folder or its bucket; None if there is none."""
    if args.resume not in ("auto", "never"):
        return _named(args, say)
    if args.output_url:
        from common.checkpoints.run_bucket import RunBucket

        RunBucket(args, say).bring_newest()
    return checkpoint.newest(args.checkpoint_dir, say)


def settings_before(args: argparse.Namespace, say: Callable) -> dict:
    """Return, on every rank, the arguments of the run that this start continues; {} for a new run or with --doctor."""
    if args.doctor or (args.resume == "never" and not args.world.restart_count):
        return {}

    def look():
        found = to_evaluate(args, say)
        return ({}, {"arguments": found[1]["arguments"]}, found[2]) if found else None

    found = from_rank_0(look, "settings")
    return found[1]["arguments"] if found else {}


def _from_path(args: argparse.Namespace, say: Callable[[str], None]) -> Checkpoint:
    """Return the checkpoint of --resume PATH; UserError if this run's folder has it and later ones, without --overwrite."""
    state, about, path = _named(args, say)
    later = [number for number in checkpoint.numbers(args.checkpoint_dir) if number > about["samples_seen"]]
    newer = later if _inside(path, args.checkpoint_dir) else []
    if newer and not args.overwrite:
        raise UserError(
            f"--resume {path} has {len(newer)} later checkpoints in its folder: "
            "give --overwrite true to delete those, or another --output_dir"
        )
    return state, about, path


def _named(args: argparse.Namespace, say: Callable[[str], None]) -> Checkpoint:
    """Return the checkpoint of --resume PATH: a file, or the newest in a folder."""
    path = args.resume
    if is_bucket(path):
        from common.checkpoints.run_bucket import fetched

        path = fetched(path, args.input_dir, say)
    if os.path.isdir(path):
        inner = os.path.join(path, "checkpoints")
        found = checkpoint.newest(inner if os.path.isdir(inner) else path, say)
        if not found:
            raise UserError(
                f"--resume {path} holds no checkpoint: "
                "give a .pt file that has its .json next to it, or the output folder of a run"
            )
        return found
    if not os.path.isfile(path):
        raise UserError(f"--resume {path} does not exist: give auto, never, or the path of a checkpoint")
    if not path.endswith(".pt") and not os.path.exists(f"{path}.json"):
        raise UserError(
            f"--resume {path} is no checkpoint: give a .pt file that has its .json next to it; with weights alone, as a .pth "
            "file has them, a run of train_imagenet.py begins by --weights"
        )
    return (*checkpoint.read(path), path)


def _inside(path: str, folder: str) -> bool:
    return os.path.dirname(os.path.realpath(path)) == os.path.realpath(folder)


def refuse_another_run(about: Mapping[str, Any], ours: Mapping[str, Any], path: str) -> None:
    """Raise UserError unless the checkpoint at `path` is of a run of this identity(). `about`: its manifest."""
    theirs = dict(about["identity"])
    if about.get("classes"):  # before 0.4.0 they were not in the identity
        theirs[CLASSES] = describe_classes(about["classes"])
    compared = [what for what in ours if what in theirs or what != CLASSES]  # a script may name its classes later
    different = [
        f"{what} is {ours[what]} here but {theirs.get(what)} there" for what in compared if ours[what] != theirs.get(what)
    ]
    if different:
        raise UserError(
            f"{path} belongs to another run: {'; '.join(different)}; "
            "give another --output_dir, or --resume never --overwrite true"
        )


def refuse_other_classes(theirs: Sequence[str], ours: Sequence[str], path: str) -> None:
    """Raise UserError if the first outputs of the weights at `path` are not for the classes of the data, which are `ours`."""
    if theirs and [*theirs[: len(ours)]] != [*ours]:
        before = describe_classes(theirs)
        here = describe_classes(ours)
        raise UserError(
            f"{path} was trained on other classes: {before} there, and {here} here: give --data_url with the classes of before "
            "or, if the names alone differ, correct them in its .json"
        )
