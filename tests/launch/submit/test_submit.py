"""Submissions as data: what each platform's request holds, which mistakes are refused, and what is run really runs."""

import argparse
import dataclasses
import datetime
import json
import os
import re
import sys

import pytest
import yaml

from launch.submit import command as submit
from launch.submit import main, request
from launch.submit.command import PLATFORMS, build_parser, new_lines
from launch.submit.platform import describe
from launch.submit.request import Request, mistakes
from launch.submit.secrets import secrets
from tests.tools.jobs import ROOT
from tests.tools.submitting import OWN, REMOTE_PLATFORMS, ask, words_of


def wrong(asked):
    platform = PLATFORMS[asked.platform]
    return [*mistakes(asked), *platform.mistakes(asked), *secrets(asked, platform.secrets)]


def at(body, path):
    """at({"a": [{"b": 1}]}, "a.0.b") == 1"""
    for word in path.split("."):
        body = body[int(word)] if isinstance(body, list) else body[word]
    return body


@pytest.mark.parametrize("platform", PLATFORMS)
def test_a_good_request_has_no_mistake(platform):
    assert wrong(ask(platform)) == []


# platform | what is asked for beside OWN | where it is in the request | what is there
GOOD = [
    ("modelarts", {}, "metadata.name", "run-7"),
    ("modelarts", {}, "algorithm.code_dir", "/bkt/code/"),
    ("modelarts", {"accelerator": "npu", "engine": "pytorch_2.7.1-cann_8.3.rc1-py_3.11-hce_2.0.2509-aarch64-snt9b", "flavor": "modelarts.bm.npu.8"}, "algorithm.environments", {"PYTHONUNBUFFERED": "1", "NCCL_DEBUG": "INFO"}),
    ("modelarts", {"accelerator": "npu", "engine": None, "image": "swr/torch-npu"}, "algorithm.environments.NPROC_PER_NODE", "8"),
    ("modelarts", {}, "algorithm.boot_file", "/bkt/code/jobs/train_ddp.py"),
    ("modelarts", {}, "algorithm.engine", {"engine_id": "pytorch_2.1.0-cuda_12.1-py_3.10.6-ubuntu_22.04-x86_64"}),
    ("modelarts", {}, "algorithm.parameters", [{"name": "epochs", "value": "2"}, {"name": "lr", "value": "0.1"}]),
    ("modelarts", {}, "algorithm.inputs.0", {"name": "data_url", "access_method": "parameter", "remote": {"obs": {"obs_url": "/bkt/cifar/"}}}),
    ("modelarts", {}, "algorithm.outputs.0.remote.obs.obs_url", "/bkt/runs/7/"),
    ("modelarts", {}, "algorithm.outputs.0.prefetch_to_local", True),
    ("modelarts", {"data_url": None}, "algorithm.inputs", []),
    ("modelarts", {}, "algorithm.environments", {"PYTHONUNBUFFERED": "1", "NPROC_PER_NODE": "8", "NCCL_DEBUG": "INFO"}),
    ("modelarts", {}, "metadata.annotations", {"fault-tolerance/job-retry-num": "3", "fault-tolerance/job-unconditional-retry": "true", "fault-tolerance/hang-retry": "true"}),
    ("modelarts", {}, "spec.resource", {"flavor_id": "modelarts.p3.large", "node_count": 2, "pool_id": "pool-1"}),
    ("modelarts", {}, "spec.auto_stop", {"time_unit": "HOURS", "duration": 12}),
    ("modelarts", {"log_url": "obs://bkt/log"}, "spec.log_export_path", {"obs_url": "/bkt/log/"}),
    ("modelarts", {"spot": True}, "spec.schedule_policy", {"preemptible": True}),
    ("modelarts", {"retries": 0}, "metadata", {"name": "run-7"}),
    ("modelarts", {"engine": None, "image": "swr/torch:2"}, "algorithm.engine", {"image_url": "swr/torch:2"}),
    ("modelarts", {"engine": None, "image": "swr/torch:2"}, "algorithm.command", "python -u /home/ma-user/modelarts/user-job-dir/code/jobs/train_ddp.py --epochs 2 --lr 0.1"),
    ("modelarts", {"engine": None, "image": "swr/torch:2"}, "algorithm.outputs.0.access_method", "env"),
    ("pai-dlc", {}, "JobSpecs", [{"Type": "Worker", "PodCount": 2, "Image": "registry/torch:2", "EcsSpec": "ecs.gn7i"}]),
    ("pai-dlc", {"spot": True}, "JobSpecs.0.SpotSpec", {"SpotStrategy": "SpotAsPriceGo"}),
    ("pai-dlc", {"flavor": None, "pool": "quota1"}, "JobSpecs.0.ResourceConfig", {"GPU": "8"}),
    ("pai-dlc", {"flavor": None, "pool": "quota1"}, "ResourceId", "quota1"),
    ("pai-dlc", {}, "JobType", "PyTorchJob"),
    ("pai-dlc", {}, "WorkspaceId", "42"),
    ("pai-dlc", {}, "UserCommand", "pip install -q -r /mnt/code/requirements.txt && exec python -u /mnt/code/jobs/train_ddp.py --epochs 2 --lr 0.1 --data_url /mnt/data --output_dir /mnt/output"),
    ("pai-dlc", {"arguments": ("--resume", "a b;c")}, "UserCommand", "pip install -q -r /mnt/code/requirements.txt && exec python -u /mnt/code/jobs/train_ddp.py --resume 'a b;c' --data_url /mnt/data --output_dir /mnt/output"),
    ("pai-dlc", {}, "DataSources.1", {"Uri": "oss://bkt.oss-cn-hangzhou-internal.aliyuncs.com/cifar/", "MountPath": "/mnt/data"}),
    ("pai-dlc", {}, "Settings.ErrorMonitoringArgs", "--enable-job-restart True --max-num-of-job-restart 3 --job-execution-mode Sync --enable-job-hang-detection True"),
    ("pai-dlc", {"retries": 0}, "Settings", {"TerminationGracePeriodSeconds": 60}),
    ("pai-dlc", {}, "JobMaxRunningTimeMinutes", 720),
    ("sagemaker", {}, "AlgorithmSpecification.ContainerEntrypoint", ["python", "/opt/ml/input/data/code/boot_sagemaker.py"]),
    ("sagemaker", {}, "AlgorithmSpecification.ContainerArguments", ["jobs/train_ddp.py"]),
    ("sagemaker", {}, "HyperParameters", {"epochs": "2", "lr": "0.1"}),
    ("sagemaker", {}, "InputDataConfig.1", {"ChannelName": "training", "DataSource": {"S3DataSource": {"S3DataType": "S3Prefix", "S3Uri": "s3://bkt/cifar/", "S3DataDistributionType": "FullyReplicated"}}}),
    ("sagemaker", {}, "CheckpointConfig", {"S3Uri": "s3://bkt/runs/7/checkpoints/", "LocalPath": "/opt/ml/checkpoints"}),
    ("sagemaker", {}, "ResourceConfig", {"InstanceType": "ml.p4d.24xlarge", "InstanceCount": 2, "VolumeSizeInGB": 100}),
    ("sagemaker", {}, "StoppingCondition", {"MaxRuntimeInSeconds": 43200}),
    ("sagemaker", {"spot": True}, "StoppingCondition", {"MaxRuntimeInSeconds": 43200, "MaxWaitTimeInSeconds": 129600}),
    ("sagemaker", {"spot": True}, "EnableManagedSpotTraining", True),
    ("sagemaker", {}, "RetryStrategy", {"MaximumRetryAttempts": 3}),
    ("sagemaker", {}, "Environment", {"PYTHONUNBUFFERED": "1", "NPROC_PER_NODE": "8", "NCCL_DEBUG": "INFO"}),
    ("kubeflow", {}, "kind", "PyTorchJob"),
    ("kubeflow", {}, "spec.nprocPerNode", "8"),
    ("kubeflow", {}, "spec.runPolicy", {"backoffLimit": 3, "cleanPodPolicy": "Running", "activeDeadlineSeconds": 43200}),
    ("kubeflow", {}, "spec.pytorchReplicaSpecs.Worker.replicas", 1),
    ("kubeflow", {}, "spec.pytorchReplicaSpecs.Master.restartPolicy", "OnFailure"),
    ("kubeflow", {"retries": 0}, "spec.pytorchReplicaSpecs.Master.restartPolicy", "Never"),
    ("kubeflow", {}, "spec.pytorchReplicaSpecs.Master.template.spec.terminationGracePeriodSeconds", 300),
    ("kubeflow", {}, "spec.pytorchReplicaSpecs.Master.template.spec.volumes.0", {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "65536Mi"}}),
    ("kubeflow", {}, "spec.pytorchReplicaSpecs.Master.template.spec.containers.0.command", ["python", "-u", "/code/jobs/train_ddp.py", "--epochs", "2", "--lr", "0.1", "--data_url", "/mnt/cifar", "--output_dir", "/mnt/runs/7"]),
    ("kubeflow", {}, "spec.pytorchReplicaSpecs.Master.template.spec.containers.0.resources.limits", {"nvidia.com/gpu": "8", "cpu": "32", "memory": "128Gi"}),
    ("kubeflow", {"cpus": 8, "memory": 64}, "spec.pytorchReplicaSpecs.Master.template.spec.containers.0.resources.requests", {"nvidia.com/gpu": "8", "cpu": "8", "memory": "64Gi"}),
    ("volcano", {"cpus": 8, "gpus": 0}, "spec.tasks.0.template.spec.containers.0.resources.limits", {"cpu": "8", "memory": "16Gi"}),
    ("pai-dlc", {"flavor": None, "pool": "quota1", "cpus": 8, "memory": 64}, "JobSpecs.0.ResourceConfig", {"GPU": "8", "CPU": "8", "Memory": "64Gi"}),
    ("kubeflow", {"gpus": 0, "cpus": 0, "memory": 0}, "spec.pytorchReplicaSpecs.Master.template.spec.containers.0.resources", {}),
    ("kubeflow", {}, "spec.pytorchReplicaSpecs.Master.template.spec.containers.0.envFrom", [{"secretRef": {"name": "keys"}}]),
    ("kubeflow", {"code_url": "obs://bkt/c", "region": "cn-north-4"}, "spec.pytorchReplicaSpecs.Master.template.spec.initContainers.0.env.5", {"name": "AWS_ENDPOINT_URL_S3", "value": "https://obs.cn-north-4.myhuaweicloud.com"}),
    ("kubeflow", {"runtime": "torch-distributed", "code_url": "/mnt/code", "secret": None}, "kind", "TrainJob"),
    ("kubeflow", {"runtime": "torch-distributed", "code_url": "/mnt/code", "secret": None}, "spec.runtimeRef", {"name": "torch-distributed"}),
    ("kubeflow", {"runtime": "torch-distributed", "code_url": "/mnt/code", "secret": None}, "spec.trainer.numProcPerNode", 8),
    ("kubeflow", {"runtime": "torch-distributed", "code_url": "/mnt/code", "secret": None}, "spec.trainer.command.2", "/mnt/code/jobs/train_ddp.py"),
    ("kubernetes", {}, "metadata.labels", {"kueue.x-k8s.io/queue-name": "team"}),
    ("kubernetes", {}, "spec.completionMode", "Indexed"),
    ("kubernetes", {}, "spec.backoffLimit", 6),
    ("kubernetes", {}, "spec.podFailurePolicy.rules.0", {"action": "FailJob", "onExitCodes": {"containerName": "pytorch", "operator": "In", "values": [2]}}),
    ("kubernetes", {}, "spec.podFailurePolicy.rules.1.action", "Ignore"),
    ("kubernetes", {"memory": 0}, "spec.template.spec.volumes.0.emptyDir", {"medium": "Memory"}),
    ("volcano", {"volumes": ("c:/mnt", "c:/data", "my.own:/own")}, "spec.tasks.0.template.spec.containers.0.volumeMounts.2", {"name": "claim-0", "mountPath": "/mnt"}),
    ("volcano", {"volumes": ("c:/mnt", "c:/data", "my.own:/own")}, "spec.tasks.0.template.spec.containers.0.volumeMounts.3", {"name": "claim-0", "mountPath": "/data"}),
    ("volcano", {"volumes": ("c:/mnt", "c:/data", "my.own:/own")}, "spec.tasks.0.template.spec.volumes.3", {"name": "claim-1", "persistentVolumeClaim": {"claimName": "my.own"}}),
    ("kubernetes", {}, "spec.template.spec.restartPolicy", "Never"),
    ("kubernetes", {"nodes": 1, "gpus": 0}, "spec.template.spec.containers.0.env.3", {"name": "WORLD_SIZE", "value": "1"}),
    ("volcano", {}, "spec.plugins.pytorch", ["--master=master", "--worker=worker", "--port=23456"]),
    ("volcano", {}, "spec.minAvailable", 2),
    ("volcano", {}, "spec.queue", "gold"),
    ("volcano", {}, "spec.maxRetry", 3),
    ("volcano", {"arguments": ("--min_nodes", "1")}, "spec.policies", [{"exitCode": 2, "action": "TerminateJob"}, {"event": "PodFailed", "action": "RestartPod"}, {"event": "PodEvicted", "action": "RestartPod"}]),
    ("volcano", {}, "spec.policies", [{"exitCode": 2, "action": "TerminateJob"}, {"event": "PodFailed", "action": "RestartJob"}, {"event": "PodEvicted", "action": "RestartJob"}]),
    ("volcano", {}, "spec.tasks.0.policies", [{"event": "TaskCompleted", "action": "CompleteJob"}]),
    ("volcano", {}, "spec.tasks.1.template.spec.restartPolicy", "Never"),
    ("volcano", {"retries": 0, "hours": 12.0}, "spec.tasks.1.template.spec.activeDeadlineSeconds", 43200),
]  # fmt: skip


