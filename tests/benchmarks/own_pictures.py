"""The settings of a small folder beside the best of twelve: SGD and AdamW, three rates of each, crops or whole pictures.

    python -m tests.benchmarks.own_pictures [--only shapes] [--epochs 14] [--data FOLDER]
    python -m tests.benchmarks.own_pictures --only weights        what weights bring that a run of ours has trained on digits

README's command for pictures of one's own with the same epochs, pictures, network and core as each of the twelve, in turn; two runs
beside each other, each on one core. The accuracy is that of the best epoch. With --data, another folder of pictures by the class.
"""

import argparse
import itertools
import json
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests import pictures
from tests.jobs import command, environment

README = ["--arch", "resnet18", "--image_size", 64]
SETS = {"shapes": (480, 14), "colours": (480, 14), "digits": (960, 10)}  # pictures, epochs
RATES = {"sgd": (0.01, 0.03, 0.1), "adamw": (0.0003, 0.001, 0.003)}  # for batches of 32
DECAY = {"sgd": 5e-4, "adamw": 0.05}
CUT = {"crop": ["--crop_scale", 0.08, "--resize", "short"], "whole": ["--crop_scale", 1, "--resize", "whole"]}


def run(folder, words):
    """(the best accuracy, seconds)"""
    began = time.monotonic()
    words = ["--data_url", folder.parent / "pictures", *README, *words, "--workers", 0, "--output_dir", folder]
    subprocess.run(command("train_imagenet", *words), cwd=folder.parent, env=environment(), check=True, capture_output=True)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return max(row["accuracy"] for row in rows), time.monotonic() - began


def with_weights():
    """Learnt from digits; then 150 pictures of something else, from nothing and with the weights, three times each."""
    with tempfile.TemporaryDirectory() as place, ThreadPoolExecutor(2) as pool:
        place = Path(place)
        (place / "digits").mkdir()
        pictures.make("digits", str(place / "digits" / "pictures"), 1500)
        accuracy, _ = run(place / "digits" / "out", ["--epochs", 14])
        print(f"digits: {accuracy:.3f}", flush=True)
        weights = ["--weights", place / "digits" / "out" / "epoch_14.pth"]
        forms = {"from nothing": [], "with weights": weights, "and --freeze_epochs 3": [*weights, "--freeze_epochs", 3]}
        for name in ("shapes", "colours"):
            (place / name).mkdir()
            pictures.make(name, str(place / name / "pictures"), 150)
            for form, words in forms.items():
                folders = [place / name / f"{form.replace(' ', '_')}{seed}" for seed in range(3)]
                found = pool.map(run, folders, [[*words, "--epochs", 20, "--seed", seed] for seed in range(3)])
                print(f"| {name} | {form} | {' '.join(f'{accuracy:.3f}' for accuracy, _ in found)} |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=[*SETS, "weights"], nargs="*", default=list(SETS))
    parser.add_argument("--data", type=Path, help="a folder of pictures by the class, in place of those that are drawn")
    parser.add_argument("--epochs", type=int)
    options = parser.parse_args()
    if options.only == ["weights"]:
        return with_weights()
    for name in ["data"] if options.data else options.only:
        number, epochs = SETS.get(name, (0, 20))
        epochs = options.epochs or epochs
        with tempfile.TemporaryDirectory() as place, ThreadPoolExecutor(2) as pool:
            place = Path(place)
            if options.data:
                (place / "pictures").symlink_to(options.data.resolve())
            else:
                pictures.make(name, str(place / "pictures"), number)
            forms = {"ours": ["--epochs", epochs]}
            for optimizer, cut in itertools.product(RATES, CUT):
                for lr in RATES[optimizer]:
                    forms[f"{optimizer} {lr} {cut}"] = [
                        "--epochs", epochs, "--recipe", "imagenet", "--batch_size", 32, "--lr_batch", 0, "--warmup", epochs / 10,
                        "--optimizer", optimizer, "--lr", lr, "--weight_decay", DECAY[optimizer], *CUT[cut],
                    ]  # fmt: skip
            folders = [place / form.replace(" ", "_") for form in forms]
            found = dict(zip(forms, pool.map(run, folders, forms.values())))
        for form, (accuracy, seconds) in found.items():
            print(f"| {name} | {form} | {accuracy:.3f} | {seconds:.0f} |", flush=True)
        best = max(accuracy for form, (accuracy, _) in found.items() if form != "ours")
        print(f"{name}: ours is {found['ours'][0] / best:.3f} of the best of the twelve", flush=True)


if __name__ == "__main__":
    main()
