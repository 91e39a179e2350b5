"""How much of a run is left, and which option ends it; and what its evaluations have given. The same on every rank."""

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
    resumed_at: Optional[Position] = None  # the position at which this start has resumed; None until Run.resume()

    @property
    def began_at(self) -> Position:
        """The position at which this start has resumed."""
        if self.resumed_at is None:
            raise RuntimeError("the run was asked for a step before run.resume(): call that first")
        return self.resumed_at

    def limit(self, at: Position) -> Optional[str]:
        """Return the option that ends the run at this position, or None if the run goes on."""
        if at.epoch >= self.args.epochs:
            return f"--epochs {self.args.epochs}"
        if self.steps_used_up(at):
            return f"--max_steps {self.args.max_steps}"
        if self._epochs_used_up(at):
            return f"--run_epochs {self.args.run_epochs}"
        if self.patience is not None and at.best is not None and at.epoch - at.best["epoch"] >= self.patience:
            return "the present --early_stopping_patience"
        return None

    def steps_used_up(self, at: Position) -> bool:
        return self.args.max_steps is not None and at.total_steps >= self.args.max_steps

    def _epochs_used_up(self, at: Position) -> bool:
        return self.args.run_epochs is not None and at.epoch - self.began_at.epoch >= self.args.run_epochs

    def cut_short(self, at: Position) -> bool:
        """Whether --max_steps or --run_epochs is used up before all --epochs are done."""
        return at.epoch < self.args.epochs and (self.steps_used_up(at) or self._epochs_used_up(at))

    def finished(self, at: Position) -> bool:
        return bool(self.limit(at)) and not (self._epochs_used_up(at) and at.epoch < self.args.epochs)

    def epoch_is_over(self, at: Position) -> bool:
        return at.consumed >= self.sampler.samples_per_epoch

    def began_this_epoch(self, at: Position) -> bool:
        """Whether this start began the current epoch, and did not resume it in its middle."""
        return at.epoch > self.began_at.epoch or not self.began_at.consumed

    def progress(self, at: Position) -> float:
        in_epoch = (at.consumed + self.sampler.global_batch / 2) / self.sampler.samples_per_epoch
        return min(1.0, (at.epoch + in_epoch) / self.args.epochs)

    def samples_left(self, at: Position) -> int:
        left = (self.args.epochs - at.epoch) * self.sampler.samples_per_epoch - at.consumed
        if self.args.max_steps is None:
            return left
        return min(left, (self.args.max_steps - at.total_steps) * self.sampler.global_batch)

    def evaluations_left(self, at: Position) -> int:
        return -(-(at.consumed + self.samples_left(at)) // self.sampler.samples_per_epoch)

    def step_of_the_epoch(self, at: Position) -> tuple[int, int]:
        """Return (steps done in the current epoch, steps of a whole epoch)."""
        return at.consumed // self.sampler.global_batch, self.sampler.samples_per_epoch // self.sampler.global_batch


class Results:
    def __init__(self, best_by: str, best_is: Optional[str] = None):
        """`best_by`: the metric that decides. `best_is`: "highest" (also if unset) or "lowest"; required for a loss."""
        if best_is is None and re.search("(loss|error|mae|mse)$", best_by):
            raise UserError(
                f'Run(best_by="{best_by}") does not say which value is better: give best_is="lowest" or best_is="highest"'
            )
        if best_is not in (None, "highest", "lowest"):
            raise UserError(f'Run(best_is={best_is!r}): give "highest" or "lowest"')
        self.best_by = best_by
        self.best_is = best_is or "highest"
        self.history: list[dict[str, Any]] = []

    def warning_of_best_by(self, metrics: Mapping[str, float]) -> Optional[str]:
        """Return a warning after the first epoch of a run if its metrics lack the one that chooses the best epoch."""
        if self.history or not metrics or self.best_by in metrics:
            return None
        return f"warning: no epoch is the best so far: best_by is {self.best_by}, and end_epoch() gives {', '.join(metrics)}"

    def close_epoch(self, at: Position, train_loss: float, metrics: Mapping[str, float]) -> Position:
        """Add the row of an epoch whose last step ended at `at`; returns the position after the epoch."""
        epoch = at.epoch + 1
        score = metrics.get(self.best_by)
        before = (at.best or {}).get(self.best_by)
        self.history.append({**at.row(epoch), "train_loss": train_loss, **metrics})
        if score is None or math.isnan(score):
            return at.after_epoch(at.best)
        if not (before is None or math.isnan(before) or (score < before if self.best_is == "lowest" else score > before)):
            return at.after_epoch(at.best)
        return at.after_epoch({"epoch": epoch, "samples_seen": at.samples_seen, self.best_by: score})

    def news(self, at: Position) -> str:
        """Return the best epoch and the changes since the epoch before, to end a log line; empty without a best epoch."""
        if at.best is None:
            return ""
        row = self.history[-1]
        before = self.history[-2] if len(self.history) > 1 else {}
        by = self.best_by
        is_best = at.best["epoch"] == at.epoch
        words = ["the best so far" if is_best else f"best {at.best[by]:.4f} in epoch {at.best['epoch']}"]
        names = dict.fromkeys((by, "loss", "train_loss"))
        words += [f"{name} {row[name] - before[name]:+.4f}" for name in names if name in row and name in before]
        return f" ({', '.join(words)})"

    def summary(self, at: Position, weights: Optional[str] = None) -> str:
        """Return a sentence about the best epoch; empty if there is none. `weights`: the name of the file with its weights."""
        if not at.best:
            return ""
        which = "lowest" if self.best_is == "lowest" else "best"
        file = f" ({weights})" if weights else ""
        return f"{which} {self.best_by} {at.best[self.best_by]:.4f} in epoch {at.best['epoch']}{file}. "
