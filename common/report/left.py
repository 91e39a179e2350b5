"""Read the files that a run has left in its folder.

A file may be missing, cut off, of an older version, or untrusted.
"""

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
from common.files import append, drop_partial_line

FILES = ("metrics.jsonl", "speed.jsonl", "journal.jsonl", "state.json", "report.json")
LARGEST = 1 << 30  # bytes: a larger file is ignored
LARGEST_UNJOINED = 1 << 23  # bytes: of a larger speed.jsonl, rows are joined
SOURCES = ("from_bucket_mib", "from_bucket_first_mib", "on_disk_mib")  # where the data of a pack came from
SUMMED = (
    "images", "waiting_for_data", "transfer", "compute", "evaluation", "saving", "paused",
    "waiting_for_storage", *SOURCES
)  # fmt: skip
NON_METRICS = {"epoch", "steps", "samples", "train_loss"}
LARGEST_NUMBER = 1e11  # larger ones are dropped; as Unix time it is in the year 5138
NUMERIC_FIELDS = {
    "time",
    "epoch",
    "epochs",
    "samples",
    "steps",
    "ranks",
    "nodes",
    "pause",
    "rows",
}  # must be numbers in the journal


@dataclasses.dataclass
class RunFiles:
    """The content of a run's files. Values that are not numbers where the page needs numbers are left out."""

    folder: str
    name: str  # the folder's name, which the page shows as that of the run
    epochs: list[dict]  # metrics.jsonl: numbers alone
    speed: list[dict]  # speed.jsonl: a row for each line of the log and each epoch, numbers alone
    journal: list[dict]  # journal.jsonl: what happened
    scores: dict  # report.json: the newest evaluation

    @classmethod
    def read(cls, folder: str, name: Optional[str] = None) -> "RunFiles":
        """Read the files of the run in a folder; UserError if it has none. `name`: for the page."""
        if not any(os.path.exists(os.path.join(folder, file)) for file in FILES):
            raise UserError(
                f"{one_line(name or folder)} holds no run: give the output folder of a job that has trained"
            )
        epochs, speed, journal, _, scores = (_lines(os.path.join(folder, file)) for file in FILES)
        epochs = [{key: row[key] for key in row if _is_number(row[key])} for row in epochs]
        speed = _joined_rows(
            ({key: row[key] for key in row if _is_number(row[key])} for row in speed),
            os.path.join(folder, FILES[1]),
        )
        journal = [
            {key: row[key] for key in row if key not in NUMERIC_FIELDS or _is_number(row[key])}
            for row in journal
        ]
        scores = next(scores, None)
        shown_name = one_line(name or os.path.basename(os.path.abspath(folder)))
        return cls(folder, shown_name, epochs, speed, journal, _scores_for_page(scores) if scores else {})

    def events(self, kind: str) -> list[dict]:
        """Return the events of a kind.

        Repeats of "nodes" are left out, as several ranks may have recorded the same change.
        """
        rows = [row for row in self.journal if row.get("event") == kind]
        if kind == "nodes":
            return list({(str(row.get("text")), row.get("samples")): row for row in rows}.values())
        return rows

    @property
    def start(self) -> dict:
        """The event of the newest start; empty if none was recorded."""
        return (self.events("start") or [{}])[-1]

    @property
    def end(self) -> dict:
        """The event with which the newest start ended; empty if none was recorded."""
        end = (self.events("end") or [{}])[-1]
        return end if end.get("time", 0) >= self.start.get("time", 0) else {}

    def training_rows(self) -> list[dict]:
        """Return the rows of `speed`, without those of earlier starts past the sample from which a later
        start went on."""
        kept_rows: list[dict] = []
        next_rows = collections.deque(self.speed)
        for start in self.events("start")[1:]:
            while next_rows and next_rows[0].get("time", math.inf) < start.get("time", 0):
                kept_rows.append(next_rows.popleft())
            while kept_rows and kept_rows[-1].get("samples", 0) > start.get("samples", 0):
                kept_rows.pop()
        return [*kept_rows, *next_rows]

    def metrics(self) -> list[str]:
        """Return the names of the evaluation's metrics, in the order in which the epochs have them."""
        return [
            name
            for name in dict.fromkeys(name for row in self.epochs for name in row)
            if name not in NON_METRICS
        ]

    def best(self) -> tuple[str, dict]:
        """Return the name of the metric that chooses the best epoch, and that epoch's row;
        both are empty if there is none."""
        metric = next(
            (name for name in (self.start.get("best_by"), "accuracy", "psnr") if name in self.metrics()), ""
        )
        choose = min if self.start.get("best_is") == "lowest" else max
        return metric, choose(
            (row for row in self.epochs if metric in row), key=lambda row: row[metric], default={}
        )

    def has_learnt(self) -> bool:
        """Return whether the best accuracy is above that of guessing; False if it is not known."""
        counts = [row[0] for row in self.scores.get("by_class", ())]
        best = max((row["accuracy"] for row in self.epochs if "accuracy" in row), default=0.0)
        return sum(counts) > 0 and best > accuracy_by_chance(max(counts), sum(counts))

    def seconds(self) -> float:
        """Return the seconds of all starts together, each from its beginning to the last row that is known of
        it."""
        begin_times = [row.get("time", 0) for row in self.events("start")]
        times = [row.get("time", 0) for row in self.journal + self.speed]
        end_times = (
            max((time for time in times if time < until), default=0) for until in [*begin_times[1:], math.inf]
        )
        return sum(max(0, end - begin) for begin, end in zip(begin_times, end_times))

    def picture_counts(self) -> dict[str, list]:
        """Return {"classes": [(class, pictures in training, in validation)], "left_out": [(reason, count, an
        example)]}; {} if the run recorded none, or they are damaged."""
        with contextlib.suppress(KeyError, TypeError, ValueError, OverflowError):  # the file may be damaged
            counts = self.start["data"]
            classes = [(one_line(name), int(train), int(val)) for name, train, val in counts["classes"]]
            left_out = [
                (one_line(reason), int(count), one_line(name)) for reason, count, name in counts["left_out"]
            ]
            return {"classes": classes, "left_out": left_out}
        return {}


