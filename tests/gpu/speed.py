"""How fast the jobs are on this GPU, each beside a peer in the same minutes: three windows of each process, median and range."""

import os
import shutil
import statistics
import sys
import time
from importlib import metadata
from pathlib import Path

import numpy as np

from tests.gpu import judge
from tests.gpu.rows import Missing, is_there, last_json

ROUNDS = int(os.environ.get("GPU_ROUNDS", "1"))
CORES = [cores for cores in (1, 4, 8, 16) if cores <= (os.cpu_count() or 1)]
CIFAR = ["--custom_data", "true", "--epochs", 2]
TRAINING = ["--training_only", "true", "--recipe", "imagenet"]
SYNTHETIC = ["--data_backend", "synthetic", "--arch", "resnet50", "--epochs", 2, *TRAINING]  # 1,281,167 samples an epoch
UNSAVED = ["--checkpoints", "false"]
OF_A_BATCH = 128
LEVEL = 0.97  # of a peer's speed: what two equal programs are apart
LIBRARIES = ("accelerate", "lightning", "timm")


def measured(row, first, last, job, *options, environment=None):
    """See tests/gpu/measured.py."""
    folder = row.folder / "measured"
    shutil.rmtree(folder, ignore_errors=True)
    words = [sys.executable, "-m", "tests.gpu.measured", first, last, f"jobs/{job}.py", *options, "--output_dir", folder]
    return last_json(row.run(*words, environment=environment))


def peer(row, call):
    """A function of peers.py, in a process of its own."""
    return last_json(row.python(f"from tests.gpu import peers; peers.show(peers.{call})"))


def side_by_side(row, ours, peers, unit="images/s"):
    """{name: function} of ours and of the peers, in turn, each of which gives several rates; figures for each, and what is returned:
    {ours: (median, ratio to the best peer's median)}."""
    everyone, found = {**ours, **peers}, {}
    for _ in range(ROUNDS):
        for name, measure in everyone.items():
            values = found.setdefault(name, [])
            values.extend(measure())
            row.figures[name] = f"{statistics.median(values):,.0f} {unit} ({min(values):,.0f} to {max(values):,.0f})"
    middle = {name: statistics.median(values) for name, values in found.items()}
    best = max(middle[name] for name in peers)
    return {name: (middle[name], middle[name] / best) for name in ours}


def training_on_cifar(row):
    """train.py and train_amp.py beside the same step in plain torch, and beside a CUDA graph of it, on a batch that is there."""
    for job, half in (("train", False), ("train_amp", True)):

        def ours(*more, job=job):
            return measured(row, 100, 1300, job, *CIFAR, "--batch_size", OF_A_BATCH, *more)["images/s"]

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
    """train.py with --compile true, on 50,000 images where --data has them: the aim is 30 s on an H200. The second time its kernels
    are compiled already."""
    for name in ("30 epochs, from start to end", "once more"):
        began = time.monotonic()
        row.job("train", *cifar_data(), "--compile", "true", "--resume", "never", "--overwrite", "true")
        row.figures[name] = f"{time.monotonic() - began:.0f} s"


def cifar_data():
    folder = os.environ.get("GPU_DATA")
    return ["--data_url", folder] if folder else ["--custom_data", "true"]


def resnet50_on_noise(row):
    """The flagship beside torchvision's reference loop, both on a batch that is on the GPU, eager beside eager and compiled beside
    compiled: no slower."""
    batch, peak = 256, []

    def ours(dtype, compiled):
        words = [*SYNTHETIC, *UNSAVED, "--batch_size", batch, "--amp_dtype", dtype, "--compile", compiled]
        found = measured(row, 20, 80, "train_imagenet", *words)
        peak.append(found.get("peak MiB"))
        return found["images/s"]

    def torchvision(dtype, compiled):
        return peer(row, f"reference(peers.noise({batch}), dtype={dtype!r}, compiled={compiled == 'true'})")

    dtypes = ("bfloat16", "float16")  # torch's own kernels compute norms in the one, cuDNN's in the other
    for compiled, name in (("false", "torchvision's loop"), ("true", "torchvision's loop, torch.compile()")):
        found = side_by_side(
            row,
            {
                f"train_imagenet.py, {dtype}, --compile {compiled}": lambda dtype=dtype, compiled=compiled: ours(
                    dtype, compiled
                )
                for dtype in dtypes
            },
            {f"{name}, {dtype}": lambda dtype=dtype, compiled=compiled: torchvision(dtype, compiled) for dtype in dtypes},
        )
        best = max(ratio for _, ratio in found.values())
        row.judge(f"beside {name}", judge.at_least(best, LEVEL))
    row.figures["peak memory"] = f"{peak[0]} MiB"


