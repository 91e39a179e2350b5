"""A small folder of pictures: README's command beside a plain loop as people write it (plain_loop.py).

    python -m tests.benchmarks.own_pictures [--only shapes] [--seeds 3]
    python -m tests.benchmarks.own_pictures --only weights        what weights bring that a run of ours has trained on digits
    python -m tests.benchmarks.own_pictures --with trivialaugment ...     today's options one by one (TODAY); with --kept FILE
                                                                          the same command goes on where it was ended

The same pictures, network, epochs and core for both, in turn; two runs beside each other, each on one core. The accuracy is that of
the best epoch, on 300 other pictures of the same kind.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.tools import pictures
from tests.tools.jobs import command, environment

README = ["--arch", "resnet18", "--image_size", 64]
SETS = {"shapes": (480, 14), "small_shapes": (540, 30), "colours": (480, 14), "digits": (960, 10)}  # pictures, epochs
VALIDATION = 300
RARE = 0.1  # of the pictures of a class are left in the odd ones of "unbalanced digits"
TODAY = {
    "trivialaugment": ["--augmentation", "trivialaugment"], "randaugment": ["--augmentation", "randaugment"],
    "random_erasing": ["--random_erasing", 0.1], "mixup": ["--mixup", 0.2], "cutmix": ["--cutmix", 1], "clip_grad": ["--clip_grad", 1],
    "class_weights": ["--class_weights", "balanced"], "nothing": [],
}  # fmt: skip


def ours(data, epochs, seed, folder, *words):
    """The accuracy of the best epoch."""
    words = ["--data_url", data, *README, "--epochs", epochs, "--seed", seed, *words, "--workers", 0, "--output_dir", folder]
    subprocess.run(command("train_imagenet", *words), cwd=folder.parent, env=environment(), check=True, capture_output=True)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return max(row["accuracy"] for row in rows)


def plain(data, epochs, seed, _folder):
    words = [sys.executable, "-m", "tests.benchmarks.plain_loop", data, epochs, seed]
    return float(
        subprocess.run([str(word) for word in words], env=environment(), check=True, capture_output=True, text=True).stdout
    )


def with_weights():
    """Learnt from digits; then 150 pictures of something else, from nothing and with the weights, three times each."""
    with tempfile.TemporaryDirectory() as place, ThreadPoolExecutor(2) as pool:
        place = Path(place)
        pictures.make("digits", str(place / "digits"), 1500)
        print(f"digits: {ours(place / 'digits', 14, 0, place / 'learnt'):.3f}", flush=True)
        weights = ["--weights", place / "learnt" / "epoch_14.pth"]
        forms = {"from nothing": [], "with weights": weights, "and --freeze_epochs 3": [*weights, "--freeze_epochs", 3]}
        for name in ("shapes", "colours"):
            pictures.make(name, str(place / name), 150)
            for form, words in forms.items():
                runs = [(place / name, 20, seed, place / f"{name}{form.replace(' ', '_')}{seed}", *words) for seed in range(3)]
                found = pool.map(lambda run: ours(*run), runs)
                print(f"| {name} | {form} | {' '.join(f'{accuracy:.3f}' for accuracy in found)} |", flush=True)


def with_today(names, seeds, kept):
    """Today's options one by one. `kept`: a file with a line for each run, which has the same accuracy however often it is done."""
    known = dict(json.loads(line) for line in kept.read_text().splitlines()) if kept and kept.exists() else {}

    def accuracy_of(name, option, data, epochs, seed, folder):
        if (key := f"{name}, {option}, {seed}") not in known:
            known[key] = ours(data, epochs, seed, folder, *TODAY[option])
            if kept:
                with kept.open("a") as file:
                    file.write(json.dumps([key, known[key]]) + "\n")
        return known[key]

    for name in ("small_shapes", "colours", "digits", "unbalanced digits"):
        kind = name.rpartition(" ")[2]
        number, epochs = SETS[kind]
        with tempfile.TemporaryDirectory() as place, ThreadPoolExecutor(2) as pool:
            place = Path(place)
            pictures.make(kind, str(place / "data" / "train"), number)
            pictures.make(kind, str(place / "data" / "val"), VALIDATION, seed=1)
            if name != kind:
                for folder in sorted((place / "data" / "train").iterdir())[1::2]:
                    there = sorted(folder.iterdir())
                    for path in there[int(len(there) * RARE) :]:
                        path.unlink()
            runs = {
                option: [
                    pool.submit(accuracy_of, name, option, place / "data", epochs, seed, place / f"{option}{seed}")
                    for seed in range(seeds)
                ]
                for option in (names if name != kind else [one for one in names if one != "class_weights"])
            }
            for option, running in runs.items():
                found = [run.result() for run in running]
                shown = " ".join(f"{accuracy:.3f}" for accuracy in found)
                print(f"| {name}, {epochs} epochs | {option} | {shown} | {statistics.mean(found):.3f} |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=[*SETS, "weights"], nargs="*", default=list(SETS))
    parser.add_argument("--with", dest="options", choices=TODAY, nargs="+")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--kept", type=Path, metavar="FILE")
    options = parser.parse_args()
    if options.options:
        return with_today(options.options, options.seeds, options.kept)
    if options.only == ["weights"]:
        return with_weights()
    for name in options.only:
        number, epochs = SETS[name]
        with tempfile.TemporaryDirectory() as place, ThreadPoolExecutor(2) as pool:
            place = Path(place)
            pictures.make(name, str(place / "data" / "train"), number)
            pictures.make(name, str(place / "data" / "val"), VALIDATION, seed=1)
            runs = [(way, seed) for seed in range(options.seeds) for way in (ours, plain)]
            running = [pool.submit(way, place / "data", epochs, seed, place / f"out{seed}") for way, seed in runs]
            found = [run.result() for run in running]
        of_ours, of_plain = found[::2], found[1::2]
        ratio = statistics.mean(of_ours) / statistics.mean(of_plain)
        shown = [" ".join(f"{accuracy:.3f}" for accuracy in accuracies) for accuracies in (of_ours, of_plain)]
        print(f"| {name}, {epochs} epochs | {shown[0]} | {shown[1]} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
