"""DpexDataLoader over Ray on this machine beside torch's DataLoader and the original Dpex design, with as many workers.

    python -m tests.benchmarks.ray [--workers 1] [--rounds 3]

Light: 64 images as float tensors that are only copied (38 MB a batch). Heavy: the same, computed for some milliseconds a sample.
Waits: samples that wait instead, with one and with twice as many workers, as a second host would bring. Photographs: 64 samples of
110 KB. The forms take turns; the first epoch of each starts its workers and is not counted. The original design is two hops
through ray.util.queue's actor, indices in and torch batches out, as its code had it.
"""

import argparse
import os
import statistics
import time

import torch
from torch.utils.data import DataLoader, Dataset

from datasets.dpex import DpexDataLoader
from tests.benchmarks.base import machine

BATCH = 64


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
            return number
        image = self.image.clone()
        for _ in range(2 if self.kind == "heavy" else 0):
            image = torch.nn.functional.avg_pool2d(image[None], 3, 1, 1)[0].sqrt()
        return image, number


def original(data, workers):
    """The design of the original in few lines: each batch goes through one queue actor, pickled as torch pickles it."""
    import ray
    from ray.util.queue import Queue

    if not ray.is_initialized():
        ray.init(address="local", include_dashboard=False, log_to_driver=False, num_cpus=2 * workers + 4)
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


def rate(batches):
    """Batches a second behind the first few, which wait for workers to start."""
    settled, begun, number = 4, None, 0
    for number, _ in enumerate(batches, 1):
        if number == settled:
            begun = time.perf_counter()
    return (number - settled) / (time.perf_counter() - begun)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ.setdefault("RAY_AUTH_TOKEN", "0" * 64)  # of the original's cluster, which is gone with this program
    print(machine(), "\n\n| transform | form | batches/s, median (range) | ms a batch | of torch |\n|---|---|---|---|---|")
    for kind, batches in (("light", 40), ("heavy", 16), ("photographs", 60), ("waits", 24)):
        data, how = Samples(kind, batches), {"batch_size": BATCH, "num_workers": options.workers}
        twice = {**how, "num_workers": 2 * options.workers}
        forms = {
            "torch": DataLoader(data, persistent_workers=True, **how),
            "ours, local": DpexDataLoader(data, False, persistent_workers=True, **how),
            "ours, over Ray": DpexDataLoader(data, True, "local", persistent_workers=True, **how),
        }
        if kind == "waits":
            forms["ours, over Ray, twice the workers"] = DpexDataLoader(data, True, "local", persistent_workers=True, **twice)
        for loader in forms.values():
            rate(loader)
        found = {name: [] for name in [*forms, "the original's design"]}
        for _ in range(options.rounds):
            for name, loader in forms.items():
                found[name].append(rate(loader))
            found["the original's design"].append(rate(original(data, options.workers)))
        reference = statistics.median(found["torch"])
        for name, rates in found.items():
            middle = statistics.median(rates)
            spread = f"{middle:.1f} ({min(rates):.1f}-{max(rates):.1f})"
            print(f"| {kind} | {name} | {spread} | {1000 / middle:.1f} | {middle / reference:.2f} |", flush=True)


if __name__ == "__main__":
    main()
