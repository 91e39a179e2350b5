"""Where a run stands, as the manifest of a checkpoint has it. What else it says: common/run/about.py."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Optional


@dataclasses.dataclass(frozen=True)
class Position:
    """Where a run stands: between two of its steps, or at the end of an epoch."""

    samples_seen: int = 0  # in all epochs
    total_steps: int = 0
    epoch: int = 0  # completed epochs
    consumed: int = 0  # samples seen in the current epoch
    # of the best epoch so far: its number, samples_seen, and the metric
    best: Optional[Mapping[str, Any]] = None

    @classmethod
    def of(cls, about: Mapping[str, Any]) -> "Position":
        """Return the position of a checkpoint. `about`: its manifest."""
        return cls(**{field.name: about[field.name] for field in dataclasses.fields(cls)})

    def after_step(self, samples: int) -> "Position":
        """Return the position one step later. `samples`: those of the step, on all ranks."""
        seen = self.samples_seen + samples
        consumed = self.consumed + samples
        return dataclasses.replace(
            self, samples_seen=seen, total_steps=self.total_steps + 1, consumed=consumed
        )

    def after_epoch(self, best: Optional[Mapping[str, Any]]) -> "Position":
        """Return the position at the beginning of the next epoch. `best`: of the best epoch so far."""
        return dataclasses.replace(self, epoch=self.epoch + 1, consumed=0, best=best)

    def row(self, epoch: int) -> dict[str, int]:
        """Return where the run stands, as fields for metrics.jsonl or the journal.

        `epoch`: the epoch that the row is about.
        """
        return {"epoch": epoch, "steps": self.total_steps, "samples": self.samples_seen}
