"""What is said about a run: in the manifest of a checkpoint, in the journal of a start,
and as commands that go on from here.

These facts are the command, options that are not at their defaults, the machine, and versions.
"""

import argparse
import contextlib
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any, Optional, Protocol

import numpy as np
import torch

from common import VERSION, arguments, devices, progress
from common.alive import heartbeat
from common.checkpoints.parts import SavedParts
from common.checkpoints.position import Position
from common.checkpoints.saver import Saving
from common.machine import cores
from common.run.peers import Fixed
from common.run.plan import Plan, Results, Sampler
from common.run.unsaved import Unsaved
from common.secrets import HIDDEN, is_secret, mask

LAUNCHER = "ANYRANK_LAUNCHER"  # the command of `python -m launch`, which sets it if it has started all nodes
# options that a platform adds on each node
PLATFORM_OPTIONS = {"init_method", "rank", "world_size", "local_rank"}


class RunState(Protocol):
    """What a manifest, a journal and the first lines of a log need of a run."""

    args: argparse.Namespace
    sampler: Sampler
    parts: SavedParts
    unsaved: Unsaved
    device: torch.device
    position: Position
    plan: Plan
    results: Results
    peers: Fixed
    saving: Saving


def versions() -> dict[str, str]:
    """Return the versions of this project, Python, torch and numpy."""
    return {
        "anyrank": VERSION,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
    }


def machine(device: torch.device) -> dict[str, Any]:
    """Describe the machine of this process, without its name and address."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
        cpu = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        cpu = platform.machine()
    memory = os.sysconf("SC_PAGESIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "device": devices.describe(device),
        "cpu": cpu,
        "cores": cores.count(),
        "memory_gib": round(memory / 2**30),
    }


def restart_command(args: argparse.Namespace, words: list[str], omit: Collection[str] = ()) -> str:
    """Return the command to start this run again, without secrets, the platform's options and `omit`."""
    if progress.in_notebook():
        return "run the cell again"
    launcher = shlex.split(os.environ.get(LAUNCHER, ""))
    kept = []
    remaining_words = iter(launcher or words)
    for word in remaining_words:
        name, equals, _ = word.partition("=")
        option = name.lstrip("-").replace("-", "_")
        is_left_out = option in {*PLATFORM_OPTIONS, *omit}
        if name.startswith("-") and (is_left_out or is_secret(option)):
            if not is_left_out:
                kept.append(f"{name}={HIDDEN}")
            if not equals:
                next(remaining_words, None)  # its value
        else:
            kept.append(mask(word))
    if launcher:
        return shlex.join(kept)
    if "TORCHELASTIC_RUN_ID" not in os.environ or heartbeat.has_parent():
        # our parent process sets it for its workers, too
        return f"python {shlex.join(kept)}"
    nodes = f"--nnodes {args.world.num_nodes} " if args.world.num_nodes > 1 else ""
    return f"torchrun --nproc_per_node {args.world.local_world_size} {nodes}{shlex.join(kept)}"


def export_command(folder: str) -> Optional[str]:
    """Return the command that exports an output folder's best network for other programs;
    None in a bundle without launch/."""
    root = Path(__file__).resolve().parents[2]
    if not (root / "launch").is_dir():
        return None
    export_format = "torch" if devices.TORCH >= (2, 6) else "onnx"
    if not (root / "pyproject.toml").exists():  # installed by pip
        return shlex.join(["anyrank", "export", folder, "--format", export_format])
    if os.getcwd() == str(root):
        return shlex.join(["python", "-m", "launch", "export", folder, "--format", export_format])
    words = ["python", "-m", "launch", "export", os.path.abspath(folder), "--format", export_format]
    return f"cd {shlex.quote(str(root))} && {shlex.join(words)}"


def manifest_of(run: RunState) -> dict[str, Any]:
    """Return the manifest of a checkpoint that is made now, without the digest and size of its file."""
    return {
        **vars(run.position),
        "global_batch": run.sampler.global_batch,
        "world_size": run.peers.size,
        "run": run.saving.id,
        "lr": run.parts.learning_rate(),
        "identity": run.saving.identity,
        "asked": arguments.plain_values(run.args.given),
        "arguments": arguments.plain_values(vars(run.args)),
        "job": run.args.world.job_id,
        "classes": run.saving.classes,
        "data_digests": run.saving.data_digests,
        "versions": versions(),
    }


def code_version() -> dict[str, str]:
    """Return {"commit": ...} of the job's code, with -dirty if files have changed since;
    {} if git knows none."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = [
            "git",
            "-C",
            os.path.dirname(os.path.abspath(sys.argv[0])),
            "describe",
            "--always",
            "--dirty",
            "--exclude=*",
        ]
        return {
            "commit": subprocess.run(
                command, capture_output=True, text=True, timeout=5, check=True
            ).stdout.strip()
        }
    return {}


def _short(value: object) -> object:
    return f"{value:.6g}" if isinstance(value, float) else value


def facts_of_this_start(run: RunState, goes_on_from: Optional[str]) -> dict[str, Any]:
    """Return what the journal records of this start. `goes_on_from`: the restored checkpoint, if any."""
    args = run.args
    position = run.position
    changed = {name: default for name, default in args.changed.items() if name not in PLATFORM_OPTIONS}
    shown = {name: HIDDEN if is_secret(name) else mask(_short(vars(args)[name])) for name in changed}
    return {
        "run": run.saving.id,
        "goes_on_from": goes_on_from,
        # gone on from the --resume PATH of this start
        "branched": bool(goes_on_from) and args.resume not in ("auto", "never"),
        **position.row(position.epoch),
        "consumed": position.consumed,
        "epochs": args.epochs,
        "samples_per_epoch": run.sampler.samples_per_epoch,
        "best_by": run.results.best_by,
        "best_is": run.results.best_is,
        "global_batch": run.sampler.global_batch,
        "ranks": run.peers.size,
        "synthetic": args.input.synthetic,
        "job": args.job,
        "command": restart_command(args, sys.argv),
        "options": {name: [shown[name], str(_short(default))] for name, default in changed.items()},
        "data": args.data,
        "use": export_command(args.output_dir),
        "machine": machine(run.device),
        "versions": {**versions(), **code_version()},
        "platform": args.world.platform,
        "nodes": args.world.num_nodes,
    }
