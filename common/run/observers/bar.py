"""A bar on a terminal or in a notebook: a name, the steps, and as many words as fit; the others fall away from the right."""

import shutil
from collections.abc import Sequence
from typing import Any, Optional

from common import progress

LEAST = 10  # columns of the bar itself
USUAL = (100, 24)  # columns and rows of a terminal that reports 0 of them, as a container's may


def shown(name: str, total: int, done: int = 0) -> Optional["Bar"]:
    """Return a new bar; None where nobody would see it, as in a file, or without tqdm."""
    made = progress.bar(total=total, initial=done, desc=name, leave=False, bar_format="{desc} |{bar}| {n_fmt}/{total_fmt}")
    return Bar(made, name, total) if made else None


class Bar:
    def __init__(self, made: Any, name: str, total: int):
        self._made = made
        self._taken = len(f"{name} || {total}/{total}")  # columns, without the bar itself

    def update(self) -> None:
        self._made.update()

    def say(self, words: Sequence[str]) -> None:
        columns, rows = shutil.get_terminal_size(USUAL)
        fitting = fit(words, columns - self._taken - LEAST)
        self._made.ncols, self._made.nrows = columns, rows
        self._made.bar_format = "{desc} |{bar}| {n_fmt}/{total_fmt}" + fitting
        self._made.refresh()

    def close(self) -> None:
        self._made.close()


def fit(words: Sequence[str], columns: int) -> str:
    """Return as many of the words, each behind a comma, as fit into the columns; the first one always."""
    text = "".join(f", {word}" for word in words[:1])
    for word in words[1:]:
        if len(text) + len(f", {word}") >= columns:
            break
        text += f", {word}"
    return text
