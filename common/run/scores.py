"""The scores of a network: the job's `evaluate` adds logits, labels and sample ids;
the scores are read afterwards.

# loader.pixels makes pictures of mistakes, and may be left out. A fourth argument, loader.file_of, names
# their files.
scores = Scores(classes, device, loader.pixels)
for images, labels in loader:
    scores.add(model(images), labels, loader.ids, images)
scores.all_reduce()  # every rank had its own part of the samples
scores.accuracy, scores.top5, scores.loss, scores.confusion, scores.per_class(), scores.worst, scores.mistakes
"""

import argparse
import dataclasses
import functools
import math
from typing import Any, Callable, Optional

import torch

from common import devices
from common.alive.stops import STOPS
from common.chance import NOTHING_IS_LEARNT, accuracy_by_chance
from common.ranks import collectives

KEPT_WORST = 32  # samples with the highest losses that are kept, of each rank and of all
SHOWN = 24  # pictures of the worst mistakes, and as many of the surest
SIDE = 64  # their width and height
KINDS = ("worst", "surest")
WHITE = 255
LISTED = 1000  # mistakes that are listed: those with the highest losses


@dataclasses.dataclass(frozen=True)
class Mistake:
    """A sample whose class was not recognised."""

    id: int
    label: int
    predicted: int
    loss: float
    confidence: float  # the softmax of the predicted class
    picture: Optional[torch.Tensor]  # uint8 (3, SIDE, SIDE)


