"""What the observers of a run are told, made up (common/run/observers)."""

import argparse

import torch

from common.arguments import Input
from common.checkpoints.position import Position
from common.run.clock import PHASES
from common.run.observers import Facts
from common.run.plan import Plan, Results
from common.run.side_files import SideFiles
from datasets.sampler import EpochSampler

LINE = {"loss": 1.25, "lr": 0.05, "seconds_left": 64.0, "skipped": 0,
        "speed": {"images_per_s": 100.0, "waiting_for_data": 0.1, "transfer": 0.1, "compute": 0.8}}  # fmt: skip
EPOCH = {"is_complete": True, "metrics": {}, "scores": None, "skipped": 0}


def options(folder, **more):
    """Of a run of two epochs whose output is in `folder`."""
    given = {"epochs": 2, "max_steps": None, "run_epochs": None, "output_dir": str(folder), "tensorboard_dir": str(folder / "tensorboard"),
             "output_url": None, "checkpoints": True, "profile": False, "log_seconds": None, "print_freq": None, "track": None, "input": Input(), "lr": 0.1}  # fmt: skip
    return argparse.Namespace(**{**given, **more})


def observer(kind, folder, **ranks):
    return kind(options(folder), torch.device("cpu"), SideFiles(str(folder), **ranks))


def facts(folder, at=None, seconds=1.0):
    """At this position of it; an epoch has ten steps of 128 samples."""
    plan = Plan(options(folder), EpochSampler(1280, 128, seed=0), None, Position())
    reading = {**dict.fromkeys(PHASES, seconds), "training": 3 * seconds}
    return Facts(at or Position(samples_seen=640, total_steps=5, consumed=640), plan, Results("accuracy"), reading)
