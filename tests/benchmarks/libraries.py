"""The same training in other libraries, which a user would pick instead: each in an environment of its own, taking turns (make bench).

    python -m tests.benchmarks.libraries [--rounds 5]
    python -m tests.benchmarks.libraries --loop lightning --width 16 --batch 64      one of them alone; its last line is JSON

Each process trains ResNet-18 on made-up CIFAR-10, in float32 on one thread: as the documentation of the library shows it, without its logger,
progress bar and checkpoints, on images that are normalised already; ours is jobs/train.py as a user starts it, with its log, its crops and its
checkpoints. The second network is next to none, so that what is around a step is seen. A GPU has these loops in tests/gpu/peers.py.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Callable, NamedTuple

import torch
from torch import nn

from tests.benchmarks import rows
from tests.benchmarks.base import machine
from tests.gpu.measured import NAMES, WINDOWS, end, process_age
from tests.gpu.rows import last_json
from tests.tools.jobs import ROOT, environment

# {loop: what pip installs}
NEEDS = {"accelerate": "accelerate==1.15.0", "lightning": "lightning==2.6.6"}
FIRST, LAST = 10, 70  # the steps between which is measured
OURS = "train.py"
NETWORKS = {"ResNet-18 of width 16, batches of 64": (16, 64), "of width 1, batches of 1": (1, 1)}


class Training(NamedTuple):
    network: nn.Module
    loss_fn: nn.Module
    batches: Iterable  # of (images, labels), over and over or of one epoch
    device: torch.device
    precision: str  # float32, or the half precision of autocast
    after_step: Callable[[], None]  # ends the process after the last step that is measured


class Steps:
    """To be called after each step: the figures of tests/gpu/measured.py, of a loop that is not ours."""

    def __init__(
        self, first: int, last: int, batch: int, synchronize: Callable[[], None], end_with: Callable[[dict[str, Any]], None]
    ) -> None:
        self._marks = [first + (last - first) * number // WINDOWS for number in range(WINDOWS + 1)]
        self._batch = batch
        self._synchronize = synchronize
        self._end_with = end_with
        self._steps = 0
        self._times: list[float] = []
        self._figures: dict[str, Any] = {}

    def __call__(self) -> None:
        self._steps += 1
        if self._steps not in (1, 2, *self._marks):
            return
        self._synchronize()
        if self._steps == 1:
            self._figures["CPU seconds to the first step"] = round(time.process_time(), 2)
        if self._steps <= 2:
            self._figures.setdefault("seconds to", {})[f"the {NAMES[self._steps]} step"] = round(process_age(), 2)
        if self._steps in self._marks:
            self._times.append(time.perf_counter())
        if self._steps == self._marks[-1]:
            steps = [later - earlier for earlier, later in zip(self._marks, self._marks[1:])]
            seconds = [later - earlier for earlier, later in zip(self._times, self._times[1:])]
            self._figures["images/s"] = [count * self._batch / passed for count, passed in zip(steps, seconds)]
            self._end_with(self._figures)


class ChannelsLast(nn.Module):
    """So that every library trains in the same layout."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network.to(memory_format=torch.channels_last)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.network(images.to(memory_format=torch.channels_last))


def optimizer_of(network: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4, fused=True)


def half(training: Training) -> AbstractContextManager[Any]:
    if training.precision == "float32":
        return nullcontext()
    return torch.autocast(training.device.type, getattr(torch, training.precision))


# --- The loops ----------------------------------------------------------------------------------------------------------------


def plain(training: Training) -> None:
    network = training.network.to(training.device)
    optimizer = optimizer_of(network)
    scaler = torch.amp.GradScaler(training.device.type, enabled=training.precision == "float16")
    while True:
        for images, labels in training.batches:
            images = images.to(training.device, non_blocking=True)
            labels = labels.to(training.device, non_blocking=True)
            with half(training):
                loss = training.loss_fn(network(images), labels)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            training.after_step()


def accelerate(training: Training) -> None:
    from accelerate import Accelerator

    names = {"float32": "no", "bfloat16": "bf16", "float16": "fp16"}
    accelerator = Accelerator(cpu=training.device.type == "cpu", mixed_precision=names[training.precision])
    network, optimizer, batches = accelerator.prepare(training.network, optimizer_of(training.network), training.batches)
    while True:
        for images, labels in batches:
            with accelerator.autocast():
                loss = training.loss_fn(network(images), labels)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            training.after_step()


def lightning(training: Training) -> None:
    from lightning import LightningModule, Trainer

    class Module(LightningModule):
        def __init__(self):
            super().__init__()
            self.network = training.network

        def training_step(self, batch, _):
            images, labels = batch
            return training.loss_fn(self.network(images), labels)

        def configure_optimizers(self):
            return optimizer_of(self.network)

        def on_train_batch_end(self, *_):
            training.after_step()

    names = {"float32": "32-true", "bfloat16": "bf16-mixed", "float16": "16-mixed"}
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    kind = "cpu" if training.device.type == "cpu" else "gpu"
    trainer = Trainer(max_epochs=-1, accelerator=kind, devices=1, precision=names[training.precision], **quiet)
    trainer.fit(Module(), training.batches)


