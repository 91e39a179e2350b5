"""The peers of a rank: the ranks that train together, and what they agree on."""

import argparse
from collections.abc import Sequence
from typing import Any, Callable, Optional

import torch

from common import world
from common.ranks import collectives
from common.run.agreement import Agreement
from common.run.saving import restore


class Fixed:
    """The ranks of the process group, or this process alone: the same from the first step to the last.

    common/elastic has peers that may change, with the same interface.
    """

    each_has_a_ledger = True
    told_to_stop: Optional[Callable[[], int]] = None  # whether a signal that comes is meant for the run; None: all are

    def __init__(self, args: argparse.Namespace):
        if not collectives.grouped():
            world.require_one_device(args)
        self.rank, self.size = collectives.rank_and_size()
        self.shows = self.rank == 0  # and writes, but in a trial
        self.may_write = self.shows  # now or later
        self.agreement = Agreement(args.max_hours, args.save_seconds)

    def find(self, look: Callable[[], Optional[restore.Checkpoint]], identity: dict) -> Optional[restore.Checkpoint]:
        """Return the checkpoint to go on from. The nodes have separate disks, so rank 0 looks for it and sends it to all."""
        if self.size > 1:
            collectives.compare(identity)
        return restore.from_rank_0(look)

    def meet(self, run: Any) -> None:
        """The run is restored."""
        self.agreement.begin()

    def form_again(self) -> None:
        """The step that was taken has no result, as the ranks have changed in it; those of Fixed never do."""

    def samples_of_step(self, ids: torch.Tensor) -> torch.Tensor:
        """Return those that this rank's ledger has of a step."""
        return ids

    def counted(self) -> None:
        """A step counts."""

    def due(self) -> Sequence[float]:
        """Return after a step, alike on every rank, (signal to stop on or 0, whether the hours are over, whether to save)."""
        self.agreement.exchange((lambda own: collectives.reduce(own, "MAX")) if self.size > 1 else None)
        return self.agreement.due()

    def together(self, work: Callable, *arguments: Any) -> Any:
        """Return what Run.together returns."""
        return work(*arguments)
