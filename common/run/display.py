"""What a person sees of a run: progress, metrics.jsonl, TensorBoard, curves.png, report.txt and report.json.

On a terminal a bar; in a platform's log a key=value line every few seconds, which the platform's regular expressions can read.
"""

import datetime
import io
import json
import os
import shutil
import time
from typing import Any, Optional

import torch

from common import moments, optional, progress
from common.errors import one_line
from common.run import events
from common.run.spare import Spare
from common.run.timing import Window

CURVES_SECONDS = 60  # the least time between two drawings of the curves, which take a moment
REPORT_SECONDS = 180  # and between two of the report; where that takes long, a hundred times as long
MOST_COLUMNS = 30  # of a confusion matrix that is shown whole, and pairs that are shown of a larger one


class Display:
    """Does nothing on every rank but 0 (`active`), so that no caller has to look at its rank."""

    def __init__(
        self, output_dir: str, tensorboard_dir: str, active: bool, writes: bool, print_freq: Optional[int] = None,
    ):  # fmt: skip
        """`print_freq`: a line for so many steps; None: one every few seconds."""
        self._print_freq = print_freq
        self.output_dir, self._tensorboard_dir, self.active = output_dir, tensorboard_dir, active
        self._writes = writes  # files; a trial leaves none
        self._bar = None
        self._events: Optional[str] = None  # TensorBoard's file, once there is something to write
        self._spare = Spare(self.say)
        self._window = Window(print_freq)
        self.scores: Any = None  # of the newest evaluation
        self._scores_written: Any = None
        self.begin()

    def begin(self) -> None:
        """From here on, count the time until the curves and the report are due."""
        self._curves_drawn, self._report_due = time.monotonic(), time.monotonic() + REPORT_SECONDS

    def say(self, text: str) -> None:
        if self.active:
            progress.say(text)

    def take_over(self) -> None:
        """From here on this rank shows the progress and writes the files: the one that did has gone."""
        self.active = self._writes = True

    # --- While training ---

    def start_epoch(self, epoch: int, epochs: int, steps: int, done: int) -> None:
        self._window = Window(self._print_freq)
        if self.active:
            columns, rows = shutil.get_terminal_size((100, 24))  # a container's terminal may report 0 columns
            name = f"epoch {epoch + 1}/{epochs}"
            self._bar = progress.bar(total=steps, initial=done, desc=name, unit="step", ncols=columns, nrows=rows)

    def step(self, samples: int, seconds: tuple[float, ...]) -> bool:
        """Count one step and its seconds in each phase; True when it is time for a line."""
        self._window.add(samples, seconds)
        if self._bar:
            self._bar.update()
        return self._window.due()

    def line(self, place: str, loss: float, lr: float, seconds_left: float) -> dict[str, float]:
        """Show the progress; returns, since the last line, the images a second and the share of each phase of the time."""
        rate, shares = self._window.close()
        split = " ".join(f"{phase}={share:.0%}" for phase, share in shares.items())
        left = datetime.timedelta(seconds=int(seconds_left))
        if self._bar:
            self._bar.set_postfix_str(f"loss {loss:.4f}, {rate:.0f} images/s, {split}, {left} left")
        else:
            self.say(f"{place} loss={loss:.4f} lr={lr:.6f} images_per_s={rate:.0f} left={left} {split}")
        return {"images_per_s": rate, **shares}

    def end_epoch(self) -> None:
        if self._bar:
            self._bar.close()
            self._bar = None

    # --- Files ---

    def scalars(self, step: int, values: dict[str, float]) -> None:
        if self.active:
            moments.announce("scalars", step, values)
        if self._writes and optional.there(optional.EVENTS):
            self._add_events(step, *(events.scalar(step, name, value) for name, value in values.items()))

    def _add_events(self, step, *records):
        if self._events is None:
            self._events = os.path.join(self._tensorboard_dir, events.file_name())
            records = (events.beginning(step), *records)
        self._spare.append(self._events, b"".join(records))

    def metrics(self, history: list[dict]) -> None:
        """metrics.jsonl: the epochs of the checkpoint and those since, none that will be trained again after a restart."""
        path = os.path.join(self.output_dir, "metrics.jsonl")
        if self._writes and (history or os.path.exists(path)):
            self._spare.write(path, b"".join(json.dumps(row).encode() + b"\n" for row in history))

    def state(self, **state: object) -> None:
        """state.json: whether the run is finished, for who has only the exit code 0, which --max_hours gives as well."""
        if self._writes:
            self._spare.write(os.path.join(self.output_dir, "state.json"), json.dumps(state).encode() + b"\n")

    def picture(self, name: str, pixels: torch.Tensor, step: int) -> None:
        if not self._writes:
            return
        if optional.there(optional.EVENTS):
            self._add_events(step, events.image(step, name, pixels))
        self._spare.write(os.path.join(self.output_dir, "examples", f"{name}.png"), png(pixels))

    def curves_are_due(self) -> bool:
        return time.monotonic() - self._curves_drawn >= CURVES_SECONDS

    def curves(self, history: list[dict]) -> None:
        """curves.png: the loss and the metrics of each epoch, one panel each."""
        self._curves_drawn = time.monotonic()
        if not self._writes or not history or not optional.there(optional.FIGURES):
            return
        from matplotlib.figure import Figure

        names = ["train_loss"] + [name for name in history[-1] if name in ("accuracy", "psnr", "ssim")]
        width = 4 * len(names)
        figure = Figure(figsize=(width, 3))
        figure.subplots_adjust(left=0.6 / width, right=1 - 0.15 / width, bottom=0.16, top=0.9, wspace=0.25)  # layouts are slow
        for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names):
            axes.plot([row["epoch"] for row in history], [row.get(name) for row in history], marker="o", markersize=3)
            axes.set(title=name.replace("_", " "), xlabel="epoch")
            axes.grid(alpha=0.3)
        picture = io.BytesIO()
        figure.savefig(picture, dpi=100)
        self._spare.write(os.path.join(self.output_dir, "curves.png"), picture.getvalue())

    def report(self) -> None:
        """report.txt: precision and recall of every class, and which were taken for which; and what is new in the others."""
        if not self._writes or self.scores is None:
            return
        self._write_scores()
        confusion, classes = self.scores.confusion, [one_line(name) for name in self.scores.classes]  # folders have any name
        lines = [table(confusion, classes)] if optional.there(optional.TABLE) else []
        lines += matrix(confusion, classes) if len(classes) <= MOST_COLUMNS else pairs(self.scores)
        self._spare.write(os.path.join(self.output_dir, "report.txt"), "\n".join([*lines, ""]).encode())

    def report_is_due(self) -> bool:
        return self._writes and time.monotonic() >= self._report_due

    def written(self) -> None:
        """What the newest scores say; then the others may make something of what is there."""
        if not self._writes:
            return
        write, began = self._spare.write, time.monotonic()
        self._write_scores()
        moments.announce("written", self.output_dir, lambda name, content: write(os.path.join(self.output_dir, name), content))
        self._report_due = time.monotonic() + max(REPORT_SECONDS, 100 * (time.monotonic() - began))
        self.leave_out(began)

    def _write_scores(self):
        """report.json and examples/mistakes.png."""
        if self.scores is None or self.scores is self._scores_written:
            return
        said, picture = self.scores.said(), self.scores.picture()
        self._spare.write(os.path.join(self.output_dir, "report.json"), json.dumps(said).encode() + b"\n")
        if picture is not None:
            self._spare.write(os.path.join(self.output_dir, "examples", "mistakes.png"), png(picture))
        self._scores_written = self.scores

    def leave_out(self, began: float) -> None:
        """Of the speed, the time since then."""
        self._window.leave_out(time.monotonic() - began)

    def close(self) -> None:
        self.end_epoch()
        self._spare.retry()


def png(pixels: torch.Tensor) -> bytes:
    """Of uint8 (3, H, W)."""
    from PIL import Image

    encoded = io.BytesIO()
    Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(encoded, format="png")
    return encoded.getvalue()


def table(confusion: torch.Tensor, classes: list[str]) -> str:
    """Precision and recall of every class."""
    from sklearn.metrics import classification_report

    places = confusion.nonzero()  # of ten thousand classes all pairs would take gigabytes
    true, predicted = places.T.numpy()
    options: dict = {"labels": range(len(classes)), "target_names": classes, "digits": 4, "zero_division": 0}
    return str(classification_report(true, predicted, sample_weight=confusion[tuple(places.T)].numpy(), **options))


def matrix(confusion: torch.Tensor, classes: list[str]) -> list[str]:
    """The confusion matrix as text: its columns have numbers, and its rows the numbers and whole names."""
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


def pairs(scores: Any) -> list[str]:
    rows = [f"{count:6d}  {one_line(true)} -> {one_line(given)}" for true, given, count in scores.confused(MOST_COLUMNS)]
    return [f"The {len(rows)} most frequent confusions: how often, true class -> predicted class.", "", *rows]
