"""A run as it lies in its folder, made up: for tests of what is shown of one."""

import json
import math

import numpy as np
from PIL import Image

from common.report.page import SQUARE_SIDE as SIDE
from common.report.page import SQUARES_PER_ROW as SHOWN

TIME = 1_800_000_000.0


def lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def made_up(folder, epochs=4, steps=5, names=("cat", "dog", "ship"), event=(), **start):
    """Of so many epochs of so many lines; `event`: more of the journal."""
    folder.mkdir(parents=True, exist_ok=True)
    size, speed, metrics = 100, [], []
    for epoch in range(1, epochs + 1):
        for step in range(1, steps + 1):
            done = (epoch - 1) * steps + step
            last = step == steps
            speed.append({
                "time": TIME + 10 * done, "epoch": epoch, "steps": done, "samples": done * size, "loss": None if last else 3 / done,
                "lr": None if last else 0.1 / done, "images": size, "images_per_s": 50.0 + step, "waiting_for_data": 1.0,
                "transfer": 0.5, "compute": 8.0, "evaluation": 0.4 * last, "saving": 0.1 * last, "paused": 0.0, "waiting_for_storage": 0.0,
                "peak_memory_mib": 512.5,
            })  # fmt: skip
        metrics.append({
            "epoch": epoch, "steps": epoch * steps, "samples": epoch * steps * size, "train_loss": 2 / epoch,
            "accuracy": 1 - 0.7 ** epoch - 0.1 * (epoch == epochs), "loss": 2.5 / math.sqrt(epoch),
        })  # fmt: skip
    about = {
        "run": "1", "goes_on_from": None, "epoch": 0, "samples": 0, "steps": 0, "epochs": epochs, "best_by": "accuracy", "ranks": 2,
        "job": "train", "command": "python jobs/train.py --epochs 4 --output_dir /runs/7", "options": {"epochs": ["4", "30"]},
        "machine": {"device": "cuda:0 (NVIDIA H200)", "cores": 16}, "versions": {"torch": "2.15.0"}, "synthetic": True,
    }  # fmt: skip
    journal = [
        {"time": TIME, "event": "start", **about, **start},
        {"time": TIME + 1, "event": "warning", "text": "the images are synthetic"},
    ]
    lines(folder / "metrics.jsonl", metrics)
    lines(folder / "speed.jsonl", speed)
    lines(folder / "journal.jsonl", [*journal, *event])
    write_scores(folder, list(names))
    return folder


def ended(how="finished", why="--epochs 4", after=200):
    return {"time": TIME + after, "event": "end", "how": how, "why": why, "epoch": 4, "samples": 2000}


def write_scores(folder, names, seed=0):
    """report.json, and the pictures of its mistakes."""
    draw = np.random.default_rng(seed)
    counts = draw.integers(0, 3 if len(names) > 30 else 40, (len(names), len(names))) + 50 * np.eye(len(names), dtype=int)
    right, given, true = counts.diagonal(), counts.sum(axis=0), counts.sum(axis=1)
    rows = [
        {"class": name, "samples": int(true[place]), "recall": right[place] / true[place], "precision": right[place] / given[place], "f1": 0.5}
        for place, name in enumerate(names)
    ]  # fmt: skip
    shots = [
        {"id": number, "class": names[number % len(names)], "predicted": names[(number + 1) % len(names)], "loss": 9.0, "confidence": 0.9}
        for number in range(SHOWN)
    ]  # fmt: skip
    cells = [[*map(int, place), int(counts[tuple(place)])] for place in np.argwhere(counts)]
    said = {
        "samples": int(counts.sum()),
        "classes": rows,
        "confusion": cells,
        "mistakes": {"worst": shots, "surest": shots[:3]},
    }
    (folder / "report.json").write_text(json.dumps(said))
    (folder / "examples").mkdir(exist_ok=True)
    pixels = draw.integers(0, 256, (2 * SIDE, SHOWN * SIDE, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(folder / "examples" / "mistakes.png", compress_level=0)
    return counts
