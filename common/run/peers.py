"""The peers of a rank: the ranks that train together, and what they agree on.

Each rank has its own clock and its own signals, so the ranks take the maximum of their values, about twice a second.
"""

import argparse
import time
from collections.abc import Sequence
from typing import Any, Callable, Optional

import torch

from common import world
from common.alive.stops import STOPS
from common.checkpoints import restore
from common.ranks import barrier, collectives

EXCHANGE_SECONDS = 0.5
MOST_STEPS = 1000  # between two exchanges


class Agreement:
    def __init__(self, max_hours: Optional[float], save_seconds: float):
        self._max_hours, self._save_seconds = max_hours, save_seconds
        self._born = time.monotonic()
        self.saved()
        self.begin()

    def begin(self) -> None:
        """Let the next exchange() involve all ranks. All call this after a restore and after each change of the ranks."""
        self._exchanged = time.monotonic()
        self._steps_left = self._steps_between = 1
        self.due: Sequence[float] = (0, 0, 0)  # (signal to stop on or 0, whether --max_hours is over, whether to save)

    def saved(self) -> None:
        self._saved = time.monotonic()

    def exchange(self, maximum: Optional[Callable[[list[float]], list[float]]]) -> None:
        """Set `due`, in each step. Several ranks use `maximum`, a reduction, about twice a second; `due` is 0 in between."""
        now = time.monotonic()
        hours = self._max_hours is not None and now - self._born >= self._max_hours * 3600
        own = [int(STOPS.noted), int(hours), int(now - self._saved >= self._save_seconds)]
        if maximum is None:
            self.due = own
            return
        self.due = (0, 0, 0)
        self._steps_left -= 1
        if self._steps_left > 0:
            return
        step_seconds = (now - self._exchanged) / self._steps_between
        *self.due, step_seconds = maximum([*own, step_seconds])
        self._exchanged = now
        self._steps_left = self._steps_between = max(1, min(MOST_STEPS, int(EXCHANGE_SECONDS / max(step_seconds, 1e-6))))


class Fixed:
    """The ranks of the process group, or this process alone, which never change; common/elastic/peers.py has ranks that do."""

    each_has_a_ledger = True
    told_to_stop: Optional[Callable[[], int]] = None  # whether a stop signal is meant for the run; None: each one is

    def __init__(self, args: argparse.Namespace):
        if not collectives.has_process_group():
            world.require_one_device(args)
        self.rank, self.size = collectives.rank_and_size()
        self.shows = self.rank == 0  # it shows the log, and writes files except in a trial
        self.may_write = self.shows  # now, or later in an elastic job
        self.agreement = Agreement(args.max_hours, args.save_seconds)

    def find(self, look: Callable[[], Optional[restore.Checkpoint]], identity: dict) -> Optional[restore.Checkpoint]:
        """Return rank 0's `look()`, a checkpoint or None, on all ranks. UserError if the ranks differ in `identity`."""
        if self.size > 1:
            collectives.require_equal(identity)
        return barrier.from_rank_0(look)

    def meet(self, run: Any) -> None:
        """Begin to exchange with the other ranks what is due. Called when the run has been restored."""
        self.agreement.begin()

    def before_first_step(self, say: Callable[[str], None]) -> None:
        """Let DistributedDataParallel add the ranks' gradients in the order of every other start. All ranks call it."""
        if self.size > 1:
            from common.ranks import buckets

            for warning in buckets.fix_all():
                say(warning)

    def all_agree(self, value: bool) -> bool:
        """Return whether `value` is true on all ranks, which all call this."""
        return bool(collectives.reduce([value], "MIN")[0]) if self.size > 1 else value

    def form_again(self) -> None:
        """Do nothing, as these ranks never change. In an elastic job, form the group again after ranks have changed."""

    def samples_of_step(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the sample ids of a step that this rank's ledger records: here `ids`, the ids of this rank's own batch."""
        return ids

    def counted(self) -> None:
        """Do nothing. Called after each step that counts; an elastic job reports changes of its nodes then."""

    def due(self) -> Sequence[float]:
        """Return (signal to stop on or 0, whether --max_hours is over, whether to save) after a step, alike on every rank."""
        self.agreement.exchange((lambda own: collectives.reduce(own, "MAX")) if self.size > 1 else None)
        return self.agreement.due

    def together(self, work: Callable, *arguments: Any) -> Any:
        return work(*arguments)
