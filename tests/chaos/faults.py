"""What happens when a rank, a host or a cable is lost, and how soon everyone knows: a table, ours beside torchrun alone.

    python -m tests.chaos.faults --trials 20 [--fault NAME] [--seed 1] [--results FILE]     (make chaos FAULT=name TRIALS=n)

Two hosts (network namespaces, so this needs root), two ranks on each. After a random number of steps the fault is injected;
measured are the seconds until every rank has stopped, whether the line in the log names the right culprit on every
surviving host, and the exit codes. Each trial is a line of the results file, so that a table can be filled in parts. The
faults before training (a node that never comes, a taken port ...) are those of tests/test_ddp.py, timed.
"""

import argparse
import json
import os
import random
import re
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

from tests.hosts import Hosts, need_namespaces, wait_all
from tests.test_ddp import LONG, workers_of

TIMEOUT = 60
OPTIONS = [*LONG, "--batch_size", "16", "--nproc_per_node", "2", "--save_steps", "1"]
OPTIONS_TORCHRUN = [*LONG, "--batch_size", "16", "--save_steps", "1"]


def worker(hosts, rank):
    """The process of this rank, on whichever host it is."""
    return workers_of([pid for number in range(2) for pid in hosts.pids(number)])[rank]


def kill_rank(hosts, draw):
    rank = draw.randrange(4)
    os.kill(worker(hosts, rank), signal.SIGKILL)
    return rf"rank {rank} \(.*killed by SIGKILL", []


def stop_rank(hosts, draw):
    rank = draw.randrange(4)
    os.kill(worker(hosts, rank), signal.SIGSTOP)
    return rf"rank {rank} \(.*stopped \(state T\)", []


def cut_cable(hosts, draw):
    hosts.cut(1)
    return r"node [01] \(ranks .*silent", []


def lose_host(hosts, draw):
    number = draw.randrange(2)
    hosts.kill(number)
    return rf"node {number} \(ranks .*is gone", [number]


FAULTS = {"rank killed": kill_rank, "rank stopped": stop_rank, "cable cut": cut_cable, "host gone": lose_host}


def start(hosts, form):
    if form == "ours":
        return [hosts.start(number, 2, *OPTIONS) for number in range(2)]
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes",
        2,
        "--nproc_per_node",
        2,
        "--master_addr",
        "10.77.0.1",
        "--master_port",
        6666,
    ]
    return [hosts.start(number, 2, *OPTIONS_TORCHRUN, launcher=[*launcher, "--node_rank", number]) for number in range(2)]


def trial(name, form, draw):
    """{seconds, named, codes}; seconds is None where somebody still ran after the timeout."""
    with tempfile.TemporaryDirectory() as folder:
        hosts = Hosts(2, Path(folder))
        try:
            processes = start(hosts, form)
            checkpoints, deadline = hosts.folders[0] / "out" / "checkpoints", time.monotonic() + 120
            while not (checkpoints.exists() and list(checkpoints.glob("*.json"))):
                if time.monotonic() > deadline or any(process.poll() is not None for process in processes):
                    raise AssertionError(hosts.log(0) + hosts.log(1))
                time.sleep(0.02)
            time.sleep(draw.uniform(0, 2))  # the moment of the fault
            pattern, gone = FAULTS[name](hosts, draw)
            left = [number for number in range(2) if number not in gone]
            try:
                codes, ends = wait_all([processes[number] for number in left], TIMEOUT)
            except AssertionError:
                return {"seconds": None, "named": False, "codes": []}
            named = all(re.search(pattern, hosts.log(number)) for number in left)
            return {"seconds": round(max(ends), 2), "named": named, "codes": codes}
        finally:
            hosts.close()


def table(results):
    rows = [
        "| fault | form | trials | all stopped, s: median (max) | right culprit | exit code not 0 |",
        "|---|---|---|---|---|---|",
    ]
    for name in FAULTS:
        for form in ("ours", "torchrun"):
            mine = [row for row in results if (row["fault"], row["form"]) == (name, form)]
            if not mine:
                continue
            times = [row["seconds"] for row in mine if row["seconds"] is not None]
            hung = len(mine) - len(times)
            shown = f"{statistics.median(times):.1f} ({max(times):.1f})" if times else "-"
            shown += f", {hung} still ran after {TIMEOUT} s" if hung else ""
            named, nonzero = sum(row["named"] for row in mine), sum(bool(row["codes"]) and all(row["codes"]) for row in mine)
            rows.append(f"| {name} | {form} | {len(mine)} | {shown} | {named} of {len(mine)} | {nonzero} of {len(mine)} |")
    return "\n".join(rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fault", choices=FAULTS, help="unset: all of them")
    parser.add_argument("--trials", type=int, default=20, help="of ours in all; torchrun gets 3")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--results", type=Path, default=Path(tempfile.gettempdir()) / "anyrank-faults.jsonl")
    options = parser.parse_args()
    need_namespaces()
    results = [json.loads(line) for line in options.results.read_text().splitlines()] if options.results.exists() else []
    for name in [options.fault] if options.fault else FAULTS:
        for form, trials in (("ours", options.trials), ("torchrun", min(3, options.trials))):
            done = sum((row["fault"], row["form"]) == (name, form) for row in results)
            for number in range(done, trials):
                found = trial(name, form, random.Random(f"{options.seed}-{name}-{number}"))
                results.append({"fault": name, "form": form, **found})
                with options.results.open("a") as file:
                    file.write(json.dumps(results[-1]) + "\n")
                print(f"{name}, {form}, trial {number + 1}: {found}", flush=True)
    print("\n" + table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
