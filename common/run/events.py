"""The records of TensorBoard's files.

TensorBoard's own writer has a thread, which a full disk ends with a traceback, and opens no folder whose name is not UTF-8.
"""

import io
import os
import socket
import time
from typing import Any


def file_name() -> str:
    return f"events.out.tfevents.{time.time():010.0f}.{socket.gethostname()}.{os.getpid()}"


def beginning(step: int) -> bytes:
    """Of a file whose events replace those of earlier files from this step on."""
    from tensorboard.compat.proto.event_pb2 import SessionLog  # pyright: ignore[reportAttributeAccessIssue]

    return _record(step, file_version="brain.Event:2") + _record(step, session_log=SessionLog(status=SessionLog.START))


def scalar(step: int, name: str, value: float) -> bytes:
    from torch.utils.tensorboard import summary

    return _record(step, summary=summary.scalar(name, value))


def image(step: int, name: str, pixels: Any) -> bytes:
    """`pixels`: uint8 (3, H, W)."""
    from torch.utils.tensorboard import summary

    return _record(step, summary=summary.image(name, pixels, dataformats="CHW"))


def _record(step, **content):
    from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
    from tensorboard.summary.writer.record_writer import RecordWriter

    encoded = io.BytesIO()
    RecordWriter(encoded).write(Event(wall_time=time.time(), step=step, **content).SerializeToString())
    return encoded.getvalue()
