"""DpexDataLoader over Ray on this machine beside torch's DataLoader, Ray Data and the original Dpex design, as many workers each.

    python -m tests.benchmarks.ray [--workers 1] [--rounds 3]

Light: 64 images as float tensors that are only copied (38 MB a batch). Heavy: the same, computed for some milliseconds a sample.
Photographs: 64 samples of 110 KB. Waits: samples that wait instead, on one, two and four hosts of a cluster, each with as many workers.
The forms take turns, an epoch each; workers that stay were started before. The original design is two hops
through ray.util.queue's actor, indices in and torch batches out, as its code had it.
"""

import argparse
import contextlib
import functools
import importlib.util
import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from datasets.dpex.loader import DpexDataLoader
from tests.benchmarks import rows
from tests.benchmarks.base import machine
from tests.tools.rayhosts import RayHosts

BATCH = 64
KINDS = {"light": 80, "heavy": 32, "photographs": 240}  # batches of an epoch
PEERS = RAY_DATA, ORIGINAL = "Ray Data", "the original's design"


class Samples(Dataset):
    def __init__(self, kind, batches):
        self.kind, self.count = kind, batches * BATCH
        self.image = torch.rand(3, 224, 224)

    def __len__(self):
        return self.count

    def __getitem__(self, number):
        if self.kind == "photographs":
            return torch.full((110_000,), number % 256, dtype=torch.uint8), number
        if self.kind == "waits":
            time.sleep(0.01)
            return torch.zeros(1), number
        image = self.image.clone()
        for _ in range(2 if self.kind == "heavy" else 0):
            image = torch.nn.functional.avg_pool2d(image[None], 3, 1, 1)[0].sqrt()
        return image, number


def original(data, workers):
    """The design of the original in few lines: each batch goes through one queue actor, pickled as torch pickles it."""
    from ray.util.queue import Queue

    ray = started(workers)
    asked, made = Queue(), Queue()

    @ray.remote(num_cpus=1)
    def work(data, asked, made):
        torch.set_num_threads(1)
        while (numbers := asked.get()) is not None:
            made.put(torch.utils.data.default_collate([data[number] for number in numbers]))

    running = [work.remote(data, asked, made) for _ in range(workers)]
    first = iter(range(0, len(data), BATCH))
    batches = len(data) // BATCH
    for _ in range(min(2 * workers, batches)):
        start = next(first)
        asked.put(list(range(start, start + BATCH)))
    for _ in range(batches):
        batch = made.get()
        start = next(first, None)
        if start is not None:
            asked.put(list(range(start, start + BATCH)))
        yield batch
    for _ in running:
        asked.put(None)
    ray.get(running)
    asked.shutdown()
    made.shutdown()


def ray_data(data, workers):
    """Ray Data as its documentation has it: numbers through map_batches, torch batches out."""
    ray = started(workers)
    ray.data.DataContext.get_current().enable_progress_bars = False

    def make(rows):
        samples = zip(*(data[int(number)] for number in rows["id"]))
        return {str(place): np.stack(column) for place, column in enumerate(samples)}

    made = ray.data.range(len(data)).map_batches(make, batch_size=BATCH, concurrency=workers)
    return ((batch["0"], batch["1"]) for batch in made.iter_torch_batches(batch_size=BATCH))


def started(workers):
    import ray

    if not ray.is_initialized():
        ray.init(address="local", include_dashboard=False, log_to_driver=False, num_cpus=2 * workers + 4)
    return ray


def rate(batches):
    """Batches a second, over a whole epoch from when it was asked for: some forms work ahead while they start."""
    begun = time.perf_counter()
    return sum(1 for _ in batches()) / (time.perf_counter() - begun)


def several_hosts(workers, stack):
    """The same loader on clusters of one, two and four hosts with as many workers each; no worker on the head."""
    os.environ.pop("RAY_AUTH_TOKEN", None)  # of the peers' cluster
    data, forms = Samples("waits", 32), {}
    for count in (1, 2, 4):
        hosts = RayHosts(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ray"))), count, head_cpus=0)
        stack.callback(hosts.close)
        os.environ.update(hosts.variables)
        name = f"ours, over Ray, {count} host{'s' if count > 1 else ''}"
        how = {"batch_size": BATCH, "num_workers": count * workers, "persistent_workers": True}
        forms[name] = DpexDataLoader(data, distribute_mode=True, head_address=hosts.address, **how)
        rate(forms[name].__iter__)
    return forms


def compare(kind, forms, rounds):
    """`forms`: {name: a function that gives the batches of an epoch}; the first one is what the others are compared with."""
    found = {name: [] for name in forms}
    for _ in range(rounds):
        for name, batches in forms.items():
            found[name].append(rate(batches))
    first = next(iter(found))
    reference = statistics.median(found[first])
    for name, rates in found.items():
        middle = statistics.median(rates)
        spread = f"{middle:.1f} ({min(rates):.1f}-{max(rates):.1f})"
        print(f"| {kind} | {name} | {spread} | {1000 / middle:.1f} | {middle / reference:.2f} |", flush=True)
        if name in PEERS:
            faster = zip(found["ours, over Ray"], rates)
            rows.keep(f"{kind} batches: ours, over Ray", name, [ours / theirs for ours, theirs in faster])
        elif name.startswith("ours, over Ray") and name != first:
            rows.keep(f"{kind} batches: {name}", first, [ours / theirs for ours, theirs in zip(rates, found[first])])


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kinds", nargs="+", choices=[*KINDS, "waits"], default=[*KINDS, "waits"], help="only these batches")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ.setdefault("RAY_AUTH_TOKEN", "0" * 64)  # of the cluster of the peers, which is gone with this program
    os.environ.update(RAY_worker_niceness="0")  # of the peers' workers, as ours have it; 15 would count on a busy machine alone
    print(machine(), "\n\n| transform | form | batches/s, median (range) | ms a batch | of the first |\n|---|---|---|---|---|")
    how = {"batch_size": BATCH, "num_workers": options.workers, "persistent_workers": True}
    for kind in (kind for kind in KINDS if kind in options.kinds):
        data = Samples(kind, KINDS[kind])
        loaders = {
            "torch": DataLoader(data, **how),
            "ours, local": DpexDataLoader(data, distribute_mode=False, **how),
            "ours, over Ray": DpexDataLoader(data, distribute_mode=True, head_address="local", **how),
        }
        for loader in loaders.values():
            rate(loader.__iter__)
        forms = {name: loader.__iter__ for name, loader in loaders.items()}
        if importlib.util.find_spec("pandas") and importlib.util.find_spec("pyarrow"):
            forms[RAY_DATA] = functools.partial(ray_data, data, options.workers)
        else:
            print(f"| {kind} | Ray Data | not installed: pip install 'ray[data]' | | |")
            rows.missing(f"{kind} batches: ours, over Ray", RAY_DATA, "Ray Data is not installed: pip install 'ray[data]'")
        forms[ORIGINAL] = functools.partial(original, data, options.workers)
        compare(kind, forms, options.rounds)
    if "waits" not in options.kinds:
        return
    with contextlib.ExitStack() as stack:
        forms = several_hosts(options.workers, stack)
        compare("waits", {name: loader.__iter__ for name, loader in forms.items()}, options.rounds)


if __name__ == "__main__":
    main()
