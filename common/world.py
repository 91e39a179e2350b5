"""Where am I: which node and which process of how many, and who is the master. A pure function of what the platform set.

The rules, one for each platform, are in platforms.py; the first that recognises its platform decides.
"""

import dataclasses
import os
import socket

from common import platforms
from common.errors import UserError

PLATFORM = "ANYRANK_PLATFORM"  # what the parent of this node recognised, so that its workers say the same
DEFAULT_PORT = 29500  # the same on every node; MASTER_PORT overrides it

JOB_ID = [
    "MA_VJ_NAME", "AIHC_JOB_NAME", "MLP_TASK_ID", "TRAINING_JOB_NAME", "AZUREML_RUN_ID", "CLOUD_ML_JOB_ID",
    "SLURM_JOB_ID", "TORCHELASTIC_RUN_ID",
]  # fmt: skip

# What counts the restarts of a job, and where each of them begins.
RESTARTS = {"TORCHELASTIC_RESTART_COUNT": 0, "SLURM_RESTART_COUNT": 0, "MA_SCHEDULE_CNT": 1, "MA_PROC_START_CNT": 1}


@dataclasses.dataclass(frozen=True)
class World:
    """This process's place. At level "node" it stands for the first of the local_world_size workers of its node."""

    platform: str
    rule: str  # what the platform was recognised by, for the log
    level: str  # "process": started once per worker; "node": once per node
    node_rank: int
    num_nodes: int
    local_rank: int
    local_world_size: int
    rank: int
    world_size: int
    master_addr: str
    master_port: int
    gpus_promised: int  # what the platform says this node has; 0 when it says nothing
    job_id: str
    restart_count: int


def here(args):
    """The world of this process: `resolve` on the real environment."""
    import torch

    gpus = 0 if args.enable_gpu is False else torch.cuda.device_count()
    return resolve(args, os.environ, gpus, socket.gethostname())


def require_one_device(args):
    """In a job of one process: refuse to be one of several that train the same thing side by side."""
    place = here(args)
    if place.num_nodes > 1 or (place.level == "process" and place.world_size > 1):
        raise UserError(
            f"{place.num_nodes} nodes with {place.world_size} processes in all were started ({place.platform}: {place.rule}), "
            f"but {args.job}.py trains on one device: start train_ddp.py instead"
        )


def resolve(args, environ, gpus, hostname):
    """`args` has init_method, rank, world_size, local_rank and, where the job has it, nproc_per_node."""
    given = platforms.Given(args, environ, gpus, hostname)
    if "RANK_TABLE_FILE" in given.env:
        raise UserError("RANK_TABLE_FILE is set: an Ascend engine, which these jobs do not support; choose a GPU or CPU flavor")
    place = next(place for rule in platforms.RULES if (place := _apply(rule, given)))
    if place.level == "node" and place.node_rank >= place.num_nodes:
        raise UserError(f"{place.rule}: node rank {place.node_rank} is not below the number of nodes, {place.num_nodes}")
    if place.rank >= place.world_size:
        raise UserError(f"{place.rule}: rank {place.rank} is not below world size {place.world_size}")
    return World(
        **{
            **dataclasses.asdict(place),
            "platform": given.env.get(PLATFORM) or place.platform,
            "master_addr": place.master_addr or "127.0.0.1",
            "master_port": place.master_port or given.number("MASTER_PORT") or DEFAULT_PORT,
        },
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
