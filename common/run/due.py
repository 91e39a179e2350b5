"""What is due after a step: a save or a stop. And whether a stop signal may end this process at once."""

import argparse
from typing import Optional

from common.alive.stops import STOPS
from common.run.peers import NOTHING, Fixed, Wanted
from common.run.side_files import SideFiles


class Due:
    """Owns what the ranks have agreed to do, until the weights are updated; and whether this process evaluates."""

    def __init__(self, args: argparse.Namespace, peers: Fixed, side_files: SideFiles):
        self.evaluates = False  # from the end of Run.steps() to Run.end_epoch()
        self._save_steps = args.save_steps
        self._peers = peers
        self._side_files = side_files
        self._wanted = NOTHING

    def after_step(self, total_steps: int, updates_wait: bool) -> Optional[Wanted]:
        """Return what to do now, alike on every rank; None while gradients accumulate, before the update of the weights."""
        wanted = self._peers.agree_after_step()
        if self._save_steps and total_steps % self._save_steps == 0:
            wanted = wanted._replace(save=1)
        self._wanted = Wanted(*map(max, self._wanted, wanted))
        if any(self._wanted):
            updates_wait = self._peers.all_agree(updates_wait)
        if updates_wait:
            return None
        now = self._wanted
        self._wanted = NOTHING
        return now

    def begin_step(self) -> None:
        STOPS.may_end = False

    def allow_stop(self, evaluates: bool = False) -> None:
        """Let a stop signal end this process at once where that is safe: always with one rank; with several, on the one that
        writes, in an evaluation. Between steps, several ranks first agree to stop."""
        self.evaluates = evaluates
        STOPS.may_end = self._peers.size == 1 or (evaluates and self._side_files.writes)

    def end_evaluation(self) -> None:
        """Let no signal end this process until what belongs to the epoch is complete."""
        self.evaluates = False
        STOPS.may_end = False
