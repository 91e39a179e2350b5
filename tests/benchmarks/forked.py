"""Loaders measured one process each: CPU time and time on the clock for an image, forms taking turns, ratios pair by pair."""

import os
import shlex
import statistics
import time
import traceback

import numpy as np
import torch

from tests.benchmarks import rows

WARM_UP = 3  # batches


def measure(form, processes=1):
    """(CPU seconds, seconds on the clock) for an image, of the batches that `form()` gives, in forked processes of one thread."""
    started = [_start(form) for _ in range(processes)]
    found = [_times(form, *one) for one in started]
    return sum(used for used, _ in found) / processes, 1 / sum(1 / clock for _, clock in found)


def _start(form):
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            torch.set_num_threads(1)
            for number, batch in enumerate(form()):
                if number < WARM_UP:
                    begun, used, count = time.perf_counter(), time.process_time(), 0
                else:
                    count += len(first_tensor(batch))
            found = [(time.process_time() - used) / count, (time.perf_counter() - begun) / count]
            os.write(writing, np.array(found).tobytes())
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(writing)
    return pid, reading


def _times(form, pid, reading):
    content = b""
    while part := os.read(reading, 64):
        content += part
    os.close(reading)
    os.waitpid(pid, 0)
    if not content:
        raise RuntimeError(f"{getattr(form, '__name__', form)} has failed")
    return tuple(np.frombuffer(content))


def first_tensor(batch):
    while not isinstance(batch, torch.Tensor):
        batch = next(iter(batch.values() if isinstance(batch, dict) else batch))
    return batch


def table(found, what, claims, data="", sizes=None):
    """The figures of every form, and its ratio to the first one's.

    `claims`: (form, its peer, by "CPU" or "clock"), the rows of the one table; `data`: the option that names the data; `sizes`: the
    bytes of an image in each form, where they are known.
    """
    for form, peer, by in claims:
        if form in found and peer in found:
            place = ["CPU", "clock"].index(by)
            ratios = [theirs[place] / mine[place] for mine, theirs in zip(found[form], found[peer])]
            rows.keep(f"{what}: {form}", peer, ratios, f"{data}--forms {shlex.join([form, peer])}")
    base = next(iter(found.values()))
    lines = [
        f"| {what} | images/s of CPU time | CPU ms an image | against the first, CPU | on the clock |"
        + " KB an image on disk |" * bool(sizes),
        "|---|---|---|---|---|" + "---|" * bool(sizes),
    ]
    for form, times in found.items():
        cells = []
        for place in (0, 1):
            ratios = sorted(theirs[place] / mine[place] for mine, theirs in zip(times, base))
            cells.append(f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")
        middle = statistics.median(used for used, _ in times)
        if sizes:
            cells.append(f"{sizes[form] / 1000:.0f}")
        lines.append(f"| {form} | {1 / middle:.0f} | {1000 * middle:.2f} | {' | '.join(cells)} |")
    return "\n".join(lines)
