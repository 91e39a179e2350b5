"""The peers of a rank: the ranks that train together, and what they agree on.

Each rank has its own clock and its own signals, so the ranks take the maximum of their values, about twice a
second.
"""

import argparse
import time
from typing import Any, Callable, NamedTuple, Optional

import torch

from common import world
from common.alive.stops import STOPS
from common.checkpoints import restore
from common.ranks import barrier, collectives

EXCHANGE_SECONDS = 0.5
MOST_STEPS = 1000  # between two exchanges


class Requests(NamedTuple):
    """What a rank asks for after a step, in numbers, of which the ranks take the maximum."""

    stop_signal: float = 0  # the signal to stop on; 0: none
    hours_are_over: float = 0  # whether --max_hours is over
    save: float = 0  # whether a save is due


NO_REQUESTS = Requests()


class Agreement:
    """Decides after which steps the ranks exchange their requests, about every EXCHANGE_SECONDS, and holds
    what they asked for."""

    def __init__(self, max_hours: Optional[float], save_seconds: float):
        self._max_hours = max_hours
        self._save_seconds = save_seconds
        self._began_at = time.monotonic()
        self._saved_at = self._began_at
        self.begin()

    def begin(self) -> None:
        """Exchange after the next step. All ranks call it after a restore, and after ranks have changed."""
        self._exchanged_at = time.monotonic()
        self._interval_steps = 1
        self._steps_left = 1
        self.requests = NO_REQUESTS  # by any rank, as the last exchange() has found it

    def note_save(self) -> None:
        self._saved_at = time.monotonic()

    def exchange(self, maximum: Optional[Callable[[list[float]], list[float]]]) -> None:
        """Set `requests` after a step: those of any rank if an exchange is due,
        and between two exchanges none.

        `maximum(values)`: returns the maximum of each value over all ranks, which all call it. None: there is
        one rank, which has its own requests after each step.
        """
        now = time.monotonic()
        hours_are_over = self._max_hours is not None and now - self._began_at >= self._max_hours * 3600
        own_requests = Requests(
            int(STOPS.noted), int(hours_are_over), int(now - self._saved_at >= self._save_seconds)
        )
        if maximum is None:
            self.requests = own_requests
            return
        self.requests = NO_REQUESTS
        self._steps_left -= 1
        if self._steps_left > 0:
            return
        step_seconds = (now - self._exchanged_at) / self._interval_steps
        *requests, slowest_step = maximum([*own_requests, step_seconds])
        self.requests = Requests(*requests)
        self._exchanged_at = now
        self._interval_steps = max(1, min(MOST_STEPS, int(EXCHANGE_SECONDS / max(slowest_step, 1e-6))))
        self._steps_left = self._interval_steps


class Fixed:
    """The ranks of a run, which never change: those of the process group, or this process alone.

    common/elastic/peers.py has ranks that do."""

    each_has_a_ledger = True  # else the rank that writes notes the samples of all
    # Returns the signal on which the run has to stop, or 0: signals that come before are not meant for it.
    # None: each signal counts.
    requested_signal: Optional[Callable[[], int]] = None

    def __init__(self, args: argparse.Namespace):
        if not collectives.has_process_group():
            world.require_one_device(args)
        self.rank, self.size = collectives.rank_and_size()
        self.shows = self.rank == 0  # it shows the log, and writes files except in a trial
        self.may_write = self.shows  # now, or later in an elastic job
        self.agreement = Agreement(args.max_hours, args.save_seconds)
        self._order_is_fixed = False  # in which DistributedDataParallel adds the gradients

    def find(
        self, find_on_rank_0: Callable[[], Optional[restore.Checkpoint]], identity: dict
    ) -> Optional[restore.Checkpoint]:
        """Return find_on_rank_0() of rank 0 on all ranks. UserError if the ranks differ in `identity`."""
        if self.size > 1:
            collectives.require_equal(identity)
        return barrier.from_rank_0(find_on_rank_0)

    def meet(self, run: object) -> None:
        """Begin to exchange requests with the other ranks. Called when the run has been restored."""
        self.agreement.begin()

    def fix_gradient_order(self, say: Callable[[str], None]) -> None:
        """Make DistributedDataParallel add gradients in the same order in each start. All ranks call it."""
        if self.size > 1 and not self._order_is_fixed:
            from common.ranks import buckets

            self._order_is_fixed = True
            for warning in buckets.fix_all():
                say(warning)

    def all_agree(self, value: bool) -> bool:
        """Return whether `value` is true on all ranks, which all call this."""
        return bool(collectives.reduce([value], "MIN")[0]) if self.size > 1 else value

    def regroup(self) -> None:
        """Do nothing, as these ranks never change.

        In an elastic job, form the group again after ranks have changed.
        """

    def samples_of_step(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the sample ids of a step that this rank's ledger records: here `ids`,
        the ids of this rank's own batch."""
        return ids

    def note_step(self) -> None:
        """Do nothing. Called after each step that counts. An elastic job reports lost and new nodes here."""

    def agree_after_step(self) -> Requests:
        """Return what any rank wants after a step, alike on every rank."""
        maximum = (lambda values: collectives.reduce(values, "MAX")) if self.size > 1 else None
        self.agreement.exchange(maximum)
        return self.agreement.requests

    def together(self, work: Callable, *arguments: object) -> Any:
        """Return work(*arguments). An elastic job repeats it if ranks change meanwhile."""
        return work(*arguments)
