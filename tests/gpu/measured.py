"""A job measured from inside: python -m tests.gpu.measured FIRST LAST jobs/JOB.py OPTIONS, ended after step LAST.

Its last line is JSON: images a second between the two steps, the longest of them in milliseconds, the peak of the GPU's memory,
and the seconds from the start of the process to the end of the first step.
"""

import json
import os
import runpy
import sys
import time
from pathlib import Path


def process_age():
    """Seconds since this process was started."""
    started = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19]) / os.sysconf("SC_CLK_TCK")
    return float(Path("/proc/uptime").read_text().split()[0]) - started


def main(first, last, script, *options):
    sys.argv = [script, *options]
    sys.path.insert(0, os.getcwd())
    import torch

    from common import devices, heartbeat
    from common.run import Run

    step, ends, found = Run.step, [], {}

    def measured(self, loss):
        step(self, loss)
        number = len(ends) + 1
        if number in (1, first, last):
            devices.synchronize(self.device)
        ends.append(time.perf_counter())
        if number == 1:
            found["seconds to the first step"] = round(process_age(), 1)
        if number == last:
            between = ends[first - 1 :]
            found["images/s"] = round((last - first) * self.global_batch / (between[-1] - between[0]), 1)
            found["longest step, ms"] = round(1000 * max(after - before for before, after in zip(between, between[1:])), 1)
            if devices.has_queues(self.device):
                found["peak MiB"] = round(torch.cuda.max_memory_allocated(self.device) / 2**20)
            print(json.dumps(found), flush=True)
            heartbeat.report_end(0)
            os._exit(0)  # nothing of this run is kept

    Run.step = measured
    runpy.run_path(script, run_name="__main__")
    sys.exit(f"the run ended after {len(ends)} steps")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
