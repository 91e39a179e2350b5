"""What a step of each job asks of the GPU and of the host, counted on the stand-in: python -m tests.gpu.rehearsal [--only ROWS] [--keep true]

costs.json holds the counts that are allowed; --keep true writes those of now.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.gpu import rehearsal
from tests.tools.jobs import command, environment

KEPT = Path(__file__).with_name("costs.json")
STEPS = (16, 28)  # those that are counted: DDP takes the times of the first ten
STEPS_OF = {"speedrun": (45, 57)}  # pictures of full size, in the second run
JUDGED = ("launches", "synchronisations", "copies in", "copies out", "copies on the device", "collectives")
SHOWN = ("memsets", "graphs", *JUDGED, "allocations")

CIFAR = ["--batch_size", "64", "--epochs", "1", "--max_steps", "30"]
PHOTOS = ["--arch", "resnet50", "--batch_size", "16", "--epochs", "1", "--max_steps", "30"]
SYNTHETIC = [*PHOTOS, "--data_backend", "synthetic"]
ROWS = {  # name: (GPUs, job, its options)
    "train": (1, "train", CIFAR),
    "train --compile": (1, "train", [*CIFAR, "--compile", "true"]),
    "train_dp": (2, "train_dp", CIFAR),
    "train_ddp": (2, "train_ddp", CIFAR),
    "train_ddp, one GPU": (1, "train_ddp", CIFAR),
    "train_amp": (1, "train_amp", CIFAR),
    "train_amp, float16": (1, "train_amp", [*CIFAR, "--amp_dtype", "float16"]),
    "train_amp --compile": (1, "train_amp", [*CIFAR, "--compile", "true"]),
    "train_ddp_amp": (2, "train_ddp_amp", CIFAR),
    "train_exact": (1, "train_exact", [*CIFAR, "--shares", "2"]),
    "train_ddp_exact": (2, "train_ddp_exact", CIFAR),
    "train_dali": (1, "train_dali", CIFAR),
    "train_dpex": (1, "train_dpex", [*CIFAR, "--workers", "1"]),
    "train_imagenet": (1, "train_imagenet", SYNTHETIC),
    "train_imagenet, two GPUs": (2, "train_imagenet", SYNTHETIC),
    "train_imagenet --compile": (1, "train_imagenet", [*SYNTHETIC, "--compile", "true"]),
    "train_imagenet, all options": (
        1,
        "train_imagenet",
        [*SYNTHETIC, "--amp_dtype", "float16", "--mixup", "0.2", "--ema", "0.999"],
    ),
    "train_restore": (1, "train_restore", ["--epochs", "1", "--max_steps", "30"]),
    "speedrun": (1, "speedrun", ["--runs", "1", "--max_samples", "4096"]),
}


def measure(name, *more):
    """{what: number a step}, "host milliseconds" of the main thread, and {place: waits a step}, of the rank with most of them.

    `more`: options besides those of the row.
    """
    gpus, job, options = ROWS[name]
    with tempfile.TemporaryDirectory() as folder:
        counting = {"REHEARSAL_COSTS": f"{folder}/costs", "REHEARSAL_STEPS": "{}:{}".format(*STEPS_OF.get(name, STEPS))}
        script = command(job, "--custom_data", "true", *options, *more, "--output_dir", f"{folder}/out")
        env = environment(**rehearsal.environment(gpus, **counting))
        done = subprocess.run(script, env=env, cwd=folder, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, f"{name}: exit code {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        ranks = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("costs.*"))]
    rank = max(ranks, key=lambda facts: facts["counts"].get("main synchronisations", 0))
    steps = rank["steps"]
    row = {"host milliseconds": round(rank["milliseconds"] / steps, 2)}
    for counted, number in rank["counts"].items():
        what = counted.split(" ", 1)[1]
        what = "copies in" if what == "copies in from pageable memory" else what
        row[what] = round(row.get(what, 0) + number / steps, 2)
    return row, {place: number / steps for place, number in rank["waits"].items()}


def kept():
    return json.loads(KEPT.read_text()) if KEPT.exists() else {}


def too_much(name, row):
    """What is more than costs.json allows."""
    allowed = kept().get(name, {})
    # A thread that copies batches ahead may have been one batch further at the end than at the beginning, or two.
    slack = {"copies in": 0.99, "launches": 1}
    return [
        f"{name}: {row[what]} {what} a step, {allowed.get(what, 0)} are allowed"
        for what in JUDGED
        if row.get(what, 0) > allowed.get(what, 0) + slack.get(what, 0)
    ]


def main(only, keep):
    rows = kept()
    for name in only or ROWS:
        row, waits = measure(name)
        print(
            f"{name}: {row['host milliseconds']} ms on the host; "
            + ", ".join(f"{row[what]:g} {what}" for what in SHOWN if what in row)
        )
        for place, number in sorted(waits.items(), key=lambda item: -item[1]):
            print(f"    waits {number:g} times a step: {place}")
        for line in too_much(name, row):
            print(f"    {line}")
        sys.stdout.flush()
        rows[name] = row
    if keep:
        KEPT.write_text(json.dumps(rows, indent=1) + "\n")