@pytest.mark.parametrize("platform, changes, path, there", GOOD, ids=[f"{row[0]} {row[2]}" for row in GOOD])
def test_what_is_asked_for_stands_where_the_platform_reads_it(platform, changes, path, there):
    request = ask(platform, **changes)
    assert wrong(request) == []
    assert at(REMOTE_PLATFORMS[platform].build(request), path) == there


# platform | what is wrong | the one line that says so
OPTIONS = ",".join(f"o{number}" for number in range(100))
BAD = [
    ("kubeflow", {"output_url": None}, "kubeflow needs --output_url: where checkpoints and results go"),
    ("pai-dlc", {"output_url": None}, "pai-dlc needs --output_url: where checkpoints and results go"),
    ("slurm", {"arguments": ("--learning_rate", "3")}, "--learning_rate is no option of jobs/train_ddp.py: did you mean --lr?"),
    ("slurm", {"arguments": ("--quota", "3")}, "--quota is no option of jobs/train_ddp.py: leave it out, or let it pass with --ignore quota"),
    ("modelarts", {"nodes": 0}, "--nodes is 0: give 1 to 1000"),
    ("local", {"gpus": 17}, "--gpus is 17: give 0 to 16"),
    ("slurm", {"hours": 0.0}, "--hours is 0: give 0.1 to 672"),
    ("volcano", {"name": "Run_7"}, "--name is 'Run_7': give a lower-case letter"),
    ("kubeflow", {"name": "a" * 55}, "--name is 'aaa"),
    ("slurm", {"job": "jobs/none.py"}, "there is no job jobs/none.py"),
    ("slurm", {"job": "launch/pack.py"}, "launch/pack.py is not a job of this repository"),
    ("slurm", {"job": "jobs/../common/job.py"}, "is not a job of this repository"),
    ("modelarts", {"flavor": None}, "modelarts needs --flavor"),
    ("modelarts", {"output_url": None}, "modelarts needs --output_url"),
    ("modelarts", {"engine": "pytorch_2.7.1-cann_8.3.rc1-py_3.11-hce_2.0.2509-aarch64-snt9b"}, "--engine pytorch_2.7.1-cann_8.3.rc1-py_3.11-hce_2.0.2509-aarch64-snt9b is for NPUs: give --accelerator npu with it"),
    ("modelarts", {"flavor": "modelarts.bm.8snt9b"}, "--flavor modelarts.bm.8snt9b is for NPUs: give --accelerator npu with it"),
    ("modelarts", {"accelerator": "npu"}, "--engine pytorch_2.1.0-cuda_12.1-py_3.10.6-ubuntu_22.04-x86_64 is for GPUs: --accelerator npu needs an Ascend one"),
    ("modelarts", {"accelerator": "tpu"}, "--accelerator is 'tpu': give gpu or npu"),
    ("modelarts", {"engine": None}, "modelarts needs --engine, one of its own PyTorch images, or --image"),
    ("modelarts", {"image": "x"}, "give one of them"),
    ("modelarts", {"region": None}, "modelarts needs --region"),
    ("modelarts", {"retries": 4}, "modelarts starts a job again 3 times at most"),
    ("modelarts", {"hours": 1.5}, "modelarts counts whole hours"),
    ("modelarts", {"code_url": "s3://bkt/code"}, "--code_url is s3://bkt/code: modelarts reads and writes obs://BUCKET/FOLDER"),
    ("modelarts", {"data_url": "obs://bkt"}, "--data_url is obs://bkt: modelarts"),
    ("modelarts", {"env": ("A=$B",)}, "--env A: modelarts takes no $ in a value"),
    ("modelarts", {"role": "r"}, "--role is for sagemaker, not for modelarts: leave it out"),
    ("pai-dlc", {"flavor": None}, "pai-dlc needs --flavor"),
    ("pai-dlc", {"workspace": None}, "pai-dlc needs --workspace"),
    ("pai-dlc", {"region": None}, "pai-dlc needs --region"),
    ("pai-dlc", {"env": ("A=" + "x" * 70000,)}, "the request is larger than 65536 bytes"),
    ("sagemaker", {"flavor": "p4d.24xlarge"}, "give a type that begins with ml."),
    ("sagemaker", {"role": "train"}, "--role is train: give the role's ARN"),
    ("sagemaker", {"arguments": ("--resume", "x" * 2501)}, "--resume has 2501 characters: sagemaker takes 2500"),
    ("sagemaker", {"arguments": (*(f"--o{number}={number}" for number in range(100)), f"--ignore={OPTIONS}")}, "the job has 101 options: sagemaker takes 100"),
    ("kubeflow", {"image": None}, "kubeflow needs --image"),
    ("kubeflow", {"code_url": "code"}, "--code_url is code: give a folder of the pods that begins with /"),
    ("kubeflow", {"code_url": "obs://bkt/c"}, "--code_url is obs://bkt/c: give --region"),
    ("kubeflow", {"runtime": "torch-distributed"}, "a TrainJob takes neither code from a bucket nor --secret"),
    ("volcano", {"hours": 12.0}, "--hours is 12 and --retries is 3: volcano counts them anew in each start, 4 times: give --retries 0, or no --hours"),
    ("kubeflow", {"code_url": "s3://b/code"}, "--code_url is s3://b/code: the name of a bucket has 3 to 255 letters, digits, dots, hyphens and underscores"),
    ("slurm", {"data_url": "s3:///x"}, "--data_url is s3:///x: the name of a bucket has"),
    ("local", {"output_url": "obs://-a-/x"}, "--output_url is obs://-a-/x: the name of a bucket has"),
    ("volcano", {"volumes": ("shared",)}, "--volumes shared: give claim:/FOLDER"),
    ("volcano", {"runtime": "x"}, "--runtime is for kubeflow, not for volcano"),
    ("slurm", {"output_url": "ftp://host/x"}, "--output_url is ftp://host/x: give a folder or s3://, obs://, oss://"),
    ("slurm", {"code_url": "s3://bkt/code"}, "slurm needs a folder that every node sees"),
    ("slurm", {"pool": "gpu\n#SBATCH --uid=0"}, "--pool has a line end in it"),
    ("slurm", {"script_line": ("a\nb",)}, "--script_line has a line end in it"),
    ("slurm", {"cpus": 5000}, "--cpus is 5000: give 0 to 1024"),
    ("pai-dlc", {"cpus": 8}, "--flavor says which cores and memory a machine has: leave out --cpus and --memory"),
    ("volcano", {"output_url": "/runs/7"}, "--output_url /runs/7 is in no volume, so it is lost with the pod: give --volumes claim:/FOLDER, or a bucket"),
    ("volcano", {"volumes": ("shared:/mnt", "c:/scratch/")}, "--volumes: /scratch is a folder of the pod itself: mount the claim elsewhere"),
    ("kubeflow", {"runtime": "x", "code_url": "/mnt/code", "secret": None, "name": "a" * 46}, "a TrainJob takes 45 letters at most"),
    ("kubernetes", {"env": ("MYSQL_PWD=x",)}, "--env MYSQL_PWD looks like a secret, which the request would show: keep it in a Secret of the cluster"),
    ("volcano", {"queue": "team"}, "--queue is for kubernetes, kubeflow, not for volcano"),
    ("kubernetes", {"patch": "/none.yaml"}, "--patch /none.yaml cannot be read: [Errno 2] No such file"),
    ("modelarts", {"memory": 8}, "--memory is for pai-dlc, kubernetes, kubeflow, volcano, slurm, not for modelarts"),
    ("slurm", {"spot": True}, "--spot is for modelarts, pai-dlc, sagemaker, not for slurm"),
    ("local", {"arguments": ("--epochs",)}, "'--epochs' does not have the form --NAME VALUE"),
    ("local", {"arguments": ("2",)}, "'2' does not have the form --NAME VALUE"),
    ("local", {"arguments": ("--epochs", "1", "--epochs=2")}, "--epochs is given twice"),
    ("slurm", {"arguments": ("--epoch", "30")}, "--epoch is no option of jobs/train_ddp.py: did you mean --epochs?"),
    ("slurm", {"arguments": ("--weight-dekay", "0.1")}, "--weight-dekay is no option of jobs/train_ddp.py: did you mean --weight_decay?"),
    ("volcano", {"volumes": ("SHARED:/mnt",)}, "--volumes SHARED:/mnt: give claim:/FOLDER, a PersistentVolumeClaim (a-z, 0-9 and -)"),
    ("local", {"arguments": ("--world_size", "2")}, "--world_size is set by the platform: leave it out"),
    ("local", {"arguments": ("--train_url", "/x")}, "--train_url is among the job's options: give --output_url before the --"),
    ("local", {"arguments": ("--data_source", "/x")}, "--data_source is among the job's options: give --data_url before the --"),
    ("local", {"arguments": ("--hf_token", "x", "--ignore", "hf_token")}, "the job's --hf_token looks like a secret, which the request would show: export it in this shell"),
    ("slurm", {"env": ("AWS_SECRET_ACCESS_KEY=x",)}, "--env AWS_SECRET_ACCESS_KEY looks like a secret, which the request would show: export it in the shell that submits"),
    ("volcano", {"env": ("MYSQL_PWD=x",)}, "--env MYSQL_PWD looks like a secret, which the request would show: keep it in a Secret of the cluster"),
    ("modelarts", {"env": ("INDEX_URL=https://me:canary@host/simple",)}, "--env holds a user or a password (https://***@host/simple)"),
    ("sagemaker", {"arguments": ("--resume", "https://host/w.pt?X-Amz-Signature=canary")}, "the job's --resume is signed or holds a key (https://host/w.pt?***)"),
    ("pai-dlc", {"image": "https://me:canary@registry/torch:2"}, "--image holds a user or a password (https://***@registry/torch:2)"),
    ("slurm", {"script_line": ("export WANDB_API_KEY=canary",)}, "--script_line sets WANDB_API_KEY, which the request would show"),
    ("local", {"env": ("PET_NNODES=2",)}, "--env PET_NNODES is set by the platform: leave it out"),
    ("local", {"env": ("A",)}, "--env A: give NAME=VALUE"),
    ("local", {"env": ("A=b\nc",)}, "the value has a character that cannot be printed"),
]  # fmt: skip


