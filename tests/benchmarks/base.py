"""What the base job costs, against the plain form of the same thing, interleaved in one run (make bench).

    python -m tests.benchmarks.base [--rounds 7] [--data FOLDER]

Every figure is a ratio of two forms that took turns, several rounds, one thread: median and range.
    (a) images/s of a training step: ours against float32, contiguous, per-sample transforms, .item() each step
    (b) batches/s of our CIFAR loader against torchvision's CIFAR10 and DataLoader with the same augmentation
    (c) what a checkpoint costs the training, as a share of a step
    (d) seconds from process start to the first optimizer step, against a plain loop's
Prints the table that results/steps.md keeps, with machine and date.
"""

import argparse
import datetime
import functools
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

from common.checkpoints.position import Position
from common.checkpoints.saver import Saving
from common.models.resnet import resnet18
from datasets import cifar10, cifar10_files, synthetic
from datasets.sampler import EpochSampler
from tests.benchmarks import rows
from tests.tools.jobs import ROOT, command, environment

CPU = torch.device("cpu")


def interleaved(forms, rounds, seconds=2.0):
    """{name: [seconds per call]} for forms that take turns; each is called until `seconds` have passed, in every round."""
    found = {name: [] for name in forms}
    for number in range(rounds + 1):
        for name, call in forms.items():
            begun, calls = time.perf_counter(), 0
            while time.perf_counter() - begun < seconds or calls == 0:
                call()
                calls += 1
            if number:  # the first round warms up
                found[name].append((time.perf_counter() - begun) / calls)
    return found


def ratio(times, what, peer, ours="ours", theirs="plain"):
    """Median and range of theirs/ours, pair by pair: how many times faster ours is; a row of the table."""
    ratios = sorted(b / a for a, b in zip(times[ours], times[theirs]))
    rows.keep(what, peer, ratios)
    return f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"


def forever(iterable):
    while True:
        yield from iterable


def torchvision_loader(images, labels, batch_size):
    """What most scripts do: PIL images, one transform a sample, torch's DataLoader."""
    from PIL import Image
    from torchvision import transforms
    from torchvision.datasets import CIFAR10

    class InMemory(CIFAR10):
        def __init__(self):
            self.data, self.targets = images.transpose(0, 2, 3, 1), labels.tolist()
            self.target_transform = None
            self.transform = transforms.Compose(
                [
                    transforms.RandomCrop(32, padding=4),
                    transforms.RandomHorizontalFlip(),
                    transforms.ToTensor(),
                    transforms.Normalize(cifar10.MEAN, cifar10.STD),
                ]
            )

    assert Image
    return torch.utils.data.DataLoader(InMemory(), batch_size=batch_size, shuffle=True)


def our_loader(images, labels, batch_size):
    data = cifar10.ImageArrays(images, labels, classes=[])
    return cifar10.loader(data, EpochSampler(len(data), batch_size, seed=0), CPU, augment=True)


