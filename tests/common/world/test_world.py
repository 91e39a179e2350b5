"""One row for every platform and every trap: what it sets, and where that puts the process."""

import os
import subprocess
import types

import pytest

from common import world
from common.errors import UserError
from common.world import folders, rules
from tests.tools.worlds import MODELARTS, MPI, SRUN, TORCHRUN, resolve

SAGEMAKER = {
    "SM_HOSTS": '["algo-1", "algo-10", "algo-2"]',
    "SM_CURRENT_HOST": "algo-2",
    "SM_NUM_GPUS": "4",
    "MASTER_PORT": "7777",
}
VERTEX = {
    "CLUSTER_SPEC": '{"cluster": {"workerpool0": ["a-0:2222"], "workerpool1": ["b-0:2222", "b-1:2222"]}, "task": {"type": "workerpool1", "index": 1}, "environment": "cloud"}'
}
KUBEFLOW = {
    "PET_NNODES": "2",
    "PET_NODE_RANK": "1",
    "PET_NPROC_PER_NODE": "4",
    "PET_MASTER_ADDR": "m",
    "PET_MASTER_PORT": "23456",
    "RANK": "1",
    "WORLD_SIZE": "8",
}
PAI = {"RANK": "1", "WORLD_SIZE": "2", "NPROC_PER_NODE": "8", "MASTER_ADDR": "dlc-master-0", "MASTER_PORT": "23456"}
ARGS = {"init_method": "tcp://10.0.0.1:6666", "rank": 1, "world_size": 2}