def timm(training: Training) -> None:
    """The lines of its train.py that are around a step, with its optimizer."""
    from timm.optim import create_optimizer_v2
    from timm.utils import NativeScaler

    network = training.network.to(training.device)
    optimizer = create_optimizer_v2(network, opt="sgd", lr=0.1, momentum=0.9, weight_decay=5e-4)
    scaler = NativeScaler(device=training.device.type) if training.precision == "float16" else None
    while True:
        for images, labels in training.batches:
            images, labels = images.to(training.device), labels.to(training.device)
            with half(training):
                loss = training.loss_fn(network(images), labels)
            if scaler:
                scaler(loss, optimizer, parameters=network.parameters())
            else:
                loss.backward()
                optimizer.step()
            optimizer.zero_grad()
            training.after_step()


LOOPS = {loop.__name__: loop for loop in (plain, accelerate, lightning, timm)}

# --- On a CPU -----------------------------------------------------------------------------------------------------------------


def train_on_cifar(loop: str, width: int, batch: int) -> None:
    from common.models import resnet18
    from datasets import synthetic

    images, labels = synthetic.cifar_like(5000, "train")
    pictures = (torch.from_numpy(images).float() / 255 - 0.5) / 0.25
    data = torch.utils.data.TensorDataset(pictures, torch.from_numpy(labels))
    batches = torch.utils.data.DataLoader(data, batch, shuffle=True, drop_last=True)
    network, loss_fn = ChannelsLast(resnet18(width=width)), nn.CrossEntropyLoss()
    LOOPS[loop](
        Training(network, loss_fn, batches, torch.device("cpu"), "float32", Steps(FIRST, LAST, batch, lambda: None, end))
    )


def measured(loop: str, width: int, batch: int) -> dict:
    """What a process of this loop found, or one of train.py."""
    with tempfile.TemporaryDirectory() as folder:
        if loop == OURS:
            options = ["--custom_data", "true", "--width", width, "--batch_size", batch, "--max_samples", 5000, "--epochs", 2]
            words = [sys.executable, "-m", "tests.gpu.measured", FIRST, LAST, "jobs/train.py", *options, "--output_dir", folder]
        else:
            from tests.tools.packages import python_program  # a machine with a GPU may have no pytest

            python = python_program("python", NEEDS[loop]) if loop in NEEDS else sys.executable
            words = [python, "-m", "tests.benchmarks.libraries", "--loop", loop, "--width", width, "--batch", batch]
        env = environment(PYTHONPATH=str(ROOT))
        done = subprocess.run(list(map(str, words)), cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
        if done.returncode:
            raise RuntimeError(f"{loop} ended with {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")
        found = last_json(done.stdout)
        return {**found, "a step, ms": 1000 * batch / statistics.median(found["images/s"])}


def middle(values: list[float], form: str = ".2f") -> str:
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


HEAD = """| loop | start to the end of the first step, s | of the second | CPU s to the first | a step, ms | images/s | train.py is faster by |
|---|---|---|---|---|---|---|"""


def line(name: str, found: list[dict], ours: list[dict]) -> str:
    version = NEEDS[name].partition("==")[2] if name in NEEDS else ""
    cells = [
        f"{name} {version}".strip(),
        middle([one["seconds to"]["the first step"] for one in found]),
        middle([one["seconds to"]["the second step"] for one in found]),
        middle([one["CPU seconds to the first step"] for one in found]),
        middle([one["a step, ms"] for one in found]),
        middle([statistics.median(one["images/s"]) for one in found], ".0f"),
        "" if name == OURS else middle(ratios(found, ours, lambda one: one["a step, ms"])),
    ]
    return f"| {' | '.join(cells)} |"


def ratios(theirs: list[dict], ours: list[dict], of: Callable[[dict], float]) -> list[float]:
    """How many times less it took with ours, round by round."""
    return [of(one) / of(other) for one, other in zip(theirs, ours)]


def keep(name: str, found: list[dict], ours: list[dict]) -> None:
    rows.keep("a step of train.py on one thread", NEEDS[name], ratios(found, ours, lambda one: one["a step, ms"]))
    starts = ratios(found, ours, lambda one: one["seconds to"]["the second step"])
    rows.keep("start of train.py to its second step", NEEDS[name], starts)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--loop", choices=list(LOOPS), help=argparse.SUPPRESS)
    parser.add_argument("--width", type=int, default=16, help=argparse.SUPPRESS)
    parser.add_argument("--batch", type=int, default=64, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.loop:
        return train_on_cifar(options.loop, options.width, options.batch)
    names = [OURS, "plain", *NEEDS]
    print(f"{machine()}; one thread, {options.rounds} rounds, median (range)")
    for what, (width, batch) in NETWORKS.items():
        print(f"\n{what}\n\n{HEAD}")
        found = {name: [] for name in names}
        for _ in range(options.rounds):
            for name in names:
                found[name].append(measured(name, width, batch))
        for name in names:
            print(line(name, found[name], found[OURS]), flush=True)
        if width > 1:
            for name in NEEDS:
                keep(name, found[name], found[OURS])
    return None


if __name__ == "__main__":
    sys.exit(main())
