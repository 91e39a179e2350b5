"""The mean over shares, with the same bits for any number of ranks and wherever each share is computed.

The shares are the leaves of a binary tree, in the order of their numbers. Siblings are added; a value without
a sibling moves up unchanged. A rank adds its own shares as far as the tree allows. The remaining roots are
sent in chunks: every rank receives one chunk of the roots of all ranks and finishes the tree for this chunk,
then all ranks gather the chunks. The communication library adds nothing, because its sums depend on the
number of ranks.
"""

from collections.abc import Sequence
from typing import Any, Callable, Optional

import torch

Root = tuple[int, int, Any]  # (level, index in the level, value)


def shares_of(rank: int, ranks: int, shares: int) -> range:
    """Return the shares that this rank computes; two ranks' numbers of shares differ by one at most."""
    return range(rank * shares // ranks, (rank + 1) * shares // ranks)


def grow(roots: list[Root], root: Root, shares: int, add: Callable[[Any, Any], Any]) -> None:
    """Append `root`, the top of a subtree, to `roots`, and merge siblings by `add`.

    `shares`: leaves of the whole tree.
    """
    level, index, value = root
    while True:
        width = -(-shares // 2**level)
        if index % 2 and roots and roots[-1][:2] == (level, index - 1):
            value = add(roots.pop()[2], value)
        elif index % 2 or index + 1 < width or width == 1:
            break  # its sibling comes later, or is another rank's; or this is the top
        level = level + 1
        index = index // 2
    roots.append((level, index, value))


def subtree_positions(own_shares: range, shares: int) -> list[tuple[int, int]]:
    """Return [(level, index)] of the subtrees that remain of `own_shares` after a rank has added them up."""
    roots: list[Root] = []
    for share in own_shares:
        grow(roots, (0, share, None), shares, lambda left, right: None)
    return [(level, index) for level, index, _ in roots]


class Part:
    """A group of tensors that are averaged together: one flat vector for each share,
    exchanged after the last share."""

    def __init__(self, tensors: Sequence[torch.Tensor], shares: int, group: Any):
        """`shares`: the number of shares of all ranks; `group`: AllRanks or an elastic job's Members."""
        self._group = group
        ranks = group.size
        self.tensors = list(tensors)
        self._shares = shares
        self._ranks = ranks
        self._strides = [torch.empty_like(tensor, device="meta").stride() for tensor in self.tensors]
        self._chunk = -(-sum(tensor.numel() for tensor in tensors) // ranks)
        self._subtrees = [subtree_positions(shares_of(rank, ranks, shares), shares) for rank in range(ranks)]
        self._roots: list[Root] = []
        self._free_buffers: list[torch.Tensor] = []
        self._sent_chunks: Any = None  # to the other ranks, during an exchange
        self._received_chunks: Any = None  # from the other ranks
        self._work: Any = None

    def add(self, share: int, values: Sequence[Optional[torch.Tensor]]) -> None:
        """Add the values of `tensors` in this share; None counts as zeros.

        A rank adds its shares in ascending order.
        """
        flat = self._free_buffers.pop() if self._free_buffers else self._zeros(self._ranks * self._chunk)
        views = self._views(flat)
        missing = [view for view, value in zip(views, values) if value is None]
        pairs = [(view, value) for view, value in zip(views, values) if value is not None]
        if missing:
            torch._foreach_zero_(missing)
        if pairs:
            targets, values = zip(*pairs)
            torch._foreach_copy_(targets, values)
        self._put(share, flat)

    def _put(self, share: int, flat: torch.Tensor) -> None:
        grow(self._roots, (0, share, flat), self._shares, self._sum)

    def _zeros(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=self.tensors[0].dtype, device=self.tensors[0].device)

    def _views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return views of a flat vector that have the shapes and memory layouts of `tensors`."""
        views = []
        begin = 0
        for tensor, strides in zip(self.tensors, self._strides):
            views.append(flat.as_strided(tensor.shape, strides, begin))
            begin += tensor.numel()
        return views

    def _sum(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        self._free_buffers.append(right)
        return left.add_(right)

    def send(self) -> None:
        """With several ranks, begin to send each its chunk of the sums. All must send in the same order."""
        if self._ranks == 1:
            return
        sums = [value.view(self._ranks, 1, self._chunk) for _, _, value in self._roots]
        self._sent_chunks = torch.cat(sums, dim=1).view(-1) if len(sums) > 1 else sums[0].view(-1)
        sizes = [len(roots) * self._chunk for roots in self._subtrees]
        self._received_chunks = self._zeros(sum(sizes))
        self._work = self._group.all_to_all(
            self._received_chunks, self._sent_chunks, sizes, [len(sums) * self._chunk] * self._ranks
        )

    def finish(self) -> None:
        """Compute the means of this rank's chunk, and begin to gather all chunks.

        With one rank, its chunk is the whole.
        """
        if self._ranks == 1:
            ((_, _, self._total),) = self._roots
            self._total.div_(self._shares)
            return
        self._work.wait()
        roots: list[Root] = []
        chunks = iter(self._received_chunks.split(self._chunk))
        for positions in self._subtrees:
            for position in positions:
                grow(roots, (*position, next(chunks)), self._shares, torch.Tensor.add_)
        ((_, _, chunk),) = roots
        self._total = self._zeros(self._ranks * self._chunk)
        self._work = self._group.all_gather(self._total, chunk.div_(self._shares))

    def means(self) -> list[torch.Tensor]:
        """Wait for the exchange; return the mean of each of `tensors`,
        in memory that the next step may overwrite."""
        if self._ranks > 1:
            self._work.wait()
        self._sent_chunks = self._received_chunks = self._work = None
        self._free_buffers += [value for _, _, value in self._roots]
        self._roots = []
        return self._views(self._total)


class AnyOrder(Part):
    """A Part that adds with all_reduce: it is faster, and the bits depend on the number of ranks."""

    def _put(self, share: int, flat: torch.Tensor) -> None:
        if self._roots:
            flat = self._sum(self._roots[0][2], flat)
        self._roots = [(0, 0, flat)]

    def send(self) -> None:
        ((_, _, self._total),) = self._roots
        if self._ranks > 1:
            self._work = self._group.all_reduce(self._total)

    def finish(self) -> None:
        """Do nothing: the all_reduce of send() is the whole exchange."""

    def means(self) -> list[torch.Tensor]:
        views = super().means()
        self._total.div_(self._shares)
        return views
