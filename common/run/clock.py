"""The clock of a run: the seconds that this start has spent in each phase, its speed, and the time left.

The host's clock measures all phases but the transfer to a GPU. The transfer overlaps the computation and is
measured by the GPU's clock, so the phases of the training may add up to more than 100 %. Writing the log and
files counts as saving. Neither saving nor a wait for a store or disk that does not answer
(common/alive/patience.py) is part of the speed.
"""

import time
from collections.abc import Mapping
from typing import Optional

from common.alive import heartbeat

LINE_SECONDS = 5
WARM_UP = 10  # steps that are slower than those to come
TRAINING_PHASES = ("waiting_for_data", "transfer", "compute")
PHASES = (*TRAINING_PHASES, "evaluation", "saving", "paused", "waiting_for_storage")
# {phase of the heartbeat: phase of the clock}. The time of other phases of the heartbeat, as of the start, is
# not counted.
PHASE_OF_HEARTBEAT = {
    "data": "waiting_for_data", "step": "compute", "evaluate": "evaluation", "save": "saving",
    "publish": "saving", "join": "paused",
}  # fmt: skip


class Clock:
    def __init__(self, line_every: Optional[int] = None, test_samples: int = 0):
        """`line_every`: steps between lines of the log; unset, they come by time (LINE_SECONDS).

        `test_samples`: samples of an evaluation."""
        self._seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self._phase = ""
        self._last_read_at = time.monotonic()
        self._last_step_at = self._last_read_at
        self._pulse = heartbeat.of_this_process()
        self._seconds_waited = self._pulse.waited_seconds()
        self._transfers_overlap = False  # whether transfers overlap the computing
        self._line_every = line_every
        self._test_samples = test_samples
        self._evaluations = 0
        # (samples, seconds of training) after each step of this start
        self._marks: list[tuple[int, float]] = []
        self.begin_epoch()

    def enter(self, phase: str, steps: int) -> None:
        """Begin a phase, and report it in the heartbeat, which a parent process reads.

        `steps`: steps of the run so far.
        """
        is_first_step = phase in heartbeat.STEP_PHASES and not self._marks
        self._pulse.set("compile" if is_first_step else phase, steps)
        self.read()
        self._phase = PHASE_OF_HEARTBEAT.get(phase, "")

    def add_transfer(self, seconds: float, overlaps: bool) -> None:
        """Add seconds of transfer. `overlaps`: with a step; if not, subtract them from waiting_for_data."""
        self._seconds["transfer"] += seconds
        self._transfers_overlap = overlaps
        if not overlaps:
            self._seconds["waiting_for_data"] -= seconds

    def read(self) -> dict[str, float]:
        """Return the seconds of each phase; "training" is the sum of the first three,
        without overlapping transfers."""
        now = time.monotonic()
        waited = self._pulse.waited_seconds()
        if self._phase:
            # A loader process that waits for storage while the rank computes delays nothing.
            storage = (
                0.0
                if self._phase == "compute"
                else max(0.0, min(waited - self._seconds_waited, now - self._last_read_at))
            )
            self._seconds[self._phase] += now - self._last_read_at - storage
            self._seconds["waiting_for_storage"] += storage
        self._last_read_at = now
        self._seconds_waited = waited
        training = self._seconds["waiting_for_data"] + self._seconds["compute"]
        if not self._transfers_overlap:
            training += self._seconds["transfer"]
        return {**self._seconds, "training": training}

    # --- Between two lines of the log ---

    def begin_epoch(self) -> None:
        """Begin to measure the speed, for a line of the log after the first step of the epoch."""
        self._begin_lap()
        self._is_first_lap = True

    def _begin_lap(self) -> None:
        """Begin to measure the speed for the next line of the log."""
        self._lap_start = self.read()
        self._lap_images = 0
        self._lap_steps = 0
        self._is_first_lap = False

    def count_step(self, samples: int, trained: int) -> bool:
        """Count a step of `samples` samples; return whether a log line is due.

        `trained`: samples of this start so far.
        """
        self._lap_images += samples
        self._lap_steps += 1
        training = self.read()["training"]
        if len(self._marks) >= 1000:
            self._marks = self._marks[::2]
        self._marks.append((trained, training))
        self._last_step_at = self._last_read_at
        if self._line_every:
            return self._is_first_lap or self._lap_steps >= self._line_every
        return self._is_first_lap or training - self._lap_start["training"] >= LINE_SECONDS

    def seconds_since_step(self) -> float:
        """Return the seconds since the last step ended."""
        return time.monotonic() - self._last_step_at

    def lap(self) -> dict[str, float]:
        """Return the images per second and the fraction of each training phase since the last lap began;
        begin a new one."""
        previous = self._lap_start
        images = self._lap_images
        self._begin_lap()
        return speed(previous, self._lap_start, images)

    # --- The rest ---

    def count_evaluation(self) -> None:
        """Count an evaluation, for the estimate of the time left."""
        self._evaluations += 1

    def seconds_left(self, samples: int, evaluations: int) -> Optional[float]:
        """Estimate the time until the end of the run; None after the first step,
        which prepares what later steps use.

        A sample is assumed to take as long as in the later half of this start, an evaluation with its save as
        long as on average. Before the first evaluation, a test sample is assumed to take a third of a
        training sample: no backward pass.
        """
        samples_done, training = self._marks[-1]
        middle = next(mark for mark in self._marks if mark[0] >= samples_done / 2)
        if middle == self._marks[-1]:
            return None
        seconds_per_sample = (training - middle[1]) / max(samples_done - middle[0], 1)
        seconds = self.read()
        seconds_per_evaluation = self._test_samples * seconds_per_sample / 3
        if self._evaluations:
            seconds_per_evaluation = (seconds["evaluation"] + seconds["saving"]) / self._evaluations
        return max(0.0, samples * seconds_per_sample + evaluations * seconds_per_evaluation)


def speed(begin: Mapping[str, float], end: Mapping[str, float], images: int) -> dict[str, float]:
    """Return the images per second between two readings of a clock,
    and the fraction of each phase of the training."""
    training = max(end["training"] - begin["training"], 1e-9)
    fractions = {name: min(1.0, (end[name] - begin[name]) / training) for name in TRAINING_PHASES}
    return {"images_per_s": images / training, **fractions}
