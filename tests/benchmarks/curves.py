"""Whether a fast way to the pictures costs what is learned from them: the flagship's loss with each, beside that of other seeds.

    python -m tests.benchmarks.curves --data FOLDER        a folder with train/CLASS/*.JPEG and val/CLASS/*.JPEG

Every run is a whole job of 300 steps, ResNet-18 at 64 x 64, the same seed and so the same crops and order; only where the pictures
come from differs. Where two curves are apart, seeds are the measure: by how much the same backend differs with another seed.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.benchmarks.base import machine
from tests.tools.jobs import ROOT, command, environment

STEPS, BATCH, SEEDS = 300, 16, 3
PACKED = ["original", "320", "256", "raw"]
LAST = 5  # epochs whose mean loss is compared


def train(folder, name, data, backend, seed=0):
    """The mean training loss of each epoch."""
    options = ["--arch", "resnet18", "--image_size", 64, "--batch_size", BATCH, "--lr", 0.02, "--label_smoothing", 0]
    options += ["--data_url", data, "--data_backend", backend, "--seed", seed, "--max_steps", STEPS]
    options += ["--recipe", "imagenet"]
    pictures = sum(1 for _ in (folder / "photographs" / "train").rglob("*.JPEG"))
    options += ["--epochs", STEPS // (pictures // BATCH), "--output_dir", folder / name, "--workers", 0]
    subprocess.run(command("train_imagenet", *options), cwd=folder, env=environment(), check=True, capture_output=True)
    return [json.loads(line)["train_loss"] for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="a folder with train/CLASS/*.JPEG and val/CLASS/*.JPEG")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        (folder / "photographs").symlink_to(options.data.resolve())
        data, found = folder / "photographs", {}
        for seed in range(SEEDS):
            found[f"pytorch, seed {seed}"] = train(folder, f"seed{seed}", data, "pytorch", seed)
        found["dali-cpu, seed 0"] = train(folder, "dali", data, "dali-cpu")
        for form in PACKED:
            pack = [sys.executable, "-m", "launch", "pack", str(data), str(folder / form), "--form", form]
            subprocess.run(pack, cwd=ROOT, env=environment(), check=True, capture_output=True)
            found[f"packed {form}, seed 0"] = train(folder, f"packed_{form}", folder / form, "packed")
    base = next(iter(found.values()))
    print(f"{machine()}; {STEPS} steps\n")
    print(f"| run | loss of the last {LAST} epochs | its difference from the first | largest difference in an epoch |")
    print("|---|---|---|---|")
    for name, losses in found.items():
        last = statistics.mean(losses[-LAST:])
        apart = max(abs(one - other) for one, other in zip(losses, base))
        print(f"| {name} | {last:.4f} | {last - statistics.mean(base[-LAST:]):+.4f} | {apart:.4f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
