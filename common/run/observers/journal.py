"""The history of a run, with times, in two files to which every start appends lines.

journal.jsonl  a line for each start, warning, change of the nodes, set of example pictures, and end
speed.jsonl    a line for each line of the log and each epoch: images a second, the most memory so far, how
               many seconds each phase has taken since the line before and, while data arrive, how many MiB of
               them came (from_bucket_first_mib, before the rest of their shard; from_bucket_mib) or were on
               this node's disk (on_disk_mib)

metrics.jsonl contains none of this, so that it is a function of seed and data alone.
"""

import argparse
import contextlib
import json
import os
import statistics
import time
from collections.abc import Mapping
from typing import Any, Optional

import torch

from common import devices, moments
from common.alive import heartbeat
from common.errors import is_victim, one_line
from common.files import open_regular
from common.run.observers.observer import Facts, Observer
from common.run.side_files import SideFiles

TAIL = 1 << 13  # bytes of speed.jsonl: some twenty rows


class Journal(Observer):
    """Writes nothing before the run begins, as the folder may still be another run's.

    Earlier events are kept until then.
    """

    def __init__(self, _args: argparse.Namespace, device: torch.device, side_files: SideFiles):
        self._device = device
        self._side_files = side_files
        self._is_active = False
        self._early_rows: list[dict] = []
        # The seconds of each phase, the samples of this start and the epoch, as of the last row.
        self._last_row: tuple[Mapping[str, float], int, int] = ({}, 0, 1)

    def began(self, facts: Facts, about: dict) -> None:
        self._last_row = (*self._last_row[:2], facts.position.epoch + 1)
        if not self._side_files.writes:
            return
        self._is_active = True
        early_rows = self._early_rows
        self._early_rows = []
        for row in early_rows:
            self._append("journal.jsonl", row)
        self._write_event("start", **about)

    def log_due(self, facts: Facts, loss: float, lr: float, **_: object) -> None:
        self._write_row(facts, facts.position.epoch + 1, loss, lr)

    def saved(self, facts: Facts, is_complete: bool) -> None:
        epoch = facts.position.epoch
        if not is_complete:
            epoch += 1  # the position does not count it
        self._write_row(facts, epoch)

    def ending(self, facts: Facts, outcome: str, reason: Optional[str]) -> None:
        self._write_event("end", how=outcome, why=reason, **facts.position.row(facts.position.epoch))

    def ended(self, facts: Facts) -> None:
        self._write_row(facts, self._last_row[2])

    def failed(self, facts: Facts, error: BaseException) -> None:
        if not (is_victim(error) and (heartbeat.has_parent() or heartbeat.has_watcher())):
            # they know the cause and record it
            reason = one_line(f"{type(error).__name__}: {error}")[:500]
            self._write_event("end", how="failed", why=reason, **facts.position.row(facts.position.epoch))

    def picture(self, _facts: Facts, name: str, details: dict, **_: object) -> None:
        self._write_event("picture", name=name, **details)

    def nodes_changed(self, facts: Facts, news: str, ranks: int, pause: float) -> None:
        self._write_event(
            "nodes", text=news, ranks=ranks, pause=round(pause, 1), samples=facts.position.samples_seen
        )

    def logged(self, _facts: Optional[Facts], text: str) -> None:
        """Record a line of the log that is a warning or advice."""
        if text.startswith(("warning: ", "advice: ")):
            self._write_event("warning", text=one_line(text).partition(": ")[2])

    def _write_event(self, event: str, **facts: Any) -> None:
        row = {"time": round(time.time(), 3), "event": event, **facts}
        if self._is_active:
            self._append("journal.jsonl", row)
        else:
            self._early_rows.append(row)

    def _write_row(
        self, facts: Facts, epoch: int, loss: Optional[float] = None, lr: Optional[float] = None
    ) -> None:
        previous_seconds, previous_samples, _ = self._last_row
        samples = facts.position.samples_seen - facts.plan.start_position.samples_seen
        self._last_row = (facts.seconds, samples, epoch)
        images = samples - previous_samples
        if not self._is_active:
            return
        elapsed = {
            phase: seconds - previous_seconds.get(phase, 0.0) for phase, seconds in facts.seconds.items()
        }
        training = elapsed.pop("training")
        rate = None
        if images and training > 0:
            rate = round(images / training, 3)
        row = {
            "time": round(time.time(), 3), **facts.position.row(epoch), "loss": loss, "lr": lr,
            "images": images, "images_per_s": rate,
            **{phase: round(seconds, 4) for phase, seconds in elapsed.items()},
            "peak_memory_mib": round(devices.peak_memory(self._device) / 2**20, 1),
        }  # fmt: skip
        moments.announce("row", row)
        self._append("speed.jsonl", row)

    def _append(self, name: str, row: dict[str, Any]) -> None:
        self._side_files.append(name, json.dumps(row).encode() + b"\n")


def earlier_rate(folder: str) -> Optional[float]:
    """Return the median images per second in the last rows of speed.jsonl; None without any."""
    rates = []
    for line in _last_lines(os.path.join(folder, "speed.jsonl")):
        with contextlib.suppress(ValueError, RecursionError):  # a line that was cut off by a kill
            row = json.loads(line)
            rate = row.get("images_per_s") if isinstance(row, dict) else None
            if isinstance(rate, (int, float)) and rate > 0:
                rates.append(rate)
    return statistics.median(rates) if rates else None


def _last_lines(path: str) -> list[bytes]:
    """Return the lines that begin in the last TAIL bytes of a file; none if it cannot be read."""
    with contextlib.suppress(OSError), open_regular(path) as file:
        offset = max(0, file.seek(0, os.SEEK_END) - TAIL)
        file.seek(offset)
        lines = file.readlines()
        return lines[1:] if offset else lines
    return []
