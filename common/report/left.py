"""Read the files that a run has left in its folder. A file may be missing, cut off, of an older version, or untrusted."""

import collections
import contextlib
import dataclasses
import io
import json
import math
import os
import time
from collections.abc import Iterator
from typing import Optional

from common.chance import accuracy_by_chance
from common.errors import UserError, one_line
from common.files import append, drop_half_a_line

FILES = ("metrics.jsonl", "speed.jsonl", "journal.jsonl", "state.json", "report.json")
LARGEST = 1 << 30  # bytes: a larger file is ignored
GROUPED = 1 << 23  # bytes: of a larger speed.jsonl, rows are joined
CAME = ("from_bucket_mib", "from_bucket_first_mib", "on_disk_mib")  # where the data of a pack came from
ADDED = (
    "images", "waiting_for_data", "transfer", "compute", "evaluation", "saving", "paused", "waiting_for_storage", *CAME
)  # fmt: skip
NOT_OF_AN_EVALUATION = {"epoch", "steps", "samples", "train_loss"}
LARGEST_NUMBER = 1e11  # larger ones are dropped; as Unix time it is in the year 5138
NUMBERS = {"time", "epoch", "epochs", "samples", "steps", "ranks", "nodes", "pause", "rows"}  # must be numbers in the journal


@dataclasses.dataclass
class RunFiles:
    folder: str
    name: str  # the folder's name, which the page shows as that of the run
    epochs: list[dict]  # metrics.jsonl: numbers alone
    speed: list[dict]  # speed.jsonl: a row for each line of the log and each epoch, numbers alone
    journal: list[dict]  # journal.jsonl: what happened
    scores: dict  # report.json: the newest evaluation

    @classmethod
    def read(cls, folder: str, name: Optional[str] = None) -> "RunFiles":
        if not any(os.path.exists(os.path.join(folder, file)) for file in FILES):
            raise UserError(f"{one_line(name or folder)} holds no run: give the output folder of a job that has trained")
        epochs, speed, journal, _, scores = (_lines(os.path.join(folder, file)) for file in FILES)
        epochs = [{key: row[key] for key in row if _is_number(row[key])} for row in epochs]
        speed = _joined_rows(
            ({key: row[key] for key in row if _is_number(row[key])} for row in speed), os.path.join(folder, FILES[1])
        )
        journal = [{key: row[key] for key in row if key not in NUMBERS or _is_number(row[key])} for row in journal]
        scores = next(scores, None)
        shown = one_line(name or os.path.basename(os.path.abspath(folder)))
        return cls(folder, shown, epochs, speed, journal, _scores_for_page(scores) if scores else {})

    def events(self, kind: str) -> list[dict]:
        """Return the events of a kind. Repeats of "nodes" are left out, as several ranks may have recorded the same change."""
        rows = [row for row in self.journal if row.get("event") == kind]
        return list({(str(row.get("text")), row.get("samples")): row for row in rows}.values()) if kind == "nodes" else rows

    @property
    def start(self) -> dict:
        """The event of the newest start; empty if none was recorded."""
        return (self.events("start") or [{}])[-1]

    @property
    def end(self) -> dict:
        """The event with which the newest start ended; empty if none was recorded."""
        end = (self.events("end") or [{}])[-1]
        return end if end.get("time", 0) >= self.start.get("time", 0) else {}

    def trained(self) -> list[dict]:
        """Return the rows of `speed`, without those of earlier starts past the sample from which a later start went on."""
        kept: list[dict] = []
        next_rows = collections.deque(self.speed)
        for start in self.events("start")[1:]:
            while next_rows and next_rows[0].get("time", math.inf) < start.get("time", 0):
                kept.append(next_rows.popleft())
            while kept and kept[-1].get("samples", 0) > start.get("samples", 0):
                kept.pop()
        return [*kept, *next_rows]

    def metrics(self) -> list[str]:
        """Return the names of the evaluation's metrics, in the order in which the epochs have them."""
        return [name for name in dict.fromkeys(name for row in self.epochs for name in row) if name not in NOT_OF_AN_EVALUATION]

    def best(self) -> tuple[str, dict]:
        """Return the name of the metric that chooses the best epoch, and that epoch's row; both are empty if there is none."""
        by = next((name for name in (self.start.get("best_by"), "accuracy", "psnr") if name in self.metrics()), "")
        choose = min if self.start.get("best_is") == "lowest" else max
        return by, choose((row for row in self.epochs if by in row), key=lambda row: row[by], default={})

    def has_learnt(self) -> bool:
        """Return whether the best accuracy is above that of guessing; False if it is not known."""
        counts = [row[0] for row in self.scores.get("by_class", ())]
        best = max((row["accuracy"] for row in self.epochs if "accuracy" in row), default=0.0)
        return sum(counts) > 0 and best > accuracy_by_chance(max(counts), sum(counts))

    def seconds(self) -> float:
        """Return the seconds of all starts together, each from its beginning to the last row that is known of it."""
        begins = [row.get("time", 0) for row in self.events("start")]
        times = [row.get("time", 0) for row in self.journal + self.speed]
        ends = (max((time for time in times if time < until), default=0) for until in [*begins[1:], math.inf])
        return sum(max(0, end - begin) for begin, end in zip(begins, ends))

    def data(self) -> dict[str, list]:
        """Return counts of pictures, {"classes": [(name, train, val)], "left_out": [(reason, count, name)]}; or {}."""
        with contextlib.suppress(KeyError, TypeError, ValueError):
            said = self.start["data"]
            classes = [(one_line(name), int(train), int(val)) for name, train, val in said["classes"]]
            left_out = [(one_line(reason), int(count), one_line(name)) for reason, count, name in said["left_out"]]
            return {"classes": classes, "left_out": left_out}
        return {}


