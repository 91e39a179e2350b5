"""The place of a process: its node and rank, the number of nodes and ranks, the platform, and the address of the master."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class World:
    """The place of a process. At level "node" its rank is that of the first of the local_world_size workers of its node."""

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
    gpus_promised: int = 0  # GPUs, NPUs: how many the platform says this node has; 0 when it says nothing
    job_id: str = ""
    restart_count: int = 0

    def owns_the_only(self, gpus: int) -> bool:
        """Whether these GPUs, all that a process sees, are its own: srun --gpus-per-task=1, or a wrapper around mpirun."""
        return gpus == 1 and self.level == "process" and self.platform in ("slurm", "openmpi", "ascend")
