"""What costs one more photograph, epoch, step or start of a run, in seconds, memory, bytes and requests.

    python -m tests.benchmarks.growth [--counts 1000 1280000] [--rounds 3]     photographs
    python -m tests.benchmarks.growth --orders 14000000 1000000000             the order of an epoch alone
    python -m tests.benchmarks.growth --length epochs steps starts             a long run of a tiny network: 1,000 epochs,
                                                                               a million steps, 200 starts in a bucket

Photographs: the index of a tree, that of a pack, the order of an epoch. The indexes are warm, as they are at every start but the
first. They are synthetic: a pack of a few real files, whose samples are repeated in the index. Each figure is of a process of its
own; memory is what it holds more afterwards. The first step is that of `train_imagenet.py --data_backend packed` with a small
network, from process start to the line that follows it; beside it the memory of its loader processes.
"""

import argparse
import hashlib
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np

from common.files import write_atomically
from datasets.packs import packed
from datasets.photos import files, tree
from tests.benchmarks import rows
from tests.benchmarks.base import machine
from tests.tools.jobs import ROOT, command, environment
from tests.tools.ranks import children

COUNTS = [1_000, 10_000, 100_000, 1_000_000, 1_280_000]
CLASSES = 1000
FEW = 64  # real pictures in the pack
LOADERS = 2  # processes

PROBE = """
import json, os, sys, time
import numpy, torch
from datasets.photos import tree
from datasets.packs import packed
from datasets.sampler import EpochSampler

def held():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

what, place, index, count = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
before, begun = held(), time.perf_counter()
if what == "tree":
    made = tree.load(place, index)
elif what == "pack":
    made = packed.load(place, "train")
else:
    made = iter(EpochSampler(count, 256, seed=0))
    next(made)
seconds = time.perf_counter() - begun
assert what == "sampler" or len(made) == count
print(json.dumps([seconds, held() - before]))
"""


def pictures(folder):
    """FEW photographs, in as many classes as ImageNet has."""
    from PIL import Image

    generator = np.random.default_rng(0)
    for split in ("train", "val"):
        for number in range(CLASSES):
            (folder / split / f"n{number:08d}").mkdir(parents=True)
        for number in range(FEW):
            picture = Image.fromarray(generator.integers(0, 256, (60, 80, 3), np.uint8)).resize((400, 300))
            picture.save(folder / split / f"n{number:08d}" / f"{number}.JPEG")


def names_of(count):
    return [f"n{number * CLASSES // count:08d}/ILSVRC2012_{number:08d}.JPEG" for number in range(count)]


def synthetic_tree(folder, indexes, count):
    """A tree's index, as datasets.photos.tree keeps it; there are no files."""
    for number in range(CLASSES):
        (folder / f"n{number:08d}").mkdir(parents=True)
    stored = {
        "signature": text(tree._signature(str(folder), list(files.classes(str(folder)).items()))), "names": text("\0".join(names_of(count))),
        "left_out": text("{}"), "changed": np.zeros(0, np.int64), "labels": np.arange(count) * CLASSES // count,
        "special": np.zeros(count, bool), "widths": np.full(count, 500, np.int32), "heights": np.full(count, 375, np.int32),
    }  # fmt: skip
    np.savez(content := io.BytesIO(), **stored)
    name = hashlib.sha256(os.fsencode(os.path.realpath(folder))).hexdigest()[:16]
    (indexes / "index").mkdir(parents=True)
    write_atomically(str(indexes / "index" / f"{name}.npz"), content.getbuffer())


def synthetic_pack(real, folder, count):
    """The shards of a real pack, under an index in which its samples come again and again."""
    folder.mkdir()
    for path in real.iterdir():
        if path.suffix == ".tar" or path.name == "val-index.npz":
            os.link(path, folder / path.name)
    few = packed.load(str(real), "train")
    again = np.resize(np.arange(len(few)), count)
    arrays = {name: getattr(few, name)[again] for name in packed.PER_SAMPLE}
    about = {"shards": few.shards, "identity": few.identity, "form": few.form}
    whole = tree.Tree("", [f"n{number:08d}" for number in range(CLASSES)], names_of(count), left_out={}, **{
        name: arrays[name] for name in ("labels", "widths", "heights", "special")
    })  # fmt: skip
    packed.write_index(str(folder), "train", whole, about, arrays)


def text(words):
    return np.frombuffer(words.encode(), np.uint8)


