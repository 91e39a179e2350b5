"""How fast the jobs are on this GPU, each beside a peer in the same minutes: rounds of both in turn, median and range."""

import os
import shutil
import statistics
import sys
import time
from pathlib import Path

import numpy as np

from tests.gpu import judge
from tests.gpu.rows import last_json

ROUNDS = int(os.environ.get("GPU_ROUNDS", "3"))
CORES = [cores for cores in (1, 4, 8, 16) if cores <= (os.cpu_count() or 1)]
CIFAR = ["--custom_data", "true", "--epochs", 20]
SYNTHETIC = ["--custom_data", "true", "--data_backend", "synthetic", "--arch", "resnet50", "--epochs", 100]
OF_A_BATCH = 128


def measured(row, first, last, job, *options):
    """See tests/gpu/measured.py."""
    folder = row.folder / "measured"
    shutil.rmtree(folder, ignore_errors=True)
    words = [sys.executable, "-m", "tests.gpu.measured", first, last, f"jobs/{job}.py", *options, "--output_dir", folder]
    return last_json(row.run(*words))


def peer(row, call):
    """A function of peers.py, in a process of its own."""
    return last_json(row.python(f"from tests.gpu import peers; peers.show(peers.{call})"))


def side_by_side(row, ours, peers, unit="images/s"):
    """{name: function} of ours and of the peers, in turn; figures for each, and what is returned: {ours: (median, ratio to the
    best peer's median)}."""
    everyone, found = {**ours, **peers}, {}
    for _ in range(ROUNDS):
        for name, measure in everyone.items():
            found.setdefault(name, []).append(measure())
    for name, values in found.items():
        row.figures[name] = f"{statistics.median(values):,.0f} {unit} ({min(values):,.0f} to {max(values):,.0f})"
    middle = {name: statistics.median(values) for name, values in found.items()}
    best = max(middle[name] for name in peers)
    return {name: (middle[name], middle[name] / best) for name in ours}


def training_on_cifar(row):
    """train.py and train_amp.py beside the same step in plain torch, and beside a CUDA graph of it, on a batch that is there."""
    for job, half in (("train", False), ("train_amp", True)):

        def ours(*more, job=job):
            return measured(row, 40, 400, job, *CIFAR, "--batch_size", OF_A_BATCH, *more)["images/s"]

        ratios = side_by_side(
            row,
            {f"{job}.py": ours, f"{job}.py --compile true": lambda ours=ours: ours("--compile", "true")},
            {
                f"plain torch, half={half}": lambda half=half: peer(row, f"plain_cifar({OF_A_BATCH}, {half})"),
                f"a CUDA graph of it, half={half}": lambda half=half: peer(row, f"captured_cifar({OF_A_BATCH}, {half})"),
            },
        )
        for name, (_, ratio) in ratios.items():
            row.figures[f"{name} beside the better one"] = f"{ratio:.2f}"


def thirty_epochs_of_cifar(row):
    """train.py with --compile true, on 50,000 images where --data has them: the aim is 30 s on an H200."""
    began = time.monotonic()
    row.job("train", *cifar_data(), "--compile", "true", "--resume", "never", "--overwrite", "true")
    row.figures["30 epochs, from start to end"] = f"{time.monotonic() - began:.0f} s"


def cifar_data():
    folder = os.environ.get("GPU_DATA")
    return ["--data_url", folder] if folder else ["--custom_data", "true"]


def resnet50_on_noise(row):
    """The flagship beside torchvision's reference loop, both on a batch that is on the GPU: at least 1.1 times as fast."""
    batch = 256

    def ours(*more):
        return measured(row, 20, 80, "train_imagenet", *SYNTHETIC, "--batch_size", batch, *more)

    found = side_by_side(
        row,
        {"train_imagenet.py": lambda: ours()["images/s"], "--compile true": lambda: ours("--compile", "true")["images/s"]},
        {"torchvision's loop": lambda: peer(row, f"reference(peers.noise({batch}), 60)")},
    )
    row.figures["peak memory"] = f"{ours().get('peak MiB')} MiB"
    row.judge("beside torchvision's loop", judge.at_least(max(ratio for _, ratio in found.values()), 1.1))


def photographs(row, number=0):
    """A folder of photographs as ImageNet's are: those of --data, or pictures of our own, smooth with noise, 500 x 375."""
    given = os.environ.get("GPU_DATA")
    if given and (Path(given) / "imagenet" / "train").is_dir():
        return Path(given) / "imagenet"
    from PIL import Image

    folder, random = row.folder.parent / "photographs", np.random.default_rng(0)
    for split, count in (("train", number or 128 * max(CORES)), ("val", 64)):
        for place in range(count):
            path = folder / split / f"class{place % 8}" / f"{place}.JPEG"
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                rough = Image.fromarray(random.integers(0, 256, (24, 32, 3), dtype=np.uint8)).resize((500, 375), Image.BICUBIC)
                noisy = np.asarray(rough, np.int16) + random.integers(-12, 13, (375, 500, 3))
                Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(path, quality=92)
    return folder


