"""--profile true: the time of each operation in a few steps, as a trace (for ui.perfetto.dev) and a short table."""

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

TRACED = 10  # steps in a trace
MOST = 10  # operations in its table


class Trace(Observer):
    def __init__(self, args: argparse.Namespace, device: torch.device, side_files: SideFiles):
        self._path = os.path.join(args.output_dir, "trace.json.gz")
        self._device = device
        self._say = side_files.say
        self._seen = 0
        self._waited = 0.0
        self._over = False
        self._recorder: Any = None

    def stepped(self, facts: Facts, **_: object) -> None:
        """Count a step. Begin to record after WARM_UP steps; after TRACED more, write the trace and log the table."""
        self._seen += 1
        if self._seen == WARM_UP:
            self._waited = facts.seconds["waiting_for_data"]
            self._begin()
        elif self._seen == WARM_UP + TRACED and self._recorder:
            self._end(facts.seconds["waiting_for_data"] - self._waited)

    def ending(self, _facts: Facts, **_: object) -> None:
        """Stop recording, and log a line if the run was too short for a profile."""
        self._stop()
        if not self._over:
            self._say(
                f"profile: the run ended after {self._seen} steps, and a profile takes {WARM_UP + TRACED}: "
                "raise --epochs or --max_steps"
            )

    def _begin(self):
        from torch.profiler import profile

        self._recorder = profile(activities=devices.profiled())
        self._began = time.monotonic()
        self._recorder.start()
        atexit.register(self._stop)  # a recorder that is not stopped crashes the process at its end

    def _end(self, waited: float) -> None:
        devices.synchronize(self._device)
        wall = time.monotonic() - self._began
        recorder = self._recorder
        self._stop()
        self._over = True
        place = f"trace in {self._path}"
        try:
            recorder.export_chrome_trace(self._path)
        except OSError as error:
            place = f"no trace: {self._path} cannot be written: {error.strerror}"
        self._say(f"profile: {TRACED} steps in {wall:.2f} s, {place}")
        for line in summary(recorder.key_averages(), wall, waited):
            self._say(line)

    def _stop(self):
        if self._recorder:
            self._recorder.stop()
            self._recorder = None


def summary(operations: Any, wall: float, waited: float) -> Iterator[str]:
    """Yield lines: the fractions of time for data (`waited` of `wall` seconds), host and device, and the top operations."""
    on_gpu = any(device_ms(one) for one in operations)
    device = min(1.0, sum(map(device_ms, operations)) / 1e3 / wall)
    data = min(1.0, waited / wall)
    host = "host without device" if on_gpu else "host"
    yield f"profile: {data:.0%} waiting for data, {max(0.0, 1 - data - device):.0%} {host}, {device:.0%} device"
    spent = device_ms if on_gpu else host_ms
    ranked = sorted(operations, key=spent, reverse=True)[:MOST]
    total = sum(map(spent, operations)) or 1.0
    kind = "device" if on_gpu else "host"
    yield f"profile: {'time':>6} {'ms a step':>10} {'calls a step':>13}  operation ({kind} time of its own)"
    for one in ranked:
        yield f"profile: {spent(one) / total:>6.1%} {spent(one) / TRACED:>10.2f} {one.count / TRACED:>13.1f}  {one.key}"


def host_ms(operation: Any) -> float:
    return operation.self_cpu_time_total / 1e3


def device_ms(operation: Any) -> float:
    """Return the milliseconds of a kernel on the device; 0 for a CPU operator or an annotation: their kernels count."""
    if operation.device_type == torch.autograd.DeviceType.CPU or getattr(operation, "is_user_annotation", False):
        return 0.0
    return operation.self_device_time_total / 1e3
