"""--profile true: the time of each operation in a few steps, as a trace and a short table.

The trace opens in ui.perfetto.dev, in chrome://tracing and in TensorBoard. Recorded steps are slower than others; without the
option nothing here is imported.
"""

import atexit
import os
import time
from collections.abc import Iterator
from typing import Any

import torch

STEPS, WARM_UP = 10, 10
MOST = 10  # operations in the table


class Trace:
    def __init__(self, folder: str):
        self.path = os.path.join(folder, "trace.json.gz")
        self._seen, self._waited, self._done = 0, 0.0, False
        self._recorder: Any = None

    def step(self, waiting_for_data: float) -> list[str]:
        """Count a step that has ended; after the last one recorded, the lines of the profile."""
        self._seen += 1
        if self._seen == WARM_UP:
            self._begin()
        elif self._recorder:
            self._waited += waiting_for_data
            if self._seen == WARM_UP + STEPS:
                return self._end()
        return []

    def _begin(self):
        from torch.profiler import ProfilerActivity, profile

        on_gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        self._recorder, self._began = profile(activities=[ProfilerActivity.CPU, *on_gpu]), time.monotonic()
        self._recorder.start()
        atexit.register(self.close)  # a recorder that is not stopped crashes the process at its end

    def close(self) -> list[str]:
        """The run is over: a line if it was too short for a profile."""
        if self._recorder:
            self._recorder.stop()
            self._recorder = None
        if self._done:
            return []
        self._done = True
        return [f"profile: the run ended after {self._seen} steps, and a profile takes {WARM_UP + STEPS}; raise --max_steps"]

    def _end(self):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        wall = time.monotonic() - self._began
        recorder, self._recorder, self._done = self._recorder, None, True
        recorder.stop()
        recorder.export_chrome_trace(self.path)
        return [
            f"profile: {STEPS} steps in {wall:.2f} s, trace in {self.path}",
            *summary(recorder.key_averages(), wall, self._waited),
        ]


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
        yield f"profile: {spent(one) / total:>6.1%} {spent(one) / STEPS:>10.2f} {one.count / STEPS:>13.1f}  {one.key}"


def host_ms(operation: Any) -> float:
    return operation.self_cpu_time_total / 1e3


def device_ms(operation: Any) -> float:
    """Of kernels alone: the rows of operators and annotations repeat the time of the kernels that they started."""
    if operation.device_type == torch.autograd.DeviceType.CPU or getattr(operation, "is_user_annotation", False):
        return 0.0
    return operation.self_device_time_total / 1e3