class Scores:
    """Counts of the confusion are integers, other sums float64 if the device has it. add() does not wait for
    the device."""

    def __init__(
        self, classes: list[str], device: torch.device, pixels: Optional[Callable] = None,
        file_of: Optional[Callable[[int], str]] = None,
    ):  # fmt: skip
        """`pixels`: makes uint8 (N, 3, H, W) of the network's input.

        `file_of`: returns the name of a sample's file by id."""
        self.classes = classes
        self._pixels = pixels
        self._file_of = file_of
        self._counts = torch.zeros(len(classes) ** 2, dtype=torch.int64, device=device)
        # right, among the best five, loss
        self._sums = torch.zeros(3, dtype=devices.widest(device), device=device)
        self._batches = []  # (losses, ids, labels, predicted, confidences)
        self._highest = [_Highest(pixels) for _ in KINDS]
        self.worst: list[tuple] = []  # (loss, sample id, label, predicted), the worst first
        # the last without pictures
        self.mistakes: dict[str, list[Mistake]] = {kind: [] for kind in (*KINDS, "all")}

    def add(self, logits: torch.Tensor, labels: torch.Tensor, ids: torch.Tensor, images: Any = None) -> None:
        """Add a batch.

        `ids`: the loader's ids of its samples; `images`: the network's input, needed if Scores has `pixels`.
        """
        logits = logits.float()
        predicted = logits.argmax(dim=1)
        among_five = (logits.topk(min(5, logits.shape[1])).indices == labels[:, None]).sum()
        losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
        total = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
        self._sums += torch.stack([(predicted == labels).sum(), among_five, total])
        self._counts.scatter_add_(0, labels * len(self.classes) + predicted, torch.ones_like(labels))
        confidences = logits.softmax(dim=1).amax(dim=1)
        self._batches.append((losses, ids, labels, predicted, confidences))
        for highest, values in zip(self._highest, (losses, confidences) if self._pixels else ()):
            highest.add(torch.where(predicted != labels, values.nan_to_num(torch.inf), -1.0), images)

    def all_reduce(self) -> "Scores":
        """Combine the scores of all ranks, find the worst samples and mistakes, and return self.

        Needed with one rank, too.
        """
        STOPS.wait_for(self._add_up)
        return self

    def _add_up(self) -> None:
        """Add up the sums of all ranks, and find the worst samples and mistakes among all of them."""
        group = collectives.current()
        if group.size > 1:
            group.sum(self._counts)
            group.sum(self._sums)
        columns = [torch.cat([part.cpu() for part in parts]).double() for parts in zip(*self._batches)]
        rows = torch.stack(columns, dim=1) if columns else torch.zeros(0, 5, dtype=torch.float64)
        order = rows[:, 0].nan_to_num(torch.inf).argsort(descending=True, stable=True)
        worst, _ = self._of_all_ranks(group, rows[order[:KEPT_WORST]], 0, KEPT_WORST)
        self.worst = [(loss, *map(int, rest)) for loss, *rest, _ in worst.tolist()]
        wrong = (rows[:, 2] != rows[:, 3]).nonzero().flatten()
        for kind, highest, column, limit in zip(
            self.mistakes, [*self._highest, None], (0, 4, 0), (SHOWN, SHOWN, LISTED)
        ):
            own_indices = wrong[
                rows[wrong, column].nan_to_num(torch.inf).argsort(descending=True, stable=True)
            ][:limit]
            mistaken_rows, places = self._of_all_ranks(group, rows[own_indices], column, limit)
            pictures = (
                self._pictures(group, highest, own_indices.tolist(), places)
                if self._pixels and highest
                else [None] * len(mistaken_rows)
            )
            self.mistakes[kind] = [
                Mistake(int(sample_id), int(label), int(predicted), loss, confidence, picture)
                for (loss, sample_id, label, predicted, confidence), picture in zip(
                    mistaken_rows.tolist(), pictures
                )
            ]
        # In the memory of the device.
        self._batches = []
        self._highest = []

    def _of_all_ranks(
        self, group: Any, rows: torch.Tensor, column: int, limit: int
    ) -> tuple[torch.Tensor, list[int]]:
        """Return the `limit` rows of all ranks highest in `column`, and rank * limit + row of each."""
        if group.size > 1:
            padded = torch.full((limit, 5), -1.0, dtype=self._sums.dtype, device=self._sums.device)
            padded[: len(rows)] = rows.to(padded)
            rows = torch.cat(group.gather(padded)).cpu()
        order = rows[:, column].nan_to_num(torch.inf).argsort(descending=True, stable=True)
        # The network may have more outputs than there are names.
        are_named = ((rows[:, 2:4] >= 0) & (rows[:, 2:4] < len(self.classes))).all(dim=1)
        order = order[(rows[order, 1] >= 0) & are_named[order]][:limit]
        return rows[order], order.tolist()

    def _pictures(
        self, group: Any, own_highest: "_Highest", own_mistakes: list[int], places: list[int]
    ) -> torch.Tensor:
        """Return pictures of the mistakes at `places`, which are rank * SHOWN + index in that rank's
        `own_mistakes`: numbers of samples in the order of add(). A mistake of which no picture was kept has a
        black one.

        Each rank draws its own mistakes and leaves the others black, so that the sum over the ranks has
        all."""
        kept_pictures = own_highest.pictures()
        pictures = torch.zeros(len(places), 3, SIDE, SIDE, dtype=torch.int32, device=self._sums.device)
        for index, place in enumerate(places):
            rank, own_index = divmod(place, SHOWN)
            if rank != group.rank:
                continue
            picture = kept_pictures.get(own_mistakes[own_index])
            if picture is not None:
                pictures[index] = picture
        if group.size > 1 and places:
            group.sum(pictures)
        return pictures.to("cpu", torch.uint8)

    # --- Answers ---

    @functools.cached_property
    def confusion(self) -> torch.Tensor:
        """Confusion matrix counts[true class, predicted class] on the CPU.

        It is computed once, so call all_reduce() first.
        """
        return self._counts.view(len(self.classes), len(self.classes)).cpu()

    @property
    def samples(self) -> int:
        """Number of samples that were added, on all ranks. Call all_reduce() first."""
        return int(self.confusion.sum())

    @property
    def accuracy(self) -> float:
        return self._sums[0].item() / self.samples

    @property
    def top5(self) -> float:
        """Fraction of samples whose class is among the five highest logits."""
        return self._sums[1].item() / self.samples

    @property
    def loss(self) -> float:
        """Mean cross-entropy, without label smoothing."""
        return self._sums[2].item() / self.samples

    @property
    def chance(self) -> float:
        """Accuracy up to which a network may merely guess the most frequent class."""
        return accuracy_by_chance(int(self.confusion.sum(dim=1).max()), self.samples)

    def nothing_learnt(self, epoch: int, args: argparse.Namespace) -> Optional[str]:
        """Return a warning if, after a fifth of the epochs and an epoch without warm-up, the accuracy on real
        data is not above chance; else None."""
        option = vars(args).get("warmup")
        warmup = min(option, args.epochs / 2) if isinstance(option, (int, float)) else 0
        check_epoch = max(-(-args.epochs // 5), 1 + math.ceil(warmup))
        if epoch != check_epoch or args.input.synthetic or self.accuracy > self.chance or self.chance >= 1:
            return None
        weights_advice = ""
        if "weights" in args and not args.weights:
            weights_advice = ", --weights FILE to begin with"
        return (
            f"warning: after {epoch} of {args.epochs} epochs {NOTHING_IS_LEARNT}: an accuracy of "
            f"{self.accuracy:.4f} may be chance. Try a third of --lr {args.lr:g} and three times as "
            f"much{weights_advice}, and look whether the labels are right"
        )

    def per_class(self) -> list[tuple[str, int, float]]:
        """Return [(class, number of its samples, fraction of them that was recognised)] in the order of the
        classes."""
        counts = self.confusion.sum(dim=1).tolist()
        recognised_counts = self.confusion.diagonal().tolist()
        return [
            (name, count, recognised / count if count else 0.0)
            for name, count, recognised in zip(self.classes, counts, recognised_counts)
        ]

    def confused(self, limit: int) -> list[tuple[str, str, int]]:
        """Return the `limit` most frequent confusions: [(true class, predicted class, count)]."""
        wrong = [cell for cell in self._cells() if cell[0] != cell[1]]
        wrong = sorted(wrong, key=lambda cell: -cell[2])[:limit]
        return [(self.classes[true], self.classes[predicted], count) for true, predicted, count in wrong]

    def _cells(self):
        """Return [[number of the true class, number of the predicted class,
        count]] of the counts that are not 0."""
        places = self.confusion.nonzero()
        return torch.cat([places, self.confusion[tuple(places.T)][:, None]], dim=1).tolist()

    def as_json(self) -> dict[str, Any]:
        """Return the contents of report.json without the epoch.

        "confusion" is [[true class, predicted class, count > 0]].
        """
        predicted = self.confusion.sum(dim=0).tolist()
        rows = [
            {
                "class": name,
                "samples": count,
                "recall": recall,
                "precision": recall * count / predicted_count if predicted_count else 0.0,
                "f1": 2 * recall * count / (count + predicted_count) if count + predicted_count else 0.0,
            }
            for (name, count, recall), predicted_count in zip(self.per_class(), predicted)
        ]
        mistakes = {
            kind: [self._row_of(mistake) for mistake in listed] for kind, listed in self.mistakes.items()
        }
        return {
            "samples": self.samples, "accuracy": self.accuracy, "top5": self.top5, "loss": _finite(self.loss),
            "classes": rows, "confusion": self._cells(), "mistakes": mistakes,
        }  # fmt: skip

    def _row_of(self, mistake: Mistake) -> dict[str, Any]:
        row = {
            "id": mistake.id,
            "class": self.classes[mistake.label],
            "predicted": self.classes[mistake.predicted],
            "loss": _finite(mistake.loss),
            "confidence": _finite(mistake.confidence),
        }
        if self._file_of:
            row["file"] = self._file_of(mistake.id)
        return row

    def picture(self) -> Optional[torch.Tensor]:
        """Draw the mistakes of highest loss above those of highest confidence; None without any,
        or without `pixels`."""
        if not self._pixels or not self.mistakes["all"]:
            return None
        columns = max(len(self.mistakes[kind]) for kind in KINDS)
        sheet: Any = torch.full((3, SIDE * len(KINDS), SIDE * columns), WHITE, dtype=torch.uint8)
        for row, kind in enumerate(KINDS):
            for column, mistake in enumerate(self.mistakes[kind]):
                sheet[:, row * SIDE : (row + 1) * SIDE, column * SIDE : (column + 1) * SIDE] = mistake.picture
        return sheet


def _finite(value: Any) -> Any:
    """Return the value, or None if it is infinite or not a number, which JSON cannot hold."""
    return value if math.isfinite(value) else None


class _Highest:
    """Small pictures of the samples with the highest values so far. add() does not wait for the device."""

    def __init__(self, pixels: Any):
        self._pixels = pixels
        self._samples_seen = 0
        self._kept: Any = None  # values, places in the order of add(), pictures

    def add(self, values: torch.Tensor, images: Any) -> None:
        top = values.topk(min(SHOWN, len(values)))
        kept = [top.values, top.indices + self._samples_seen]
        small = images[top.indices].float()
        if (factor := min(small.shape[2:]) // SIDE) > 1:
            small = torch.nn.functional.avg_pool2d(small, factor)
        kept.append(torch.nn.functional.interpolate(small, size=(SIDE, SIDE), mode="nearest"))
        if self._kept:
            kept = [torch.cat(pair) for pair in zip(self._kept, kept)]
            order = kept[0].topk(min(SHOWN, len(kept[0]))).indices
            kept = [part[order] for part in kept]
        self._kept = kept
        self._samples_seen += len(values)

    def pictures(self) -> dict[int, torch.Tensor]:
        """Return {number of the sample in the order of add(): its picture} of the samples that were kept."""
        return dict(zip(self._kept[1].tolist(), self._pixels(self._kept[2]))) if self._kept else {}
