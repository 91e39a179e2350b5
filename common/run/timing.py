"""Where the time of training goes: waiting for data, moving them to the device, computing; and what to do about it.

The host's clock measures the first and the last. On a GPU the transfer overlaps the computing and is measured by the GPU's
clock, so there the three may add up to more than 100 %. Saving and logging are in none of them.
"""

import atexit
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Callable, Optional

import torch

from common import devices

LINE_SECONDS = 5
PHASES = ("waiting_for_data", "transfer", "compute")
STARVED = 0.25  # share of the time spent waiting from which the loader is called the bottleneck
WARM_UP = 10  # steps before a profile's clock starts
TRACED, MOST = 10, 10  # steps in a trace; operations in the table


class Window:
    """Samples, and seconds in each phase, since the last line of the log."""

    def __init__(self, every: Optional[int] = None):
        """A line is due after so many steps; None: after some seconds."""
        self._first, self._every = True, every
        self._begin_anew()

    def _begin_anew(self):
        self._began, self._samples, self._seconds = time.monotonic(), 0, [0.0] * len(PHASES)
        self._steps = 0

    def add(self, samples: int, seconds: Sequence[float]) -> None:
        self._samples += samples
        self._steps += 1
        self._seconds = [sum(pair) for pair in zip(self._seconds, seconds)]

    def leave_out(self, seconds: float) -> None:
        """They went into something else."""
        self._began += seconds

    def due(self) -> bool:
        if self._every:
            return self._first or self._steps >= self._every
        return self._first or time.monotonic() - self._began >= LINE_SECONDS

    def close(self) -> tuple[float, dict[str, float]]:
        """(samples a second, {phase: share of the time}), and begin anew."""
        passed = max(time.monotonic() - self._began, 1e-9)
        rate, shares = self._samples / passed, {name: min(1.0, spent / passed) for name, spent in zip(PHASES, self._seconds)}
        self._begin_anew()
        self._first = False
        return rate, shares


class TimeLeft:
    """How long the rest of a run takes: a step as in the later half of those of this start, an evaluation as on average.

    Before the first evaluation that is a guess: a sample takes a third of what it takes in training, which also goes backward.
    """

    def __init__(self, test_samples: int):
        self._marks: list[tuple[int, float]] = []  # (samples, seconds of training) of this start
        self._epochs, self._test_samples = 0, test_samples

    def mark(self, samples: int, training: float) -> None:
        """After each step."""
        if len(self._marks) >= 1000:
            self._marks = self._marks[::2]
        self._marks.append((samples, training))

    def epoch(self) -> None:
        """One has ended, with its evaluation."""
        self._epochs += 1

    def seconds(self, samples_left: int, evaluations_left: int, spent: Mapping[str, float]) -> float:
        """`spent`: in each phase, as Course.read() gives it."""
        samples, training = self._marks[-1]
        first = next(mark for mark in self._marks if mark[0] >= samples / 2)
        if first == self._marks[-1]:  # there is only one
            first = (0, 0.0)
        of_a_sample = (training - first[1]) / max(samples - first[0], 1)
        evaluation = spent["evaluation"] / self._epochs if self._epochs else self._test_samples * of_a_sample / 3
        rest = samples_left * of_a_sample * (1 + spent["saving"] / max(training, 1e-9))
        return rest + evaluations_left * evaluation


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


class Trace:
    """--profile true: the time of each operation in a few steps, which are slower than others, as a trace and a short table.

    The trace opens in ui.perfetto.dev, in chrome://tracing and in TensorBoard.
    """

    def __init__(self, folder: str, device: torch.device, say: Callable[[str], None]):
        self._path, self._device, self._say = os.path.join(folder, "trace.json.gz"), device, say
        self._seen, self._waited, self._over = 0, 0.0, False
        self._recorder: Any = None

    def step(self, waiting_for_data: float) -> None:
        """Count a step that has ended; after the last one recorded, show the profile."""
        self._seen += 1
        if self._seen == WARM_UP:
            self._begin()
        elif self._recorder:
            self._waited += waiting_for_data
            if self._seen == WARM_UP + TRACED:
                self._end()

    def close(self) -> None:
        """The run is over: say so if it was too short for a profile."""
        self._stop()
        if not self._over:
            self._say(
                f"profile: the run ended after {self._seen} steps, and a profile takes {WARM_UP + TRACED}; raise --max_steps"
            )

    def _begin(self):
        from torch.profiler import profile

        self._recorder, self._began = profile(activities=devices.profiled()), time.monotonic()
        self._recorder.start()
        atexit.register(self._stop)  # a recorder that is not stopped crashes the process at its end

    def _end(self):
        devices.synchronize(self._device)
        wall, recorder = time.monotonic() - self._began, self._recorder
        self._stop()
        self._over, place = True, f"trace in {self._path}"
        try:
            recorder.export_chrome_trace(self._path)
        except OSError as error:
            place = f"no trace: {self._path} cannot be written: {error.strerror}"
        self._say(f"profile: {TRACED} steps in {wall:.2f} s, {place}")
        for line in summary(recorder.key_averages(), wall, self._waited):
            self._say(line)

    def _stop(self):
        if self._recorder:
            self._recorder.stop()
            self._recorder = None


def summary(operations: Any, wall: float, waited: float) -> Iterator[str]:
    """The shares of the elapsed time, and the operations that took most of it."""
    on_gpu = any(device_ms(one) for one in operations)
    device = min(1.0, sum(map(device_ms, operations)) / 1e3 / wall)
    data = min(1.0, waited / wall)
    host = "host without device" if on_gpu else "host"
    yield f"profile: {data:.0%} waiting for data, {max(0.0, 1 - data - device):.0%} {host}, {device:.0%} device"
    spent = device_ms if on_gpu else host_ms
    ranked = sorted(operations, key=spent, reverse=True)[:MOST]
    total = sum(map(spent, operations)) or 1.0
    kind = "device" if on_gpu else "host"
    yield f"profile: {'share':>6} {'ms a step':>10} {'calls a step':>13}  operation ({kind} time of its own)"
    for one in ranked:
        yield f"profile: {spent(one) / total:>6.1%} {spent(one) / TRACED:>10.2f} {one.count / TRACED:>13.1f}  {one.key}"


def host_ms(operation: Any) -> float:
    return operation.self_cpu_time_total / 1e3


def device_ms(operation: Any) -> float:
    """Of kernels alone: the rows of operators and annotations repeat the time of the kernels that they started."""
    if operation.device_type == torch.autograd.DeviceType.CPU or getattr(operation, "is_user_annotation", False):
        return 0.0
    return operation.self_device_time_total / 1e3


def advice(remedies: Sequence[str], waiting: float) -> Optional[str]:
    """One line if the network waits for the loader and something can be done about it; else None."""
    if not remedies or waiting < STARVED:
        return None
    cause = f"the network waited for data {waiting:.0%} of the time, the loader is the bottleneck"
    return f"advice: {cause}: try {'; or '.join(remedies)}"
