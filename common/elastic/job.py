"""The listener that makes a job elastic: it replaces a node's parent process, the workers' group and the peers of a run."""

import argparse
from typing import Optional

import torch

from common import heartbeat
from common.elastic.members import Members
from common.elastic.peers import Elastic
from common.elastic.supervisor import ElasticSupervisor
from common.errors import UserError, count
from common.ranks.collectives import GROUP


def workers(args: argparse.Namespace) -> None:
    """Raise a UserError if --min_nodes is given and the job cannot be elastic."""
    here, least = args.world, args.min_nodes
    if not least or heartbeat.has_parent():
        return
    if here.level == "process":
        raise UserError(
            f"--min_nodes needs one process per node, and {here.platform} starts one per rank: start it as python JOB"
        )
    if here.world_size == 1 and not args.max_restarts:
        raise UserError("--min_nodes is for several nodes or workers, and this is the only one")
    if least > here.num_nodes:
        raise UserError(f"--min_nodes {least}, but the job has {count(here.num_nodes, 'node')}")
    if args.max_restarts:
        raise UserError("with --min_nodes the others go on, and --max_restarts starts all workers again: give one of the two")


def parent(args: argparse.Namespace, alike: dict) -> Optional[ElasticSupervisor]:
    return ElasticSupervisor(args.world, args.min_nodes, args.join_seconds, alike, args.output_dir) if args.min_nodes else None


def members(args: argparse.Namespace, device: torch.device) -> Optional[Members]:
    return Members(args.world.rank, args.world.world_size, device) if args.min_nodes else None


def peers(args: argparse.Namespace) -> Optional[Elastic]:
    return Elastic(args, GROUP.members) if GROUP.members else None
