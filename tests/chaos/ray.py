"""Kill a worker, a host or the head of a Ray cluster in the middle of an epoch, again and again.

    python -m tests.chaos.ray --trials 20 --seed 1        (make chaos)

Three hosts that cannot see the repository, three workers. The moment is drawn at random. Every batch has to be what it is without
a fault, in the same place, and none may keep the reader waiting for 30 s. A lost host is replaced by another one; after a lost
head there is a new cluster.
"""

import argparse
import os
import random
import signal
import statistics
import sys
import tempfile
import warnings
from pathlib import Path

from datasets.dpex.loader import DpexDataLoader
from tests.datasets.dpex.test_faults import COUNT, STALL, Pictures, epoch
from tests.tools.rayhosts import RayHosts

FAULTS = ["worker killed", "host lost", "head lost"]


def strike(fault, hosts, draw):
    if fault == "worker killed":
        os.kill(draw.choice(sorted(hosts.workers())), signal.SIGKILL)
    elif fault == "host lost":
        hosts.kill(len(hosts.raylets) - 1 - draw.randrange(2))
    else:
        hosts.kill_head()


def trials(fault, count, seed):
    """The longest wait of each epoch, or what was wrong."""
    found, hosts, loader, cluster = [], None, None, None
    for number in range(count):
        draw = random.Random(f"{seed}-{fault}-{number}")
        if hosts is None or fault != "worker killed":
            loader = None
            if hosts:
                hosts.close()
            cluster = tempfile.TemporaryDirectory(prefix="chaos")
            hosts = RayHosts(Path(cluster.name), 2)
            os.environ.update(hosts.variables)
            loader = DpexDataLoader(Pictures(), distribute_mode=True, head_address=hosts.address, batch_size=2, num_workers=3)
        at, now, before = draw.randrange(2, COUNT - 10), hosts, draw
        try:
            found.append(epoch(loader, lambda now=now, draw=before: strike(fault, now, draw), at)[0])
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
        print(f"{fault} {number}, at batch {at}: {found[-1]}", flush=True)
    loader = None
    hosts.close()
    return found


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--fault", choices=FAULTS)
    options = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    rows, good = [], True
    for fault in [options.fault] if options.fault else FAULTS:
        found = trials(fault, options.trials, options.seed)
        waits = [wait for wait in found if isinstance(wait, float) and wait < STALL]
        good &= len(waits) == len(found)
        middle = f"{statistics.median(waits):.1f} s ({max(waits):.1f})" if waits else "-"
        rows.append(f"| {fault} | {len(waits)} of {len(found)} | {middle} |")
    print(
        "\n| fault | same batches in the same order, no wait of 30 s | longest wait, median (most) |\n|---|---|---|",
        *rows,
        sep="\n",
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