@pytest.mark.parametrize("platform, changes, words", BAD, ids=[f"{row[0]} {row[2][:40]}" for row in BAD])
def test_each_mistake_is_one_line_of_its_own(platform, changes, words):
    lines = wrong(ask(platform, **changes))
    assert len(lines) == 1, lines
    assert words in lines[0] and "canary" not in lines[0]


def test_the_help_says_what_is_allowed():
    told = " ".join(submit.build_parser().format_help().split())
    for words in (
        *("after so many hours, 0.1 to 672", "how many machines, 1 to 1000", "0 to 16", "is started again, 0 to 30"),
        *("the role that the job runs as [needed by sagemaker]", "instead of a PyTorchJob [only kubeflow]"),
    ):
        assert words in told
    assert "[]" not in told


def test_blanks_around_the_value_of_a_variable_arrive():
    words = ["jobs/train.py", "--platform", "local", "--env", "A= b\t", "--env=C=-d ", "--nodes", "2"]
    options = submit.build_parser().parse_args(words)
    asked = submit.request_from(options, [], datetime.datetime(2026, 1, 1))
    assert asked.environment == {"A": " b\t", "C": "-d "} and asked.nodes == 2
    assert not wrong(asked)


@pytest.mark.parametrize("value", ["-y", "--epochs", "-0.5"])
def test_a_value_that_looks_like_an_option_arrives_as_a_value(value):
    asked = ask("slurm", arguments=(f"--weights={value}", "--lr", "0.1"))
    parser = argparse.ArgumentParser()
    parser.add_argument("--weights"), parser.add_argument("--lr"), parser.add_argument("--epochs")
    parsed = parser.parse_args(request.command(asked, "/code")[3:])
    assert (parsed.weights, parsed.lr, parsed.epochs) == (value, "0.1", None)


