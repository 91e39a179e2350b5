"""What one more rank costs: starts of a tiny job on nodes of 8 ranks, each node a network namespace of this machine.

    python -m tests.benchmarks.ranks [--ranks 2 16 64 256] [--mib 1]

For each number of ranks four starts: one with torch alone, one of ours, one that resumes and is stopped by a signal to its last
node, one that resumes and whose last rank is killed. What is counted is counted by the kernel, per namespace, from phase to phase:
bytes and segments of TCP that a node sends, also to itself, and its connections. `mib`: of the checkpoint. Times say little where
256 ranks share two cores; the counts say what there is to grow.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

from tests.benchmarks.base import machine
from tests.tools.hosts import Hosts
from tests.tools.jobs import ROOT, wait_for

ON_A_NODE = 8
STEPS = 50
JOB = '''
import json, os, sys, time
sys.path.insert(0, {root!r})
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

def counts():
    found = {{}}
    for path in ("/proc/net/snmp", "/proc/net/netstat"):
        lines = open(path).read().splitlines()
        for names, values in zip(lines[::2], lines[1::2]):
            found.update(zip((names.split()[0] + name for name in names.split()[1:]), map(int, values.split()[1:])))
    return [found[name] for name in ("IpExt:OutOctets", "Tcp:OutSegs", "Tcp:CurrEstab")]

def held():
    lines = open("/proc/self/smaps_rollup").read().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private")) >> 10

def said(phase):
    """All ranks are there. One of each node says what it has counted."""
    distributed.barrier()
    if int(os.environ["LOCAL_RANK"]) == 0:
        print("said", json.dumps([phase, time.time(), *counts(), held()]), flush=True)
    distributed.barrier()

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 1 << 40
    def __getitem__(self, number):
        return torch.tensor([float(number % 7)])

def step(model, optimizer, batch):
    loss = model(batch).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss

def alone():
    print("said", json.dumps(["started", time.time(), *counts(), held()]), flush=True)
    distributed.init_process_group("gloo")
    said("joined")
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    said("resumed")
    for _ in range({steps}):
        step(model, optimizer, torch.ones(1, 1))
    said("steps")
    distributed.destroy_process_group()

def main():
    from common import arguments, devices
    from common.ranks import group
    from common.ranks.collectives import rank_and_size
    from common.run import Run
    from datasets.loader import SampleLoader
    from datasets.sampler import EpochSampler

    parser = arguments.general_parser("ranks", data="is not used", workers=0)
    parser.set_defaults(lr=1e-9)
    group.add_options(parser)
    args = arguments.parse(parser)
    if args.world.level == "node":
        print("said", json.dumps(["started", time.time(), *counts(), held()]), flush=True)
    group.start_workers(args)
    device = devices.choose(args)
    group.join(args, device)
    said("joined")
    sampler, model = EpochSampler(1 << 20, 1, seed=0), DistributedDataParallel(torch.nn.Linear(1, 1))
    sampler.shard(*rank_and_size())
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    model.module.register_buffer("rest", torch.zeros({mib} << 18))  # in the checkpoint, and nothing to DDP
    run = Run(args, sampler, model.module, best_by="loss", best_is="lowest", optimizer=optimizer)
    run.resume()
    said("resumed")
    for _ in run.epochs():
        for number, batch in enumerate(run.steps(SampleLoader(Numbers(), sampler, device)), 1):
            run.step(step(model, optimizer, batch))
            if number == {steps}:
                said("steps")
        run.end_epoch(loss=1.0)

if __name__ == "__main__":
    if "ALONE" in os.environ:
        alone()
    else:
        from common.alive.wire import channel
        from common.job import run_job

        channel.SILENCE_SECONDS = 120.0  # 2 cores make 32 parents wait
        run_job(main)
'''


class Nodes:
    """`ranks` of them on hosts of 8."""

    def __init__(self, ranks, mib, folder):
        self.ranks, self.each = ranks, min(ON_A_NODE, max(1, ranks // 2))
        self.count = ranks // self.each
        self.hosts = Hosts(self.count, folder, forked=True)
        self.job = folder / "job.py"
        self.job.write_text(JOB.format(root=str(ROOT), mib=mib, steps=STEPS))

    def alone(self):
        for rank in range(self.ranks):
            own = {
                "RANK": rank,
                "LOCAL_RANK": rank % self.each,
                "WORLD_SIZE": self.ranks,
                "MASTER_ADDR": "10.77.0.1",
                "MASTER_PORT": 6000,
            }
            own["GLOO_SOCKET_IFNAME"] = "eth0"
            self.hosts.run(
                rank // self.each,
                sys.executable,
                self.job,
                env={"ALONE": "", **{name: str(value) for name, value in own.items()}},
            )

    def start(self, *words):
        platform = [
            "--init_method",
            "tcp://10.77.0.1:6666",
            "--world_size",
            self.count,
            "--nproc_per_node",
            self.each,
            "--epochs",
            9,
        ]
        for node in range(self.count):
            self.hosts.run(node, sys.executable, self.job, *platform, "--rank", node, "--output_dir", "out", *words)

    def said(self, node):
        lines = self.hosts.log(node).splitlines()
        return [json.loads(line[5:]) for line in lines if line.startswith("said ")]

    def ended(self):
        """(seconds until all have, their exit codes)"""
        begun, codes = time.monotonic(), set()
        for process in self.hosts.processes:
            codes.add(process.wait(1800))
        return time.monotonic() - begun, codes

    def forget(self):
        self.hosts.processes.clear()
        for folder in self.hosts.folders:
            (folder / "log").unlink()


def phases(first, other):
    """Of node 0 and another one, by phase: {phase: (seconds, bytes, segments, connections, MiB, and the last four of the other)}"""
    found = {}
    for before, after, earlier, later in zip(first, first[1:], other, other[1:]):
        own = [after[2] - before[2], after[3] - before[3], *after[4:], later[2] - earlier[2], later[3] - earlier[3], *later[4:]]
        found[after[0]] = [after[1] - before[1], *own]
    return found


def row(ranks, who, phase, seconds, *cells):
    shown = [f"{cells[0] / 1e6:.2f}", f"{cells[1]:,}", *cells[2:4], f"{cells[4] / 1e6:.2f}", f"{cells[5]:,}", *cells[6:]]
    print(f"| {ranks} | {who} | {phase} | {seconds:.1f} | {' | '.join(map(str, shown))} |", flush=True)


def of(ranks, mib, folder):
    nodes = Nodes(ranks, mib, folder)
    last = nodes.count - 1
    try:
        nodes.alone()
        seconds, codes = nodes.ended()
        assert codes == {0}, nodes.hosts.log(0)
        every = nodes.said(0)[nodes.each - 1 :], nodes.said(last)[nodes.each - 1 :]  # each rank has said that it started
        for phase, cells in phases(*every).items():
            row(ranks, "torch", phase, *cells)
        nodes.forget()

        nodes.start("--max_steps", STEPS)
        seconds, codes = nodes.ended()
        assert codes == {0}, nodes.hosts.log(0)
        for phase, cells in phases(nodes.said(0), nodes.said(last)).items():
            row(ranks, "ours", phase, *cells)
        nodes.forget()

        for how in ("stopped", "killed"):
            nodes.start()
            wait_for(lambda: len(nodes.said(0)) == 4, nodes.hosts.processes[0], "50 steps")
            if how == "stopped":
                row(ranks, "ours", "resumed", *phases(nodes.said(0), nodes.said(last))["resumed"])
                nodes.hosts.processes[last].send_signal(signal.SIGTERM)
            else:
                name = f"rank {ranks - 1}"
                (victim,) = [pid for pid in nodes.hosts.pids(last) if Path(f"/proc/{pid}/comm").read_text().strip() == name]
                os.kill(victim, signal.SIGKILL)
            seconds, codes = nodes.ended()
            line = next(
                (text for text in nodes.hosts.log(0).splitlines() if how == "killed" and f"rank {ranks - 1}" in text), ""
            )
            print(f"| {ranks} | ours | {how}, exit codes {sorted(codes)} | {seconds:.1f} | {line}", flush=True)
            nodes.forget()
    finally:
        nodes.hosts.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 16, 64, 256])
    parser.add_argument("--mib", type=int, default=1)
    options = parser.parse_args()
    if wrong := [ranks for ranks in options.ranks if ranks % min(ON_A_NODE, max(1, ranks // 2)) or ranks < 2]:
        parser.error(f"--ranks: {wrong} do not fill nodes of {ON_A_NODE}")
    print(f"{machine()}\n")
    columns = "MB | segments | connections | MiB of a rank"
    print(f"| ranks | | phase | s | node 0 sends: {columns} | another node sends: {columns} |\n|{'---|' * 12}")
    for ranks in options.ranks:
        with tempfile.TemporaryDirectory() as folder:
            of(ranks, options.mib, Path(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
