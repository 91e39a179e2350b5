"""Write the newest evaluation to report.json, report.txt and examples/mistakes.png, and decide when to renew report.html."""

import argparse
import json
import os
import time
from typing import Optional

import torch

from common import moments, packages
from common.errors import one_line
from common.run.observers.files import png
from common.run.observers.observer import Facts, Observer
from common.run.scores import Scores
from common.run.side_files import SideFiles

REPORT_SECONDS = 180  # the least time between two pages; where one takes long, a hundred times as long
MOST_COLUMNS = 30  # classes of the largest confusion matrix that is shown whole; of larger ones, so many pairs are shown


class Report(Observer):
    def __init__(self, args: argparse.Namespace, _device: torch.device, side_files: SideFiles):
        self._folder = args.output_dir
        self._side_files = side_files
        self._due = 0.0
        self._scores: Optional[Scores] = None
        self._epoch = 0  # in which the scores were measured
        self._written: Optional[Scores] = None  # the scores that are in the files

    def began(self, _facts: Facts, **_: object) -> None:
        self._due = self._due or time.monotonic() + REPORT_SECONDS

    def epoch_ended(self, facts: Facts, scores: Optional[Scores], **_: object) -> None:
        if scores is not None:
            self._scores = scores
            self._epoch = facts.position.epoch
            if facts.plan.limit(facts.position):  # before the checkpoint, after which a start does not evaluate again
                self.text(scores)

    def line(self, _facts: Facts, **_: object) -> None:
        self._page_if_due()

    def saved(self, _facts: Facts, **_: object) -> None:
        self._page_if_due()

    def _page_if_due(self):
        if time.monotonic() >= self._due:
            self.page()

    def ended(self, _facts: Facts) -> None:
        self.page()

    def failed(self, _facts: Facts, **_: object) -> None:
        self.page()

    def text(self, scores: Scores) -> None:
        """If this rank writes, write report.json, and confusions and (with scikit-learn) precision and recall to report.txt."""
        if not self._side_files.writes:
            return
        self._write_scores()
        confusion = scores.confusion
        classes = [one_line(name) for name in scores.classes]  # folders have any name
        lines = [table(confusion, classes)] if packages.there(packages.TABLE) else []
        lines += matrix(confusion, classes) if len(classes) <= MOST_COLUMNS else pairs(scores)
        self._side_files.write("report.txt", "\n".join([*lines, ""]).encode())

    def page(self) -> None:
        """If this rank writes, write report.json if its scores are new, and announce that for report.html to be made."""
        if not self._side_files.writes:
            return
        began = time.monotonic()
        self._write_scores()
        moments.announce("written", self._folder, self._side_files.write)
        now = time.monotonic()
        self._due = now + max(REPORT_SECONDS, 100 * (now - began))

    def _write_scores(self):
        if self._scores is None or self._scores is self._written:
            return
        said = self._scores.as_json()
        picture = self._scores.picture()
        self._side_files.write("report.json", json.dumps({"epoch": self._epoch, **said}).encode() + b"\n")
        if picture is not None:
            self._side_files.write(os.path.join("examples", "mistakes.png"), png(picture))
        self._written = self._scores


def table(confusion: torch.Tensor, classes: list[str]) -> str:
    """Return the precision and recall of every class as text."""
    from sklearn.metrics import classification_report

    places = confusion.nonzero()  # of ten thousand classes all pairs would take gigabytes
    true, predicted = places.T.numpy()
    options: dict = {"labels": range(len(classes)), "target_names": classes, "digits": 4, "zero_division": 0}
    return str(classification_report(true, predicted, sample_weight=confusion[tuple(places.T)].numpy(), **options))


def matrix(confusion: torch.Tensor, classes: list[str]) -> list[str]:
    """Return the lines of the confusion matrix: columns are headed by the numbers of the classes, rows by number and name."""
    widest = max(5, len(str(int(confusion.max()))) + 1)
    name = max(map(len, classes))
    title = "Confusion matrix: rows are the true class, columns the predicted one, by its number."
    header = " " * (name + 5) + "".join(f"{number:>{widest}}" for number in range(len(classes)))
    counts = ["".join(f"{count:{widest}d}" for count in row) for row in confusion.tolist()]
    return [
        title,
        "",
        header,
        *(f"{number:>3} {label:<{name}} {row}" for number, (label, row) in enumerate(zip(classes, counts))),
    ]


def pairs(scores: Scores) -> list[str]:
    rows = [f"{count:6d}  {one_line(true)} -> {one_line(given)}" for true, given, count in scores.confused(MOST_COLUMNS)]
    return [f"The {len(rows)} most frequent confusions: how often, true class -> predicted class.", "", *rows]