def test_several_mistakes_are_all_said():
    assert len(wrong(ask("modelarts", nodes=0, flavor=None, code_url="s3://bkt/code", env=("A",)))) == 4


def test_every_option_is_known_to_a_platform_and_needed_only_where_it_is_known():
    for field in dataclasses.fields(Request):
        if field.metadata:
            assert set(field.metadata["needed_by"]) <= set(field.metadata["used_by"]) <= set(PLATFORMS) - {"local"}, field.name


# --- The verb ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def nothing_known(monkeypatch, tmp_path):
    """A machine without credentials and without tools."""
    for name in [name for name in os.environ if name not in ("LANG", "TMPDIR")]:
        monkeypatch.delenv(name)
    for name, value in {"HOME": str(tmp_path), "PATH": "/nowhere", "AWS_EC2_METADATA_DISABLED": "true"}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("platform", REMOTE_PLATFORMS)
def test_without_a_credential_the_request_is_shown_and_nothing_sent(platform, nothing_known, capsys):
    assert main(words_of(ask(platform))) == 0
    printed, body = capsys.readouterr(), REMOTE_PLATFORMS[platform].build(ask(platform))
    if platform in request.CLUSTERS:
        assert list(yaml.safe_load_all(printed.out))[-1] == body
    else:
        assert (printed.out[:-1] if isinstance(body, str) else json.loads(printed.out)) == body
    assert printed.err == f"nothing is sent, because there is no credential: {REMOTE_PLATFORMS[platform].credentials}\n"


