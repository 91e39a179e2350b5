"""--find_max_batch true: the largest --batch_size of which a few steps fit into the memory of one device.

Each size is tried by a child process: it trains STEPS steps of this job, as it always does, and saves nothing. Sizes are
doubled while they fit, and halved while they do not; then what lies between is halved.
"""

import argparse
import os
import signal
import sys
from typing import Callable, Optional

from common import moments, progress
from common.errors import UserError

STEPS = 3  # the optimizer makes its state in the first
NO_MEMORY, TOO_FEW_SAMPLES = 71, 72  # exit codes of a child, beside those of every job
PRECISION = 16  # what lies between is halved until it is below this fraction of a size
MARGIN = 16  # this fraction is left free: a larger picture or a library's buffer may come later


def find(args: argparse.Namespace) -> None:
    """Return in each child, with the arguments for its size; else print the size that was found, and exit."""
    vars(args).update(nproc_per_node=1, total_batch=None, min_nodes=None)

    def ends_with(size: int, fits_below: bool) -> int:
        """Return the exit code of a child that tries this size; 0 if it fits. In this child, raise _IsChild."""
        sys.stdout.flush()
        child = os.fork()
        if not child:
            with open(os.devnull, "w") as nothing:
                os.dup2(nothing.fileno(), 1)  # the lines of its job
            args.batch_size = size
            moments.listen(_Trial(fits_below))
            raise _IsChild
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        said = {0: "fits", NO_MEMORY: "does not fit", TOO_FEW_SAMPLES: "is more than the data have"}
        if code not in said:
            if code < 0:
                progress.say(f"error: --batch_size {size}: its process ended by {signal.Signals(-code).name}")
            sys.exit(code if code > 0 else 1)
        progress.say(f"--batch_size {size} {said[code]}")
        return code

    try:
        size, refused = largest(args.batch_size, ends_with)
    except _IsChild:
        return
    if not size:
        raise UserError("not even --batch_size 1 fits into the memory of this device: take a smaller network or smaller images")
    if refused == TOO_FEW_SAMPLES:
        progress.say(f"done: --batch_size {size} fits, and the data have too few samples for a larger one")
    else:
        progress.say(f"done: take --batch_size {with_margin(size)}: {size} is the largest of which {STEPS} steps fitted")
    sys.exit(0)


def largest(first: int, ends_with: Callable[[int, bool], int]) -> tuple[int, Optional[int]]:
    """Return (the largest size that fits, to within a PRECISIONth; 0 if none does, the code of the next larger one).

    `ends_with(size, fits_below)`: 0 if this size fits; `fits_below`: whether a smaller one did.
    """
    fits = 0
    refused = None
    too_large = 0
    size = first
    while True:
        code = ends_with(size, fits > 0)
        if code == 0:
            fits = size
        else:
            refused = code
            too_large = size
        if too_large and too_large - fits <= max(1, too_large // PRECISION):
            return fits, refused
        if not too_large:
            size = 2 * size
        elif not fits:
            size = size // 2
        else:
            size = (fits + too_large) // 2


def with_margin(size: int) -> int:
    """Return the size less a MARGINth; a multiple of 8 if it is larger than that, for which kernels are made."""
    smaller = max(1, size - size // MARGIN)
    return smaller // 8 * 8 if smaller >= 8 else smaller


class _IsChild(Exception):
    pass


class _Trial:
    """In a child: ends it with the code for its error, if this is about the size."""

    def __init__(self, fits_below: bool):
        self._fits_below = fits_below

    def world(self, args: argparse.Namespace) -> None:
        if args.world.world_size > 1:
            raise UserError(
                "--find_max_batch looks at the memory of one device: start one process, without torchrun, on one node"
            )

    def failure(self, error: Exception) -> None:
        from common.devices.diagnosis import no_memory

        if no_memory(error):
            os._exit(NO_MEMORY)
        if isinstance(error, UserError) and self._fits_below:
            os._exit(TOO_FEW_SAMPLES)
