"""CPU-seconds of one core to 80 % on CIFAR-10: jobs/speedrun.py beside the recipe of the ModelArts sample, in turn (make bench).

    python -m tests.benchmarks.speedrun --data FOLDER [--rounds 3]        a folder with cifar-10-batches-py

In every round each network of speedrun.py is trained once as a whole job, with another seed, and the sample's recipe (Adam 0.01, 128
images a step, float32, no augmentation) goes on for its share of the seconds that ResNet-18 took: at the end it has had as many as one run.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

from common.models.resnet import resnet18
from datasets import cifar10_files
from tests.benchmarks import rows
from tests.benchmarks.base import forever, machine
from tests.tools.jobs import command, environment

TARGET, NETS = 0.8, ["resnet18", "small"]
SAMPLE = "an epoch of the ModelArts sample's recipe"


class Sample:
    """The training of the sample, which can be stopped and gone on with."""

    def __init__(self, folder):
        train, test = (
            cifar10_files.read_files(folder, names) for names in (cifar10_files.TRAIN_FILES, cifar10_files.TEST_FILES)
        )
        self.train, self.test = (
            TensorDataset(torch.tensor(images) / 255, torch.tensor(labels)) for images, labels in (train, test)
        )
        self.batches = forever(DataLoader(self.train, batch_size=128, shuffle=True))
        self.model = resnet18()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)

    def train_for(self, seconds):
        """CPU-seconds an epoch, at the speed of these."""
        begun, images_seen = time.process_time(), 0
        while time.process_time() - begun < seconds:
            images, labels = next(self.batches)
            loss = torch.nn.functional.cross_entropy(self.model(images), labels)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            images_seen += len(images)
        return (time.process_time() - begun) / images_seen * len(self.train)

    @torch.no_grad()
    def accuracy(self):
        self.model.eval()
        right = sum((self.model(images).argmax(dim=1) == labels).sum().item() for images, labels in DataLoader(self.test, 500))
        return right / len(self.test)


def job(net, seed, data, folder):
    """(CPU-seconds, accuracy)"""
    words = ["--net", net, "--target", TARGET, "--seed", seed, "--enable_gpu", "false"]
    words += ["--data_url", data, "--output_dir", folder / net]
    subprocess.run(command("speedrun", *words), cwd=folder, env=environment(), check=True, stdout=subprocess.DEVNULL)
    row = json.loads((folder / net / "runs.jsonl").read_text().splitlines()[-1])
    return row["seconds"], row["accuracy"]


def middle(values, form):
    return f"{form.format(statistics.mean(values))} ({form.format(min(values))} to {form.format(max(values))})"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="a folder with cifar-10-batches-py")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    data = options.data.resolve()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    sample, epochs, found = Sample(str(data / cifar10_files.FOLDER)), [], {net: [] for net in NETS}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(options.rounds):
            for net in NETS:
                found[net].append(job(net, seed, data, Path(folder)))
                print(
                    f"seed {seed}, {net}: {found[net][-1][0]:.0f} CPU-s, {found[net][-1][1]:.2%}", file=sys.stderr, flush=True
                )
            epochs.append(sample.train_for(found["resnet18"][-1][0] / options.rounds))
            print(f"the sample's recipe: {epochs[-1]:.0f} CPU-s an epoch", file=sys.stderr, flush=True)
    for net, runs in found.items():
        if statistics.mean(accuracy for _, accuracy in runs) < TARGET:
            print(f"error: {net} has missed its target: {runs}", file=sys.stderr)
            return 1
    seconds = {net: [run[0] for run in found[net]] for net in NETS}
    rows.keep(
        "80 % with ResNet-18, one core",
        SAMPLE,
        [epoch / ours for epoch, ours in zip(epochs, seconds["resnet18"])],
        "--data FOLDER",
    )
    ratios = [theirs / ours for theirs, ours in zip(seconds["resnet18"], seconds["small"])]
    rows.keep("80 % with 2 million parameters, one core", "80 % with ResNet-18", ratios, "--data FOLDER")

    print(
        f"{machine()}; one core, {options.rounds} seeds, mean (range)\n\n| training | CPU-seconds | test accuracy, 10,000 images |\n|---|---|---|"
    )
    for net in NETS:
        print(f"| speedrun.py, {net} | {middle(seconds[net], '{:.0f}')} | {middle([run[1] for run in found[net]], '{:.2%}')} |")
    print(f"| the sample's recipe, stopped | {statistics.mean(seconds['resnet18']):.0f} | {sample.accuracy():.2%} |")
    print(f"| the sample's recipe, an epoch | {middle(epochs, '{:.0f}')} | |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