@pytest.mark.parametrize("platform", REMOTE_PLATFORMS)
def test_without_a_credential_nothing_can_be_sent(platform, nothing_known, capsys):
    assert main(["--dry_run", "false", *words_of(ask(platform))]) == 2
    assert capsys.readouterr() == ("", f"error: there is no credential: {REMOTE_PLATFORMS[platform].credentials}\n")


@pytest.mark.parametrize(
    "platform, env, package, extra",
    [
        ("modelarts", {"HUAWEICLOUD_SDK_AK": "x"}, "huaweicloudsdkmodelarts", "modelarts"),
        ("pai-dlc", {"ALIBABA_CLOUD_ACCESS_KEY_ID": "x"}, "alibabacloud_pai_dlc20201203", "pai-dlc"),
        ("kubeflow", {"KUBECONFIG": "x"}, "kubernetes", "kubernetes"),
    ],
)
def test_a_missing_sdk_is_one_line_that_names_its_extra(platform, env, package, extra, monkeypatch, capsys):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    for name in (package, "huaweicloudsdkcore.auth.provider", "alibabacloud_credentials.client"):
        monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    assert main(words_of(ask(platform))) == 2
    assert capsys.readouterr() == ("", f"error: {package} is not installed: pip install .[{extra}]\n")
    assert f'{extra} = ["{package}' in (ROOT / "pyproject.toml").read_text()