def training_step(loader, channels_last=True, fused=True, looks_at_loss=False, half=False):
    """A call that trains on the next batch, in our form or in another."""
    layout = torch.channels_last if channels_last else torch.contiguous_format
    model, loss_fn = resnet18().to(memory_format=layout), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4, fused=fused)
    batches = forever(loader)

    def step():
        images, labels = next(batches)
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            loss = loss_fn(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if looks_at_loss:
            loss.item()

    return step


def checkpoint_stall(rounds):
    """Medians: seconds of a full-width step, seconds that a save holds the training up, seconds until it is on disk."""
    images, labels = synthetic.cifar_like(512, "train")
    step = training_step(our_loader(images, labels, 128))
    model = resnet18()
    state = {"model": model.state_dict(), "momentum": [torch.zeros_like(p) for p in model.parameters()]}
    stalls, writes = [], []
    with tempfile.TemporaryDirectory() as folder:
        where = argparse.Namespace(output_dir=folder, checkpoint_dir=folder, output_url="", checkpoints=True, keep=rounds)
        saving = Saving(where, [], print)
        for number in range(rounds):
            begun = time.perf_counter()
            saving.save(lambda: state, vars(Position(samples_seen=number)))
            stalls.append(time.perf_counter() - begun)
            saving.wait()
            writes.append(time.perf_counter() - begun)
    steps = interleaved({"step": step}, rounds, seconds=1.0)["step"]
    rows.keep("what a checkpoint holds training up", "writing it before going on", [b / a for a, b in zip(stalls, writes)])
    return statistics.median(steps), statistics.median(stalls), statistics.median(writes)


PLAIN = """
import torch, torchvision
from common.models import resnet18
images, labels = torch.rand(50000, 3, 32, 32), torch.randint(10, (50000,))
model = resnet18(width=4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
torch.nn.functional.cross_entropy(model(images[:128]), labels[:128]).backward()
optimizer.step()
print("images_per_s", flush=True)
"""


def first_step(rounds):
    """Seconds from process start to the line that follows the first optimizer step: the job as a user starts it, a plain loop."""
    found = {"ours": [], "plain": []}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            ours = command("train", "--custom_data", "true", "--width", 4, "--max_steps", 1, "--output_dir", folder)
            for name, script in (("ours", ours), ("plain", [sys.executable, "-c", PLAIN])):
                begun, env = time.perf_counter(), environment(PYTHONPATH=str(ROOT))
                with subprocess.Popen(script, cwd=folder, env=env, stdout=subprocess.PIPE, text=True) as process:
                    for line in process.stdout:
                        if "images_per_s" in line:
                            found[name].append(time.perf_counter() - begun)
    return found


def machine():
    name = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            name = line.split(":")[1].strip()
            break
    return f"{os.cpu_count()} x {name}, torch {torch.__version__}, {datetime.date.today()}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--data", help="folder with cifar-10-batches-py; unset: synthetic images of the same shape")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.data:
        images, labels = cifar10_files.read_files(str(Path(options.data) / cifar10_files.FOLDER), cifar10_files.TRAIN_FILES)
    else:
        images, labels = synthetic.cifar_like(5000, "train")
    images = np.ascontiguousarray(images)

    print(
        f"{machine()}; one thread, {options.rounds} rounds, median (range)\n\n| what | ours | plain | ours is faster by |\n|---|---|---|---|"
    )
    ours, plain = (functools.partial(make, images, labels, 128) for make in (our_loader, torchvision_loader))
    forms = {
        "ours": training_step(ours()),
        "plain": training_step(plain(), channels_last=False, fused=False, looks_at_loss=True),
        "contiguous": training_step(ours(), channels_last=False),
        "optimizer not fused": training_step(ours(), fused=False),
    }
    times = interleaved(forms, options.rounds, seconds=6)
    rates = {name: 128 / statistics.median(values) for name, values in times.items()}
    faster = ratio(times, "training step, one core", "float32, contiguous, .item() each step")
    print(
        f"| (a) training step, images/s | {rates['ours']:.1f} | {rates['plain']:.1f} | {faster} |",
        flush=True,
    )

    for form in ("contiguous", "optimizer not fused"):
        alone = ratio(times, "training step", form, theirs=form)
        print(f"| (a) the same, {form} | | {rates[form]:.1f} | {alone} |", flush=True)

    ours, plain = forever(ours()), forever(plain())
    times = interleaved({"ours": lambda: next(ours), "plain": lambda: next(plain)}, options.rounds, seconds=2)
    rates = {name: 1 / statistics.median(values) for name, values in times.items()}
    faster = ratio(times, "CIFAR-10 loader", "torchvision CIFAR10 + DataLoader")
    print(
        f"| (b) loader, batches of 128 a second | {rates['ours']:.0f} | {rates['plain']:.1f} | {faster} |",
        flush=True,
    )

    step, stall, write = checkpoint_stall(options.rounds)
    print(
        f"| (c) checkpoint of 89 MB: stall against a step of {step * 1000:.0f} ms | {stall * 1000:.0f} ms, {stall / step:.1%} of a step | {write * 1000:.0f} ms if written before going on | {write / stall:.1f} |"
    )

    times = first_step(options.rounds)
    ours, plain = (statistics.median(values) for values in times.values())
    faster = ratio(times, "process start to first step", "a plain loop")
    print(f"| (d) process start to first optimizer step, s | {ours:.1f} | {plain:.1f} | {faster} |")


if __name__ == "__main__":
    sys.exit(main())