def probe(what, place, index, count, rounds):
    """Medians: (seconds, MiB)"""
    words = [sys.executable, "-c", PROBE, what, str(place), str(index), str(count)]
    run = [json.loads(subprocess.check_output(words, cwd=ROOT, env=environment(PYTHONPATH=str(ROOT)))) for _ in range(rounds)]
    return [statistics.median(values) for values in zip(*run)]


def own_memory(pid):
    """MiB that a process shares with no other."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private")) / 1024


def first_step(pack, folder, rounds):
    """Per round: (seconds to the first step, MiB of its own that a loader process has then)."""
    found = []
    for number in range(rounds):
        words = command(
            "train_imagenet", "--data_url", pack, "--data_backend", "packed", "--arch", "resnet18", "--image_size", 64,
            "--batch_size", 8, "--max_steps", 1, "--workers", LOADERS, "--output_dir", folder / f"{pack.name}-{number}",
        )  # fmt: skip
        begun = time.perf_counter()
        with subprocess.Popen(words, cwd=folder, env=environment(), stdout=subprocess.PIPE, text=True) as process:
            for line in process.stdout:
                if "images_per_s" in line:
                    seconds, job = time.perf_counter() - begun, Path(f"/proc/{process.pid}/cmdline").read_bytes()
                    loaders = [pid for pid in children(process) if Path(f"/proc/{pid}/cmdline").read_bytes() == job]
                    found.append((seconds, statistics.median(map(own_memory, loaders))))
    return found


# --- A long run ----------------------------------------------------------------------------------------------------------


TINY = ["--custom_data", "true", "--max_samples", 64, "--batch_size", 32, "--width", 1, "--keep", 2]
FILES = ("metrics.jsonl", "speed.jsonl", "journal.jsonl", "report.html")
LOOKED_AT = (1_000, 10_000, 100_000, 1_000_000)  # steps
STEPS = """
import os, sys
sys.path.insert(0, {root!r})
import torch
from common import arguments, devices
from common.job import run_job
from common.ranks import group
from common.run import Run
from datasets.loader import SampleLoader
from datasets.sampler import EpochSampler

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return {steps}
    def __getitem__(self, number):
        return torch.tensor([float(number % 7)])

