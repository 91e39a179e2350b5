"""The history of a run, with times, in two files to which every start appends lines.

journal.jsonl   a line for each start, warning, change of the nodes, set of example pictures, and end
speed.jsonl     a line for each line of the log and each epoch: images a second, the most memory so far, how many seconds each
                phase has taken since the line before and, while data arrive, how many MiB of them came (from_bucket_first_mib,
                before the rest of their shard; from_bucket_mib) or were on this node's disk (on_disk_mib)

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
    """Writes nothing before the run begins, as the folder may still be another run's. Earlier events are kept until then."""

    def __init__(self, _args: argparse.Namespace, device: torch.device, side_files: SideFiles):
        self._device = device
        self._side_files = side_files
        self._active = False
        self._early: list[dict] = []
        # The seconds of each phase, the samples of this start and the epoch, as of the last row.
        self._last: tuple[Mapping[str, float], int, int] = ({}, 0, 1)

    def began(self, facts: Facts, about: dict) -> None:
        self._last = (*self._last[:2], facts.position.epoch + 1)
        if not self._side_files.writes:
            return
        self._active = True
        early = self._early
        self._early = []
        for row in early:
            self._append("journal.jsonl", row)
        self._event("start", **about)

    def line(self, facts: Facts, loss: float, lr: float, **_: object) -> None:
        self._row(facts, facts.position.epoch + 1, loss, lr)

    def saved(self, facts: Facts, whole: bool) -> None:
        self._row(facts, facts.position.epoch + (not whole))

    def ending(self, facts: Facts, how: str, why: Optional[str]) -> None:
        self._event("end", how=how, why=why, **facts.position.row(facts.position.epoch))

    def ended(self, facts: Facts) -> None:
        self._row(facts, self._last[2])

    def failed(self, facts: Facts, error: BaseException) -> None:
        if not (is_victim(error) and (heartbeat.has_parent() or heartbeat.has_watcher())):  # they know the cause and record it
            why = one_line(f"{type(error).__name__}: {error}")[:500]
            self._event("end", how="failed", why=why, **facts.position.row(facts.position.epoch))

    def picture(self, _facts: Facts, name: str, what: dict, **_: object) -> None:
        self._event("picture", name=name, **what)

    def nodes(self, facts: Facts, news: str, ranks: int, pause: float) -> None:
        self._event("nodes", text=news, ranks=ranks, pause=round(pause, 1), samples=facts.position.samples_seen)

    def said(self, _facts: Optional[Facts], text: str) -> None:
        """Record a line of the log that is a warning or advice."""
        if text.startswith(("warning: ", "advice: ")):
            self._event("warning", text=one_line(text).partition(": ")[2])

    def _event(self, event: str, **facts: Any) -> None:
        row = {"time": round(time.time(), 3), "event": event, **facts}
        if self._active:
            self._append("journal.jsonl", row)
        else:
            self._early.append(row)

    def _row(self, facts: Facts, epoch: int, loss: Optional[float] = None, lr: Optional[float] = None) -> None:
        before, seen, _ = self._last
        trained = facts.position.samples_seen - facts.plan.began_at.samples_seen
        self._last = (facts.seconds, trained, epoch)
        images = trained - seen
        if not self._active:
            return
        passed = {phase: spent - before.get(phase, 0.0) for phase, spent in facts.seconds.items()}
        training = passed.pop("training")
        row = {
            "time": round(time.time(), 3), **facts.position.row(epoch), "loss": loss, "lr": lr, "images": images,
            "images_per_s": round(images / training, 3) if images and training > 0 else None,
            **{phase: round(spent, 4) for phase, spent in passed.items()},
            "peak_memory_mib": round(devices.peak_memory(self._device) / 2**20, 1),
        }  # fmt: skip
        moments.announce("row", row)
        self._append("speed.jsonl", row)

    def _append(self, name: str, row: dict[str, Any]) -> None:
        self._side_files.append(name, json.dumps(row).encode() + b"\n")


def rate_before(folder: str) -> Optional[float]:
    """Return the median images per second in the last rows of speed.jsonl, from earlier starts; None if they tell none."""
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
        begin = max(0, file.seek(0, os.SEEK_END) - TAIL)
        file.seek(begin)
        lines = file.readlines()
        return lines[1:] if begin else lines
    return []
