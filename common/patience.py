"""The time limit for waits that may end by themselves, such as for a store that does not answer (--patience).

A process that waits notes this in the pulse of its rank (heartbeat.py). The parent or watcher then knows that the rank does not
hang, and the log has one line for a wait, however many processes wait.
"""

import os
import random
import threading
import time
from typing import Callable, Optional

from common import heartbeat

VARIABLE = "ANYRANK_PATIENCE"  # set by use(), for the processes that this one starts, too
DEFAULT = 300.0
LONGEST_PAUSE = 8
WORTH_A_LINE = 5  # seconds of a wait that is over

Say = Callable[[str], object]  # prints a line of the log


def use(seconds: float) -> None:
    os.environ[VARIABLE] = str(seconds)


def limit() -> float:
    """How many seconds a store or a disk is waited for."""
    return float(os.environ.get(VARIABLE) or DEFAULT)


class Patience:
    """The time limit for repeated attempts, of any thread. It counts from the first of the attempts that failed in a row."""

    def __init__(self, seconds: Optional[float] = None) -> None:
        """`seconds`: unset, limit()."""
        self.seconds = limit() if seconds is None else seconds
        self._wait = heartbeat.of_this_process().store
        self._stop, self._lock = threading.Event(), threading.Lock()
        self._since, self._failures = 0.0, 0

    def change(self, seconds: float, in_the_way: bool) -> None:
        """Another limit, also for what is being tried already. `in_the_way`: whether the training waits, too."""
        self.seconds = seconds
        self._wait = (heartbeat.of_this_process() if in_the_way else heartbeat.Pulse(None)).store

    def good(self, what: str = "", say: Say = print) -> None:
        """There was a good answer, of `what` if it may have been waited for."""
        self._since, self._failures = 0.0, 0
        if what and (waited := self._wait.ends(what)) > WORTH_A_LINE:
            say(f"warning: {what} has answered after {waited:.0f} s")

    def is_over(self, what: str, began: float) -> bool:
        """Return whether it is over, after an attempt that began then and has failed."""
        with self._lock:
            self._since = self._since or began
            over = self._stop.is_set() or time.monotonic() - self._since > self.seconds
        if over:
            self._wait.ends(what)
        return over

    def pause(self, what: str, say: Say, line: str) -> None:
        """Wait before the next attempt, for a random time, which grows with each failure in a row. `line` is said once."""
        with self._lock:
            self._failures += 1
            until = self._since + self.seconds
            most = min(LONGEST_PAUSE, 0.1 * 2 ** min(self._failures, 10), max(0.05, until - time.monotonic()))
            if self._wait.begins(what, self._since, until):
                say(f"warning: {line}; trying again for {self.seconds:g} s{' (--patience)' * self.has_option}")
        self._stop.wait(random.uniform(0.05, most))

    @property
    def has_option(self) -> bool:
        """Whether this program has an option for the limit, and the limit is that."""
        return VARIABLE in os.environ and self.seconds == limit()

    def give_up(self) -> None:
        """End every pause, and ask no more."""
        self._stop.set()