def resnet50_in_other_libraries(row):
    """The same step in bfloat16 in what people would pick instead, each as its documentation has it, in turns: no slower."""
    present = [name for name in LIBRARIES if is_there(name)]
    if not present:
        raise Missing(f"not installed: {', '.join(LIBRARIES)}")
    row.figures["versions"] = ", ".join(f"{name} {metadata.version(name)}" for name in present)
    batch = 256
    for compiled, theirs in (("false", "eager"), ("true", "torch.compile()")):
        words = [*SYNTHETIC, *UNSAVED, "--batch_size", batch, "--amp_dtype", "bfloat16", "--compile", compiled]

        def ours(words=words):
            return measured(row, 20, 80, "train_imagenet", *words)["images/s"]

        def library(name, compiled=compiled):
            return peer(row, f"in_library({name!r}, {batch}, compiled={compiled == 'true'})")

        peers = {f"{name}, {theirs}": lambda name=name, library=library: library(name) for name in present}
        found = side_by_side(row, {f"train_imagenet.py, --compile {compiled}": ours}, peers)
        ((_, ratio),) = found.values()
        row.judge(f"beside the fastest of them, {theirs}", judge.at_least(ratio, LEVEL))


def photographs(row, number):
    """A folder of at least so many photographs, as ImageNet's are, for the training: those of --data, or pictures of our own, smooth
    with noise, 500 x 375. Where there are fewer, each has several names."""
    given, folder = os.environ.get("GPU_DATA"), row.folder.parent / "photographs"
    if given and (Path(given) / "imagenet" / "train").is_dir():
        source = Path(given) / "imagenet"
    else:
        source = drawn(row.folder.parent / "drawn")
    if len(list((source / "train").glob("*/*"))) >= number:
        return source
    for split, count in (("train", number), ("val", 64)):
        pictures = sorted((source / split).glob("*/*"))
        for place in range(count):
            path = folder / split / pictures[place % len(pictures)].parent.name / f"{place}.JPEG"
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.symlink_to(pictures[place % len(pictures)])
    return folder


