"""Stop signals: noted when they come, as a handler may interrupt any code,
and obeyed between two batches or during a wait."""

import signal
from collections.abc import Iterable, Iterator
from typing import Any, Callable, Optional

from common.errors import STOP_SIGNALS


class Interrupted(BaseException):
    """A stop signal has ended a wait.

    A BaseException, because code that reads samples catches every Exception.
    """


class Stops:
    """The stop signals of a process: which one came first, and whether it may end the process now."""

    def __init__(self):
        self.noted = 0  # the first signal that came; 0: none
        self.may_end = False  # whether this process may save and end now, without the other ranks
        self._previous_handlers: dict[int, Any] = {}  # {signal: its handler before listen()}
        self._is_waiting = False
        self._obey: Callable[[int], object] = lambda number: None
        self._counts: Optional[Callable[[], object]] = None

    def restore_handlers(self) -> None:
        """Restore the earlier handlers, and forget a signal that came: a notebook outlives its run."""
        self.noted = 0
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)
        self._previous_handlers.clear()

    def listen(self, obey: Callable[[int], object], counts: Optional[Callable[[], object]] = None) -> None:
        """Handle the stop signals from here on.

        `obey(number)` saves and ends the process; `counts()` returns whether a signal that has come is meant
        for the run; None: each one is."""
        self._obey = obey
        self._counts = counts
        for number in STOP_SIGNALS:
            previous = signal.signal(number, self.note)
            if previous not in (None, self.note):
                self._previous_handlers[number] = previous

    def note(self, number: int, _frame: object) -> None:
        """Note the first stop signal that is meant for the run;
        raise Interrupted in a wait if this process may end alone."""
        if self._counts and not self._counts():
            return
        self.noted = self.noted or number
        self.interrupt()

    def interrupt(self) -> None:
        """Raise Interrupted in a wait that a signal ends.

        Code that polls calls it too, as others may have caught the first.
        """
        if self._is_waiting and self._due():
            raise Interrupted

    def wait_for(self, work: Callable[[], Any]) -> Any:
        """Return work(), which may take long.

        If this process may end alone, a signal before or during it ends the process.
        """
        try:
            self._is_waiting = True
            try:
                if not self._due():
                    return work()
            finally:
                self._is_waiting = False
        except BaseException as error:
            # Interrupted, or an error that the interrupted code raised because of it
            self._is_waiting = False
            if not self._due() or isinstance(error, SystemExit):
                raise
        self._obey(self.noted)

    def each(self, batches: Iterable) -> Iterator:
        """Yield the batches. While it waits for one, a stop signal may end this process, as in wait_for()."""
        iterator = iter(batches)
        while (batch := self.wait_for(lambda: next(iterator, None))) is not None:
            yield batch

    def _due(self):
        return self.noted and self.may_end


STOPS = Stops()  # of this process
