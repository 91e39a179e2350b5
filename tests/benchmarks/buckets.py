"""What buckets that every start fills alike cost a step and a start: common/ranks/buckets.py beside DDP's own ways.

    python -m tests.benchmarks.buckets [--ranks 4] [--rounds 15]

All networks live in the same processes and take their steps in turns, so each round compares them under the same load. The network
is ResNet-18 on 32 x 32 images; its layers stand in the order in which they are used, or the other way round, as in no usual network.
"""

import argparse
import statistics
import time

import torch
from torch import distributed, multiprocessing
from torch.nn.parallel import DistributedDataParallel

from common.models import resnet18
from common.ranks import buckets
from tests.benchmarks.base import machine
from tests.tools.objectstore import free_port

BATCH = 8
STEPS = 2  # of each network in a round
WAYS = ("DDP's own", "fixed", "find_unused_parameters", "DDP's own, declared backwards", "fixed, declared backwards")


class DeclaredBackwards(torch.nn.Module):
    """The network with its layers, and so its weights, in the reverse of the order in which they are used."""

    def __init__(self, network: torch.nn.Module):
        super().__init__()
        self.order = [name for name, _ in network.named_children()]
        for name in reversed(self.order):
            self.add_module(name, network.get_submodule(name))
        self._forward = type(network).forward

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self._forward(self, images)


def wrapped(way: str) -> DistributedDataParallel:
    torch.manual_seed(0)
    network = resnet18(width=64)
    if "backwards" in way:
        network = DeclaredBackwards(network)
    return DistributedDataParallel(network, gradient_as_bucket_view=True, find_unused_parameters="unused" in way)


def seconds_of(steps: int, network: DistributedDataParallel, images: torch.Tensor) -> float:
    distributed.barrier()
    begun = time.perf_counter()
    for _ in range(steps):
        network.zero_grad()
        network(images).square().mean().backward()
    distributed.barrier()
    return time.perf_counter() - begun


def measure(rank: int, ranks: int, rounds: int, port: int) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    images = torch.randn(BATCH, 3, 32, 32)
    networks = {way: wrapped(way) for way in WAYS}
    fixing = []
    for way, network in networks.items():
        if way.startswith("fixed"):
            begun = time.perf_counter()
            buckets.fix(network)
            fixing.append(time.perf_counter() - begun)
        seconds_of(3, network, images)
    taken = {way: [] for way in WAYS}
    for number in range(rounds):
        for way in WAYS if number % 2 else reversed(WAYS):
            taken[way].append(seconds_of(STEPS, networks[way], images) / STEPS)
    if rank == 0:
        step = statistics.median(taken["fixed"])
        print(f"{machine()}\n{ranks} ranks, a step: {1000 * step:.0f} ms; fixing at the start: {1000 * max(fixing):.0f} ms\n")
        print("| a step with | peer | time of ours / the peer's: median (range) |\n|---|---|---|")
        for ours, peer in (("fixed", WAYS[0]), ("find_unused_parameters", WAYS[0]), (WAYS[4], WAYS[3])):
            ratios = sorted(one / other for one, other in zip(taken[ours], taken[peer]))
            print(f"| {ours} | {peer} | {statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f}) |")
    distributed.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    multiprocessing.spawn(measure, (options.ranks, options.rounds, free_port()), nprocs=options.ranks)


if __name__ == "__main__":
    main()
