"""Timers: how long the parts of a program take, and a start of a job that only measures some steps."""

import argparse
import time
from collections.abc import Mapping
from typing import Optional

import torch

from common import devices
from common.errors import UserError
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
        """Return a line with the seconds of all parts, and of the training phases in `seconds`, which is run.seconds."""
        parts = ", ".join(f"{name.replace('_', ' ')} {seconds[name]:.1f} s" for name in TRAINING_PHASES)
        return "time: " + ", ".join(f"{name} {spent:.1f} s" for name, spent in self._laps.items()) + f" (of which {parts})"


class Trial:
    """A start that takes a few steps to measure them (--prof, --find_max_batch). It reads no checkpoint and writes no file."""

    def __init__(self, args: argparse.Namespace, prof: Optional[int], sampler: Sampler, device: torch.device, clock: Clock):
        """`prof`: measure the speed of this many steps, after some that warm up; unset: none, for --find_max_batch."""
        if args.find_max_batch and not devices.is_accelerator(device):
            raise UserError("--find_max_batch true looks at the memory of a GPU, and this job computes on a CPU")
        self._args = args
        self._steps = prof or 0
        self._steps_left = WARM_UP + self._steps
        self._sampler = sampler
        self._device = device
        self._clock = clock
        self._seconds_at_first: dict[str, float] = {}

    def after_step(self, total_steps: int) -> Optional[str]:
        """Return a line with the speed after the last step of --prof, else None. --find_max_batch exits after its last one."""
        if self._args.find_max_batch:
            from common.devices import largest_batch

            largest_batch.end_of_step(self._args, total_steps, self._sampler, self._finish_work)
        self._steps_left -= 1
        if self._steps_left == self._steps:
            self._finish_work()
            self._seconds_at_first = self._clock.read()
        if self._steps_left > 0 or not self._steps:
            return None
        self._finish_work()
        samples = self._sampler.global_batch * self._steps
        fractions = speed(self._seconds_at_first, self._clock.read(), samples)
        rate = fractions.pop("images_per_s")
        split = ", ".join(f"{fractions[phase]:.0%} {phase.replace('_', ' ')}" for phase in TRAINING_PHASES)
        return f"Training speed was {rate:.1f} images/s over {self._steps} steps: {split}"

    def _finish_work(self) -> None:
        devices.synchronize(self._device)
