"""The progress of long work: a bar on a terminal or in a notebook, a line every ten seconds in a log,
a message to waiters."""

import builtins
import importlib.util
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, Callable, Optional

from common import moments, packages
from common.errors import one_line
from common.files import MIB

LINE_SECONDS = 10  # between two lines in a log
TELL_SECONDS = 1  # between two calls of `tell`

Tell = Callable[[str, int], None]


class Progress:
    """Counts things, bytes, or both.

    Any number of threads may add to it; as a context manager it closes its bar at the end.

        Progress("indexing /data", total=3000, unit="images")
        Progress("fetching s3://bucket/data", total=30, unit="objects", total_bytes=4000000)
        Progress("fetching https://host/file")  # bytes, of an unknown total

    `tell(text, number)` is called at most once a second; `number` counts the things and bytes, so it changes
    with any progress.
    """

    def __init__(
        self,
        title: str,
        total: Optional[int] = None,
        unit: str = "",
        total_bytes: Optional[int] = None,
        tell: Optional[Tell] = None,
    ) -> None:
        self._title = one_line(title)
        self._total = total
        self._unit = unit
        self._total_bytes = total_bytes
        self._tell = tell
        self._things = self._bytes = self._old_bytes = 0
        self._began = self._reported_at = self._printed_at = time.monotonic()
        self._lock = threading.Lock()
        # Things may differ in size, so the bytes show the progress better if their total is known.
        self._by_bytes = not unit or total_bytes is not None
        if self._by_bytes:
            options = {"total": total_bytes, "unit": "B", "unit_scale": True, "unit_divisor": 1024}
        else:
            options = {"total": total, "unit": f" {unit}", "unit_scale": False, "unit_divisor": 1000}
        self._bar = bar(desc=self._title[:40], **options)

    def add(self, things: int = 0, size: int = 0, old: bool = False) -> None:
        """Count more things and bytes as done.

        `old`: an earlier start did them, so the bytes are left out of the speed.
        """
        with self._lock:
            self._things += things
            self._bytes += size
            if old:
                self._old_bytes += size
            now = time.monotonic()
            if self._bar is not None:
                self._bar.set_postfix_str(
                    self._counted_things() if self._by_bytes else self._counted_bytes(), refresh=False
                )
                self._bar.update(size if self._by_bytes else things)
            elif now - self._printed_at >= LINE_SECONDS:
                self._printed_at = now
                print(self.text(), flush=True)
            if self._tell and now - self._reported_at >= TELL_SECONDS:
                self._reported_at = now
                self._tell(self.text(), self._things + self._bytes)

    def text(self) -> str:
        """Return a line for the log: what is done and how fast;
        with a known total also the total and the time left."""
        words = [self._counted_things(), self._counted_bytes(), *self._speed_and_time_left()]
        return f"{self._title}: {', '.join(filter(None, words))}"

    def describe(self) -> str:
        """Return a text with the bytes, the seconds and the speed, for a line after the end."""
        seconds = self._seconds()
        return (
            f"{self._bytes / MIB:.1f} MiB in {seconds:.1f} s, "
            f"{(self._bytes - self._old_bytes) / MIB / seconds:.1f} MiB/s"
        )

    def _counted_things(self) -> str:
        return f"{_done_of(self._things, self._total)} {self._unit}" if self._unit else ""

    def _counted_bytes(self) -> str:
        total = None if self._total_bytes is None else self._total_bytes // MIB
        return f"{_done_of(self._bytes // MIB, total)} MiB" if self._bytes or self._by_bytes else ""

    def _speed_and_time_left(self) -> list[str]:
        byte_speed = (self._bytes - self._old_bytes) / self._seconds()
        speed = self._things / self._seconds()
        speed_text = (
            f"{byte_speed / MIB:.1f} MiB/s"
            if self._bytes or self._by_bytes
            else f"{speed:.0f} {self._unit}/s"
        )
        done, total = (self._bytes, self._total_bytes) if self._by_bytes else (self._things, self._total)
        speed = byte_speed if self._by_bytes else speed
        if total is None or speed <= 0:
            return [speed_text]
        return [speed_text, f"{(total - done) / speed:.0f} s left"]

    def _seconds(self) -> float:
        return max(time.monotonic() - self._began, 1e-3)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Waiting:
    """A wait, of which a log shows a line every ten seconds."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._printed_at = self._began

    @property
    def seconds(self) -> float:
        """The seconds since the wait began, at least 0.001."""
        return max(time.monotonic() - self._began, 1e-3)

    def claim_line(self) -> bool:
        """Return whether to print a line now: True at most once in ten seconds."""
        now = time.monotonic()
        is_due = now - self._printed_at >= LINE_SECONDS
        if is_due:
            self._printed_at = now
        return is_due


def _done_of(done: int, total: Optional[int]) -> str:
    return str(done) if total is None else f"{done} of {total}"


def in_notebook() -> bool:
    """Whether this process runs the cells of a notebook, or the lines or scripts of IPython on a terminal."""
    return hasattr(builtins, "__IPYTHON__")


def ipython() -> Any:
    """Return IPython's shell in this process."""
    return sys.modules["IPython"].get_ipython()


def bar(**options: Any) -> Any:
    """Return a tqdm bar with these options; None if nobody would see it or tqdm is missing."""
    is_visible = sys.stderr.isatty() or in_notebook()
    if not is_visible or not packages.is_available(packages.BAR):
        return None
    has_widgets = in_notebook() and importlib.util.find_spec("ipywidgets") is not None
    module: Any = importlib.import_module("tqdm.auto") if has_widgets else sys.modules["tqdm"]
    return module.tqdm(**options)


def with_bar(things: Sequence, title: str, unit: str) -> Iterator:
    """Yield the things.

    On a terminal, tqdm (if it is installed) shows a bar, which is removed after the last of them.
    """
    progress_bar = bar(total=len(things), desc=title, unit=unit, leave=False)
    for thing in things:
        yield thing
        if progress_bar is not None:
            progress_bar.update()
    if progress_bar is not None:
        progress_bar.close()


counted = with_bar  # its name in copies of jobs/speedrun.py of 0.3.0


def say(text: str) -> None:
    """Print one line, with secrets masked and control characters escaped, above a bar if any;
    tell listeners (moments.py)."""
    line = coloured(one_line(text))
    if "tqdm" in sys.modules:
        sys.modules["tqdm"].tqdm.write(line, file=sys.stdout)
    else:
        print(line)
    sys.stdout.flush()
    moments.announce("said", text)


def warn(text: str) -> None:
    """Print a warning as one line, and tell listeners (moments.py).

    For loader processes, as it does not look for a bar.
    """
    print(coloured(one_line(f"warning: {text}")), flush=True)
    moments.announce("said", f"warning: {text}")


COLOURS = {"warning: ": 33, "advice: ": 33, "done: ": 32}  # as a terminal numbers them: yellow, green


def coloured(line: str) -> str:
    """Return the line, on a terminal in colour if it begins with warning,
    advice or done (not with NO_COLOR or TERM=dumb)."""
    colour = next((number for prefix, number in COLOURS.items() if line.startswith(prefix)), None)
    if (
        not colour
        or os.environ.get("NO_COLOR")
        or os.environ.get("TERM") == "dumb"
        or not sys.stdout.isatty()
    ):
        return line
    return f"\033[{colour}m{line}\033[0m"
