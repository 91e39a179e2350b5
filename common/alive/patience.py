"""The time limit for waits that may end by themselves, such as for a store that does not answer (--patience).

A process that waits reports it in the pulse of its rank (heartbeat.py). The parent or watcher then knows that the rank does not
hang, and the log has one line for a wait, however many processes wait.
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
    os.environ[VARIABLE] = str(seconds)


def limit() -> float:
    return float(os.environ.get(VARIABLE) or DEFAULT)


class Patience:
    """A time limit for repeated attempts, by any number of threads. It counts from the first of the failures in a row."""

    def __init__(self, seconds: Optional[float] = None) -> None:
        """`seconds`: the time limit; None: that of --patience, or 300 in a program without this option."""
        self.seconds = limit() if seconds is None else seconds
        self._wait = heartbeat.of_this_process().store
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._since = 0.0
        self._failures = 0

    def set_limit(self, seconds: float, in_the_way: bool) -> None:
        """Set another limit, also for attempts under way. `in_the_way`: training waits for them, so the watcher must know."""
        self.seconds = seconds
        self._wait = (heartbeat.of_this_process() if in_the_way else heartbeat.Pulse(None)).store

    def succeeded(self, what: str = "", say: Say = print) -> None:
        """Note a success, which ends a row of failures. If there was a wait for `what`, end it, and `say` so if it was long."""
        self._since = 0.0
        self._failures = 0
        if what and (waited := self._wait.report_end(what)) > WORTH_A_LINE:
            say(f"warning: {what} has answered after {waited:.0f} s")

    def failed(self, what: str, began: float) -> bool:
        """Note a failed attempt that began at `began`, by time.monotonic(); return whether to make no more attempts."""
        with self._lock:
            self._since = self._since or began
            over = self._stop.is_set() or time.monotonic() - self._since > self.seconds
        if over:
            self._wait.report_end(what)
        return over

    def pause(self, what: str, say: Say, line: str) -> None:
        """Sleep before the next attempt, up to 8 s at random, less at first. `say` logs `line` at most once for a wait."""
        with self._lock:
            self._failures += 1
            until = self._since + self.seconds
            most = min(LONGEST_PAUSE, 0.1 * 2 ** min(self._failures, 10), max(0.05, until - time.monotonic()))
            if self._wait.report_begin(what, self._since, until):
                say(f"warning: {line}; trying again for {self.seconds:g} s{' (--patience)' * self.has_option}")
        self._stop.wait(random.uniform(0.05, most))

    @property
    def has_option(self) -> bool:
        """Whether the limit is that of the option --patience, which not every program has."""
        return VARIABLE in os.environ and self.seconds == limit()

    def give_up(self) -> None:
        """End every pause, and let failed() return True from now on."""
        self._stop.set()
