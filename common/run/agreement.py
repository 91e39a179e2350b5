"""What is due, alike on every rank: a stop that a platform asked for, the end of --max_hours, a checkpoint.

Each rank has its own clock and its own signals, so the ranks take the maximum of their values: not in every step, but twice a
second by the step time of the slowest rank, which they exchange as well.
"""

import time
from collections.abc import Sequence
from typing import Optional

from common.processes import collectives

EXCHANGE_SECONDS = 0.5
MOST_STEPS = 1000  # between two exchanges


class Agreement:
    def __init__(self, max_hours: Optional[float], save_seconds: float, world_size: int):
        self._max_hours, self._save_seconds, self._world_size = max_hours, save_seconds, world_size
        self._born = self._saved = self._exchanged = time.monotonic()
        self._steps_left = self._steps_between = 1
        self.signal: Optional[int] = None  # the one that this process has received

    def begin(self) -> None:
        """The run has been restored: the clocks of the next checkpoint and of the steps start now."""
        self._saved = self._exchanged = time.monotonic()

    def saved(self) -> None:
        self._saved = time.monotonic()

    def due(self) -> Sequence[float]:
        """(signal to stop on or 0, whether the hours are over, whether a checkpoint is due); called once in every step."""
        now = time.monotonic()
        hours = self._max_hours is not None and now - self._born >= self._max_hours * 3600
        own = [int(self.signal or 0), int(hours), int(now - self._saved >= self._save_seconds)]
        if self._world_size == 1:
            return own
        self._steps_left -= 1
        if self._steps_left > 0:
            return 0, 0, 0
        step_seconds = (now - self._exchanged) / self._steps_between
        *agreed, step_seconds = collectives.reduce([*own, step_seconds], "MAX")
        self._exchanged = now
        self._steps_left = self._steps_between = max(1, min(MOST_STEPS, int(EXCHANGE_SECONDS / max(step_seconds, 1e-6))))
        return agreed
