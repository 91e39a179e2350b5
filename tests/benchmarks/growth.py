"""How start-up time and memory grow with the number of photographs: the index of a tree, the index of a pack, the order of an epoch.

    python -m tests.benchmarks.growth [--counts 1000 1280000] [--rounds 3]

The indexes are warm, as they are at every start but the first. They are synthetic: a pack of a few real files, whose samples are
repeated in the index. Each figure is of a process of its own; memory is what it holds more afterwards. The first step is that of
`train_imagenet.py --data_backend packed` with a small network, from process start to the line that follows it.
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
from pathlib import Path

import numpy as np

from common.files import write_atomically
from datasets.photos import files, packed, tree
from tests.benchmarks import rows
from tests.benchmarks.base import machine
from tests.jobs import ROOT, command, environment

COUNTS = [1_000, 10_000, 100_000, 1_000_000, 1_280_000]
CLASSES = 1000
FEW = 64  # real pictures in the pack

PROBE = """
import json, os, sys, time
import numpy, torch
from datasets.photos import packed, tree
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
        "signature": text(tree._signature(str(folder), files.classes(str(folder)))), "names": text("\0".join(names_of(count))),
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


def first_step(pack, folder, rounds):
    found = []
    for number in range(rounds):
        words = command(
            "train_imagenet", "--data_url", pack, "--data_backend", "packed", "--arch", "resnet18", "--image_size", 64,
            "--batch_size", 8, "--max_steps", 1, "--output_dir", folder / f"{pack.name}-{number}",
        )  # fmt: skip
        begun = time.perf_counter()
        with subprocess.Popen(words, cwd=folder, env=environment(), stdout=subprocess.PIPE, text=True) as process:
            for line in process.stdout:
                if "images_per_s" in line:
                    found.append(time.perf_counter() - begun)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counts", type=int, nargs="+", default=COUNTS, help=f"of photographs, at least {CLASSES}")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    print(f"{machine()}; {options.rounds} rounds, medians\n")
    print(
        "| photographs | tree: s | MiB | pack: s | MiB | order of an epoch: s | MiB | process start to first step, s |\n|---|---|---|---|---|---|---|---|"
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
            print(f"| {count:,} | {' | '.join(cells)} | {statistics.median(steps[count]):.1f} |", flush=True)
    few, *_, most = sorted(steps)
    rows.keep(
        f"process start to first step, {most:,} photographs", f"{few:,}", [a / b for a, b in zip(steps[few], steps[most])]
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