def add_end(folder: str, since: float, why: str) -> bool:
    """Add to the journal that the run failed, if just one start began since `since` and has no end; return whether it did."""
    left = RunFiles.read(folder)
    began = [row for row in left.events("start") if row.get("time", 0) >= since]
    if left.end or len(began) != 1:  # it wrote its end, never began, or a later start has followed
        return False
    last = max(left.speed, key=lambda row: row.get("time", 0), default={})
    now = max(round(time.time(), 3), began[0]["time"])  # the clock may have gone back
    row = {"time": now, "event": "end", "how": "failed", "why": why, "samples": last.get("samples", 0)}
    with io.FileIO(os.path.join(folder, FILES[2]), "r+") as file:
        drop_half_a_line(file)
        append(file, json.dumps(row).encode() + b"\n")
    return True


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < LARGEST_NUMBER


def _scores_for_page(scores: dict) -> dict:
    """Return what the page needs of report.json; empty if that is malformed."""
    with contextlib.suppress(KeyError, TypeError, ValueError, IndexError, AttributeError):
        names = [one_line(str(row["class"])) for row in scores["classes"]]
        by_class = [
            [int(row["samples"]), *(float(row[name]) for name in ("recall", "precision", "f1"))] for row in scores["classes"]
        ]
        cells = [(int(true), int(given), int(count)) for true, given, count in scores["confusion"]]
        if all(0 <= true < len(names) and 0 <= given < len(names) and 0 < times < 1e15 for true, given, times in cells):
            mistakes = {
                kind: [
                    {
                        **{word: one_line(str(one[word])) for word in ("id", "class", "predicted")},
                        "sure": float(one["confidence"] or 0),
                        "name": one_line(str(one.get("file", f"#{one['id']}"))),
                    }
                    for one in found
                ]
                for kind, found in scores["mistakes"].items()
            }
            epoch = int(scores.get("epoch") or 0)
            return {"epoch": epoch, "names": names, "by_class": by_class, "cells": cells, "mistakes": mistakes}
    return {}


def _lines(path: str) -> Iterator[dict]:
    """Yield the JSON objects in the lines of a file, and skip other lines. A missing or too large file yields nothing."""
    if not os.path.isfile(path) or os.path.getsize(path) > LARGEST:
        return
    with open(path, "rb") as file:
        for line in file:
            with contextlib.suppress(ValueError, RecursionError):
                row = json.loads(line)
                if isinstance(row, dict):
                    yield row


def _joined_rows(rows: Iterator[dict], path: str) -> list[dict]:
    """Join neighbouring rows of an epoch if the file is large, to save memory: sum the values in ADDED, else keep the last."""
    most = os.path.getsize(path) // GROUPED if os.path.exists(path) else 0
    found = []
    size = 0
    for row in rows:
        if found and size < most and found[-1].get("epoch") == row.get("epoch"):
            size += 1
            sums = {name: found[-1].get(name, 0) + row[name] for name in ADDED if name in row}
            found[-1] = {**found[-1], **row, **sums}
        else:
            found.append(row)
            size = 0
    return found
