"""What happened when, for who looks at the run afterwards: two files to which every start adds its lines.

journal.jsonl   a line for each start, warning, change of the nodes, set of example pictures, and end
speed.jsonl     a line for each line of the log and each epoch: images a second, the most memory so far, and how many seconds
                each phase has taken since the line before

metrics.jsonl has none of these, so that it is a function of seed and data alone.
"""

import contextlib
import json
import os
import statistics
import time
from typing import Any, Callable, Optional

from common import moments
from common.errors import one_line
from common.run.spare import Spare

TAIL = 1 << 13  # bytes of speed.jsonl: some twenty rows
PHASES = ("waiting_for_data", "transfer", "compute", "evaluation", "saving", "paused")
# In which of them the time of a worker's phase is (heartbeat.py); it is in no other while it starts.
OF_THE_HEARTBEAT = {
    "data": "waiting_for_data", "step": "compute", "compile": "compute", "evaluate": "evaluation", "save": "saving",
    "publish": "saving", "join": "paused",
}  # fmt: skip


class Course:
    """How many seconds each phase has taken."""

    def __init__(self):
        self.seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self._phase: Optional[str] = None
        self._since, self._beside = time.monotonic(), False

    def enter(self, phase: str) -> None:
        """`phase`: of the heartbeat."""
        now = time.monotonic()
        if self._phase:
            self.seconds[self._phase] += now - self._since
        self._phase, self._since = OF_THE_HEARTBEAT.get(phase), now

    def transferred(self, seconds: float, beside: bool) -> None:
        """`beside`: while a step was computed; else the time has been taken for waiting."""
        self.seconds["transfer"] += seconds
        self._beside = beside
        if not beside:
            self.seconds["waiting_for_data"] -= seconds

    def read(self) -> dict[str, float]:
        """The seconds of each phase until now; those of "training" are of the first three, without a transfer beside."""
        now = time.monotonic()
        if self._phase:
            self.seconds[self._phase] += now - self._since
        self._since = now
        training = self.seconds["waiting_for_data"] + self.seconds["compute"]
        return {**self.seconds, "training": training + (0 if self._beside else self.seconds["transfer"])}


class Journal:
    """Writes nothing before begin(), as the folder may still be another run's; what is told until then is kept."""

    def __init__(self, folder: str, say: Callable[[str], None], at_failure: Callable[[], None] = lambda: None):
        """`at_failure`: called after the job's failure has been noted."""
        self._folder, self._spare, self._active = folder, Spare(say), False
        self._at_failure, self._process = at_failure, os.getpid()
        self._early: list[dict] = []
        self._last: tuple[dict[str, float], int] = ({}, 0)  # of the row before: the seconds of each phase, the samples

    def listen(self) -> None:
        moments.listen(self)

    def begin(self) -> None:
        self._active, early = True, self._early
        self._early = []
        for row in early:
            self._append("journal.jsonl", row)

    def event(self, event: str, **facts: Any) -> None:
        row = {"time": round(time.time(), 3), "event": event, **facts}
        if self._active:
            self._append("journal.jsonl", row)
        else:
            self._early.append(row)

    def speed(
        self, seconds: dict[str, float], memory: int, trained: int, loss: Optional[float], lr: Optional[float], **place: int
    ) -> None:
        """A row. `seconds`: as Course.read() gives them; `memory`: bytes at most; `trained`: samples of this start."""
        last, before = self._last
        passed = {phase: spent - last.get(phase, 0.0) for phase, spent in seconds.items()}
        self._last, training, images = (seconds, trained), passed.pop("training"), trained - before
        row = {
            "time": round(time.time(), 3), **place, "loss": loss, "lr": lr, "images": images,
            "images_per_s": round(images / training, 3) if images and training > 0 else None,
            **{phase: round(spent, 4) for phase, spent in passed.items()},
            "peak_memory_mib": round(memory / 2**20, 1),
        }  # fmt: skip
        if self._active:
            self._append("speed.jsonl", row)

    def _append(self, name, row):
        if os.getpid() != self._process:  # a loader process, forked from ours in the midst of anything
            self._process, self._spare = os.getpid(), Spare(print)
        self._spare.append(os.path.join(self._folder, name), json.dumps(row).encode() + b"\n")

    # --- What it hears ---

    def said(self, text: str) -> None:
        if text.startswith(("warning: ", "advice: ")):
            self.event("warning", text=one_line(text).partition(": ")[2])

    def failure(self, error: BaseException) -> None:
        if self._active:
            self.event("end", how="failed", why=one_line(f"{type(error).__name__}: {error}")[:500])
            with contextlib.suppress(Exception):  # the error itself is what the user has to see
                self._at_failure()


def rate_before(folder: str) -> Optional[float]:
    """The images a second in the last rows of the starts before, if there are any."""
    rates = []
    with contextlib.suppress(OSError, ValueError, AttributeError), open(os.path.join(folder, "speed.jsonl"), "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
        rates = [rate for line in file.readlines()[1:] if (rate := json.loads(line).get("images_per_s"))]
    return statistics.median(rates) if rates else None
