"""The client of the sample cache beside plain pymemcache: what a sample costs, and how long a bad server holds one up.

    python -m tests.benchmarks.memcached [--rounds 9]       (make bench)

The forms take turns, each in a forked process of its own, so that its CPU time is the client's alone. The servers are memcached's
own, on this machine. Of what datasets/kspeed/fleet.py adds to pymemcache each part is also taken out alone, and what it once had is put back. Beside a bad
server ours has a deadline of 0.05 s and pymemcache its own two timeouts of 0.05 s; the costs are taken with 10 s.
"""

import argparse
import contextlib
import functools
import os
import statistics
import subprocess
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from pymemcache import __version__

from tests.benchmarks import rows
from tests.benchmarks.bad_memcached import behaviour
from tests.benchmarks.base import machine
from tests.benchmarks.memcached_forms import (
    CONNECTING,
    FORMS,
    GETS,
    LIBRARY,
    OURS,
    PARALLEL,
    POOL,
    SETS,
    SIZES,
    THREADS,
    WARM_UP,
    content,
    fill,
    text,
)
from tests.tools.memcached import Memcached
from tests.tools.packages import program


def forked(function):
    """What the function returns, an array of floats, from a process of its own."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        code = 1
        try:
            os.write(writing, np.array(function()).tobytes())
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writing)
    with open(reading, "rb") as file:
        found = np.frombuffer(file.read())
    if os.waitpid(pid, 0)[1]:
        raise RuntimeError("a form has failed, see above")
    return tuple(found)


def cost(call, all_of=lambda call, work: [bool(call(*one)) for one in work]):
    """(CPU, seconds on the clock) for one of the calls."""

    def measured(work):
        all_of(call, [work[number % len(work)] for number in range(WARM_UP)])
        begun, used = time.perf_counter(), time.process_time()
        found = all_of(call, [work[number % len(work)] for number in range(GETS)])
        times = time.process_time() - used, time.perf_counter() - begun
        if not all(found):
            raise RuntimeError(f"{sum(not one for one in found)} of {GETS} have failed")
        return [seconds / GETS for seconds in times]

    return measured


def in_turn(forms, rounds, work, servers, all_of=None):
    found = {form: [] for form in forms}
    for _ in range(rounds):
        for form, make in forms.items():
            found[form].append(forked(lambda make=make: cost(make(servers), *filter(None, [all_of]))(work)))
    return found


def ratios(found, form, base, place=0):
    return sorted(theirs[place] / mine[place] for mine, theirs in zip(found[base], found[form]))


def table(what, found):
    lines = [f"| {what} | CPU, us | on the clock, us | CPU, of ours without the checksum |", "|---|---|---|---|"]
    for form, times in found.items():
        cpu, clock = ([1e6 * one[place] for one in times] for place in (0, 1))
        ratio = text(ratios(found, form, OURS)) if form != OURS else ""
        lines.append(f"| {form} | {text(cpu, 0)} | {statistics.median(clock):.0f} | {ratio} |")
    return "\n".join(lines) + "\n"


@functools.cache
def threads():
    return ThreadPoolExecutor(THREADS)


def in_threads(call, work):
    return list(threads().map(lambda one: bool(call(*one)), work))


def costs(rounds):
    for count, size in ((1, SIZES[0]), (3, SIZES[0]), (10, SIZES[0]), (1, SIZES[1])):
        with contextlib.ExitStack() as stack:
            servers = [stack.enter_context(Memcached("-m", 128)) for _ in range(count)]
            work, what = fill(servers, size), f"{size // 1000} KB, {count} server{'s' * (count > 1)}"
            found = in_turn(FORMS, rounds, work, servers)
            print(table(f"get, {what}", found), flush=True)
            if count != 3:
                continue
            keep("get from memcached", "pymemcache's HashClient", ratios(found, LIBRARY, "ours, SampleCache"))
            keep("get from memcached, no checksum", "pymemcache's HashClient", ratios(found, LIBRARY, OURS))
            print(table(f"get, {what}", in_turn(CONNECTING, rounds, work, servers)), flush=True)
            found = in_turn(PARALLEL, rounds, work, servers, in_threads)
            print(table(f"get in {THREADS} threads, {what}", found), flush=True)
            keep(f"get from memcached in {THREADS} threads", POOL, ratios(found, POOL, "ours, SampleCache"))
            samples = [(key, content(number, size)) for number, (key, _) in enumerate(work)]
            print(table(f"set, {what}", in_turn(SETS, rounds, samples, servers)), flush=True)


def keep(what, peer, values):
    rows.keep(f"{what}, 110 KB, 3 servers, CPU", peer, values)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    version = subprocess.run([program("memcached"), "-V"], capture_output=True, text=True, check=True).stdout.strip()
    print(f"{machine()}; pymemcache {__version__}, {version}; {options.rounds} rounds, median (range)\n")
    costs(options.rounds)
    behaviour(min(options.rounds, 3))
    return 0


if __name__ == "__main__":
    sys.exit(main())