def test_mistakes_are_printed_one_to_a_line(capsys):
    assert main(["--platform", "slurm", "jobs/none.py", "--nodes", "0", "--name", "x\x1b[2J"]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("error: ") == printed.err.count("\n") == 3
    assert "\x1b" not in printed.err


def test_a_job_that_is_no_python_is_a_mistake(monkeypatch, tmp_path):
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "train.py").write_text("import torch\nfor\n")
    monkeypatch.setattr(request, "ROOT", tmp_path)
    (line,) = wrong(ask("slurm", job="jobs/train.py"))
    assert re.fullmatch(r"jobs/train.py is no Python: invalid syntax \(\S*train.py, line 2\)", line)


def test_neither_a_job_nor_one_to_stop_is_a_mistake(capsys):
    assert main(["--platform", "local"]) == 2
    assert capsys.readouterr().err == "error: give a job, such as jobs/train_ddp.py, or --stop JOB_ID\n"


def test_the_commands_of_the_table_of_platforms_are_requests_without_a_mistake():
    rows = re.findall(r"^\| [^|]+ \| `([a-z-]+ --[^`]+)` \|$", (ROOT / "docs" / "platforms.md").read_text(), re.MULTILINE)
    assert [row.split()[0] for row in rows] == ["modelarts", "pai-dlc", "sagemaker", "kubernetes", "slurm"]
    for row in rows:
        words = row.replace("ARN", OWN["sagemaker"]["role"]).split()
        options = submit.build_parser().parse_args(["jobs/train_ddp.py", "--nodes", "2", "--gpus", "8", "--platform", *words])
        assert wrong(submit.request_from(options, ["--epochs", "30"], datetime.datetime(2026, 1, 2))) == [], row


