"""The ranks agree on what is due: a stop requested by the platform, the end of --max_hours, or a checkpoint.

Each rank has its own clock and its own signals, so the ranks take the maximum of their values, about twice a second.
"""

import time
from collections.abc import Sequence
from typing import Callable, Optional

from common.alive.stops import STOPS

EXCHANGE_SECONDS = 0.5
MOST_STEPS = 1000  # between two exchanges


class Agreement:
    def __init__(self, max_hours: Optional[float], save_seconds: float):
        self._max_hours, self._save_seconds = max_hours, save_seconds
        self._born = time.monotonic()
        self.saved()
        self.begin()

    def begin(self) -> None:
        """Let the next exchange() involve all ranks. All call this after a restore and after each change of the ranks."""
        self._exchanged = time.monotonic()
        self._steps_left = self._steps_between = 1
        self._due: Sequence[float] = (0, 0, 0)

    def saved(self) -> None:
        self._saved = time.monotonic()

    def exchange(self, maximum: Optional[Callable[[list[float]], list[float]]]) -> None:
        """Set due(), in each step. Several ranks use `maximum`, a reduction, about twice a second; due() is 0 in between."""
        now = time.monotonic()
        hours = self._max_hours is not None and now - self._born >= self._max_hours * 3600
        own = [int(STOPS.noted), int(hours), int(now - self._saved >= self._save_seconds)]
        if maximum is None:
            self._due = own
            return
        self._due = (0, 0, 0)
        self._steps_left -= 1
        if self._steps_left > 0:
            return
        step_seconds = (now - self._exchanged) / self._steps_between
        *self._due, step_seconds = maximum([*own, step_seconds])
        self._exchanged = now
        self._steps_left = self._steps_between = max(1, min(MOST_STEPS, int(EXCHANGE_SECONDS / max(step_seconds, 1e-6))))

    def due(self) -> Sequence[float]:
        """Return the result of exchange(): (signal to stop on or 0, whether --max_hours is over, whether to save)."""
        return self._due
