"""Where a process is, for arguments and variables of platforms."""

import types

from common import world

MODELARTS = {
    "MA_NUM_HOSTS": "2",
    "VC_WORKER_NUM": "2",
    "VC_TASK_INDEX": "1",
    "MA_NUM_GPUS": "8",
    "VC_WORKER_HOSTS": "job-worker-0.job,job-worker-1.job",
    "MA_VJ_NAME": "job",
}


TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "TORCHELASTIC_RUN_ID": "x",
    "MASTER_ADDR": "n0",
    "MASTER_PORT": "1234",
}


SRUN = {"SLURM_JOB_ID": "77", "SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "2", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
        "SLURM_STEP_NODELIST": "gpu[07-08],login1", "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}  # fmt: skip


MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "0",
}


def resolve(args, env, gpus=0, hostname="host", launcher=""):
    given = {"init_method": None, "rank": None, "world_size": None, "local_rank": None, "nproc_per_node": None, **args}
    return world.resolve(types.SimpleNamespace(**given), env, gpus, hostname, launcher)
