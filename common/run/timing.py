"""Timers for programs that print their speed: the seconds of each part, and the images per second of some steps."""

import time
from collections.abc import Mapping
from typing import Callable, Optional

from common.run.clock import TRAINING_PHASES, WARM_UP, Clock, speed


class Stopwatch:
    """Measures how long the parts of a program take."""

    def __init__(self):
        self._last, self._laps = time.monotonic(), {}

    def lap(self, name: str) -> None:
        """Add the time since the last call, or since the Stopwatch was made, to the part `name`."""
        now = time.monotonic()
        self._laps[name] = self._laps.get(name, 0.0) + now - self._last
        self._last = now

    def summary(self, seconds: Mapping[str, float]) -> str:
        """Return a line with the seconds of all parts, and of the training phases in `seconds`, which is run.seconds."""
        parts = ", ".join(f"{name.replace('_', ' ')} {seconds[name]:.1f} s" for name in TRAINING_PHASES)
        return "time: " + ", ".join(f"{name} {spent:.1f} s" for name, spent in self._laps.items()) + f" (of which {parts})"


class Profile:
    """Measures the speed of N steps for --prof N, after some that warm up."""

    def __init__(self, steps: int, clock: Clock, finish_work: Callable[[], None]):
        self._left, self._steps = WARM_UP + steps, steps
        self._clock = clock
        self._finish_work = finish_work

    def step(self, samples: int) -> Optional[str]:
        """Count a step of `samples` samples. Return a line with the speed after the last step to measure, else None."""
        self._left -= 1
        if self._left in (0, self._steps):
            self._finish_work()
        if self._left == self._steps:
            self._began = self._clock.read()
        if self._left:
            return None
        fractions = speed(self._began, self._clock.read(), samples * self._steps)
        rate = fractions.pop("images_per_s")
        split = ", ".join(f"{fraction:.0%} {phase.replace('_', ' ')}" for phase, fraction in fractions.items())
        return f"Training speed was {rate:.1f} images/s over {self._steps} steps: {split}"
