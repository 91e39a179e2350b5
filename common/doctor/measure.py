"""The doctor's measurements of a job, in a few seconds: its loader, its steps, the network between its nodes."""

import argparse
import os
import time
from collections.abc import Generator
from typing import Any

import torch
from torch import distributed

from common import devices
from common.checkpoints import checkpoint
from common.checkpoints.weights import evaluated_weights
from common.doctor.checks import PREFETCHED
from common.ranks.collectives import rank_and_size, reduce

LOADER_SECONDS, MODEL_SECONDS = 1.0, 1.5  # of measuring
HANG_SECONDS = 120  # for both together; after that the job is taken to hang
MOST_STEPS = 50
SMALL, LARGE = 256 << 10, 16 << 20  # bytes of an all-reduce; the large one is left out on a slow network
ALL_REDUCES = 3


def time_loader(loader: Any, workers: int) -> tuple[Any, float]:
    """Return (a batch, the seconds to load one on the slowest rank), measured once the prefetched batches are used up."""
    prefetched, batches = 1 + PREFETCHED * workers, _endless(loader)
    for _ in range(prefetched):
        batch = next(batches)
    done, began = 0, time.monotonic()
    while not done or time.monotonic() - began < LOADER_SECONDS:
        next(batches)
        done += 1
    return batch, _slowest((time.monotonic() - began) / done)


def _endless(loader):
    while True:
        yield from loader


def time_steps(run: Any, batch: Any) -> Generator[Any, None, float]:
    """Yield the batch for a few steps, equally many on all ranks; return the seconds of a step on the slowest rank."""
    steps = 2
    for warm in (False, True):
        devices.synchronize(run.device)
        began = time.monotonic()
        for _ in range(steps):
            yield batch
        devices.synchronize(run.device)
        seconds = _slowest((time.monotonic() - began) / steps)
        if not warm:
            steps = max(1, min(MOST_STEPS, int(MODEL_SECONDS / seconds)))
    return seconds


def _slowest(seconds):
    return seconds if rank_and_size()[1] == 1 else reduce([seconds], "MAX")[0]


def all_reduce_rate(device: torch.device) -> float:
    """Return the bytes per second that the slowest rank sends, and also receives, in an all-reduce."""
    ranks = distributed.get_world_size()
    for length in (SMALL, LARGE):
        tensor = torch.zeros(length // 4, device=device)
        for times in (1, ALL_REDUCES):  # the first one connects the ranks
            began = time.monotonic()
            for _ in range(times):
                distributed.all_reduce(tensor)
            devices.synchronize(device)
        seconds = _slowest((time.monotonic() - began) / ALL_REDUCES)
        if seconds > 0.1:
            break
    return 2 * (ranks - 1) / ranks * length / seconds


def steps_left(args: argparse.Namespace, sampler: Any) -> int:
    """Return the number of steps until the end of the run; with --resume auto, from its newest checkpoint."""
    steps = args.epochs * (sampler.samples_per_epoch // sampler.global_batch)
    done = checkpoint.numbers(args.checkpoint_dir) if args.resume == "auto" else []
    return max(0, min(steps, args.max_steps or steps) - (done[-1] // sampler.global_batch if done else 0))


def room_to_save(run: Any) -> int:
    """Return the bytes to keep free for saving: --keep + 2 checkpoints and weights, less the checkpoints that are there."""
    state, folder = run.state(), run.args.checkpoint_dir
    need = (run.args.keep + 2) * (checkpoint.size_of(state) + checkpoint.size_of(evaluated_weights(state)))
    files = [checkpoint.path_of(folder, number) for number in checkpoint.numbers(folder)]
    return max(0, need - sum(os.path.getsize(path) for path in files if os.path.exists(path)))