def add_end(folder: str, since: float, reason: str) -> bool:
    """Add to the journal that the run failed, if just one start began since `since` and has no end;
    return whether it did."""
    run = RunFiles.read(folder)
    starts = [row for row in run.events("start") if row.get("time", 0) >= since]
    if run.end or len(starts) != 1:  # it wrote its end, never began, or a later start has followed
        return False
    last_row = max(run.speed, key=lambda row: row.get("time", 0), default={})
    now = max(round(time.time(), 3), starts[0]["time"])  # the clock may have gone back
    row = {"time": now, "event": "end", "how": "failed", "why": reason, "samples": last_row.get("samples", 0)}
    with io.FileIO(os.path.join(folder, FILES[2]), "r+") as file:
        drop_partial_line(file)
        append(file, json.dumps(row).encode() + b"\n")
    return True


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < LARGEST_NUMBER


def _scores_for_page(scores: dict) -> dict:
    """Return the fields of report.json that the page shows, with their types;
    {} if any is missing or malformed."""
    with contextlib.suppress(KeyError, TypeError, ValueError, OverflowError, IndexError, AttributeError):
        names = [one_line(str(row["class"])) for row in scores["classes"]]
        by_class = [
            [int(row["samples"]), *(float(row[name]) for name in ("recall", "precision", "f1"))]
            for row in scores["classes"]
        ]
        cells = [(int(true), int(predicted), int(count)) for true, predicted, count in scores["confusion"]]
        if all(
            0 <= true < len(names) and 0 <= predicted < len(names) and 0 < times < 1e15
            for true, predicted, times in cells
        ):
            mistakes = {
                kind: [
                    {
                        **{field: one_line(str(mistake[field])) for field in ("id", "class", "predicted")},
                        "sure": float(mistake["confidence"] or 0),
                        "name": one_line(str(mistake.get("file", f"#{mistake['id']}"))),
                    }
                    for mistake in rows
                ]
                for kind, rows in scores["mistakes"].items()
            }
            epoch = int(scores.get("epoch") or 0)
            return {
                "epoch": epoch,
                "names": names,
                "by_class": by_class,
                "cells": cells,
                "mistakes": mistakes,
            }
    return {}


def _lines(path: str) -> Iterator[dict]:
    """Yield the JSON objects in the lines of a file, and skip other lines.

    A missing or too large file yields nothing.
    """
    if not os.path.isfile(path) or os.path.getsize(path) > LARGEST:
        return
    with open(path, "rb") as file:
        for line in file:
            with contextlib.suppress(ValueError, RecursionError):
                row = json.loads(line)
                if isinstance(row, dict):
                    yield row


def _joined_rows(rows: Iterator[dict], path: str) -> list[dict]:
    """Join neighbouring rows of an epoch if the file is large, to save memory: sum the values in SUMMED,
    else keep the last."""
    max_joined = os.path.getsize(path) // LARGEST_UNJOINED if os.path.exists(path) else 0
    joined = []
    num_joined = 0
    for row in rows:
        if joined and num_joined < max_joined and joined[-1].get("epoch") == row.get("epoch"):
            num_joined += 1
            sums = {name: joined[-1].get(name, 0) + row[name] for name in SUMMED if name in row}
            joined[-1] = {**joined[-1], **row, **sums}
        else:
            joined.append(row)
            num_joined = 0
    return joined
