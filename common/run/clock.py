"""The clock of a run: the seconds that this start has spent in each phase, its speed, and the time left.

The host's clock measures all phases but the transfer to a GPU. The transfer overlaps the computation and is measured by the
GPU's clock, so the phases of the training may add up to more than 100 %. Writing the log and files counts as saving. Neither
saving nor a wait for a store or disk that does not answer (common/alive/patience.py) is part of the speed.
"""

import time
from collections.abc import Mapping
from typing import Optional

from common.alive import heartbeat

LINE_SECONDS = 5
WARM_UP = 10  # steps that are slower than those to come
TRAINING_PHASES = ("waiting_for_data", "transfer", "compute")
PHASES = (*TRAINING_PHASES, "evaluation", "saving", "paused", "waiting_for_storage")
# {phase of the heartbeat: phase of the clock}. The time of other phases of the heartbeat, as of the start, is not counted.
OF_THE_HEARTBEAT = {
    "data": "waiting_for_data", "step": "compute", "evaluate": "evaluation", "save": "saving", "publish": "saving",
    "join": "paused",
}  # fmt: skip


class Clock:
    def __init__(self, line_every: Optional[int] = None, test_samples: int = 0):
        """`line_every`: steps between lines of the log (unset: LINE_SECONDS); `test_samples`: samples of an evaluation."""
        self._seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self._phase = ""
        self._since = time.monotonic()
        self._stepped = self._since
        self._pulse = heartbeat.of_this_process()
        self._waited = self._pulse.waited_seconds()
        self._beside = False  # whether transfers overlap the computing
        self._line_every = line_every
        self._test_samples = test_samples
        self._evaluations = 0
        self._marks: list[tuple[int, float]] = []  # (samples, seconds of training) after each step of this start
        self.begin_lap()

    def enter(self, phase: str, steps: int) -> None:
        """Begin a phase, and report it in the heartbeat, which a parent process reads. `steps`: steps of the run so far."""
        self._pulse.set("compile" if phase in heartbeat.STEP_PHASES and not self._marks else phase, steps)
        self.read()
        self._phase = OF_THE_HEARTBEAT.get(phase, "")

    def transferred(self, seconds: float, beside: bool) -> None:
        """Add seconds of transfer to the device. `beside`: they overlapped a step; else subtract them from waiting_for_data."""
        self._seconds["transfer"] += seconds
        self._beside = beside
        if not beside:
            self._seconds["waiting_for_data"] -= seconds

    def read(self) -> dict[str, float]:
        """Return the seconds of each phase; "training" is the sum of the first three, without overlapping transfers."""
        now = time.monotonic()
        waited = self._pulse.waited_seconds()
        if self._phase:
            # A loader process that waits for storage while the rank computes delays nothing.
            storage = 0.0 if self._phase == "compute" else max(0.0, min(waited - self._waited, now - self._since))
            self._seconds[self._phase] += now - self._since - storage
            self._seconds["waiting_for_storage"] += storage
        self._since = now
        self._waited = waited
        training = self._seconds["waiting_for_data"] + self._seconds["compute"]
        return {**self._seconds, "training": training + (0 if self._beside else self._seconds["transfer"])}

    # --- Between two lines of the log ---

    def begin_lap(self) -> None:
        """Begin to measure the speed for the next line of the log. Called when an epoch begins: its first step gets a line."""
        self._lap_began = self.read()
        self._lap_images = 0
        self._lap_steps = 0
        self._is_first = True

    def stepped(self, samples: int, trained: int) -> bool:
        """Count a step of `samples` samples; return whether a log line is due. `trained`: samples of this start so far."""
        self._lap_images += samples
        self._lap_steps += 1
        training = self.read()["training"]
        if len(self._marks) >= 1000:
            self._marks = self._marks[::2]
        self._marks.append((trained, training))
        self._stepped = self._since
        if self._line_every:
            return self._is_first or self._lap_steps >= self._line_every
        return self._is_first or training - self._lap_began["training"] >= LINE_SECONDS

    def since_step(self) -> float:
        return time.monotonic() - self._stepped

    def lap(self) -> dict[str, float]:
        """Return the images per second and the fraction of each training phase since the last lap began; begin a new one."""
        before = self._lap_began
        images = self._lap_images
        self.begin_lap()
        self._is_first = False
        return speed(before, self._lap_began, images)

    # --- The rest ---

    def evaluated(self) -> None:
        self._evaluations += 1

    def seconds_left(self, samples: int, evaluations: int) -> Optional[float]:
        """Estimate the time until the end of the run; None after the first step, which prepares what later steps use.

        A sample is assumed to take as long as in the later half of this start, an evaluation with its save as long as on
        average. Before the first evaluation, a test sample is assumed to take a third of a training sample: no backward pass.
        """
        done, training = self._marks[-1]
        first = next(mark for mark in self._marks if mark[0] >= done / 2)
        if first == self._marks[-1]:
            return None
        of_a_sample = (training - first[1]) / max(done - first[0], 1)
        spent = self.read()
        guess = self._test_samples * of_a_sample / 3
        evaluation = (spent["evaluation"] + spent["saving"]) / self._evaluations if self._evaluations else guess
        return max(0.0, samples * of_a_sample + evaluations * evaluation)


def speed(before: Mapping[str, float], now: Mapping[str, float], images: int) -> dict[str, float]:
    """Return the images per second between two readings of a clock, and the fraction of each phase of the training."""
    training = max(now["training"] - before["training"], 1e-9)
    fractions = {name: min(1.0, (now[name] - before[name]) / training) for name in TRAINING_PHASES}
    return {"images_per_s": images / training, **fractions}
