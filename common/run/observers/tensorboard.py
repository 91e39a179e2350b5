"""Write TensorBoard's events.

Its own writer cannot cope with a full disk, or with a folder whose name is not UTF-8.
"""

import argparse
import io
import os
import socket
import time
from typing import Any, Optional

import torch

from common import packages
from common.run.observers.observer import Facts, Observer
from common.run.side_files import SideFiles


class TensorBoard(Observer):
    def __init__(self, args: argparse.Namespace, _device: torch.device, side_files: SideFiles):
        self._folder = os.path.abspath(args.tensorboard_dir)
        self._side_files = side_files
        self._file: Optional[str] = None  # once there is something to write

    def log_due(self, facts: Facts, loss: float, lr: float, speed: dict, **_: object) -> None:
        speeds = {f"speed/{name}": value for name, value in speed.items()}
        self._add_scalars(facts, {"train/loss": loss, "train/lr": lr, **speeds})

    def epoch_ended(self, facts: Facts, metrics: dict, **_: object) -> None:
        self._add_scalars(facts, {f"test/{name}": value for name, value in metrics.items()})

    def picture(self, facts: Facts, name: str, pixels: torch.Tensor, **_: object) -> None:
        step = facts.position.total_steps
        if self._is_enabled():
            self._add(step, image(step, name, pixels))

    def _add_scalars(self, facts: Facts, values: dict[str, float]) -> None:
        step = facts.position.total_steps
        if self._is_enabled():
            self._add(step, *(scalar(step, name, value) for name, value in values.items()))

    def _is_enabled(self):
        return self._side_files.writes and packages.is_available(packages.EVENTS)

    def _add(self, step: int, *records: bytes) -> None:
        if self._file is None:
            self._file = os.path.join(self._folder, file_name())
            records = (first_records(step), *records)
        self._side_files.append(self._file, b"".join(records))


def file_name() -> str:
    """Return a new file's name in the form that TensorBoard looks for."""
    return f"events.out.tfevents.{time.time():010.0f}.{socket.gethostname()}.{os.getpid()}"


def first_records(step: int) -> bytes:
    """Return the first records of a file whose events replace those of earlier files from this step on."""
    from tensorboard.compat.proto.event_pb2 import SessionLog  # pyright: ignore[reportAttributeAccessIssue]

    return _record(step, file_version="brain.Event:2") + _record(
        step, session_log=SessionLog(status=SessionLog.START)
    )


def scalar(step: int, name: str, value: float) -> bytes:
    """Return an event with a number."""
    from torch.utils.tensorboard import summary

    return _record(step, summary=summary.scalar(name, value))


def image(step: int, name: str, pixels: torch.Tensor) -> bytes:
    """Return an event with a picture. `pixels`: uint8 (3, H, W)."""
    from torch.utils.tensorboard import summary

    return _record(step, summary=summary.image(name, pixels, dataformats="CHW"))


def _record(step: int, **content: Any) -> bytes:
    from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
    from tensorboard.summary.writer.record_writer import RecordWriter

    encoded = io.BytesIO()
    RecordWriter(encoded).write(Event(wall_time=time.time(), step=step, **content).SerializeToString())
    return encoded.getvalue()
