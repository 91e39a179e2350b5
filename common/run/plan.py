"""How much of a run is left, and which option ends it, computed from a Position. The answers are the same on every rank."""

import argparse
import dataclasses
from typing import Any, Optional

from common.checkpoints.position import Position


@dataclasses.dataclass(frozen=True)
class Plan:
    args: argparse.Namespace
    sampler: Any  # of the training data; it knows the size of a step and of an epoch
    patience: Optional[int] = None  # epochs without a better one, after which the run ends
    resumed_at: Any = None  # the Position at which this start has resumed; None until Run.resume()

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

    def _epochs_used_up(self, at):
        return self.args.run_epochs is not None and at.epoch - self.resumed_at.epoch >= self.args.run_epochs

    def cut_short(self, at: Position) -> bool:
        """Whether --max_steps or --run_epochs is used up before all --epochs are done."""
        return at.epoch < self.args.epochs and (self.steps_used_up(at) or self._epochs_used_up(at))

    def finished(self, at: Position) -> bool:
        return bool(self.limit(at)) and not (self._epochs_used_up(at) and at.epoch < self.args.epochs)

    def epoch_is_over(self, at: Position) -> bool:
        return at.consumed >= self.sampler.samples_per_epoch

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
