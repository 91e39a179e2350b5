"""The observers of a run: they write its log and the files beside its checkpoints. None can change the run or make it fail.

    resumed      the run has been restored; began: the first lines of the log have been said
    takes_over   this rank writes from here on, because the rank that wrote was lost; `began` follows
    epoch_began, stepped
    line         a line of the log is due
    epoch_ended  before its checkpoint is written; saved: after that
    nodes        nodes were lost, or have joined
    ending       the run is over; ended: its last checkpoint is written, and what an observer still has to write is due
    failed       the job is about to end with an error
    left         all is published
    said         a line of the log; picture: one to look at

An observer has a file, and a line in `of_a_rank`; without this line the training is the same. An observer is called at the
moments for which it has a method, with Facts and the keyword arguments of the moment.
"""

import argparse
import contextlib
from typing import Any

import torch

from common import moments
from common.errors import one_line
from common.run.observers.console import Console
from common.run.observers.files import Files
from common.run.observers.journal import Journal
from common.run.observers.records import Facts
from common.run.observers.report import Report
from common.run.observers.tensorboard import TensorBoard
from common.run.observers.trace import Trace
from common.run.side_files import SideFiles

__all__ = ["Facts", "Observers", "of_a_rank"]


def of_a_rank(args: argparse.Namespace, shows: bool, writes: bool, may_write: bool) -> list[type]:
    """Return a rank's observers in calling order. The rank `shows` the log, `writes` files, `may_write` now or later."""
    wanted = {
        Trace: writes and args.profile,
        Journal: may_write,
        Files: may_write,
        Console: shows or may_write,
        TensorBoard: may_write,
        Report: may_write,
    }
    return [kind for kind in wanted if wanted[kind]]


class Observers:
    def __init__(self, args: argparse.Namespace, device: torch.device, side_files: SideFiles, may_write: bool):
        kinds = of_a_rank(args, side_files.shows, side_files.writes, may_write)
        self._side_files, self._present = side_files, [kind(args, device, side_files) for kind in kinds]
        self._newest: Any = None  # the last Facts
        moments.listen(self)

    def tell(self, moment: str, facts: Facts, **more: Any) -> None:
        """Call the method `moment` of each observer that has it. Drop one that fails; a loader worker's death is raised."""
        self._newest = facts
        for one in list(self._present):
            try:
                if hear := getattr(one, moment, None):
                    hear(facts, **more)
            except Exception as error:
                if "DataLoader worker" in str(error):  # torch raises this in a signal handler, in any code
                    raise
                self._present = [other for other in self._present if other is not one]
                why = f"{type(error).__name__}: {one_line(error)[:300]}"
                say = self._side_files.say if self._side_files.shows else print
                if moment != "failed":  # a warning would hide the error of the job itself
                    say(f"warning: {type(one).__name__} has failed, and the run goes on without it: {why}")

    def said(self, text: str) -> None:
        self.tell("said", self._newest, text=text)

    def failure(self, error: BaseException) -> None:
        with contextlib.suppress(Exception):
            if self._newest and self._newest.plan.resumed_at:
                self.tell("failed", self._newest, error=error)
