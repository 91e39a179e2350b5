"""Where the time of training goes: waiting for data, moving them to the device, computing; and what to do about it.

The host's clock measures the first and the last. On a GPU the transfer overlaps the computing and is measured by the GPU's
clock, so there the three may add up to more than 100 %. Saving and logging are in none of them.
"""

import time
from collections.abc import Sequence
from typing import Callable, Optional

LINE_SECONDS = 5
PHASES = ("waiting_for_data", "transfer", "compute")
STARVED = 0.25  # share of the time spent waiting from which the loader is called the bottleneck
WARM_UP = 10  # steps before a profile's clock starts


class Window:
    """Samples, and seconds in each phase, since the last line of the log."""

    def __init__(self):
        self._first = True
        self._begin_anew()

    def _begin_anew(self):
        self._began, self._samples, self._seconds = time.monotonic(), 0, [0.0] * len(PHASES)

    def add(self, samples: int, seconds: Sequence[float]) -> None:
        self._samples += samples
        self._seconds = [sum(pair) for pair in zip(self._seconds, seconds)]

    def due(self) -> bool:
        return self._first or time.monotonic() - self._began >= LINE_SECONDS

    def close(self) -> tuple[float, dict[str, float]]:
        """(samples a second, {phase: share of the time}), and begin anew."""
        passed = max(time.monotonic() - self._began, 1e-9)
        rate, shares = self._samples / passed, {name: min(1.0, spent / passed) for name, spent in zip(PHASES, self._seconds)}
        self._begin_anew()
        self._first = False
        return rate, shares


class Stopwatch:
    """How long the parts of a start have taken."""

    def __init__(self):
        self._last, self._laps = time.monotonic(), {}

    def lap(self, name: str) -> None:
        """Add the time since the last lap to the part `name`."""
        now = time.monotonic()
        self._laps[name] = self._laps.get(name, 0.0) + now - self._last
        self._last = now

    def summary(self, seconds: Sequence[float]) -> str:
        """One line; `seconds`: run.seconds, those of the training in each phase."""
        parts = ", ".join(f"{name.replace('_', ' ')} {spent:.1f} s" for name, spent in zip(PHASES, seconds))
        return "time: " + ", ".join(f"{name} {spent:.1f} s" for name, spent in self._laps.items()) + f" (of which {parts})"


class Profile:
    """--prof N: a window over N steps, after some that warm up."""

    def __init__(self, steps: int, finish_work: Callable[[], None]):
        self._left, self._finish_work = WARM_UP + steps, finish_work
        self._steps, self._window = steps, Window()

    def step(self, samples: int, seconds: Sequence[float]) -> Optional[str]:
        """Count a step; after the last one, the line that says how fast they were."""
        self._left -= 1
        if self._left >= self._steps:
            if self._left == self._steps:
                self._finish_work()
                self._window = Window()
            return None
        self._window.add(samples, seconds)
        if self._left:
            return None
        self._finish_work()
        rate, shares = self._window.close()
        split = ", ".join(f"{share:.0%} {phase.replace('_', ' ')}" for phase, share in shares.items())
        return f"Training speed was {rate:.1f} images/s over {self._steps} steps: {split}"


def advice(remedies: Sequence[str], waiting: float) -> Optional[str]:
    """One line if the network waits for the loader and something can be done about it; else None."""
    if not remedies or waiting < STARVED:
        return None
    cause = f"the network waited for data {waiting:.0%} of the time, the loader is the bottleneck"
    return f"advice: {cause}: try {'; or '.join(remedies)}"