# what | arguments | environment | GPUs | platform, level, node_rank/num_nodes, local_rank/local_world_size, rank/world_size, master
GOOD = [
    ("plain", {}, {}, 0, "plain node 0/1 0/1 0/1 127.0.0.1:29500"),
    ("plain, 4 GPUs", {}, {}, 4, "plain node 0/1 0/4 0/4 127.0.0.1:29500"),
    ("ModelArts arguments", ARGS, {}, 8, "modelarts node 1/2 0/8 8/16 10.0.0.1:6666"),
    ("ModelArts arguments on CPU", ARGS, {}, 0, "modelarts node 1/2 0/1 1/2 10.0.0.1:6666"),
    ("ModelArts, one node, only init_method", {"init_method": "tcp://h:1"}, {"MA_NUM_GPUS": "8"}, 8, "modelarts node 0/1 0/8 0/8 h:1"),
    ("ModelArts, one node without init_method", {"world_size": 1}, {}, 2, "modelarts node 0/1 0/2 0/2 127.0.0.1:29500"),
    ("ModelArts, rank from the environment", {"init_method": "tcp://h:1", "world_size": 2}, {"VC_TASK_INDEX": "1"}, 0, "modelarts node 1/2 0/1 1/2 h:1"),
    ("ModelArts, IPv6 master", {**ARGS, "init_method": "tcp://[fe80::1]:29400"}, {}, 0, "modelarts node 1/2 0/1 1/2 fe80::1:29400"),
    ("ModelArts, one process per GPU by hand", {**ARGS, "rank": 3, "world_size": 4, "nproc_per_node": 1}, {}, 2, "modelarts node 3/4 1/1 3/4 10.0.0.1:6666"),
    ("ModelArts own image", {}, MODELARTS, 8, "modelarts node 1/2 0/8 8/16 job-worker-0.job:6666"),
    ("ModelArts own image, index meaningless on one node", {}, {"MA_NUM_HOSTS": "1", "VC_TASK_INDEX": "3"}, 0, "modelarts node 0/1 0/1 0/1 127.0.0.1:6666"),
    ("ModelArts route planning", {}, {**MODELARTS, "RANK_AFTER_ACC": "0"}, 0, "modelarts node 0/2 0/1 0/2 job-worker-0.job:6666"),
    ("ModelArts says 8 cards, torch sees 4", {}, MODELARTS, 4, "modelarts node 1/2 0/4 4/8 job-worker-0.job:6666"),
    ("PAI-DLC: RANK counts nodes", {}, PAI, 8, "pai-dlc node 1/2 0/8 8/16 dlc-master-0:23456"),
    ("Baidu AIHC", {}, {**PAI, "AIHC_JOB_NAME": "j"}, 8, "baidu-aihc node 1/2 0/8 8/16 dlc-master-0:23456"),
    ("Volcengine", {}, {"MLP_ROLE_INDEX": "1", "MLP_WORKER_NUM": "2", "MLP_WORKER_GPU": "8", "MLP_WORKER_0_HOST": "w0", "MLP_WORKER_0_PORT": "2222"}, 8,
     "volcengine node 1/2 0/8 8/16 w0:2222"),
    ("SageMaker: place in the list, not the number", {}, SAGEMAKER, 4, "sagemaker node 2/3 0/4 8/12 algo-1:7777"),
    ("SageMaker SDK v3", {}, {"SM_HOST_COUNT": "2", "SM_CURRENT_HOST_RANK": "1", "SM_MASTER_ADDR": "algo-1", "SM_MASTER_PORT": "7777"}, 1, "sagemaker node 1/2 0/1 1/2 algo-1:7777"),
    ("SageMaker torch_distributed", {}, {**SAGEMAKER, **TORCHRUN}, 2, "torchrun process 1/2 1/2 3/4 n0:1234"),
    ("SageMaker MPI", {}, {**SAGEMAKER, **MPI}, 2, "openmpi process 1/2 1/2 3/4 algo-1:7777"),
    ("Azure ML", {}, {"AZUREML_RUN_ID": "r", "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "NODE_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "6105"}, 2,
     "azureml process 1/2 1/2 3/4 a:6105"),
    ("Azure ML, one process per node", {}, {"AZUREML_RUN_ID": "r", "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "NODE_RANK": "0", "MASTER_ADDR": "a"}, 0,
     "azureml process 0/2 0/1 0/2 a:29500"),
    ("Azure ML MPI: NODE_RANK is 0 everywhere", {}, {**MPI, "NODE_RANK": "0", "AZ_BATCH_MASTER_NODE": "10.0.0.4:6000"}, 2, "openmpi process 1/2 1/2 3/4 10.0.0.4:29500"),
    ("Vertex AI", {}, VERTEX, 8, "vertex node 2/3 0/8 16/24 a-0:2222"),
    ("Vertex AI, RANK counts replicas", {}, {**VERTEX, "RANK": "2", "WORLD_SIZE": "3", "MASTER_ADDR": "m", "MASTER_PORT": "1"}, 8, "vertex node 2/3 0/8 16/24 m:1"),
    ("Vertex AI, empty spec", {}, {"CLUSTER_SPEC": "{}"}, 0, "vertex node 0/1 0/1 0/1 127.0.0.1:29500"),
    ("Kubeflow 1: RANK is the pod, WORLD_SIZE the processes", {}, KUBEFLOW, 4, "kubeflow node 1/2 0/4 4/8 m:23456"),
    ("Kubeflow 1: fewer processes than GPUs", {}, KUBEFLOW, 8, "kubeflow node 1/2 0/4 4/8 m:23456"),
    ("Kubeflow Trainer 2: only PET_*, nproc auto", {}, {**{k: v for k, v in KUBEFLOW.items() if k.startswith("PET")}, "PET_NPROC_PER_NODE": "auto"}, 2,
     "kubeflow node 1/2 0/2 2/4 m:23456"),
    ("an indexed Job of Kubernetes", {}, {"JOB_COMPLETION_INDEX": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "run-0.run", "NPROC_PER_NODE": "4"}, 8, "kubernetes node 1/2 0/4 4/8 run-0.run:29500"),
    ("an index that numbers jobs of their own", {}, {"JOB_COMPLETION_INDEX": "3"}, 2, "plain node 0/1 0/2 0/2 127.0.0.1:29500"),
    ("torchrun inside a Kubeflow pod", {}, {**KUBEFLOW, **TORCHRUN}, 2, "torchrun process 1/2 1/2 3/4 n0:1234"),
    ("Volcano pytorch plugin", {}, {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "m", "MASTER_PORT": "23456", "VC_TASK_INDEX": "0"}, 0, "volcano node 1/2 0/1 1/2 m:23456"),
    ("Volcano env plugin, one task", {}, {"VC_TASK_INDEX": "1", "VC_WORKER_HOSTS": "w-0.j,w-1.j"}, 0, "volcano node 1/2 0/1 1/2 w-0.j:29500"),
    ("srun, one task per GPU", {}, SRUN, 4, "slurm process 1/2 1/4 5/8 gpu07:20077"),
    ("srun, uneven tasks", {}, {**SRUN, "SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_TASKS_PER_NODE": "2,1", "SLURM_PROCID": "2", "SLURM_LOCALID": "0"}, 0,
     "slurm process 1/3 0/1 2/3 gpu07:20077"),
    ("srun, one task per node", {}, {**SRUN, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_PROCID": "1", "SLURM_LOCALID": "0"}, 4,
     "slurm node 1/2 0/4 4/8 gpu07:20077"),
    ("SLURM batch script: one process", {}, {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_JOB_NUM_NODES": "2"}, 0, "slurm node 0/1 0/1 0/1 127.0.0.1:29500"),
    ("Open MPI: NODE_RANK is not the node", {}, {**MPI, "MASTER_ADDR": "h0"}, 2, "openmpi process 1/2 1/2 3/4 h0:29500"),
    ("Open MPI on one node", {}, {**MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "3"}, 4, "openmpi process 0/1 3/4 3/4 127.0.0.1:29500"),
    ("Open MPI with one process", {}, {**MPI, **dict.fromkeys(["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"], "0"), **dict.fromkeys(["OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"], "1")}, 4,
     "openmpi process 0/1 0/1 0/1 127.0.0.1:29500"),
    ("torchrun", {}, TORCHRUN, 2, "torchrun process 1/2 1/2 3/4 n0:1234"),
    ("torchrun under a console that appends its arguments", ARGS, TORCHRUN, 2, "torchrun process 1/2 1/2 3/4 n0:1234"),
    ("torch.distributed.launch", {"local_rank": 1}, TORCHRUN, 2, "torchrun process 1/2 1/2 3/4 n0:1234"),
    ("ModelArts arguments beside a RANK that agrees", ARGS, {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, 0, "modelarts node 1/2 0/1 1/2 10.0.0.1:6666"),
    ("ModelArts arguments beside a WORLD_SIZE of processes", ARGS, {"RANK": "8", "WORLD_SIZE": "16", "MASTER_ADDR": "a"}, 8, "modelarts node 1/2 0/8 8/16 10.0.0.1:6666"),
    ("NPROC_PER_NODE on CPU", {}, {"NPROC_PER_NODE": "2"}, 0, "plain node 0/1 0/2 0/2 127.0.0.1:29500"),
    ("--nproc_per_node beats NPROC_PER_NODE", {"nproc_per_node": 3}, PAI, 8, "pai-dlc node 1/2 0/3 3/6 dlc-master-0:23456"),
]  # fmt: skip


@pytest.mark.parametrize("what, args, env, gpus, expected", GOOD, ids=[row[0] for row in GOOD])
def test_where_the_process_is(what, args, env, gpus, expected):
    w = resolve(args, env, gpus)
    found = f"{w.platform} {w.level} {w.node_rank}/{w.num_nodes} {w.local_rank}/{w.local_world_size} {w.rank}/{w.world_size} {w.master_addr}:{w.master_port}"
    assert found == expected
    assert w.rule


ELASTIC = "to take in a node later, set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun"


@pytest.mark.parametrize(
    "launcher, env, said",
    [
        ("torchrun --nnodes=1:4 --nproc_per_node 2 jobs/train_ddp.py", {}, True),
        ("python -m torch.distributed.run --nnodes 2:3 jobs/train_ddp.py", {}, True),
        ("python -m torch.distributed.run jobs/train_ddp.py", {"PET_NNODES": "1:4"}, True),
        ("torchrun --nnodes=1:4 jobs/train_ddp.py", {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}, False),
        ("torchrun --nnodes=2 jobs/train_ddp.py", {}, False),
        ("torchrun --nnodes=2:2 jobs/train_ddp.py", {}, False),
        ("torchrun --standalone jobs/train_ddp.py", {}, False),
    ],
)
def test_an_elastic_torchrun_is_told_how_it_takes_in_a_node_later(launcher, env, said):
    place = resolve({}, {**TORCHRUN, **env}, 2, launcher=launcher)
    assert place.platform == "torchrun" and (ELASTIC in place.rule) == said


def test_one_node_is_not_1_nodes():
    args = types.SimpleNamespace(job="train", world=resolve({}, {**TORCHRUN, "RANK": "1", "WORLD_SIZE": "2"}, 2))
    with pytest.raises(UserError, match=r"^1 node with 2 processes in all were started"):
        world.require_one_device(args)


def test_the_tasks_of_a_node_are_those_that_slurm_states_for_it():
    assert [rules.slurm_tasks_on("2(x2),1", node) for node in range(4)] == [2, 2, 1, None]


def test_volcano_with_two_tasks_goes_by_the_host_name():
    env = {"VC_TASK_INDEX": "0", "VC_MASTER_HOSTS": "j-master-0.j", "VC_WORKER_HOSTS": "j-worker-0.j,j-worker-1.j"}
    assert resolve({}, env, hostname="j-worker-0").node_rank == 1
    assert resolve({}, env, hostname="j-master-0").node_rank == 0
    more = {**env, "VC_AGENT_HOSTS": "j-agent-0.j"}
    nodes = [resolve({}, more, hostname=f"j-{name}").node_rank for name in ("master-0", "agent-0", "worker-0", "worker-1")]
    assert nodes == [0, 1, 2, 3], "the master is node 0, the others follow by their names"
    with pytest.raises(UserError, match="elsewhere"):
        resolve({}, env, hostname="elsewhere")


@pytest.mark.parametrize(
    "args, env, words",
    [
        ({**ARGS, "world_size": 3}, TORCHRUN, ["--world_size is 3", "WORLD_SIZE / LOCAL_WORLD_SIZE is 2"]),
        ({**ARGS, "rank": 0}, TORCHRUN, ["--rank is 0", "is 1"]),
        (ARGS, {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, ["--rank is 1", "RANK is 0"]),
        (ARGS, {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "a"}, ["--world_size is 2", "WORLD_SIZE is 3"]),
        ({**ARGS, "world_size": 1, "rank": 0}, {"RANK": "1", "WORLD_SIZE": "2"}, ["--world_size is 1", "WORLD_SIZE is 2"]),
        ({"local_rank": 0}, TORCHRUN, ["--local_rank is 0", "LOCAL_RANK is 1"]),
        ({**ARGS, "world_size": 4}, MODELARTS, ["--world_size is 4", "MA_NUM_HOSTS is 2"]),
        ({**ARGS, "rank": 2}, {}, ["node rank 2", "number of nodes, 2"]),
        ({"world_size": 2, "init_method": "tcp://h:1"}, {}, ["--world_size 2 without --rank"]),
        ({"world_size": 2, "rank": 0}, {}, ["without --init_method"]),
        ({**ARGS, "init_method": "10.0.0.1:6666"}, {}, ["10.0.0.1:6666", "tcp://HOST:PORT"]),
        ({**ARGS, "init_method": "tcp://h:99999"}, {}, ["tcp://HOST:PORT"]),
        ({}, {**MODELARTS, "VC_TASK_INDEX": "5"}, ["rank"]),
        ({}, {**KUBEFLOW, "RANK": "0"}, ["RANK is 0", "PET_NODE_RANK is 1"]),
        ({}, {"PET_NNODES": "1:4", "PET_NODE_RANK": "0"}, ["1:4", "torchrun"]),
        ({}, {"RANK": "x", "WORLD_SIZE": "2", "MASTER_ADDR": "m"}, ["RANK is 'x'", "whole number"]),
        ({}, {"RANK": "0", "WORLD_SIZE": "2"}, ["no master address"]),
        ({}, MPI, ["MASTER_ADDR"]),
        ({}, {**SAGEMAKER, "SM_CURRENT_HOST": "algo-7"}, ["algo-7", "SM_HOSTS"]),
        ({}, {"CLUSTER_SPEC": "{"}, ["CLUSTER_SPEC", "JSON"]),
        ({}, {"CLUSTER_SPEC": "[" * 200_000}, ["CLUSTER_SPEC", "JSON"]),
        ({}, {**VERTEX, "RANK": "1", "WORLD_SIZE": "3"}, ["RANK is 1", "is 2"]),
    ],
)
def test_a_contradiction_is_refused_naming_both_values(args, env, words):
    with pytest.raises(UserError) as refused:
        resolve(args, env, 8)
    assert all(word in str(refused.value) for word in words), refused.value


def test_job_id_and_restarts():
    w = resolve({}, {**MODELARTS, "MA_SCHEDULE_CNT": "2", "MA_PROC_START_CNT": "3"})
    assert (w.job_id, w.restart_count, w.gpus_promised) == ("job", 3, 8)


@pytest.mark.parametrize(
    "env",
    [
        MODELARTS,
        {**TORCHRUN, "ANYRANK_PROMISED": "8"},  # a worker whose parent was told by the platform
        {**SRUN, "SLURM_GPUS_ON_NODE": "8"},
    ],
    ids=["a node", "a worker", "a task of SLURM"],
)
def test_what_a_platform_promises_is_known_to_every_process(env):
    assert [resolve({}, env, gpus).gpus_promised for gpus in (0, 8)] == [8, 8]


@pytest.mark.parametrize(
    "argv, env, expected",
    [
        ({}, {}, (None, "output_dir/train", "output_dir/train/checkpoints", "output_dir/train/tensorboard")),
        (
            {"output_dir": "/o", "data_url": "/d"},
            {"SM_MODEL_DIR": "/opt/ml/model"},
            ("/d", "/o", "/o/checkpoints", "/o/tensorboard"),
        ),
        ({}, {"data_url": "/in", "train_url": "/out"}, ("/in", "/out", "/out/checkpoints", "/out/tensorboard")),
        (
            {},
            {"SM_CHANNEL_TRAINING": "/c", "SM_CHANNEL_AAA": "/a", "SM_MODEL_DIR": "/m"},
            ("/c", "/m", "/opt/ml/checkpoints", "/opt/ml/output/tensorboard"),
        ),
        (
            {},
            {"SM_CHANNEL_CIFAR": "/c"},
            ("/c", "output_dir/train", "output_dir/train/checkpoints", "output_dir/train/tensorboard"),
        ),
        (
            {},
            {
                "PAI_INPUT_TRAIN": "/i",
                "PAI_OUTPUT_MODEL": "/m",
                "PAI_OUTPUT_CHECKPOINTS": "/k",
                "PAI_OUTPUT_TENSORBOARD": "/t",
            },
            ("/i", "/m", "/k", "/t"),
        ),
        (
            {},
            {
                "AIP_MODEL_DIR": "gs://b/model/",
                "AIP_CHECKPOINT_DIR": "gs://b/k/",
                "AIP_TENSORBOARD_LOG_DIR": "gs://b/t/",
            },
            (None, "/gcs/b/model/", "/gcs/b/k/", "/gcs/b/t/"),
        ),
        ({}, {"AIHC_TENSORBOARD_LOG_PATH": "/t", "output_dir": "/o"}, (None, "/o", "/o/checkpoints", "/t")),
    ],
)
def test_where_a_job_reads_and_writes(argv, env, expected):
    args = types.SimpleNamespace(**{"data_url": None, "input_dir": None, "output_dir": None, "job": "train", **argv})
    found = folders.resolve(args, env)
    assert (found["data_url"], found["output_dir"], found["checkpoint_dir"], found["tensorboard_dir"]) == expected


def test_an_address_is_read_from_and_a_bucket_written_through_a_folder_of_this_machine():
    args = types.SimpleNamespace(data_url="obs://b/x", input_dir=None, output_dir="s3://bucket/runs/7/", job="train")
    found = folders.resolve(args, {"PAI_OUTPUT_CHECKPOINTS": "/k"})
    assert found["data_url"] == "obs://b/x" and found["output_url"] == "s3://bucket/runs/7/"
    assert found["checkpoint_dir"] == "output_dir/s3/bucket/runs/7/checkpoints"


@pytest.mark.parametrize(
    "argv, env, words",
    [
        ({"data_url": "ftp://h/x"}, {}, "give a folder, or an address that begins with s3://, obs://, oss://, https://"),
        ({"output_dir": "https://h/x"}, {}, "give a folder, or an address that begins with s3://, obs://, oss://"),
        ({}, {"PAI_OUTPUT_CHECKPOINTS": "oss://b/k"}, "checkpoint folder is oss://b/k: give a folder, no address"),
        ({"output_dir": "S3://bkt/x"}, {}, "give a folder, or an address that begins with s3://"),
        ({"output_dir": "s3:/bkt/x"}, {}, "give a folder, or an address that begins with s3://"),
    ],
)
def test_an_address_that_cannot_be_used_is_refused(argv, env, words):
    args = types.SimpleNamespace(**{"data_url": None, "input_dir": None, "output_dir": None, "job": "train", **argv})
    with pytest.raises(UserError, match=words):
        folders.resolve(args, env)


def test_the_command_line_of_a_launcher_need_not_be_utf_8(monkeypatch):
    words = ["sh", "-c", "echo runs; read line", "torchrun", "--nnodes=1:4", os.fsdecode(b"odd\xff")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as launcher:
        assert launcher.stdout.readline() == b"runs\n"  # before, the kernel may show no command line
        monkeypatch.setattr(os, "getppid", lambda: launcher.pid)
        args = dict.fromkeys(("init_method", "rank", "world_size", "local_rank", "nproc_per_node"))
        assert ELASTIC in world.find_place(types.SimpleNamespace(**args, enable_gpu=False), TORCHRUN).rule


@pytest.mark.parametrize(
    "job, words", [("train_amp", "start train_ddp.py instead"), ("mine", "add the lines of docs/your_script.md, On every GPU")]
)
def test_a_job_of_one_device_that_was_started_as_several_says_what_to_do(job, words):
    args = types.SimpleNamespace(
        job=job, world=types.SimpleNamespace(num_nodes=1, level="process", world_size=2, platform="torchrun", rule="RANK")
    )
    with pytest.raises(UserError, match=f"but {job}.py trains on one device: {words}"):
        world.require_one_device(args)
