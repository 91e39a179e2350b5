"""What an observer is told of a run, and when."""

import dataclasses
from collections.abc import Mapping
from typing import Optional

import torch

from common.checkpoints.position import Position
from common.run.plan import Plan, Results
from common.run.scores import Scores


@dataclasses.dataclass(frozen=True)
class Facts:
    """What every observer gets at every moment: where the run stands."""

    position: Position
    plan: Plan  # whose `resumed_at` is None until the run has resumed
    results: Results
    seconds: Mapping[str, float]  # as Clock.read() gives them
    unit: str = "samples"  # what the loader gives, or "images"
    is_evaluating: bool = False


class Observer:
    """An observer of a run overrides the moments that it needs, in the order of a run."""

    def resumed(self, facts: Facts) -> None:
        """The run has been restored."""

    def began(self, facts: Facts, about: dict) -> None:
        """The first lines of the log have been said. `about`: facts about this start, for the journal."""

    def takes_over(self, facts: Facts) -> None:
        """This rank writes from here on, because the rank that wrote was lost; began() follows."""

    def epoch_began(self, facts: Facts) -> None:
        """An epoch begins, or goes on after a restart; no step of this start was taken in it."""

    def stepped(self, facts: Facts, loss: torch.Tensor) -> None:
        """A step was taken. `loss`: on the device, which may still be computing it."""

    def evaluation_began(self, facts: Facts) -> None:
        """The last step of this start in the epoch was taken."""

    def evaluated(self, facts: Facts, batches: int, total: int) -> None:
        """So many batches of an evaluation are done, on a rank that shows the log."""

    def log_due(
        self, facts: Facts, loss: float, lr: float, speed: dict, seconds_left: Optional[float], skipped: int
    ) -> None:
        """A line of the log is due. `skipped`: steps so far whose gradients overflowed."""

    def picture(self, facts: Facts, name: str, pixels: torch.Tensor, details: dict) -> None:
        """There is a picture to look at."""

    def epoch_ended(
        self, facts: Facts, is_complete: bool, metrics: dict, scores: Optional[Scores], skipped: int
    ) -> None:
        """The evaluation is over, and the checkpoint not yet written."""

    def saved(self, facts: Facts, is_complete: bool) -> None:
        """The checkpoint of the epoch is being written."""

    def nodes_changed(self, facts: Facts, news: str, ranks: int, pause: float) -> None:
        """Nodes were lost, or have joined: `news` says which. `pause`: seconds since the last step."""

    def ending(self, facts: Facts, outcome: str, reason: Optional[str]) -> None:
        """The run is over. `outcome`: finished, limit or stopped; `reason`: the option or the signal."""

    def ended(self, facts: Facts) -> None:
        """The last checkpoint is written. What an observer still has to write is due."""

    def failed(self, facts: Facts, error: BaseException) -> None:
        """The job is about to end with an error."""

    def closed(self, facts: Facts, outcome: str, reason: str, is_saved: bool, last_good: str) -> None:
        """Everything is published: the last moment. `last_good`: a sentence on the newest checkpoint."""

    def logged(self, facts: Facts, text: str) -> None:
        """A line of the log was printed."""
