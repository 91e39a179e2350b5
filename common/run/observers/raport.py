"""--raport_file: the numbers of a run as lines of JSON, under the names that NVIDIA's ResNet-50 script gives them."""

import datetime
import json
import time
from typing import Any

from common import arguments
from common.run.observers.records import Facts
from common.run.spare import Spare

NAMES = {"accuracy": ("val.top1", 100), "top5": ("val.top5", 100), "loss": ("val.loss", 1)}  # {ours: theirs, and a factor}


class Raport:
    """A start adds its lines to those of the starts before: first one with the arguments, then one for each line of the log."""

    def __init__(self, args: Any, _device: Any, spare: Spare):
        self._name, self._spare = args.raport_file, spare
        self._began, self._arguments = time.monotonic(), arguments.plain(vars(args))

    def line(self, facts: Facts, loss: float, lr: float, speed: dict, **_: Any) -> None:
        self._log({"train.loss": loss, "train.lr": lr, "train.total_ips": speed["images_per_s"]}, facts)

    def epoch_ended(self, facts: Facts, metrics: dict, **_: Any) -> None:
        self._log({name: factor * metrics[ours] for ours, (name, factor) in NAMES.items() if ours in metrics}, facts)

    def _log(self, numbers, facts):
        if not self._spare.writes or not numbers:
            return
        if self._arguments:
            self._write("PARAMETER", self._arguments, 0)
            self._arguments = {}
        self._write("LOG", numbers, facts.position.total_steps)

    def _write(self, kind, data, step):
        now = datetime.datetime.now(datetime.timezone.utc)
        row = {
            "timestamp": now.timestamp(), "datetime": now.isoformat(), "elapsedtime": time.monotonic() - self._began,
            "type": kind, "step": step, "data": data,
        }  # fmt: skip
        self._spare.append(self._name, json.dumps(row).encode() + b"\n")
