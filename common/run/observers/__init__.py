"""The observers of a run: they write its log and the files beside its checkpoints.

None can change the run or make it fail.

An observer has a file, and its lines in observers_of_rank(); without these the training is the same.
observer.py says what it is called with, and when.
"""

import argparse
import contextlib
import os
from collections.abc import Sized
from typing import Any, Callable

import torch

from common import moments
from common.errors import one_line
from common.run.observers.observer import Facts, Observer
from common.run.side_files import SideFiles

__all__ = ["Facts", "Observer", "Observers", "observers_of_rank"]


def observers_of_rank(args: argparse.Namespace, shows: bool, writes: bool, may_write: bool) -> list[type]:
    """Return a rank's observers in calling order.

    The rank `shows` the log, `writes` files, `may_write` now or later.
    """
    kinds: list[type] = []  # imported where they are wanted: most ranks have none
    if writes and args.profile:
        from common.run.observers.trace import Trace

        kinds.append(Trace)
    if may_write:
        from common.run.observers.files import Files
        from common.run.observers.journal import Journal

        kinds += [Journal, Files]
    if shows or may_write:
        from common.run.observers.console import Console

        kinds.append(Console)
    if may_write:
        from common.run.observers.report import Report
        from common.run.observers.tensorboard import TensorBoard

        kinds += [TensorBoard, Report]
    if may_write and args.track:
        from common.run.observers.tracker import Tracker

        kinds.append(Tracker)
    if may_write and "KUBEFLOW_TRAINER_SERVER_URL" in os.environ:
        from common.run.observers.trainjob import TrainJob

        kinds.append(TrainJob)
    return kinds


class Observers:
    def __init__(
        self, args: argparse.Namespace, device: torch.device, side_files: SideFiles, may_write: bool
    ):
        kinds = observers_of_rank(args, side_files.shows, side_files.writes, may_write)
        self._side_files = side_files
        self._active: list[Observer] = [kind(args, device, side_files) for kind in kinds]
        self._latest_facts: Any = None  # the last Facts
        moments.listen(self, ends_with_run=True)

    def notify(self, moment: Callable[..., None], facts: Facts, **details: Any) -> None:
        """Call `moment`, a method of Observer, of each observer.

        Drop one that fails; a loader worker's death is raised.
        """
        self._latest_facts = facts
        for observer in list(self._active):
            try:
                getattr(observer, moment.__name__)(facts, **details)
            except Exception as error:
                if "DataLoader worker" in str(error):  # torch raises this in a signal handler, in any code
                    raise
                self._active = [active for active in self._active if active is not observer]
                reason = f"{type(error).__name__}: {one_line(error)[:300]}"
                say = self._side_files.say if self._side_files.shows else print
                if moment is not Observer.failed:  # a warning would hide the error of the job itself
                    say(
                        f"warning: {type(observer).__name__} has failed, and the run goes on without "
                        f"it: {reason}"
                    )

    def batch(self, number: int, loader: Sized) -> None:
        """Listener of common.moments: pass on the progress of an evaluation."""
        if self._side_files.shows and self._latest_facts and self._latest_facts.is_evaluating:
            self.notify(Observer.evaluated, self._latest_facts, batches=number, total=len(loader))

    def said(self, text: str) -> None:
        """Listener of common.moments: pass on a line of the log."""
        self.notify(Observer.logged, self._latest_facts, text=text)

    def failure(self, error: BaseException) -> None:
        """Listener of common.moments: pass on the error that ends the job, once the run has resumed."""
        with contextlib.suppress(Exception):
            if self._latest_facts and self._latest_facts.plan.resumed_at:
                self.notify(Observer.failed, self._latest_facts, error=error)
