"""metrics.jsonl, state.json, curves.png and examples/: the epochs of a run as numbers and as pictures."""

import argparse
import io
import json
import os
import time
from collections.abc import Mapping

import torch

from common import packages
from common.run.observers.observer import Facts, Observer
from common.run.side_files import SideFiles

DRAWN_ALONE = ("accuracy", "psnr", "ssim")  # metrics with a figure of their own
CURVES_SECONDS = 60  # the least time between two drawings of the curves, which take a moment


class Files(Observer):
    def __init__(self, args: argparse.Namespace, _device: torch.device, side_files: SideFiles):
        self._folder = args.output_dir
        self._epochs = args.epochs
        self._side_files = side_files

    def began(self, facts: Facts, **_: object) -> None:
        self._curves_drawn_at = time.monotonic()
        self._write_metrics(facts)
        self._write_state(facts)

    def epoch_ended(self, facts: Facts, is_complete: bool, **_: object) -> None:
        if is_complete:
            self._write_metrics(facts)

    def saved(self, facts: Facts, **_: object) -> None:
        if time.monotonic() - self._curves_drawn_at >= CURVES_SECONDS:
            self.draw_curves(facts)

    def ended(self, facts: Facts) -> None:
        self.draw_curves(facts)
        self._write_state(facts)

    def picture(self, _facts: Facts, name: str, pixels: torch.Tensor, **_: object) -> None:
        self._side_files.write(os.path.join("examples", f"{name}.png"), png(pixels))

    def _write_metrics(self, facts: Facts) -> None:
        """Write metrics.jsonl, a row per epoch of the run's history.

        An empty history is written only over an existing file.
        """
        history = facts.results.history
        if history or os.path.exists(os.path.join(self._folder, "metrics.jsonl")):
            self._side_files.write(
                "metrics.jsonl", b"".join(json.dumps(row).encode() + b"\n" for row in history)
            )

    def _write_state(self, facts: Facts) -> None:
        """Write to state.json whether the run is finished.

        Exit code 0 does not tell: --max_hours ends with 0 as well.
        """
        state = {
            "finished": facts.plan.is_finished(facts.position),
            "epoch": facts.position.epoch,
            "epochs": self._epochs,
        }
        self._side_files.write("state.json", json.dumps(state).encode() + b"\n")

    def draw_curves(self, facts: Facts) -> None:
        """Draw the losses and, if measured, accuracy, PSNR and SSIM over the epochs,
        if this rank writes and has matplotlib."""
        self._curves_drawn_at = time.monotonic()
        history = facts.results.history
        if not self._side_files.writes or not history or not packages.is_available(packages.FIGURES):
            return
        from matplotlib.figure import Figure

        panels = panels_of(history[-1])
        width = 4 * len(panels)
        figure = Figure(figsize=(width, 3))
        # layouts are slow
        figure.subplots_adjust(left=0.6 / width, right=1 - 0.15 / width, bottom=0.16, top=0.9, wspace=0.25)
        epochs = [row["epoch"] for row in history]
        for axes, (title, lines) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items()):
            for name, label in lines.items():
                axes.plot(epochs, [row.get(name) for row in history], marker="o", markersize=3, label=label)
            axes.set(title=title, xlabel="epoch")
            axes.grid(alpha=0.3)
            if len(lines) > 1:
                axes.legend()
        picture = io.BytesIO()
        figure.savefig(picture, dpi=100)
        self._side_files.write("curves.png", picture.getvalue())


def panels_of(metrics: Mapping[str, float]) -> dict[str, dict[str, str]]:
    """Return {title of a figure: {metric: label of its line}} for the metrics that are drawn."""
    panels = {
        "loss": {"train_loss": "training", "loss": "validation"},
        **{name: {name: name} for name in DRAWN_ALONE},
    }
    drawn = {}
    for title, lines in panels.items():
        measured = {name: label for name, label in lines.items() if name in metrics}
        if measured:
            drawn[title] = measured
    return drawn


def png(pixels: torch.Tensor) -> bytes:
    """Encode pixels, uint8 (3, H, W), as PNG."""
    from PIL import Image

    encoded = io.BytesIO()
    Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(encoded, format="png")
    return encoded.getvalue()
