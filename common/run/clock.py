"""The clock of a run: the seconds that this start has spent in each phase, its speed, and the time left.

The host's clock measures all phases but the transfer to a GPU. The transfer overlaps the computation and is measured by the
GPU's clock, so the phases of the training may add up to more than 100 %. Showing and writing count as saving. Neither saving
nor a wait for a store or disk that does not answer (common/patience.py) is part of the speed.
"""

import time
from collections.abc import Mapping
from typing import Optional

from common import heartbeat

LINE_SECONDS = 5
TRAINING = ("waiting_for_data", "transfer", "compute")
PHASES = (*TRAINING, "evaluation", "saving", "paused", "waiting_for_storage")
# In which of them the time of a worker's phase is (heartbeat.py); it is in no other while it starts.
OF_THE_HEARTBEAT = {
    "data": "waiting_for_data", "step": "compute", "evaluate": "evaluation", "save": "saving", "publish": "saving",
    "join": "paused",
}  # fmt: skip


class Clock:
    def __init__(self, line_every: Optional[int] = None, test_samples: int = 0):
        """`line_every`: a line of the log is due after so many steps; None: after some seconds."""
        self._seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self._phase, self._since = "", time.monotonic()
        self._stepped = self._since
        self._pulse = heartbeat.of_this_process()
        self._waited = self._pulse.waited()
        self._beside = False  # whether transfers overlap the computing
        self._line_every, self._test_samples, self._evaluations = line_every, test_samples, 0
        self._marks: list[tuple[int, float]] = []  # (samples, seconds of training) after each step of this start
        self.begin_lap()

    def enter(self, phase: str, steps: int) -> None:
        """Begin a phase, and tell the heartbeat. `steps`: those of the run."""
        self._pulse.set("compile" if phase in heartbeat.TRAINING and not self._marks else phase, steps)
        self.read()
        self._phase = OF_THE_HEARTBEAT.get(phase, "")

    def transferred(self, seconds: float, beside: bool) -> None:
        """Add seconds of transfer. `beside`: while a step was computed; else the time has been taken for waiting."""
        self._seconds["transfer"] += seconds
        self._beside = beside
        if not beside:
            self._seconds["waiting_for_data"] -= seconds

    def read(self) -> dict[str, float]:
        """Return the seconds of each phase until now; those of "training" are of the first three, without a transfer beside."""
        now, waited = time.monotonic(), self._pulse.waited()
        if self._phase:
            # What a loader process waits for while the rank computes holds nobody up.
            storage = 0.0 if self._phase == "compute" else max(0.0, min(waited - self._waited, now - self._since))
            self._seconds[self._phase] += now - self._since - storage
            self._seconds["waiting_for_storage"] += storage
        self._since, self._waited = now, waited
        training = self._seconds["waiting_for_data"] + self._seconds["compute"]
        return {**self._seconds, "training": training + (0 if self._beside else self._seconds["transfer"])}

    # --- Between two lines of the log ---

    def begin_lap(self) -> None:
        """An epoch begins, whose first step is shown."""
        self._lap_began, self._lap_images, self._lap_steps, self._is_first = self.read(), 0, 0, True

    def stepped(self, samples: int, trained: int) -> bool:
        """Count a step; `trained`: samples of this start. Whether a line is due."""
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
        """Return the seconds since the last one, or since the run was made."""
        return time.monotonic() - self._stepped

    def lap(self) -> dict[str, float]:
        """Return, since the last line, the images a second, and the fraction of each phase of the training."""
        before, images = self._lap_began, self._lap_images
        self.begin_lap()
        self._is_first = False
        return speed(before, self._lap_began, images)

    # --- The rest ---

    def evaluated(self) -> None:
        """An epoch has ended, with its evaluation."""
        self._evaluations += 1

    def seconds_left(self, samples: int, evaluations: int) -> Optional[float]:
        """A step takes as long as in the later half of those of this start, an evaluation and its save as long as on average.

        Before the first evaluation that is a guess: a sample takes a third of what it takes in training, which also goes
        backward. The first step says nothing: it prepares what the others use. None: there is only that one.
        """
        done, training = self._marks[-1]
        first = next(mark for mark in self._marks if mark[0] >= done / 2)
        if first == self._marks[-1]:
            return None
        of_a_sample, spent = (training - first[1]) / max(done - first[0], 1), self.read()
        guess = self._test_samples * of_a_sample / 3
        evaluation = (spent["evaluation"] + spent["saving"]) / self._evaluations if self._evaluations else guess
        return max(0.0, samples * of_a_sample + evaluations * evaluation)


def speed(before: Mapping[str, float], now: Mapping[str, float], images: int) -> dict[str, float]:
    """Return, between two readings, the images a second, and the fraction of each phase of the training."""
    training = max(now["training"] - before["training"], 1e-9)
    return {"images_per_s": images / training, **{name: min(1.0, (now[name] - before[name]) / training) for name in TRAINING}}
