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
    """The ranks of the process group, or this process alone, which stay together from the first step to the last.

    common/elastic/peers.py has the same interface for ranks that may change.
    """

    each_has_a_ledger = True
    told_to_stop: Optional[Callable[[], int]] = None  # whether a stop signal is meant for the run; None: each one is

    def __init__(self, args: argparse.Namespace):
        if not collectives.grouped():
            world.require_one_device(args)
        self.rank, self.size = collectives.rank_and_size()
        self.shows = self.rank == 0  # it shows the log, and writes files except in a trial
        self.may_write = self.shows  # now, or later in an elastic job
        self.agreement = Agreement(args.max_hours, args.save_seconds)

    def find(self, look: Callable[[], Optional[restore.Checkpoint]], identity: dict) -> Optional[restore.Checkpoint]:
        """Return the checkpoint to resume from. Nodes may have separate disks, so rank 0 looks for it and sends it to all."""
        if self.size > 1:
            collectives.compare(identity)
        return restore.from_rank_0(look)

    def meet(self, run: Any) -> None:
        """Begin to agree, once the run is restored."""
        self.agreement.begin()

    def form_again(self) -> None:
        """Form the group again after a step without a result, in which ranks have changed. Fixed ranks never change."""

    def samples_of_step(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the ids of a step's samples that this rank's ledger records. `ids`: those of this rank's batch."""
        return ids

    def counted(self) -> None:
        """Called after each step that has been counted."""

    def due(self) -> Sequence[float]:
        """Return (signal to stop on or 0, whether --max_hours is over, whether to save) after a step, alike on every rank."""
        self.agreement.exchange((lambda own: collectives.reduce(own, "MAX")) if self.size > 1 else None)
        return self.agreement.due()

    def together(self, work: Callable, *arguments: Any) -> Any:
        """Return `work(*arguments)`, in which every rank takes part."""
        return work(*arguments)
