"""Find the place of this process from arguments and environment,
by the first rule that recognises its platform."""

import argparse
import contextlib
import dataclasses
import os
import socket
from collections.abc import Mapping
from typing import Callable, Optional

from common.errors import UserError, count
from common.world.rules import RULES
from common.world.world import LaunchContext, World

# set by a node's parent for its workers: the platform, and how it was recognised
PLATFORM = "ANYRANK_PLATFORM"
# the same: how many GPUs or NPUs the node has according to the platform
PROMISED = "ANYRANK_PROMISED"
DEFAULT_PORT = 29500  # the same on every node; MASTER_PORT overrides it

JOB_ID = [
    "MA_VJ_NAME", "AIHC_JOB_NAME", "MLP_TASK_ID", "TRAINING_JOB_NAME", "AZUREML_RUN_ID", "CLOUD_ML_JOB_ID",
    "SLURM_JOB_ID", "TORCHELASTIC_RUN_ID",
]  # fmt: skip

# {variable that counts the starts or restarts of a job: its value in the first start}
RESTARTS = {
    "TORCHELASTIC_RESTART_COUNT": 0,
    "SLURM_RESTART_COUNT": 0,
    "MA_SCHEDULE_CNT": 1,
    "MA_PROC_START_CNT": 1,
}


def find_place(args: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> World:
    """Return the place of this process, which jobs read as args.world. torch counts the GPUs,
    unless --enable_gpu is false."""
    from common import devices  # imports torch, which most programs of launch/ do not need

    gpus = 0 if args.enable_gpu is False else devices.count()
    return resolve(args, environ, gpus, socket.gethostname(), _launcher())


def _launcher() -> str:
    """Return the command line of the parent process; empty if it cannot be read."""
    with contextlib.suppress(OSError), open(f"/proc/{os.getppid()}/cmdline", errors="replace") as file:
        return file.read().replace("\0", " ")
    return ""


def require_one_device(args: argparse.Namespace) -> None:
    """Raise UserError if a single-process job was started as several processes,
    each of which would train the same network."""
    world = args.world
    if world.num_nodes > 1 or (world.level == "process" and world.world_size > 1):
        raise UserError(
            f"{count(world.num_nodes, 'node')} with {count(world.world_size, 'process', 'processes')} in all "
            f"were started ({world.platform}: {world.rule}), but {args.job}.py trains on one device: "
            f"{advice_for_several_devices(args.job)}"
        )


def advice_for_several_devices(job: str) -> str:
    """Return what to do with a job, named as its file without .py,
    that trains on one device where there are several."""
    if job in (
        "train",
        "train_amp",
        "train_dali",
        "train_dp",
        "train_dpex",
        "train_exact",
        "train_restore",
        "speedrun",
    ):
        return "start train_ddp.py instead"
    return "add the lines of docs/your_script.md, On every GPU of every node"


def resolve(
    args: argparse.Namespace, environ: Mapping[str, str], gpus: int, hostname: str, launcher: str = ""
) -> World:
    """Return this process's place.

    It reads only init_method, rank, world_size, local_rank and nproc_per_node of `args`.
    """
    context = LaunchContext(args, environ, gpus, hostname, launcher)
    place = next(world for rule in RULES if (world := _apply(rule, context)))
    platform, _, rule = context.env.get(PLATFORM, "").partition(": ")
    if place.level == "node" and place.node_rank >= place.num_nodes:
        raise UserError(
            f"{place.rule}: node rank {place.node_rank} is not below the number of nodes, {place.num_nodes}"
        )
    if place.rank >= place.world_size:
        raise UserError(f"{place.rule}: rank {place.rank} is not below world size {place.world_size}")
    return dataclasses.replace(
        place,
        platform=platform or place.platform,
        rule=rule or place.rule,
        master_addr=place.master_addr or "127.0.0.1",
        master_port=place.master_port or context.number("MASTER_PORT") or DEFAULT_PORT,
        gpus_promised=place.gpus_promised or context.number(PROMISED),
        job_id=next((context.env[name] for name in JOB_ID if name in context.env), ""),
        restart_count=sum(
            max(0, context.number(name) - initial)
            for name, initial in RESTARTS.items()
            if name in context.env
        ),
    )


def _apply(rule: Callable[[LaunchContext], Optional[World]], context: LaunchContext) -> Optional[World]:
    """Return rule(context); UserError if a variable has another form than the rule expects."""
    try:
        return rule(context)
    except UserError:
        raise
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"the environment looks like that of {rule.__name__}, but its variables do not have the "
            f"documented form: {error!r}"
        ) from None
