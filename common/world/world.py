"""The place of a process (World), and what a rule (rules.py) looks at to find it (LaunchContext)."""

import argparse
import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any, Optional

from common.errors import UserError


@dataclasses.dataclass(frozen=True)
class World:
    """The place of a process.

    At level "node", `rank` is that of the first of the node's local_world_size workers.
    """

    platform: str
    rule: str  # what the platform was recognised by, for the log
    level: str  # "process": started once per worker; "node": once per node
    node_rank: int
    num_nodes: int
    local_rank: int
    local_world_size: int
    rank: int
    world_size: int
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    gpus_promised: int = 0  # GPUs or NPUs that this node has according to the platform; 0 if it does not say
    job_id: str = ""
    restart_count: int = 0

    def owns_only_gpu(self, gpus: int) -> bool:
        """Whether the launcher seems to have given this process its own GPU or NPU (srun --gpus-per-task=1),
        of `gpus` seen."""
        return gpus == 1 and self.level == "process" and self.platform in ("slurm", "openmpi", "ascend")


class LaunchContext:
    """Everything a rule may look at: arguments, environment, number of GPUs, host name,
    and the launcher's command line."""

    def __init__(
        self, args: argparse.Namespace, environ: Mapping[str, str], gpus: int, hostname: str, launcher: str
    ):
        self.args = args
        self.gpus = gpus
        self.hostname = hostname
        self.launcher = launcher
        self.env = {name: value.strip() for name, value in environ.items() if value.strip()}

    def has(self, *names: str) -> bool:
        """Whether all of these variables are set and not blank."""
        return all(name in self.env for name in names)

    def number(self, *names: str) -> int:
        """Return the whole number in the first of these variables that is set, else 0."""
        for name in names:
            if name in self.env:
                if not re.fullmatch(r"\d{1,9}", self.env[name]):
                    raise UserError(f"{name} is {self.env[name][:80]!r}: a whole number was expected")
                return int(self.env[name])
        return 0

    def json(self, name: str) -> Any:
        """Return the parsed JSON of a variable; UserError if it is invalid."""
        try:
            return json.loads(self.env[name])
        except (ValueError, RecursionError):
            raise UserError(f"{name} is {self.env[name][:80]!r}: JSON was expected") from None


def require_equal(name: str, value: Optional[int], other_name: str, other_value: int) -> None:
    """Raise UserError unless `value` is None or equal to `other_value`."""
    if value is not None and value != other_value:
        raise UserError(
            f"{name} is {value} but {other_name} is {other_value}: they contradict each other; give one "
            "of them"
        )


def process(platform: str, rule: str, rank: int, size: int, local_rank: int, local_size: int, node_rank: int,
            master: Optional[str] = None, port: Optional[int] = None) -> World:  # fmt: skip
    """Return the place of a process whose launcher starts one process per worker."""
    nodes = max(1, size // max(1, local_size))
    return World(
        platform,
        rule,
        "process",
        node_rank,
        nodes,
        local_rank,
        local_size,
        rank,
        size,
        master or "",
        port or 0,
    )


def node(context: LaunchContext, platform: str, rule: str, node_rank: int, nodes: int,
         master: Optional[str] = None, port: Optional[int] = None, promised: int = 0) -> World:  # fmt: skip
    """Return a node's place. --nproc_per_node unset: at most one worker per GPU; without GPUs,
    NPROC_PER_NODE or 1."""
    if nodes > 1 and not master:
        raise UserError(
            f"{rule}: {nodes} nodes but no master address; set MASTER_ADDR to the first node, alike on "
            "every node"
        )
    workers = context.args.nproc_per_node
    local_rank = 0
    if workers is None:
        workers = context.number("NPROC_PER_NODE") or promised or context.gpus
        workers = (min(workers, context.gpus) if context.gpus else context.number("NPROC_PER_NODE")) or 1
    elif workers == 1 and context.gpus:  # the user starts one process per GPU, and each counts as a node
        local_rank = (
            context.args.local_rank if context.args.local_rank is not None else node_rank % context.gpus
        )
    ranks = (local_rank, workers, node_rank * workers, nodes * workers)
    return World(platform, rule, "node", node_rank, nodes, *ranks, master or "", port or 0, promised)
