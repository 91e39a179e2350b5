"""From arguments and environment to the place of this process; the first rule that recognises its platform decides."""

import argparse
import dataclasses
import os
import socket
from collections.abc import Mapping

from common.errors import UserError
from common.world.place import World
from common.world.rules import RULES, Given

PLATFORM = "ANYRANK_PLATFORM"  # what the parent of this node recognised, so that its workers say the same
DEFAULT_PORT = 29500  # the same on every node; MASTER_PORT overrides it

JOB_ID = [
    "MA_VJ_NAME", "AIHC_JOB_NAME", "MLP_TASK_ID", "TRAINING_JOB_NAME", "AZUREML_RUN_ID", "CLOUD_ML_JOB_ID",
    "SLURM_JOB_ID", "TORCHELASTIC_RUN_ID",
]  # fmt: skip

# What counts the restarts of a job, and where each of them begins.
RESTARTS = {"TORCHELASTIC_RESTART_COUNT": 0, "SLURM_RESTART_COUNT": 0, "MA_SCHEDULE_CNT": 1, "MA_PROC_START_CNT": 1}


def here(args: argparse.Namespace, environ: Mapping = os.environ) -> World:
    """The place of this process, with the GPUs that torch sees; later it is args.world."""
    import torch

    gpus = 0 if args.enable_gpu is False else torch.cuda.device_count()
    return resolve(args, environ, gpus, socket.gethostname())


def require_one_device(args: argparse.Namespace) -> None:
    """In a job of one process: refuse to be one of several that train the same thing side by side."""
    world = args.world
    if world.num_nodes > 1 or (world.level == "process" and world.world_size > 1):
        raise UserError(
            f"{world.num_nodes} nodes with {world.world_size} processes in all were started ({world.platform}: {world.rule}), "
            f"but {args.job}.py trains on one device: start train_ddp.py instead"
        )


def resolve(args: argparse.Namespace, environ: Mapping, gpus: int, hostname: str) -> World:
    """A pure function of what is given; of `args` it takes init_method, rank, world_size, local_rank and nproc_per_node."""
    given = Given(args, environ, gpus, hostname)
    if "RANK_TABLE_FILE" in given.env:
        raise UserError("RANK_TABLE_FILE is set: an Ascend engine, which these jobs do not support; choose a GPU or CPU flavor")
    found = next(world for rule in RULES if (world := _apply(rule, given)))
    if found.level == "node" and found.node_rank >= found.num_nodes:
        raise UserError(f"{found.rule}: node rank {found.node_rank} is not below the number of nodes, {found.num_nodes}")
    if found.rank >= found.world_size:
        raise UserError(f"{found.rule}: rank {found.rank} is not below world size {found.world_size}")
    return dataclasses.replace(
        found,
        platform=given.env.get(PLATFORM) or found.platform,
        master_addr=found.master_addr or "127.0.0.1",
        master_port=found.master_port or given.number("MASTER_PORT") or DEFAULT_PORT,
        job_id=next((given.env[name] for name in JOB_ID if name in given.env), ""),
        restart_count=sum(max(0, given.number(name) - first) for name, first in RESTARTS.items() if name in given.env),
    )


def _apply(rule, given):
    try:
        return rule(given)
    except UserError:
        raise
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"the environment looks like {rule.__name__}'s, but its variables are not in the form that it documents: {error!r}"
        ) from None
