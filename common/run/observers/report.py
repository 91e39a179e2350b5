"""Write the newest evaluation to report.json, report.txt and examples/mistakes.png,
and decide when to renew report.html."""

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
# classes of the largest confusion matrix that is shown whole; of larger ones, so many pairs are shown
MOST_COLUMNS = 30


class Report(Observer):
    def __init__(self, args: argparse.Namespace, _device: torch.device, side_files: SideFiles):
        self._folder = args.output_dir
        self._side_files = side_files
        self._page_due_at = 0.0
        self._scores: Optional[Scores] = None
        self._epoch = 0  # in which the scores were measured
        self._written_scores: Optional[Scores] = None  # the scores that are in the files

    def began(self, _facts: Facts, **_: object) -> None:
        self._page_due_at = self._page_due_at or time.monotonic() + REPORT_SECONDS

    def epoch_ended(self, facts: Facts, scores: Optional[Scores], **_: object) -> None:
        if scores is not None:
            self._scores = scores
            self._epoch = facts.position.epoch
            if facts.plan.limit(facts.position):
                # Before the last checkpoint: a start after that does not evaluate again.
                self.write_text(scores)

    def log_due(self, _facts: Facts, **_: object) -> None:
        self._write_page_if_due()

    def saved(self, _facts: Facts, **_: object) -> None:
        self._write_page_if_due()

    def _write_page_if_due(self):
        if time.monotonic() >= self._page_due_at:
            self.write_page()

    def ended(self, _facts: Facts) -> None:
        self.write_page()

    def failed(self, _facts: Facts, **_: object) -> None:
        self.write_page()

    def write_text(self, scores: Scores) -> None:
        """If this rank writes, write report.json, and confusions and (with scikit-learn) precision and recall
        to report.txt."""
        if not self._side_files.writes:
            return
        self._write_new_scores()
        confusion = scores.confusion
        classes = [one_line(name) for name in scores.classes]  # folders have any name
        lines = []
        if packages.is_available(packages.TABLE):
            lines.append(table(confusion, classes))
        if len(classes) <= MOST_COLUMNS:
            lines += matrix(confusion, classes)
        else:
            lines += pairs(scores)
        self._side_files.write("report.txt", "\n".join([*lines, ""]).encode())

    def write_page(self) -> None:
        """If this rank writes, write new scores to report.json, and let a listener make report.html."""
        if not self._side_files.writes:
            return
        began_at = time.monotonic()
        self._write_new_scores()
        moments.announce("written", self._folder, self._side_files.write)
        now = time.monotonic()
        self._page_due_at = now + max(REPORT_SECONDS, 100 * (now - began_at))

    def _write_new_scores(self) -> None:
        """Write report.json and examples/mistakes.png if there are scores that they do not have yet."""
        if self._scores is None or self._scores is self._written_scores:
            return
        content = self._scores.as_json()
        picture = self._scores.picture()
        self._side_files.write("report.json", json.dumps({"epoch": self._epoch, **content}).encode() + b"\n")
        if picture is not None:
            self._side_files.write(os.path.join("examples", "mistakes.png"), png(picture))
        self._written_scores = self._scores


def table(confusion: torch.Tensor, classes: list[str]) -> str:
    """Return the precision and recall of every class as text."""
    from sklearn.metrics import classification_report

    places = confusion.nonzero()  # of ten thousand classes all pairs would take gigabytes
    true, predicted = places.T.numpy()
    options: dict = {"labels": range(len(classes)), "target_names": classes, "digits": 4, "zero_division": 0}
    return str(
        classification_report(true, predicted, sample_weight=confusion[tuple(places.T)].numpy(), **options)
    )


def matrix(confusion: torch.Tensor, classes: list[str]) -> list[str]:
    """Return the lines of the confusion matrix: columns are headed by the numbers of the classes,
    rows by number and name."""
    count_width = max(5, len(str(int(confusion.max()))) + 1)
    name_width = max(map(len, classes))
    title = "Confusion matrix: rows are the true class, columns the predicted one, by its number."
    header = " " * (name_width + 5) + "".join(f"{number:>{count_width}}" for number in range(len(classes)))
    counts = ["".join(f"{count:{count_width}d}" for count in row) for row in confusion.tolist()]
    return [
        title,
        "",
        header,
        *(
            f"{number:>3} {label:<{name_width}} {row}"
            for number, (label, row) in enumerate(zip(classes, counts))
        ),
    ]


def pairs(scores: Scores) -> list[str]:
    """Return lines with the most frequent confusions, in place of a matrix that would be too wide."""
    rows = [
        f"{count:6d}  {one_line(true)} -> {one_line(predicted)}"
        for true, predicted, count in scores.confused(MOST_COLUMNS)
    ]
    return [f"The {len(rows)} most frequent confusions: how often, true class -> predicted class.", "", *rows]
