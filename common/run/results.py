"""The results of a run's epochs, one row per epoch, and which epoch is the best."""

import math
import re
from collections.abc import Mapping
from typing import Any, Optional

from common.checkpoints.position import Position
from common.errors import UserError


class Results:
    def __init__(self, best_by: str, best_is: Optional[str] = None):
        """`best_by`: the metric that decides. `best_is`: "highest" (also if unset) or "lowest"; required for a loss."""
        if best_is is None and re.search("(loss|error|mae|mse)$", best_by):
            raise UserError(
                f'Run(best_by="{best_by}") does not say which value is better: give best_is="lowest" or best_is="highest"'
            )
        if best_is not in (None, "highest", "lowest"):
            raise UserError(f'Run(best_is={best_is!r}): give "highest" or "lowest"')
        self.best_by, self.best_is = best_by, best_is or "highest"
        self.history: list[dict[str, Any]] = []

    def close_epoch(self, at: Position, train_loss: float, metrics: Mapping[str, float]) -> Position:
        """Add the row of an epoch whose last step ended at `at`; returns the position after the epoch."""
        epoch, score, before = at.epoch + 1, metrics.get(self.best_by), (at.best or {}).get(self.best_by)
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
        row, before, by = self.history[-1], self.history[-2] if len(self.history) > 1 else {}, self.best_by
        is_best = at.best["epoch"] == at.epoch
        words = ["the best so far" if is_best else f"best {at.best[by]:.4f} in epoch {at.best['epoch']}"]
        names = dict.fromkeys((by, "loss", "train_loss"))
        words += [f"{name} {row[name] - before[name]:+.4f}" for name in names if name in row and name in before]
        return f" ({', '.join(words)})"

    def summary(self, at: Position, weights: Optional[str] = None) -> str:
        """Return a sentence about the best epoch; empty if there is none. `weights`: the name of the file with its weights."""
        if not at.best:
            return ""
        which, file = "lowest" if self.best_is == "lowest" else "best", f" ({weights})" if weights else ""
        return f"{which} {self.best_by} {at.best[self.best_by]:.4f} in epoch {at.best['epoch']}{file}. "
