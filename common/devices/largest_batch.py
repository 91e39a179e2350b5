"""--find_max_batch true: the largest --batch_size of which a few steps fit into the memory of one device.

Each size is tried by a process of its own: this job with that size, which ends after STEPS steps and saves
nothing. Sizes are doubled while they fit, and halved while they do not; then what lies between is halved.
"""

import argparse
import ctypes
import os
import signal
import subprocess
import sys
from typing import Any, Callable, Optional

import torch

from common import moments, progress
from common.devices.kinds import is_accelerator
from common.devices.work import synchronize
from common.errors import TooFewSamples, UserError

STEPS = 3
VARIABLE = "ANYRANK_TRIES_A_BATCH"  # set for a process that tries a size
# Exit codes of such a process, beside those of every job.
FITS = 70
NO_MEMORY = 71
TOO_FEW_SAMPLES = 72
PRECISION = 16  # what lies between is halved until it is below this fraction of a size
MARGIN = 16  # this fraction is left free: a larger picture or a library's buffer may come later
OUTCOMES = {FITS: "fits", NO_MEMORY: "does not fit", TOO_FEW_SAMPLES: "is more than the data have"}
PR_SET_PDEATHSIG = 1
ONE_PROCESS = (
    "--find_max_batch looks at one device's memory: start one process, without torchrun, on one node"
)


def find(args: argparse.Namespace) -> None:
    """Find the size, print it and exit.

    In a process that tries a size, prepare the arguments for it and return.
    """
    if VARIABLE in os.environ:
        _prepare_trial(args)
        return
    for option in ("doctor", "evaluate"):
        if vars(args)[option]:
            raise UserError(
                f"--find_max_batch takes steps of the training, and --{option} none: give one of them"
            )
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise UserError(ONE_PROCESS)
    size, next_code = largest(args.batch_size, _try_size)
    if next_code == TOO_FEW_SAMPLES and size:
        progress.say(f"done: --batch_size {size} fits, and the data have too few samples for a larger one")
    elif next_code == TOO_FEW_SAMPLES:
        raise UserError(
            "a step takes more samples than the data have, even with --batch_size 1: lower "
            "--total_batch or --shares"
        )
    elif size:
        progress.say(
            f"done: take --batch_size {with_margin(size)}: {size} is the largest of which {STEPS} steps "
            "fitted"
        )
    else:
        raise UserError(
            "not even --batch_size 1 fits into the memory of this device: take a smaller network or "
            "smaller images"
        )
    sys.exit(0)


def _try_size(size: int) -> int:
    """Run this job with a size, and return FITS, NO_MEMORY or TOO_FEW_SAMPLES.

    Exit as it did if it ended otherwise.
    """
    command = [sys.executable, *sys.argv, f"--batch_size={size}"]
    code = subprocess.run(command, env={**os.environ, VARIABLE: "1"}, stdout=subprocess.DEVNULL).returncode
    if code not in OUTCOMES:
        if code == 0:
            progress.say(f"error: with --batch_size {size} the job ended before its step {STEPS}")
        elif code < 0:
            progress.say(f"error: the process with --batch_size {size} was ended by signal {-code}")
        sys.exit(code if code > 0 else 1)
    progress.say(f"--batch_size {size} {OUTCOMES[code]}")
    return code


def largest(first_size: int, try_size: Callable[[int], int]) -> tuple[int, Optional[int]]:
    """Return (the largest size that fits, to within a PRECISIONth; 0 if none does, the code of the next
    larger one)."""
    fitting = 0
    too_large = 0
    next_code = None
    size = first_size
    while True:
        code = try_size(size)
        if code == FITS:
            fitting = size
        else:
            too_large = size
            next_code = code
        if too_large and too_large - fitting <= max(1, too_large // PRECISION):
            return fitting, next_code
        if not too_large:
            size = 2 * size
        elif not fitting:
            size = size // 2
        else:
            size = (fitting + too_large) // 2


def with_margin(size: int) -> int:
    """Return the size less a MARGINth; a multiple of 8, for which kernels are made,
    unless it is smaller than 8."""
    smaller = max(1, size - size // MARGIN)
    return smaller // 8 * 8 if smaller >= 8 else smaller


# --- A process that tries a size ----------------------------------------------------------------------------


def _prepare_trial(args: argparse.Namespace) -> None:
    """Set the arguments of a short run in one process, and listen for the errors that end it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))  # nobody waits for its result any more
    overrides = {
        "nproc_per_node": 1,
        "max_restarts": 0,
        "min_nodes": None,
        "max_steps": None,
        "run_epochs": None,
        "early_stopping_patience": None,
        "epochs": max(args.epochs, STEPS),
    }
    if args.min_nodes:
        overrides["shares"] = None
    if vars(args).get("total_batch"):
        # in whole portions: a job divides it into equal ones, which may be smaller
        portions = args.batch_size * (overrides.get("shares", vars(args).get("shares")) or 1)
        overrides["total_batch"] = -(-args.total_batch // portions) * portions
    vars(args).update({name: value for name, value in overrides.items() if name in vars(args)})
    moments.listen(_Trial())


class _Trial:
    """Ends a process that tries a size, with NO_MEMORY or TOO_FEW_SAMPLES after such an error."""

    def world(self, args: argparse.Namespace) -> None:
        if args.world.world_size > 1:
            raise UserError(ONE_PROCESS)

    def failure(self, error: Exception) -> None:
        """After an error for a lack of memory or samples, exit with the code for it, at once: no later
        listener should log it. Other errors take their course."""
        from common.devices.diagnosis import out_of_memory_message

        if out_of_memory_message(error):
            os._exit(NO_MEMORY)
        if isinstance(error, TooFewSamples):
            os._exit(TOO_FEW_SAMPLES)


class BatchTrial:
    """A start that takes STEPS steps with a size, in a process that tries it."""

    def __init__(self, args: argparse.Namespace, sampler: Any, device: torch.device):
        if not is_accelerator(device):
            raise UserError(
                "--find_max_batch true looks at the memory of a GPU, and this job computes on a CPU"
            )
        self._args = args
        self._sampler = sampler
        self._device = device

    def after_step(self, total_steps: int) -> None:
        """Exit with FITS after step STEPS; UserError if the batches of the job are smaller than --batch_size
        says."""
        size = self._args.batch_size
        batch = self._sampler.global_batch
        samples = self._sampler.num_samples
        if batch < size:
            raise UserError(
                f"this job has batches of {batch} whatever --batch_size says: there is nothing to find"
            )
        if size > samples:
            raise TooFewSamples(f"{samples} samples are fewer than --batch_size {size}")
        if total_steps == STEPS:
            synchronize(self._device)
            sys.exit(FITS)
