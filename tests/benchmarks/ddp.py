"""What DDP, our checks and exact sums cost a step, against a plain loop and a plain torchrun script, taking turns (make bench).

    python -m tests.benchmarks.ddp [--rounds 5]

Every form trains the same ResNet-18 (width 16, 64 samples per rank, float32, one thread per rank) for 60 steps as processes of
their own; a step's time is the median of the differences between consecutive steps, the first 10 left out. Ours are the jobs
as users start them, timed by their ledger; the plain ones are the loop below, with torch's own sampler and nothing else.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from datasets import cifar10
from tests.benchmarks import rows
from tests.benchmarks.base import machine
from tests.tools.jobs import ROOT, environment

STEPS, BATCH, WIDTH = 60, 64, 16


def plain_worker(output):
    """What a short script does; under torchrun with DDP, else without."""
    import torch
    from torch import distributed

    from common.models.resnet import resnet18
    from datasets import synthetic

    images, labels = synthetic.cifar_like(5000, "train")
    data = torch.utils.data.TensorDataset(torch.from_numpy(images), torch.from_numpy(labels))
    model, sampler = resnet18(width=WIDTH).to(memory_format=torch.channels_last), None
    if "RANK" in os.environ:
        distributed.init_process_group("gloo")
        sampler = torch.utils.data.distributed.DistributedSampler(data)
        model = torch.nn.parallel.DistributedDataParallel(model)
    loader = torch.utils.data.DataLoader(data, BATCH, sampler=sampler, shuffle=sampler is None, drop_last=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4, fused=True)
    loss_fn, times = torch.nn.CrossEntropyLoss(), []
    while len(times) < STEPS:
        for batch, targets in loader:
            batch = (batch.to(memory_format=torch.channels_last).float() / 255 - 0.5) / 0.25
            loss = loss_fn(model(batch), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            times.append(time.time())
            if len(times) == STEPS:
                break
    if os.environ.get("RANK", "0") == "0":
        Path(output).write_text(json.dumps(times))
    if "RANK" in os.environ:
        distributed.barrier()
        distributed.destroy_process_group()


def step_seconds(times):
    return statistics.median(later - earlier for earlier, later in zip(times[10:], times[11:]))


def plain(world_size):
    with tempfile.TemporaryDirectory() as folder:
        script = [str(ROOT / "tests" / "benchmarks" / "ddp.py"), "--worker", f"{folder}/times"]
        torchrun = ["-m", "torch.distributed.run", "--nproc_per_node", str(world_size), "--master_port", "29711"]
        words = [sys.executable, *(torchrun if world_size > 1 else []), *script]
        subprocess.run(words, env=environment(PYTHONPATH=str(ROOT)), check=True, capture_output=True, timeout=300)
        return step_seconds(json.loads(Path(f"{folder}/times").read_text()))


def ours(job, world_size, *more):
    with tempfile.TemporaryDirectory() as folder:
        options = ["--custom_data", "true", "--width", WIDTH, "--batch_size", BATCH, "--max_steps", STEPS, "--ledger", "true"]
        options += [*(["--nproc_per_node", world_size] if "ddp" in job else []), *more]
        words = [sys.executable, str(ROOT / "jobs" / f"{job}.py"), *map(str, options), "--output_dir", folder]
        subprocess.run(words, env=environment(), check=True, capture_output=True, timeout=300)
        lines = [json.loads(line) for line in Path(folder, "ledger", "rank_0.jsonl").read_text().splitlines()]
        return step_seconds([line["t"] for line in lines if "step" in line])


FORMS = {
    "plain loop, 1 process": lambda: plain(1),
    "train.py": lambda: ours("train", 1),
    "train_ddp.py, 1 rank": lambda: ours("train_ddp", 1),
    "plain torchrun script, 2 ranks": lambda: plain(2),
    "train_ddp.py, 2 ranks": lambda: ours("train_ddp", 2),
    "train_ddp.py, 4 ranks": lambda: ours("train_ddp", 4),
    "train_ddp_exact.py, 1 rank, 2 shares": lambda: ours("train_ddp_exact", 1, "--shares", 2, "--batch_size", BATCH // 2),
    "train_ddp_exact.py, 2 ranks": lambda: ours("train_ddp_exact", 2),
    "train_ddp_exact.py, 4 ranks": lambda: ours("train_ddp_exact", 4),
}
PEERS = {
    "train.py": "plain loop, 1 process", "train_ddp.py, 1 rank": "train.py",
    "train_ddp.py, 2 ranks": "plain torchrun script, 2 ranks",
    "train_ddp_exact.py, 1 rank, 2 shares": "train_ddp.py, 1 rank", "train_ddp_exact.py, 2 ranks": "train_ddp.py, 2 ranks",
    "train_ddp_exact.py, 4 ranks": "train_ddp.py, 4 ranks",
}  # fmt: skip


def checks(steps=3000):
    """Microseconds that run.steps() and run.step() add to a step that does nothing."""
    import torch

    from common import arguments
    from common.run.run import Run
    from datasets.sampler import EpochSampler

    class NoWork:
        ids, beside = torch.arange(1), False

        def transfer_seconds(self):
            return 0.0

        def __iter__(self):
            return iter(lambda: (None, None), 0)

    with tempfile.TemporaryDirectory() as folder:
        args = arguments.parse(cifar10.parser(""), ["--output_dir", folder, "--enable_gpu", "false", "--epochs", "1"])
        model = torch.nn.Linear(1, 1)
        sampler = EpochSampler(steps, 1, seed=0)
        run = Run(args, sampler, model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        run.side_files.shows = False
        run.resume()
        loss, begun = torch.zeros(()), time.perf_counter()
        for _ in run.epochs():
            for _ in run.steps(NoWork()):
                run.step(loss)
            seconds = time.perf_counter() - begun
            run.end_epoch()
        return seconds / steps * 1e6


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--worker", metavar="OUTPUT", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return plain_worker(options.worker)
    found = {name: [] for name in FORMS}
    for _ in range(options.rounds):
        for name, form in FORMS.items():
            found[name].append(form())
    print(
        f"{machine()}; {options.rounds} rounds, median (range)\n\n| form | step, ms | peer | step / peer's step |\n|---|---|---|---|"
    )
    for name, times in found.items():
        shown = f"{statistics.median(times) * 1e3:.1f} ({min(times) * 1e3:.1f} to {max(times) * 1e3:.1f})"
        peer, ratio = PEERS.get(name, ""), ""
        if peer:
            ratios = sorted(a / b for a, b in zip(times, found[peer]))
            rows.keep(f"a step of {name}", peer, [1 / ratio for ratio in ratios])
            ratio = f"{statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"
        print(f"| {name} | {shown} | {peer} | {ratio} |")
    costs = sorted(checks() for _ in range(options.rounds))
    print(f"| run.steps() and run.step() alone | {statistics.median(costs) / 1e3:.3f} | | |")
    return None


if __name__ == "__main__":
    sys.exit(main())
