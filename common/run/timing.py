"""Timers for programs that print their speed: the seconds of each part,
and the images per second of some steps."""

import time
from collections.abc import Mapping
from typing import Optional

import torch

from common import devices
from common.run.clock import TRAINING_PHASES, WARM_UP, Clock, speed
from common.run.plan import Sampler


class Stopwatch:
    """Measures how long the parts of a program take."""

    def __init__(self):
        self._last = time.monotonic()
        self._laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """Add the time since the last call, or since the Stopwatch was made, to the part `name`."""
        now = time.monotonic()
        self._laps[name] = self._laps.get(name, 0.0) + now - self._last
        self._last = now

    def summary(self, seconds: Mapping[str, float]) -> str:
        """Return a line with the seconds of all parts, and of the training phases in `seconds`,
        which is run.seconds."""
        parts = ", ".join(f"{name.replace('_', ' ')} {seconds[name]:.1f} s" for name in TRAINING_PHASES)
        return (
            "time: "
            + ", ".join(f"{name} {spent:.1f} s" for name, spent in self._laps.items())
            + f" (of which {parts})"
        )


class Profile:
    """A start that measures the speed of some steps (--prof), and then ends."""

    def __init__(self, steps: int, sampler: Sampler, device: torch.device, clock: Clock):
        """`steps`: how many to measure, after WARM_UP steps that are not measured."""
        self._measured_steps = steps
        self._steps_left = WARM_UP + steps
        self._sampler = sampler
        self._device = device
        self._clock = clock
        self._seconds_at_start: dict[str, float] = {}

    def after_step(self, _total_steps: int) -> Optional[str]:
        """Return a line with the speed after the last step to measure, else None."""
        self._steps_left -= 1
        if self._steps_left == self._measured_steps:
            devices.synchronize(self._device)
            self._seconds_at_start = self._clock.read()
        if self._steps_left > 0:
            return None
        devices.synchronize(self._device)
        samples = self._sampler.global_batch * self._measured_steps
        fractions = speed(self._seconds_at_start, self._clock.read(), samples)
        rate = fractions.pop("images_per_s")
        split = ", ".join(f"{fractions[phase]:.0%} {phase.replace('_', ' ')}" for phase in TRAINING_PHASES)
        return f"Training speed was {rate:.1f} images/s over {self._measured_steps} steps: {split}"
