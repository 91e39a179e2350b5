"""A bar on a terminal or in a notebook: a name, the steps, and as many words as fit;
the others fall away from the right."""

import os
import sys
from collections.abc import Sequence
from typing import Any, Optional

from common import progress

LEAST_COLUMNS = 10  # columns of the bar itself
DEFAULT_SIZE = os.terminal_size((100, 24))  # of a terminal that reports no columns, as a container's may
FORMAT = "{desc} |{bar}| {n_fmt}/{total_fmt}"


def open_bar(name: str, total: int, done: int = 0) -> Optional["Bar"]:
    """Return a new bar; None where nobody would see it, as in a file, or without tqdm."""
    tqdm_bar = progress.bar(total=total, initial=done, desc=name, leave=False, bar_format=FORMAT)
    return None if tqdm_bar is None else Bar(tqdm_bar, name, total)


class Bar:
    def __init__(self, tqdm_bar: Any, name: str, total: int):
        self.total = total
        self._tqdm_bar = tqdm_bar
        self._columns_without_bar = len(f"{name} || {total}/{total}")

    def move_to(self, done: int) -> None:
        self._tqdm_bar.update(done - self._tqdm_bar.n)

    def show_words(self, words: Sequence[str]) -> None:
        """Show as many of these words behind the bar as fit on the terminal."""
        columns, rows = terminal_size()
        self._tqdm_bar.ncols = columns
        self._tqdm_bar.nrows = rows
        self._tqdm_bar.bar_format = FORMAT + words_that_fit(
            words, columns - self._columns_without_bar - LEAST_COLUMNS
        )
        self._tqdm_bar.refresh()

    def close(self) -> None:
        self._tqdm_bar.close()


def terminal_size() -> os.terminal_size:
    """Return the size of the terminal that bars are drawn on, which is that of stderr."""
    try:
        size = os.get_terminal_size(sys.stderr.fileno())
    except (OSError, ValueError):  # a notebook
        return DEFAULT_SIZE
    return size if size.columns else DEFAULT_SIZE


def words_that_fit(words: Sequence[str], columns: int) -> str:
    """Return as many of the words, each behind a comma, as fit into the columns; the first one always."""
    text = "".join(f", {word}" for word in words[:1])
    for word in words[1:]:
        if len(text) + len(f", {word}") >= columns:
            break
        text += f", {word}"
    return text