def drawn(folder):
    """Fewer than a benchmark takes: to draw one takes longer than to decode it."""
    from PIL import Image

    random = np.random.default_rng(0)
    for split, count in (("train", 256), ("val", 64)):
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
    batch, workers = 128, max(CORES)
    first, steps = 8, 6 * workers  # the machine's cores decide how long this takes
    folder = photographs(row, batch * (first + steps + 2))  # one epoch
    row.figures["decoder"] = "nvImageCodec" if is_there("nvidia.nvimgcodec") else "Pillow"

    def ours(*data):
        words = ["--arch", "resnet50", "--batch_size", batch, "--workers", workers, "--epochs", 2, *TRAINING, *UNSAVED]
        return measured(row, first, first + steps, "train_imagenet", *data, *words)["images/s"]

    on_noise = statistics.median(ours("--data_backend", "synthetic"))
    found = side_by_side(
        row,
        {"train_imagenet.py": lambda: ours("--data_url", folder)},
        {
            "torchvision's loop": lambda: peer(
                row, f"reference(peers.photographs({str(folder)!r}, {batch}, {workers}), {len(os.listdir(folder / 'train'))})"
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
from tests.gpu import peers
folder, backend, workers = sys.argv[1], sys.argv[2], int(sys.argv[3])
data = Photos(tree.load(folder + "/train"), 224, True, 0)
sampler = EpochSampler(len(data), 128, seed=0)
loader = imagenet.loader(data, sampler, torch.device("cuda", 0), workers, backend)
rates, seen, began = [], 0, None
for epoch in range(50):
    sampler.start_at(epoch, 0)
    for images, _ in loader:
        if began is None or time.perf_counter() - began > 2:
            torch.cuda.synchronize()
            if began is not None:
                rates.append(seen / (time.perf_counter() - began))
            if len(rates) == 3:
                peers.show(rates)
            seen, began = 0, time.perf_counter()
        else:
            seen += len(images)
"""


def loaders(row):
    """Photographs as batches on the GPU, by so many processes, beside torchvision's ImageFolder and decoders on the GPU."""
    folder = photographs(row, 128 * 8 * max(CORES))
    row.figures["decoder"] = "nvImageCodec" if is_there("nvidia.nvimgcodec") else "Pillow"
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
        row.figures["dali-gpu"] = f"{statistics.median(loader(row, folder, 'dali-gpu', max(CORES))):,.0f} images/s"
    except RuntimeError as error:
        row.figures["dali-gpu"] = f"missing: {str(error).splitlines()[-1][-160:]}"


def loader(row, folder, backend, workers):
    return last_json(row.python(LOADER, folder, backend, workers))


def decoded_on_the_gpu(row, folder):
    try:
        return f"{statistics.median(peer(row, f'decoding({str(folder)!r})')):,.0f} images/s"
    except RuntimeError as error:
        return f"missing: {str(error).splitlines()[-1][-160:]}"


def a_checkpoint_is_saved_meanwhile(row):
    """The longest step of ResNet-50 while one checkpoint is saved, beside the longest without one."""
    words = ["train_imagenet", *SYNTHETIC, "--batch_size", 64]
    without = measured(row, 30, 90, *words, *UNSAVED)
    saving = measured(row, 30, 90, *words, "--save_steps", 60)
    row.figures["longest step, ms"] = f"{without['longest step, ms']} without, {saving['longest step, ms']} with one checkpoint"
    row.figures["reserved memory, after step 30 and step 90"] = "{} MiB, {} MiB".format(*without["reserved MiB"])
    row.judge("reserved memory grows by", judge.below(without["reserved MiB"][1] - without["reserved MiB"][0], 64))


def from_the_start_to_the_first_step(row):
    """Of a process that has not run before, and of the next one."""
    for name, words in (("train", CIFAR), ("train_imagenet", [*SYNTHETIC, "--batch_size", 64])):
        first, then = (measured(row, 2, 5, name, *words) for _ in range(2))
        row.figures[f"{name}.py"] = "{} s, then {} s".format(*(one["seconds to"]["the first step"] for one in (first, then)))
        row.figures[f"{name}.py, seconds after which it had"] = ", ".join(
            f"{mark} {seconds}" for mark, seconds in then["seconds to"].items()
        )


# What cannot be compiled the job trains without, so at the end the graphs are counted.
COUNTED = """
import atexit, os, runpy, sys
import torch._dynamo
sys.argv = sys.argv[1:]
sys.path.insert(0, os.getcwd())
atexit.register(lambda: print(torch._dynamo.utils.counters["stats"]["unique_graphs"], flush=True))
runpy.run_path(sys.argv[0], run_name="__main__")
"""

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
    for net in ("resnet18", "small"):
        printed = row.python(COUNTED, "jobs/speedrun.py", "--net", net, "--runs", 3, *cifar_data(), *out)
        row.figures[f"speedrun.py, {net}"] = "; ".join(line for line in printed.splitlines() if "in the mean of" in line)
        row.judge(f"{net}: graphs that were compiled", judge.at_least(last_json(printed), 1), number=False)
    rows = last_json(row.python(AIRBENCH, *cifar_data(), *out))
    for what, form in (("seconds", "{:.2f}"), ("accuracy", "{:.2%}")):
        values = [one[what] for one in rows]
        row.figures[f"airbench94, {what}"] = ", ".join(map(form.format, values))
