"""Stop signals: noted when they come, and obeyed between two batches or while the process waits for a batch.

The handler may interrupt any code, so it saves nothing. A wait may never end, so during a wait the handler raises Interrupted.
"""

import signal
from collections.abc import Iterable, Iterator
from typing import Any, Callable, Optional

from common.errors import STOP_SIGNALS


class Interrupted(BaseException):
    """A stop signal has ended a wait. A BaseException, because code that reads samples catches every Exception."""


class Stops:
    def __init__(self):
        self.noted = 0  # the signal
        self.may_end = False  # whether this process may save and end now, without those that train with it
        self._waits = False
        self._obey: Any = None
        self._counts: Any = None

    def listen(self, obey: Callable[[int], Any], counts: Optional[Callable[[], Any]] = None) -> None:
        """Listen to the signals from here on. `obey(number)` saves and ends the process; `counts()` says whether a
        signal is meant for it."""
        self._obey, self._counts = obey, counts
        for number in STOP_SIGNALS:
            signal.signal(number, self.note)

    def note(self, number: int, _frame: Any) -> None:
        """Handle a signal. The first signal is the one that is obeyed."""
        if self._counts and not self._counts():
            return
        self.noted = self.noted or number
        if self._waits and self.may_end:
            raise Interrupted

    def wait_for(self, work: Callable[[], Any]) -> Any:
        """work(), which may take long: a signal that comes before or meanwhile is obeyed, where this process may end alone."""
        try:
            self._waits = True
            try:
                if not self._due():
                    return work()
            finally:
                self._waits = False
        except BaseException as error:  # Interrupted, or what the code that was in its way has made of it
            self._waits = False
            if not self._due() or isinstance(error, SystemExit):
                raise
        self._obey(self.noted)

    def each(self, batches: Iterable) -> Iterator:
        """Yield the same batches, each of which is waited for in this way."""
        coming = iter(batches)
        while (batch := self.wait_for(lambda: next(coming, None))) is not None:
            yield batch

    def _due(self):
        return self.noted and self.may_end


STOPS = Stops()  # those of this process