def resnet50_on_photographs(row):
    """Beside torchvision's reference loop with its ImageFolder, all cores for each, and beside our own speed on noise."""
    folder, batch, workers = photographs(row), 128, max(CORES)
    first, steps = 8, 5 * workers  # the machine's cores decide how long this takes

    def ours(*data):
        words = [*data, "--arch", "resnet50", "--batch_size", batch, "--workers", workers, "--epochs", 50]
        return measured(row, first, first + steps, "train_imagenet", *words)["images/s"]

    on_noise = ours("--custom_data", "true", "--data_backend", "synthetic")
    found = side_by_side(
        row,
        {"train_imagenet.py": lambda: ours("--data_url", folder)},
        {
            "torchvision's loop": lambda: peer(
                row, f"reference(peers.photographs({str(folder)!r}, {batch}, {workers}), {steps}, 8, 8)"
            )
        },
    )
    ((rate, ratio),) = found.values()
    row.figures["share of the speed on noise"] = f"{rate / on_noise:.0%}"
    row.judge("beside torchvision's loop", judge.at_least(ratio, 1.0))


LOADER = """
import json, sys, time
import torch
from datasets import imagenet
from datasets.photos import tree
from datasets.photos.labelled import Photos
from datasets.sampler import EpochSampler
folder, backend, workers = sys.argv[1], sys.argv[2], int(sys.argv[3])
data = Photos(tree.load(folder + "/train"), 224, True, 0)
sampler = EpochSampler(len(data), 128, seed=0)
loader = imagenet.loader(data, sampler, torch.device("cuda", 0), workers, backend)
seen, began = 0, None
for epoch in range(50):
    sampler.start_at(epoch, 0)
    for images, _ in loader:
        if began is None or time.perf_counter() - began > 6:
            torch.cuda.synchronize()
            if began is not None:
                print(seen / (time.perf_counter() - began)); sys.exit()
            began = time.perf_counter()
        else:
            seen += len(images)
print(seen / (time.perf_counter() - began))
"""


def loaders(row):
    """Photographs as batches on the GPU, by so many processes, beside torchvision's ImageFolder and decoders on the GPU."""
    folder = photographs(row)
    for workers in CORES:
        found = side_by_side(
            row,
            {f"ours, {workers} cores": lambda workers=workers: loader(row, folder, "pytorch", workers)},
            {
                f"torchvision, {workers} cores": lambda workers=workers: peer(
                    row, f"loading(peers.photographs({str(folder)!r}, 128, {workers}), 6)"
                )
            },
        )
        ((_, ratio),) = found.values()
        row.figures[f"ours beside torchvision, {workers} cores"] = f"{ratio:.2f}"
    row.figures["torchvision.io.decode_jpeg on the GPU, whole pictures"] = decoded_on_the_gpu(row, folder)
    try:
        row.figures["dali-gpu"] = f"{loader(row, folder, 'dali-gpu', max(CORES)):,.0f} images/s"
    except RuntimeError as error:
        row.figures["dali-gpu"] = f"missing: {str(error).splitlines()[-1][-160:]}"


def loader(row, folder, backend, workers):
    return last_json(row.python(LOADER, folder, backend, workers))


def decoded_on_the_gpu(row, folder):
    try:
        return f"{peer(row, f'decoding({str(folder)!r})'):,.0f} images/s"
    except RuntimeError as error:
        return f"missing: {str(error).splitlines()[-1][-160:]}"


def a_checkpoint_is_saved_meanwhile(row):
    """The longest step of ResNet-50 with a checkpoint every ten steps, beside the longest without one."""
    words = ["train_imagenet", *SYNTHETIC, "--batch_size", 64]
    without = measured(row, 30, 90, *words)["longest step, ms"]
    saving = measured(row, 30, 90, *words, "--save_steps", 10)["longest step, ms"]
    row.figures["longest step, ms"] = f"{without} without, {saving} with a checkpoint every ten steps"


def from_the_start_to_the_first_step(row):
    """Of a process that has not run before, and of the next one."""
    for name, words in (("train", CIFAR), ("train_imagenet", [*SYNTHETIC, "--batch_size", 64])):
        seconds = [measured(row, 2, 4, name, *words)["seconds to the first step"] for _ in range(2)]
        row.figures[f"{name}.py"] = f"{seconds[0]} s, then {seconds[1]} s"


AIRBENCH = """
import json, sys
import torch
from common import arguments
from datasets import cifar10
from tests.gpu import airbench
args = arguments.parse(cifar10.parser(""), sys.argv[1:])
train, test = ((data.images.to("cuda"), data.labels.to("cuda")) for data in cifar10.load(args))
airbench.train(*train, seed=99)  # what is compiled or tuned at first
rows = []
for seed in range(3):
    network, seconds = airbench.train(*train, seed)
    rows.append({"seconds": seconds, "accuracy": airbench.accuracy(network, *test)})
print(json.dumps(rows))
"""


def speedrun_beside_airbench(row):
    """Seconds and accuracy of three runs each; without CIFAR-10 in --data the seconds alone mean something."""
    out = ["--output_dir", row.folder / "out"]
    printed = row.run(sys.executable, "jobs/speedrun.py", "--runs", 3, *cifar_data(), *out)
    row.figures["speedrun.py"] = "; ".join(printed.strip().splitlines()[-3:-1])
    rows = last_json(row.python(AIRBENCH, *cifar_data(), *out))
    for what, form in (("seconds", "{:.2f}"), ("accuracy", "{:.2%}")):
        values = [one[what] for one in rows]
        row.figures[f"airbench94, {what}"] = ", ".join(map(form.format, values))
