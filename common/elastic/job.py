"""What makes a job elastic: a parent process of a node, members of a group and peers of a run,
for REPLACED (moments.py)."""

import argparse

import torch

from common.alive import heartbeat
from common.alive.supervisor import Supervisor
from common.elastic.members import Members
from common.elastic.parent import ElasticParent
from common.elastic.peers import Elastic
from common.errors import UserError, count
from common.moments import REPLACED
from common.ranks.collectives import GROUP
from common.run.peers import Fixed


def workers(args: argparse.Namespace) -> None:
    """Listen to the moment `workers` (common/moments.py): with --min_nodes, put in place the parent, the
    members and the peers of an elastic job. In a node's parent, raise UserError if the job cannot be
    elastic."""
    world = args.world
    min_nodes = args.min_nodes
    if not min_nodes:
        return
    REPLACED.parent = parent
    REPLACED.members = members
    REPLACED.peers = peers
    if heartbeat.has_parent():  # which has looked at what follows
        return
    if world.level == "process":
        raise UserError(
            f"--min_nodes needs one process per node, and {world.platform} starts one per rank: start "
            "it as python JOB"
        )
    if world.world_size == 1 and not args.max_restarts:
        raise UserError("--min_nodes is for several nodes or workers, and this is the only one")
    if min_nodes > world.num_nodes:
        raise UserError(f"--min_nodes {min_nodes}, but the job has {count(world.num_nodes, 'node')}")
    if args.max_restarts:
        raise UserError(
            "with --min_nodes the others go on, and --max_restarts starts all workers again: give one "
            "of the two"
        )


def parent(args: argparse.Namespace, supervisor: Supervisor) -> ElasticParent:
    """Return the parent process of a node, for REPLACED.parent."""
    return ElasticParent(supervisor, args.min_nodes, args.output_dir)


def members(args: argparse.Namespace, device: torch.device) -> Members:
    """Return the group of this rank, not yet formed, for REPLACED.members."""
    return Members(args.world.rank, args.world.world_size, device)


def peers(args: argparse.Namespace) -> Fixed:
    """Return the peers of this rank, for REPLACED.peers; they never change if the job has no members."""
    return Elastic(args, GROUP.members) if GROUP.members else Fixed(args)
