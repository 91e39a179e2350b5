"""Follow the folder of a run, and send what it gains to a tracker.

The files are the queue. So a tracker that is slow, frozen or away costs the training nothing and loses no
row: what it has not taken is sent by the next start, or by `python -m launch track`. A job follows its folder
in a process of its own, so that no library of a tracker can make the training fail, wait, or hang at its end.
"""

import contextlib
import json
import os
import select
import signal
import sys
import time
from collections.abc import Collection, Iterator
from typing import IO, Any, Callable, Optional

from common.errors import one_line
from common.files import open_regular, write_atomically
from common.track import senders

PAUSE = 5.0  # seconds between two looks at the folder
LONGEST_PAUSE = 30.0  # where one takes long, or was in vain
LONGEST_REASON = 100  # letters of what a tracker's library says
ROWS = 100  # that are sent at once
# For each tool {"run": its id, "steps": samples up to which it has the rows of steps, "epochs": the same of
# epochs}.
RECORD = "tracked-{}.json"
PICTURES = ("curves.png", "examples/mistakes.png")


class Follower:
    """Sends what a run's folder gains to one tracker, and keeps there how far the tracker has it."""

    def __init__(self, folder: str, tool: str, say: Callable[[str], object]):
        self.folder = folder
        self.tool = tool
        self.record = RECORD.format(tool)
        self.num_sent = 0  # that were sent
        self._say = say
        self._has_warned = False
        self._sender: Any = None
        self._start_time: Optional[float] = None  # the time of the start that was the last at the first look

    def send(self, is_last: bool = False, fallback_end: tuple[str, str] = ("", "")) -> bool:
        """Send what is new, and return whether the tracker has all there is.

        `is_last`: this is the last call. `fallback_end`: (how, why) of the end, if the run has recorded none.
        """
        try:
            events = [
                row for row in rows(self.folder, "journal.jsonl") if row.get("event") in ("start", "end")
            ]
            starts = [row for row in events if row["event"] == "start"]
            self._start_time = self._start_time or (starts[-1]["time"] if starts else None)
            if fallback_end[0] and starts and starts[-1]["time"] != self._start_time:
                return True  # another start has begun meanwhile, and has a follower of its own
            if starts:
                start = {**starts[-1], "run": entry_of(starts[0])}
                self._sender = self._sender or senders.TOOLS[self.tool](start, self.folder)
                progress = self._send_rows(start)
                if is_last:
                    self._end(progress, events[-1], fallback_end)
        except Exception as error:  # a tracker's library may raise anything
            self._warn(error)
            return False
        if self._has_warned:
            self._report(f"{self.tool} takes the rows again")
        self._has_warned = False
        return True

    def _report(self, text: str) -> None:
        with contextlib.suppress(OSError):  # nobody hears it any more
            self._say(text)

    def _warn(self, error: Exception) -> None:
        reason = (
            f"pip install {senders.PACKAGES[self.tool]}"
            if isinstance(error, ImportError)
            else root_cause(error)
        )
        advice = f"python -m launch track {self.folder} --to {self.tool} sends them"
        if not self._has_warned:
            self._report(f"warning: {self.tool} takes no rows: {reason}; the run goes on, and {advice}")
        self._has_warned = True

    def _send_rows(self, start: dict[str, Any]) -> dict[str, Any]:
        """Send the rows that the tracker lacks, ROWS at a time; return how far it has them now."""
        progress = self._progress(start)
        for kind, new_rows in (("steps", _steps(self.folder)), ("epochs", _epochs(self.folder, start))):
            unsent = sorted(
                (row for row in new_rows if row[0] > progress.get(kind, 0)), key=lambda row: row[0]
            )
            for batch in (unsent[begin : begin + ROWS] for begin in range(0, len(unsent), ROWS)):
                progress[kind] = batch[-1][0]
                self._sender.log(batch, progress)
                self._write_record(progress)
                self.num_sent += len(batch)
        return progress

    def _end(self, progress: dict[str, Any], event: dict[str, Any], fallback_end: tuple[str, str]) -> None:
        """Send the pictures if the run has ended, and close its entry."""
        is_over = event["event"] == "end"
        if is_over and progress.get("ended") != event["time"]:
            for path in (os.path.join(self.folder, name) for name in PICTURES):
                if os.path.exists(path):
                    self._sender.picture(path, event["samples"])
        if is_over:
            self._sender.end(event["how"], event["why"])
            self._write_record({**progress, "ended": event["time"]})
        else:
            self._sender.end(*fallback_end)
            self._write_record({**progress, "ended": None})

    def _progress(self, start: dict[str, Any]) -> dict[str, Any]:
        """Return how far the tracker has the rows of this run,
        by its own account and by the record in the folder."""
        progress = {"run": start["run"]}
        for account in (next(rows(self.folder, self.record), {}), self._sender.progress()):
            if isinstance(account, dict) and account.get("run") == start["run"]:
                counters = {name: value for name, value in account.items() if isinstance(value, (int, float))}
                progress.update(
                    {
                        name: value
                        for name, value in counters.items()
                        if name not in progress or value > progress[name]
                    }
                )
        if progress.get("since") != start["time"] and _has_gone_back(self.folder, start):
            progress.update(
                {kind: min(progress.get(kind, 0), start["samples"]) for kind in ("steps", "epochs")},
                since=start["time"],
            )
        return progress

    def _write_record(self, progress: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the disk may be full
            write_atomically(os.path.join(self.folder, self.record), json.dumps(progress).encode())


def entry_of(start: dict) -> str:
    """Return the id of a run's entry, by its first start: that of the run,
    unless it has branched off another one there."""
    return f"{start['run']}-{start['samples']}" if start.get("branched") else start["run"]


def _has_gone_back(folder: str, start: dict[str, Any]) -> bool:
    """Whether this start has deleted later checkpoints, by --resume PATH --overwrite true:
    their rows are to be replaced."""
    saves = [
        row["samples"]
        for row in rows(folder, "speed.jsonl")
        if row["loss"] is None and row["time"] < start["time"]
    ]
    return bool(start.get("branched") and saves and saves[-1] > start["samples"])


def rows(folder: str, name: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file of lines of JSON; none if there is no such file.

    Lines that are damaged are left out.
    """
    with contextlib.suppress(OSError), open_regular(os.path.join(folder, name)) as file:
        for line in file:
            with contextlib.suppress(ValueError, RecursionError):
                row = json.loads(line)
                if isinstance(row, dict):
                    yield row


def root_cause(error: Exception) -> str:
    """Return the text of the error that caused this one, cut off at LONGEST_REASON:
    some servers answer with a web page."""
    cause: BaseException = error
    while inner := cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__):
        cause = inner
    text = one_line(cause) or type(cause).__name__
    return text if len(text) <= LONGEST_REASON else f"{text[:LONGEST_REASON]}..."


def _steps(folder: str) -> Collection[tuple[int, float, dict[str, float]]]:
    """Return [(samples, time, values)] of the lines of the log; of steps that were done again after a kill,
    the latest."""
    by_samples = {}
    for row in rows(folder, "speed.jsonl"):
        if row["loss"] is not None:
            speed = {
                f"speed/{name}": row[name]
                for name in ("images_per_s", "peak_memory_mib")
                if row[name] is not None
            }
            by_samples[row["samples"]] = (
                row["samples"],
                row["time"],
                {"train/loss": row["loss"], "train/lr": row["lr"], **speed},
            )
    return by_samples.values()


def _epochs(folder: str, start: dict[str, Any]) -> Iterator[tuple[int, float, dict[str, float]]]:
    """Yield (samples, time, values) of each epoch; the start's time where the epoch's is not known."""
    times = {row["samples"]: row["time"] for row in rows(folder, "speed.jsonl")}
    for row in rows(folder, "metrics.jsonl"):
        metrics = {
            f"test/{name}": row[name]
            for name in row
            if name not in ("epoch", "steps", "samples", "train_loss")
        }
        values = {"epoch": row["epoch"], "train/loss_of_epoch": row["train_loss"], **metrics}
        yield row["samples"], times.get(row["samples"], start["time"]), values


def main(folder: str, tool: str) -> None:
    """Follow the folder of the job that has started this process, until a line comes from it,
    or it has ended."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it is meant for the job, and this process ends after it
    job_output = os.fdopen(os.dup(1), "w", 1)
    devnull = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):  # for what the libraries print
        os.dup2(devnull, number)
    follower = Follower(folder, tool, lambda text: print(one_line(text), file=job_output, flush=True))
    sys.exit(not follow(follower, sys.stdin, os.getppid()))


def follow(follower: Follower, from_job: IO[str], job_pid: int) -> bool:
    """Send what is new until a line comes from the job, or it has gone;
    return whether the tracker has all."""
    has_message = job_has_ended = False
    while not has_message and not job_has_ended:
        start = time.monotonic()
        has_all = follower.send()
        pause = min(LONGEST_PAUSE, max(PAUSE, 5 * (time.monotonic() - start))) if has_all else LONGEST_PAUSE
        is_readable = bool(select.select([from_job], [], [], pause)[0])
        has_message = is_readable and bool(from_job.readline())
        job_has_ended = (
            is_readable and not has_message
        ) or os.getppid() != job_pid  # its end of the pipe may be open in a process that it had started
    if not job_has_ended:
        return follower.send(is_last=True)
    wait_for_end(follower.folder)  # the process that watched it may still note why
    return follower.send(
        is_last=True, fallback_end=("failed", "the process of the run has ended without a word")
    )


def wait_for_end(folder: str, seconds: float = PAUSE) -> None:
    """Wait until the run has recorded its end, at most `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not has_ended(folder):
        time.sleep(0.2)


def has_ended(folder: str) -> bool:
    """Whether the last start of the run has noted its end."""
    events = [row["event"] for row in rows(folder, "journal.jsonl") if row.get("event") in ("start", "end")]
    return events[-1:] == ["end"]
