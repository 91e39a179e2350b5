"""What is due after a step: a save or a stop. And whether a stop signal may end this process at once."""

import argparse
from typing import Optional

from common.alive.stops import STOPS
from common.run.peers import NO_REQUESTS, Fixed, Requests
from common.run.side_files import SideFiles


class Due:
    """Owns what the ranks have agreed to do, until the weights are updated;
    and whether this process evaluates."""

    def __init__(self, args: argparse.Namespace, peers: Fixed, side_files: SideFiles):
        self.is_evaluating = False  # from the end of Run.steps() to Run.end_epoch()
        self._save_steps = args.save_steps
        self._peers = peers
        self._side_files = side_files
        self._pending = NO_REQUESTS

    def after_step(self, total_steps: int, should_wait: bool) -> Optional[Requests]:
        """Return what to do now, the same on every rank; None while it waits for an update of the weights."""
        requests = self._peers.agree_after_step()
        if self._save_steps and total_steps % self._save_steps == 0:
            requests = requests._replace(save=1)
        self._pending = Requests(*map(max, self._pending, requests))
        if any(self._pending):
            should_wait = self._peers.all_agree(should_wait)
        if should_wait:
            return None
        agreed = self._pending
        self._pending = NO_REQUESTS
        return agreed

    def begin_step(self) -> None:
        """Let no signal end this process within the step."""
        STOPS.may_end = False

    def allow_stop(self, is_evaluating: bool = False) -> None:
        """Let a stop signal end this process at once where that is safe: always with one rank; with several,
        on the one that writes, in an evaluation. Between steps, several ranks first agree to stop."""
        self.is_evaluating = is_evaluating
        STOPS.may_end = self._peers.size == 1 or (is_evaluating and self._side_files.writes)

    def end_evaluation(self) -> None:
        """Let no signal end this process until what belongs to the epoch is complete."""
        self.is_evaluating = False
        STOPS.may_end = False
