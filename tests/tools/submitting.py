"""What the tests of launch submit ask for."""

import dataclasses

from launch.submit.command import PLATFORMS
from launch.submit.request import REMOTE, Request

REMOTE_PLATFORMS = {name: PLATFORMS[name] for name in REMOTE}


SHARED = {
    "job": "jobs/train_ddp.py",
    "arguments": ("--epochs", "2", "--lr=0.1"),
    "name": "run-7",
    "nodes": 2,
    "gpus": 8,
    "env": ("NCCL_DEBUG=INFO",),
    "hours": 12.0,
}


OWN = {
    "modelarts": {"region": "cn-north-4", "flavor": "modelarts.p3.large", "engine": "pytorch_2.1.0-cuda_12.1-py_3.10.6-ubuntu_22.04-x86_64", "pool": "pool-1", "code_url": "obs://bkt/code", "data_url": "obs://bkt/cifar/", "output_url": "obs://bkt/runs/7"},
    "pai-dlc": {"region": "cn-hangzhou", "flavor": "ecs.gn7i", "image": "registry/torch:2", "workspace": "42", "code_url": "oss://bkt/code", "data_url": "oss://bkt/cifar/", "output_url": "oss://bkt/runs/7"},
    "sagemaker": {"region": "eu-west-1", "flavor": "ml.p4d.24xlarge", "image": "registry/torch:2", "role": "arn:aws:iam::123456789012:role/train", "code_url": "s3://bkt/code", "data_url": "s3://bkt/cifar/", "output_url": "s3://bkt/runs/7"},
    "kubernetes": {"image": "registry/torch:2", "code_url": "/mnt/code", "data_url": "/mnt/cifar", "output_url": "/mnt/runs/7", "volumes": ("shared:/mnt",), "queue": "team"},
    "kubeflow": {"image": "registry/torch:2", "code_url": "s3://bkt/code", "data_url": "/mnt/cifar", "output_url": "/mnt/runs/7", "volumes": ("shared:/mnt",), "secret": "keys"},
    "volcano": {"hours": None, "image": "registry/torch:2", "code_url": "/mnt/code", "data_url": "/mnt/cifar", "output_url": "/mnt/runs/7", "volumes": ("shared:/mnt",), "pool": "gold"},
    "slurm": {"pool": "gpu", "data_url": "/data/cifar", "output_url": "/data/runs/7"},
    "local": {},
}  # fmt: skip


def ask(platform, **changes):
    return Request(platform=platform, **{**SHARED, **OWN[platform], **changes})


def words_of(request):
    """The command line that asks for this."""
    given = {field.name: getattr(request, field.name) for field in dataclasses.fields(request) if field.metadata}
    words = []
    for name, value in given.items():
        for one in value if isinstance(value, tuple) else [value]:
            words += [f"--{name}", str(one)] if one is not None else []
    defaults = {field.name: field.default for field in dataclasses.fields(request) if field.metadata}
    kept = [pair for pair in zip(words[::2], words[1::2]) if pair[1] != str(defaults[pair[0][2:]])]
    return ["--platform", request.platform, request.job, *(word for pair in kept for word in pair), "--", *request.arguments]


TRAIN_JOB = {"runtime": "torch-distributed", "code_url": "/mnt/code", "secret": None}
