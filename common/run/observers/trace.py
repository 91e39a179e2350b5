"""--profile true: the time of each operation in a few steps,
as a trace (for ui.perfetto.dev) and a short table."""

import argparse
import atexit
import os
import time
from collections.abc import Iterator
from typing import Any

import torch

from common import devices
from common.run.clock import WARM_UP
from common.run.observers.observer import Facts, Observer
from common.run.side_files import SideFiles

TRACED_STEPS = 10  # steps in a trace
TABLE_ROWS = 10  # operations in its table


class Trace(Observer):
    def __init__(self, args: argparse.Namespace, device: torch.device, side_files: SideFiles):
        self._path = os.path.join(args.output_dir, "trace.json.gz")
        self._device = device
        self._say = side_files.say
        self._steps_seen = 0
        self._waiting_before = 0.0
        self._is_over = False
        self._recorder: Any = None

    def stepped(self, facts: Facts, **_: object) -> None:
        """Count a step; record TRACED_STEPS steps after WARM_UP others,
        then write the trace and the table."""
        self._steps_seen += 1
        if self._steps_seen == WARM_UP:
            self._waiting_before = facts.seconds["waiting_for_data"]
            self._begin()
        elif self._steps_seen == WARM_UP + TRACED_STEPS and self._recorder:
            self._end(facts.seconds["waiting_for_data"] - self._waiting_before)

    def ending(self, _facts: Facts, **_: object) -> None:
        """Stop recording, and log a line if the run was too short for a profile."""
        self._stop()
        if not self._is_over:
            self._say(
                f"profile: the run ended after {self._steps_seen} steps, and a profile takes "
                f"{WARM_UP + TRACED_STEPS}: raise --epochs or --max_steps"
            )

    def _begin(self):
        from torch.profiler import profile

        self._recorder = profile(activities=devices.profiler_activities())
        self._began_at = time.monotonic()
        self._recorder.start()
        atexit.register(self._stop)  # a recorder that is not stopped crashes the process at its end

    def _end(self, waiting: float) -> None:
        devices.synchronize(self._device)
        elapsed = time.monotonic() - self._began_at
        recorder = self._recorder
        self._stop()
        self._is_over = True
        place = f"trace in {self._path}"
        try:
            recorder.export_chrome_trace(self._path)
        except OSError as error:
            place = f"no trace: {self._path} cannot be written: {error.strerror}"
        self._say(f"profile: {TRACED_STEPS} steps in {elapsed:.2f} s, {place}")
        for line in summary(recorder.key_averages(), elapsed, waiting):
            self._say(line)

    def _stop(self):
        if self._recorder:
            self._recorder.stop()
            self._recorder = None


def summary(operations: Any, elapsed: float, waiting: float) -> Iterator[str]:
    """Yield lines with the fractions of `elapsed` for data, host and device, and the longest operations."""
    on_gpu = any(device_ms(operation) for operation in operations)
    device = min(1.0, sum(map(device_ms, operations)) / 1e3 / elapsed)
    data = min(1.0, waiting / elapsed)
    host = "host without device" if on_gpu else "host"
    yield (
        f"profile: {data:.0%} waiting for data, {max(0.0, 1 - data - device):.0%} {host}, {device:.0%} device"
    )
    cost = device_ms if on_gpu else host_ms
    ranked = sorted(operations, key=cost, reverse=True)[:TABLE_ROWS]
    total = sum(map(cost, operations)) or 1.0
    kind = "device" if on_gpu else "host"
    yield f"profile: {'time':>6} {'ms a step':>10} {'calls a step':>13}  operation ({kind} time of its own)"
    for operation in ranked:
        yield (
            f"profile: {cost(operation) / total:>6.1%} {cost(operation) / TRACED_STEPS:>10.2f} "
            f"{operation.count / TRACED_STEPS:>13.1f}  {operation.key}"
        )


def host_ms(operation: Any) -> float:
    return operation.self_cpu_time_total / 1e3


def device_ms(operation: Any) -> float:
    """Return the milliseconds of a kernel on the device; 0 for a CPU operator or an annotation:
    their kernels count."""
    if operation.device_type == torch.autograd.DeviceType.CPU or getattr(
        operation, "is_user_annotation", False
    ):
        return 0.0
    return operation.self_device_time_total / 1e3