# --- What a platform answers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shown, lines, new",
    [
        ([], ["a"], ["a"]),
        (["a"], ["a", "b"], ["b"]),
        (["a", "b"], ["b", "c"], ["c"]),  # the platform gives the last two
        (["a", "a"], ["a", "a"], []),
        (["a"], [], []),
        (["a", "b"], ["x", "y"], ["x", "y"]),
    ],
)
def test_a_line_of_the_log_is_shown_once(shown, lines, new):
    assert new_lines(shown, lines) == new


def test_what_a_platform_says_is_one_line_without_a_secret():
    error = RuntimeError("no such key AKIA123\nsigned with wJalr")
    line = describe(error, {"AWS_ACCESS_KEY_ID": "AKIA123", "AWS_SECRET_ACCESS_KEY": "wJalr", "PATH": "/bin"})
    assert line == r"RuntimeError: no such key ***\nsigned with ***"


@pytest.mark.parametrize("word", ["--dry_run", "--dry-run", "--dry-run=yes"])
def test_a_yes_or_no_option_may_stand_alone_and_leaves_the_next_word(word):
    options = build_parser().parse_args([word, "jobs/train.py", "--platform", "slurm", "--output-url", "/runs/7"])
    assert (options.dry_run, options.job, options.output_url) == (True, "jobs/train.py", "/runs/7")
