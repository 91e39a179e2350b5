"""What happens when a rank, a host or a cable is lost, or two nodes do not fit together, and how soon everyone knows.

    python -m tests.chaos.faults --trials 20 [--fault NAME] [--seed 1] [--results FILE]     (make chaos FAULT=name TRIALS=n)

A table of three forms of starting the job: once per node, by torchrun, and each rank by itself (as srun -n and mpirun do it). Two
hosts (network namespaces, so this needs root), two ranks on each. Measured are the
seconds from the fault, or from the start of the last program for a fault before training, until every rank has stopped;
whether the line in the log names the right culprit on every surviving host; and the exit codes. Each trial is a line of the
results file, so that a table can be filled in parts.
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

from tests.tools.hosts import Hosts, wait_all
from tests.tools.jobs import ROOT
from tests.tools.packages import namespaces
from tests.tools.ranks import LONG, workers_of

TIMEOUT = 60
OPTIONS = [*LONG, "--batch_size", "4", "--save_steps", "1"]
ADDRESS, PORT = "10.77.0.1", 6666


class Trial:
    """Two hosts, a form of starting the job on them, and the moment of the fault."""

    def __init__(self, hosts, form, draw):
        self.hosts, self.form, self.draw = hosts, form, draw
        self.unharmed = []  # processes that have to go on

    def ranks(self, number, **how):
        """What srun -n or mpirun start on a host: each rank by itself."""
        shared = {
            "WORLD_SIZE": "4",
            "LOCAL_WORLD_SIZE": "2",
            "GROUP_RANK": str(number),
            "MASTER_ADDR": ADDRESS,
            "MASTER_PORT": str(PORT),
        }
        own = [{"RANK": str(2 * number + local), "LOCAL_RANK": str(local)} for local in range(2)]
        return [self.hosts.start(number, 2, *OPTIONS, launcher=[sys.executable], env={**shared, **env}, **how) for env in own]

    def start(self, number, nodes=2, rank=None, ours=(), **how):
        rank = number if rank is None else rank
        if self.form == "ours":
            return self.hosts.start(number, nodes, *OPTIONS, "--nproc_per_node", 2, *ours, rank=rank, **how)
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", nodes, "--node_rank", rank]
        launcher += ["--nproc_per_node", 2, "--master_addr", ADDRESS, "--master_port", PORT]
        return self.hosts.start(number, nodes, *OPTIONS, launcher=launcher, **how)

    def train(self, **how):
        """Both hosts train; returns at a random moment of it."""
        if self.form == "each rank":
            processes = [process for number in range(2) for process in self.ranks(number, **how)]
        else:
            processes = [self.start(number, **how) for number in range(2)]
        checkpoints, deadline = self.hosts.folders[0] / "out" / "checkpoints", time.monotonic() + 120
        while not (checkpoints.exists() and list(checkpoints.glob("*.json"))):
            if time.monotonic() > deadline or any(process.poll() is not None for process in processes):
                raise AssertionError(self.hosts.log(0) + self.hosts.log(1))
            time.sleep(0.02)
        time.sleep(self.draw.uniform(0, 2))
        return processes

    def name_of(self, host):
        """In the log: of a node, or of one of its ranks where each has a watcher of its own."""
        return rf"node {host} \(ranks " if self.form == "ours" else f"rank [{2 * host}{2 * host + 1}] "

    def signal(self, rank, number):
        os.kill(workers_of([pid for host in range(2) for pid in self.hosts.pids(host)])[rank], number)


# Each fault: makes it happen, and returns the processes that have to stop and {host: what its log has to say}.


def kill_rank(trial):
    processes, rank = trial.train(), trial.draw.randrange(4)
    trial.signal(rank, signal.SIGKILL)
    return processes, dict.fromkeys(range(2), rf"rank {rank} \(.*killed by SIGKILL")


def stop_rank(trial):
    processes, rank = trial.train(), trial.draw.randrange(4)
    trial.signal(rank, signal.SIGSTOP)
    return processes, dict.fromkeys(range(2), rf"rank {rank} \(.*stopped \(state T\)")


def cut_cable(trial):
    processes = trial.train()
    trial.hosts.cut(1)
    return processes, {0: rf"{trial.name_of(1)}.*silent", 1: rf"{trial.name_of(0)}.*silent"}


def lose_host(trial):
    processes, lost = trial.train(), trial.draw.randrange(2)
    trial.hosts.kill(lost)
    left = processes[2 * (1 - lost) :][:2] if trial.form == "each rank" else [processes[1 - lost]]
    return left, {1 - lost: rf"{trial.name_of(lost)}.*is lost"}


def lack_node(trial):
    there, missing = trial.draw.sample([1, 2], 2)
    processes = [trial.start(number, nodes=3, rank=rank, ours=["--join_seconds", 15]) for number, rank in enumerate((0, there))]
    return processes, dict.fromkeys(range(2), rf"node {missing} \(ranks .*did not come within 15 s")


def take_port(trial):
    listen = f"import socket, signal; taken = socket.create_server(('', {PORT})); print('taken', flush=True); signal.pause()"
    trial.hosts.run(0, sys.executable, "-c", listen)
    while "taken" not in trial.hosts.log(0):
        time.sleep(0.02)
    processes = [trial.start(number) for number in range(2)]
    return processes, {0: f"port {PORT} on this node is taken", 1: "answers but is not node 0 of this job"}


def start_second_job(trial):
    trial.unharmed = trial.train(env={"MA_VJ_NAME": "first"})
    return [trial.start(1, env={"MA_VJ_NAME": "second"})], {1: "this port belongs to another job, 'first'"}


def repeat_rank(trial):
    processes = [trial.start(number, nodes=3, rank=rank) for number, rank in ((0, 0), (1, 1), (1, 1))]
    return processes, dict.fromkeys(range(2), r"duplicate rank: host \S+ and host \S+ both say they are node 1")


def differ_in_code(trial):
    stale, other = trial.draw.randrange(2), trial.hosts.folders[1] / "stale"
    (other / "jobs").mkdir(parents=True)
    for name in ("common", "datasets"):
        (other / name).symlink_to(ROOT / name)
    (other / "jobs" / "train_ddp.py").write_text((ROOT / "jobs" / "train_ddp.py").read_text() + "\n# a stale upload\n")
    processes = [trial.start(number, root=other if number == stale else ROOT) for number in range(2)]
    return processes, dict.fromkeys(range(2), r"code differs: \w+ on (node|rank) 0 .* on (node|rank) [12]")


FORMS = ("ours", "torchrun", "each rank")
OF_ALL_FORMS = ("rank killed", "rank stopped", "cable cut", "host lost")
FAULTS = {
    "rank killed": kill_rank,
    "rank stopped": stop_rank,
    "cable cut": cut_cable,
    "host lost": lose_host,
    "node never comes (--join_seconds 15)": lack_node,
    "port taken": take_port,
    "second job on the port": start_second_job,
    "duplicate rank": repeat_rank,
    "different code": differ_in_code,
}  # fmt: skip


def run_trial(name, form, draw):
    """{seconds, named, codes}; seconds is None where somebody still ran after the timeout."""
    with tempfile.TemporaryDirectory() as folder:
        hosts = Hosts(2, Path(folder))
        try:
            trial = Trial(hosts, form, draw)
            processes, expected = FAULTS[name](trial)
            try:
                codes, ends = wait_all(processes, TIMEOUT)
            except AssertionError:
                return {"seconds": None, "named": False, "codes": []}
            named = all(re.search(pattern, hosts.log(number)) for number, pattern in expected.items())
            named = named and all(process.poll() is None for process in trial.unharmed)
            return {"seconds": round(max(ends), 2), "named": named, "codes": codes}
        finally:
            hosts.close()


def table(results):
    rows = [
        "| fault | form | trials | all stopped, s: median (max) | right culprit | exit code not 0 |",
        "|---|---|---|---|---|---|",
    ]
    for name in FAULTS:
        for form in FORMS:
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
    parser.add_argument("--trials", type=int, default=20, help="of each form in all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--results", type=Path, default=Path(tempfile.gettempdir()) / "anyrank-faults.jsonl")
    options = parser.parse_args()
    namespaces()
    results = [json.loads(line) for line in options.results.read_text().splitlines()] if options.results.exists() else []
    for name in [options.fault] if options.fault else FAULTS:
        for form in FORMS if name in OF_ALL_FORMS else FORMS[:1]:
            trials = options.trials
            done = sum((row["fault"], row["form"]) == (name, form) for row in results)
            for number in range(done, trials):
                found = run_trial(name, form, random.Random(f"{options.seed}-{name}-{number}"))
                results.append({"fault": name, "form": form, **found})
                with options.results.open("a") as file:
                    file.write(json.dumps(results[-1]) + "\n")
                print(f"{name}, {form}, trial {number + 1}: {found}", flush=True)
    print("\n" + table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
