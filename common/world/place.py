"""The place of a process: its node and rank, the number of nodes and ranks, the platform, and the address of the master."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class World:
    """The place of a process. At level "node", `rank` is that of the first of the node's local_world_size workers."""

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

    def owns_the_only(self, gpus: int) -> bool:
        """Whether the launcher seems to have given this process its own GPU or NPU (srun --gpus-per-task=1), of `gpus` seen."""
        return gpus == 1 and self.level == "process" and self.platform in ("slurm", "openmpi", "ascend")
