"""What a network got right: the job's `evaluate` adds logits, labels and sample ids; questions are asked afterwards.

scores = Scores(classes, device)
for images, labels in loader:
    scores.add(model(images), labels, loader.ids)
scores.share()                           # every rank had its own part of the samples
scores.accuracy, scores.top5, scores.loss, scores.confusion, scores.per_class(), scores.worst
"""

import functools

import torch

from common import devices
from common.processes import collectives

WORST = 32  # samples with the highest losses that are kept, of each rank and of all


class Scores:
    """Sums are exact: counts are whole numbers, losses are added in float64. Nothing waits for the device before share()."""

    def __init__(self, classes: list[str], device: torch.device):
        self.classes = classes
        self._counts = torch.zeros(len(classes) ** 2, dtype=torch.int64, device=device)
        self._sums = torch.zeros(3, dtype=devices.widest(device), device=device)  # right, among the best five, loss
        self._batches = []  # (losses, ids, labels, predicted)
        self.worst = []

    def add(self, logits: torch.Tensor, labels: torch.Tensor, ids: torch.Tensor) -> None:
        """A batch; `ids` are those of the loader that gave it."""
        logits = logits.float()
        predicted = logits.argmax(dim=1)
        among_five = (logits.topk(min(5, logits.shape[1])).indices == labels[:, None]).sum()
        losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
        total = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
        self._sums += torch.stack([(predicted == labels).sum(), among_five, total])
        self._counts.scatter_add_(0, labels * len(self.classes) + predicted, torch.ones_like(labels))
        self._batches.append((losses, ids, labels, predicted))

    def share(self) -> "Scores":
        """Add up the counts of all ranks; a collective where there are several."""
        self.worst = self._own_worst()
        group = collectives.present()
        if group.size > 1:
            group.sum(self._counts)
            group.sum(self._sums)
            mine = torch.full((WORST, 4), -1.0, dtype=torch.float64, device=self._sums.device)
            if self.worst:
                mine[: len(self.worst)] = torch.tensor(self.worst, dtype=torch.float64)
            rows = [row for part in group.gather(mine) for row in part.tolist() if row[1] >= 0]
            self.worst = [(loss, *map(int, rest)) for loss, *rest in sorted(rows, reverse=True)[:WORST]]
        return self

    def _own_worst(self):
        """[(loss, sample id, label, predicted)], the worst first."""
        if not self._batches:
            return []
        losses, ids, labels, predicted = (torch.cat([part.cpu() for part in parts]) for parts in zip(*self._batches))
        order = losses.nan_to_num(torch.inf).argsort(descending=True, stable=True)[:WORST]
        return list(zip(*(values[order].tolist() for values in (losses, ids, labels, predicted))))

    # --- Answers ---

    @functools.cached_property
    def confusion(self) -> torch.Tensor:
        """counts[true class, predicted class], on the CPU."""
        return self._counts.view(len(self.classes), len(self.classes)).cpu()

    @property
    def samples(self) -> int:
        return int(self.confusion.sum())

    @property
    def accuracy(self) -> float:
        return self._sums[0].item() / self.samples

    @property
    def top5(self) -> float:
        return self._sums[1].item() / self.samples

    @property
    def loss(self) -> float:
        """The mean cross-entropy, without label smoothing."""
        return self._sums[2].item() / self.samples

    def per_class(self) -> list[tuple[str, int, float]]:
        """[(class, samples, share of them that was recognised)] in the order of the classes."""
        counts, right = self.confusion.sum(dim=1).tolist(), self.confusion.diagonal().tolist()
        return [(name, count, hit / count if count else 0.0) for name, count, hit in zip(self.classes, counts, right)]
