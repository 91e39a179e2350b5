"""A bar on a terminal or in a notebook: a name, the steps, and as many words as fit; the others fall away from the right."""

import os
import sys
from collections.abc import Sequence
from typing import Any, Optional

from common import progress

LEAST = 10  # columns of the bar itself
USUAL = os.terminal_size((100, 24))  # of a terminal that reports no columns, as a container's may
FORM = "{desc} |{bar}| {n_fmt}/{total_fmt}"


def open_bar(name: str, total: int, done: int = 0) -> Optional["Bar"]:
    """Return a new bar; None where nobody would see it, as in a file, or without tqdm."""
    drawn = progress.bar(total=total, initial=done, desc=name, leave=False, bar_format=FORM)
    return None if drawn is None else Bar(drawn, name, total)


class Bar:
    def __init__(self, drawn: Any, name: str, total: int):
        self.total = total
        self._drawn = drawn
        self._columns_without_bar = len(f"{name} || {total}/{total}")

    def move_to(self, done: int) -> None:
        self._drawn.update(done - self._drawn.n)

    def say(self, words: Sequence[str]) -> None:
        columns, rows = terminal_size()
        self._drawn.ncols = columns
        self._drawn.nrows = rows
        self._drawn.bar_format = FORM + words_that_fit(words, columns - self._columns_without_bar - LEAST)
        self._drawn.refresh()

    def close(self) -> None:
        self._drawn.close()


def terminal_size() -> os.terminal_size:
    """Return the size of the terminal that bars are drawn on, which is that of stderr."""
    try:
        size = os.get_terminal_size(sys.stderr.fileno())
    except (OSError, ValueError):  # a notebook
        return USUAL
    return size if size.columns else USUAL


def words_that_fit(words: Sequence[str], columns: int) -> str:
    """Return as many of the words, each behind a comma, as fit into the columns; the first one always."""
    text = "".join(f", {word}" for word in words[:1])
    for word in words[1:]:
        if len(text) + len(f", {word}") >= columns:
            break
        text += f", {word}"
    return text
