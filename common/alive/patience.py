"""The time limit for waits that may end by themselves, such as for a store that does not answer (--patience).

A process that waits reports it in the pulse of its rank (heartbeat.py). The parent or watcher then knows that
the rank does not hang, and the log has one line for a wait, however many processes wait.
"""

import os
import random
import threading
import time
from typing import Callable, Optional

from common.alive import heartbeat

VARIABLE = "ANYRANK_PATIENCE"  # set by use(), and inherited by the processes that this one starts
DEFAULT = 300.0
LONGEST_PAUSE = 8  # seconds
WORTH_A_LINE = 5  # seconds that a wait must have lasted for its end to be logged

Say = Callable[[str], object]  # prints a line of the log


def use(seconds: float) -> None:
    """Set the time limit of this process and of those that it starts."""
    os.environ[VARIABLE] = str(seconds)


def limit() -> float:
    """Return the seconds of --patience; 300 in a program without this option."""
    return float(os.environ.get(VARIABLE) or DEFAULT)


class Patience:
    """A time limit for repeated attempts, by any number of threads.

    It counts from the first of the failures in a row.
    """

    def __init__(self, seconds: Optional[float] = None) -> None:
        """`seconds`: the time limit; None: that of --patience, or 300 in a program without this option."""
        self.seconds = limit() if seconds is None else seconds
        self._wait = heartbeat.of_this_process().store
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._first_failure = 0.0
        self._failures = 0

    def set_limit(self, seconds: float, blocks_training: bool) -> None:
        """Set another limit, also for attempts under way.

        `blocks_training`: whether training waits for them.
        """
        self.seconds = seconds
        self._wait = (heartbeat.of_this_process() if blocks_training else heartbeat.Pulse(None)).store

    def succeeded(self, resource: str = "", say: Say = print) -> None:
        """Note a success, which ends a row of failures.

        If there was a wait for `resource`, end it; `say` so if long.
        """
        self._first_failure = 0.0
        self._failures = 0
        if resource and (waited := self._wait.report_end(resource)) > WORTH_A_LINE:
            say(f"warning: {resource} has answered after {waited:.0f} s")

    def failed(self, resource: str, began: float) -> bool:
        """Note a failed attempt that began at `began`, by time.monotonic();
        return whether to make no more attempts."""
        with self._lock:
            self._first_failure = self._first_failure or began
            is_over = self._stop.is_set() or time.monotonic() - self._first_failure > self.seconds
        if is_over:
            self._wait.report_end(resource)
        return is_over

    def pause(self, resource: str, say: Say, message: str) -> None:
        """Sleep before the next attempt, up to 8 s at random, less at first.

        `say` logs `message` at most once for a wait.
        """
        with self._lock:
            self._failures += 1
            until = self._first_failure + self.seconds
            max_pause = min(
                LONGEST_PAUSE, 0.1 * 2 ** min(self._failures, 10), max(0.05, until - time.monotonic())
            )
            if self._wait.report_begin(resource, self._first_failure, until):
                option = " (--patience)" if self.has_option else ""
                say(f"warning: {message}; trying again for {self.seconds:g} s{option}")
        self._stop.wait(random.uniform(0.05, max_pause))

    @property
    def has_option(self) -> bool:
        """Whether the limit is that of the option --patience, which not every program has."""
        return VARIABLE in os.environ and self.seconds == limit()

    def give_up(self) -> None:
        """End every pause, and let failed() return True from now on."""
        self._stop.set()