def main():
    parser = arguments.general_parser("steps", data="is not used", workers=0)
    parser.set_defaults(lr=1e-9)
    group.add_options(parser)
    args = arguments.parse(parser)
    group.start_workers(args)
    device = devices.choose(args)
    group.join(args, device)
    sampler, model = EpochSampler({steps}, 1, seed=0), torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    run = Run(args, sampler, model, best_by="loss", best_is="lowest", optimizer=optimizer)
    run.resume()
    for _ in run.epochs():
        for number, batch in enumerate(run.steps(SampleLoader(Numbers(), sampler, device)), 1):
            loss = model(batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.step(loss)
            if number in {looked_at}:
                held = int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20
                print("seen", number, held, flush=True)
        run.end_epoch(loss=1.0)

if __name__ == "__main__":
    run_job(main)
"""


def size_of(folder):
    """| bytes of each of FILES | of the newest checkpoint | number of files |"""
    newest = max((folder / "checkpoints").glob("*.pt"), key=lambda path: path.name)
    sizes = [path.stat().st_size if (path := folder / name).exists() else 0 for name in FILES]
    return " | ".join(
        f"{number:,}" for number in (*sizes, newest.stat().st_size, sum(path.is_file() for path in folder.rglob("*")))
    )


def of_epochs(folder):
    """A start for each number of epochs: memory, seconds an epoch, and what is there afterwards."""
    print(f"| epochs | MiB | s an epoch | {' | '.join(FILES)} | checkpoint | files |\n|{'---|' * 9}")
    for count in (10, 100, 1000):
        out = folder / f"out{count}"
        words = command("train", *TINY, "--epochs", count, "--output_dir", out)
        subprocess.run(words, cwd=folder, env=environment(), check=True, stdout=subprocess.DEVNULL)
        rows = [json.loads(line) for line in (out / "speed.jsonl").read_text().splitlines()]
        seconds = (rows[-1]["time"] - rows[0]["time"]) / count
        print(f"| {count:,} | {rows[-1]['peak_memory_mib']:.0f} | {seconds:.3f} | {size_of(out)} |", flush=True)


def of_steps(folder):
    print(f"| steps | MiB then | ms a step | {' | '.join(FILES)} | checkpoint | files |\n|{'---|' * 9}")
    for count in LOOKED_AT[1:]:
        job, out = folder / f"steps{count}.py", folder / f"out{count}"
        job.write_text(STEPS.format(root=str(ROOT), steps=count, looked_at=set(LOOKED_AT)))
        begun = time.perf_counter()
        words = [sys.executable, str(job), "--epochs", "1", "--output_dir", str(out)]
        said = subprocess.run(words, cwd=folder, env=environment(), check=True, capture_output=True, text=True).stdout
        took = time.perf_counter() - begun
        held = " ".join(line.split()[2] for line in said.splitlines() if line.startswith("seen"))
        print(f"| {count:,} | {held} | {1000 * took / count:.3f} | {size_of(out)} |", flush=True)


def asked_by(store, folder, steps):
    """The methods of the requests of a start of the run in the bucket "runs", which goes on to this many steps."""
    import pytest

    from tests.tools.faultproxy import faults
    from tests.tools.jobs import run_forked

    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch, faults(store, lambda request: None, patch) as proxy:
        env = {**store.environment, "AWS_ENDPOINT_URL_S3": proxy.endpoint}
        words = [*TINY, "--epochs", 1000, "--max_steps", steps, "--output_dir", "s3://runs/7"]
        run_forked(command("train", *words)[1:], folder, env)
    return ["LIST" if one.method == "GET" and not one.is_object else one.method for one in proxy.log]


def of_starts(folder):
    """One run in a bucket, of a start for each three steps, and each in a new folder, as on a new machine."""
    from tests.tools.objectstore import ObjectStore

    print("| start | s | lists | objects read | written | deleted | objects there | bytes |\n|---|---|---|---|---|---|---|---|")
    (folder / "store").mkdir()
    store = ObjectStore(folder / "store")
    store.client().create_bucket(Bucket="runs")
    try:
        for number in range(1, 201):
            begun = time.perf_counter()
            asked = Counter(asked_by(store, folder / str(number), 3 * number))
            seconds = time.perf_counter() - begun
            if number in (2, 20, 60, 100, 200):
                there = store.client().list_objects(Bucket="runs")["Contents"]
                counts = [asked[method] for method in ("LIST", "GET", "PUT", "DELETE")]
                cells = (*counts, len(there), sum(one["Size"] for one in there))
                print(f"| {number} | {seconds:.1f} | {' | '.join(f'{cell:,}' for cell in cells)} |", flush=True)
    finally:
        store.stop()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counts", type=int, nargs="+", default=COUNTS, help=f"of photographs, at least {CLASSES}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--orders", type=int, nargs="+", help="numbers of samples")
    parser.add_argument("--length", choices=["epochs", "steps", "starts"], nargs="+")
    options = parser.parse_args()
    if options.orders or options.length:
        print(machine())
        for name in options.length or ():
            with tempfile.TemporaryDirectory() as folder:
                print()
                {"epochs": of_epochs, "steps": of_steps, "starts": of_starts}[name](Path(folder))
        for count in options.orders or ():
            seconds, size = probe("sampler", "-", "-", count, 1)
            print(f"order of {count:,}: {seconds:.2f} s, {size:,.0f} MiB more", flush=True)
        return 0
    print(f"{machine()}; {options.rounds} rounds, medians\n")
    print(
        "| photographs | tree: s | MiB | pack: s | MiB | order of an epoch: s | MiB | process start to first step, s "
        f"| MiB of a loader process |\n|{'---|' * 9}"
    )
    steps = {}
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        pictures(folder / "pictures")
        pack = [sys.executable, "-m", "launch", "pack", str(folder / "pictures"), str(folder / "real")]
        subprocess.run(pack, cwd=ROOT, env=environment(), check=True, stdout=subprocess.DEVNULL)
        for count in options.counts:
            place, indexes, many = (folder / f"{kind}{count}" for kind in ("tree", "index", "pack"))
            synthetic_tree(place, indexes, count)
            synthetic_pack(folder / "real", many, count)
            cells = []
            for what, where in (("tree", place), ("pack", many), ("sampler", place)):
                seconds, size = probe(what, where, indexes, count, options.rounds)
                cells += [f"{seconds:.3f}", f"{size:.0f}"]
            steps[count] = first_step(many, folder, options.rounds)
            first, held = map(statistics.median, zip(*steps[count]))
            print(f"| {count:,} | {' | '.join(cells)} | {first:.1f} | {held:.0f} |", flush=True)
    few, *_, most = sorted(steps)
    rows.keep(
        f"process start to first step, {most:,} photographs",
        f"{few:,}",
        [one[0] / other[0] for one, other in zip(steps[few], steps[most])],
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
