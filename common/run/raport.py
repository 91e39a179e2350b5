"""--raport_file: the numbers of a run as lines of JSON, under the names that NVIDIA's ResNet-50 script gives them."""

import argparse
import datetime
import json
import os
import time
from typing import Optional

from common import arguments, moments
from common.progress import say
from common.run.spare import Spare

# {ours: theirs, and by how much they are multiplied there}
NAMES = {
    "train/loss": ("train.loss", 1), "train/lr": ("train.lr", 1), "speed/images_per_s": ("train.total_ips", 1),
    "test/accuracy": ("val.top1", 100), "test/top5": ("val.top5", 100), "test/loss": ("val.loss", 1),
}  # fmt: skip


class Raport:
    """A start adds its lines to those of the starts before: first one with the arguments, then one for each line of the log.

    Every rank has one, and the one that writes is told the numbers: which that is may change (--min_nodes).
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self._path, self._spare, self._began = os.path.join(args.output_dir, args.raport_file), Spare(say), time.monotonic()
        self._arguments: Optional[dict] = arguments.plain(vars(args))

    def scalars(self, step: int, values: dict[str, float]) -> None:
        if self._arguments:
            self._write("PARAMETER", self._arguments, 0)
            self._arguments = None
        named = {theirs: factor * values[ours] for ours, (theirs, factor) in NAMES.items() if ours in values}
        if named:
            self._write("LOG", named, step)

    def _write(self, kind, data, step):
        now = datetime.datetime.now(datetime.timezone.utc)
        row = {
            "timestamp": now.timestamp(), "datetime": now.isoformat(), "elapsedtime": time.monotonic() - self._began,
            "type": kind, "step": step, "data": data,
        }  # fmt: skip
        self._spare.append(self._path, json.dumps(row).encode() + b"\n")


def start(args: argparse.Namespace) -> None:
    if args.raport_file:
        moments.listen(Raport(args))
