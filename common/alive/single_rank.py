"""The watcher of a job with one rank: if the rank is killed, crashes or hangs, the last line of the log says so, and where.

A rank that hangs or is in state T is ended, so that the platform can start it again; in a terminal there is only a warning.
"""

import socket
import sys
import time
from typing import Callable

from common.alive import beside, heartbeat
from common.alive.worker import Worker, stalled, summary, where
from common.errors import one_line, report_failure

LOOK_SECONDS = 0.2


def start(rank: int, killed: Callable[[float, str], object]) -> None:
    """Try to fork a watcher. It calls `killed(start time, why)` if this process is killed, crashes, or hung and was ended."""
    interactive = sys.stdin is not None and sys.stdin.isatty()
    try:
        files, _ = beside.start(rank, lambda worker: _watch(worker, interactive, killed), _unwatched)
        heartbeat.set_files_of_single_rank(files)
        heartbeat.write_stacks()
    except OSError as error:  # no room for temporary files
        print(f"warning: this process is not watched: {one_line(error)}", file=sys.stderr, flush=True)


def _unwatched() -> None:
    print("warning: the watcher of this process has ended: no line will say so if this one hangs", file=sys.stderr, flush=True)


def _watch(worker: Worker, interactive: bool, killed: Callable[[float, str], object]) -> None:
    warned, since = False, time.time()
    while worker.code is None:
        time.sleep(LOOK_SECONDS)
        worker.look()
        text = _fault(worker)
        if text and worker.code is None and interactive:
            if not warned:
                print(f"warning: {text}", file=sys.stderr, flush=True)
            warned = True
        elif text:
            print(worker.stack(), end="", file=sys.stderr, flush=True)
            report_failure(text)
            worker.process.end(1)
            killed(since, text)
            return
        else:
            warned = False


def _fault(worker):
    """Return what is wrong with the rank, or None. A rank that exits says why itself, and only training phases are timed."""
    if worker.code is not None and worker.code >= 0:
        return None
    report = worker.fault(f"host {socket.gethostname()}")
    if report:
        return report["text"]
    status = worker.status()
    if status["phase"] not in heartbeat.STEP_PHASES or not stalled([summary([status])]):
        return None
    return f"no progress {where(status)}"
