"""A job measured from inside: python -m tests.gpu.measured FIRST LAST jobs/JOB.py OPTIONS, ended after step LAST.

Its last line is JSON: images a second in three windows between the two steps, the longest step of them in milliseconds, the peak
of the GPU's memory, what torch has reserved of it at both ends, and the seconds from the start of the process to the ends of the first two
steps and to what lies before them. No epoch may end in a window: its evaluation and its checkpoint would be measured, too. CIFAR-10 is therefore as
many images as one epoch of LAST steps needs.
"""

import itertools
import json
import multiprocessing
import os
import runpy
import sys
import time
from pathlib import Path

WINDOWS = 3
NAMES = {1: "first", 2: "second"}


def process_age():
    """Seconds since this process was started."""
    started = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19]) / os.sysconf("SC_CLK_TCK")
    return float(Path("/proc/uptime").read_text().split()[0]) - started


def repeated(load, samples):
    """cifar10.load, whose training set has so many samples: its own over and over."""

    def load_more(args):
        train, test = load(args)
        times = -(-samples // len(train))
        more = type(train)(
            train.images.repeat(times, 1, 1, 1).numpy(), train.labels.repeat(times).numpy(), train.classes, samples
        )
        return more, test

    return load_more


class OneBatch:
    """A loader whose first batch comes over and over."""

    def __init__(self, loader):
        self._loader = loader

    def __getattr__(self, name):
        return getattr(self._loader, name)

    def __len__(self):
        return len(self._loader)

    def __iter__(self):
        return itertools.repeat(next(iter(self._loader)))


def end(found):
    """Nothing of this run is kept. Loader workers would hold the pipe until they notice."""
    print(json.dumps(found), flush=True)
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(0)


def main(first, last, script, *options):
    sys.argv = [script, *options]
    sys.path.insert(0, os.getcwd())
    start = {"python": process_age()}
    import torch

    start["torch"] = process_age()

    from common import devices
    from common.alive import heartbeat
    from common.run import Run
    from datasets import cifar10

    start["our modules"] = process_age()
    steps, step, end_epoch, ends, found = Run.steps, Run.step, Run.end_epoch, [], {}
    marks = [first + (last - first) * number // WINDOWS for number in range(WINDOWS + 1)]

    def announced(self, loader):
        start.setdefault("before the first batch", process_age())
        for batch in steps(self, loader):
            start.setdefault("the first batch", process_age())
            yield batch

    def measured(self, loss):
        number = len(ends) + 1
        if number in (1, 2):
            devices.synchronize(self.device)
            start[f"the {NAMES[number]} step"] = process_age()
        if number == 1:
            found["CPU seconds to the first step"] = round(time.process_time(), 2)
        if number == 2:
            found["seconds to"] = {name: round(seconds, 2) for name, seconds in start.items()}
        step(self, loss)
        if number in marks:
            devices.synchronize(self.device)
        ends.append(time.perf_counter())
        if number in (first, last) and devices.has_streams(self.device):
            found.setdefault("reserved MiB", []).append(round(torch.cuda.memory_reserved(self.device) / 2**20))
        if number == last:
            pairs = zip(marks, marks[1:])
            found["images/s"] = [round((b - a) * self.global_batch / (ends[b - 1] - ends[a - 1]), 1) for a, b in pairs]
            longest = max(after - before for before, after in zip(ends[first - 1 :], ends[first:]))
            found["longest step, ms"] = round(1000 * longest, 1)
            if devices.has_streams(self.device):
                found["peak MiB"] = round(torch.cuda.max_memory_allocated(self.device) / 2**20)
            heartbeat.report_end(0)
            end(found)

    def outside(self, *scores, **metrics):
        if first <= len(ends) < last:
            sys.exit(f"an epoch ended after step {len(ends)}, which lies in the measured window from {first} to {last}")
        end_epoch(self, *scores, **metrics)

    Run.steps, Run.step, Run.end_epoch = announced, measured, outside
    if "GPU_ONE_BATCH" in os.environ:
        loader = cifar10.loader
        cifar10.loader = lambda *args, **kwargs: OneBatch(loader(*args, **kwargs))
    if "--batch_size" in options and "--max_samples" not in options:
        cifar10.load = repeated(cifar10.load, (last + 1) * int(options[options.index("--batch_size") + 1]))
    runpy.run_path(script, run_name="__main__")
    sys.exit(f"the run ended after {len(ends)} steps")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
