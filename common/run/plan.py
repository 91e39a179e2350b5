"""How much of a run is left, and which option ends it; and what its evaluations have given.

The same on every rank.
"""

import argparse
import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any, Optional, Protocol

import numpy as np

from common.checkpoints.position import Position
from common.errors import UserError


class Sampler(Protocol):
    """What a run needs of the sampler of its training data (datasets/sampler.py)."""

    num_samples: int
    global_batch: int  # samples of all ranks in one step

    @property
    def samples_per_epoch(self) -> int: ...

    def start_at(self, epoch: int, consumed: int) -> None: ...

    def set_global_batch(self, global_batch: int) -> None: ...

    def step_ids(self, epoch: int, consumed: int) -> np.ndarray: ...

    def __len__(self) -> int: ...


@dataclasses.dataclass(frozen=True)
class Plan:
    args: argparse.Namespace
    sampler: Sampler
    patience: Optional[int] = None  # epochs without a better one, after which the run ends
    # the position at which this start has resumed; None until Run.resume()
    resumed_at: Optional[Position] = None

    @property
    def start_position(self) -> Position:
        """The position at which this start has resumed."""
        if self.resumed_at is None:
            raise RuntimeError("the run was asked for a step before run.resume(): call that first")
        return self.resumed_at

    def limit(self, position: Position) -> Optional[str]:
        """Return what ends the run at this position, in words for the log, such as "--epochs 90";
        None if it goes on."""
        if position.epoch >= self.args.epochs:
            return f"--epochs {self.args.epochs}"
        if self.steps_used_up(position):
            return f"--max_steps {self.args.max_steps}"
        if self._epochs_used_up(position):
            return f"--run_epochs {self.args.run_epochs}"
        if (
            self.patience is not None
            and position.best is not None
            and position.epoch - position.best["epoch"] >= self.patience
        ):
            return "the present --early_stopping_patience"
        return None

    def steps_used_up(self, position: Position) -> bool:
        """Whether --max_steps is used up."""
        return self.args.max_steps is not None and position.total_steps >= self.args.max_steps

    def _epochs_used_up(self, position: Position) -> bool:
        return (
            self.args.run_epochs is not None
            and position.epoch - self.start_position.epoch >= self.args.run_epochs
        )

    def is_cut_short(self, position: Position) -> bool:
        """Whether --max_steps or --run_epochs is used up before all --epochs are done."""
        return position.epoch < self.args.epochs and (
            self.steps_used_up(position) or self._epochs_used_up(position)
        )

    def is_finished(self, position: Position) -> bool:
        """Whether the run is done, so that another start with the same options has nothing to do."""
        return bool(self.limit(position)) and not (
            self._epochs_used_up(position) and position.epoch < self.args.epochs
        )

    def epoch_is_over(self, position: Position) -> bool:
        """Whether all steps of the current epoch are done."""
        return position.consumed >= self.sampler.samples_per_epoch

    def began_this_epoch(self, position: Position) -> bool:
        """Whether this start began the current epoch, and did not resume it in its middle."""
        return position.epoch > self.start_position.epoch or not self.start_position.consumed

    def progress(self, position: Position) -> float:
        """Return the fraction of all --epochs that is done in the middle of the next step; at most 1."""
        in_epoch = (position.consumed + self.sampler.global_batch / 2) / self.sampler.samples_per_epoch
        return min(1.0, (position.epoch + in_epoch) / self.args.epochs)

    def samples_left(self, position: Position) -> int:
        """Return how many samples are still to be trained on, up to --epochs or --max_steps."""
        remaining = (self.args.epochs - position.epoch) * self.sampler.samples_per_epoch - position.consumed
        if self.args.max_steps is None:
            return remaining
        return min(remaining, (self.args.max_steps - position.total_steps) * self.sampler.global_batch)

    def evaluations_left(self, position: Position) -> int:
        """Return how many evaluations are still to come: one for each epoch, also for one cut short."""
        return -(-(position.consumed + self.samples_left(position)) // self.sampler.samples_per_epoch)

    def step_of_the_epoch(self, position: Position) -> tuple[int, int]:
        """Return (steps done in the current epoch, steps of a whole epoch)."""
        return (
            position.consumed // self.sampler.global_batch,
            self.sampler.samples_per_epoch // self.sampler.global_batch,
        )


class Results:
    def __init__(self, best_by: str, best_is: Optional[str] = None):
        """`best_by`: the metric that decides.

        `best_is`: "highest" (also if unset) or "lowest"; required for a loss.
        """
        if best_is is None and re.search("(loss|error|mae|mse)$", best_by):
            choices = 'give best_is="lowest" or best_is="highest"'
            raise UserError(f'Run(best_by="{best_by}") does not say which value is better: {choices}')
        if best_is not in (None, "highest", "lowest"):
            raise UserError(f'Run(best_is={best_is!r}): give "highest" or "lowest"')
        self.best_by = best_by
        self.best_is = best_is or "highest"
        self.history: list[dict[str, Any]] = []

    def warning_if_best_by_is_missing(self, metrics: Mapping[str, float]) -> Optional[str]:
        """Return a warning if the first epoch of the run has metrics, and not the one that chooses the best
        epoch; else None."""
        if self.history or not metrics or self.best_by in metrics:
            return None
        return (
            f"warning: no epoch is the best so far: best_by is {self.best_by}, and end_epoch() gives "
            f"{', '.join(metrics)}"
        )

    def close_epoch(self, position: Position, train_loss: float, metrics: Mapping[str, float]) -> Position:
        """Add a row for the epoch that ends at `position`; return the position after it, whose `best` is this
        epoch if its score is better than all before. One without the score, or with NaN, never is."""
        epoch = position.epoch + 1
        score = metrics.get(self.best_by)
        best_score = (position.best or {}).get(self.best_by)
        self.history.append({**position.row(epoch), "train_loss": train_loss, **metrics})
        if score is None or math.isnan(score):
            return position.after_epoch(position.best)
        if best_score is None or math.isnan(best_score):
            is_better = True
        elif self.best_is == "lowest":
            is_better = score < best_score
        else:
            is_better = score > best_score
        if is_better:
            return position.after_epoch(
                {"epoch": epoch, "samples_seen": position.samples_seen, self.best_by: score}
            )
        return position.after_epoch(position.best)

    def comparison(self, position: Position) -> str:
        """Return the best epoch and what changed since the last one, to end a log line; else ""."""
        if position.best is None:
            return ""
        row = self.history[-1]
        previous = self.history[-2] if len(self.history) > 1 else {}
        if position.best["epoch"] == position.epoch:
            parts = ["the best so far"]
        else:
            parts = [f"best {position.best[self.best_by]:.4f} in epoch {position.best['epoch']}"]
        for name in dict.fromkeys((self.best_by, "loss", "train_loss")):
            if name in row and name in previous:
                parts.append(f"{name} {row[name] - previous[name]:+.4f}")
        return f" ({', '.join(parts)})"

    def summary(self, position: Position, weights_file: Optional[str] = None) -> str:
        """Return a sentence about the best epoch; "" without one. `weights_file`: the name of its weights."""
        if not position.best:
            return ""
        adjective = "lowest" if self.best_is == "lowest" else "best"
        file_note = f" ({weights_file})" if weights_file else ""
        return (
            f"{adjective} {self.best_by} {position.best[self.best_by]:.4f} in epoch "
            f"{position.best['epoch']}{file_note}. "
        )
