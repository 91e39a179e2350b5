"""What each rank has of its own, such as gradients that were not yet averaged: brought to rank 0."""

import io
from typing import Any

import torch

from common.ranks import collectives
from common.weights import tensors


def gather_differing(value: object) -> list[Any]:
    """Return on rank 0 the values of ranks 1 and up; [] on other ranks, and if all have the same.

    `value`: this rank's, of tensors and plain values. A collective of all ranks.
    """
    rank, size = collectives.rank_and_size()
    file = io.BytesIO()
    torch.save(_without_views(value), file)
    content = file.getvalue()
    if collectives.are_equal(content):
        return []
    values = []
    for source in range(1, size):
        received = collectives.broadcast(content, source)
        if rank == 0:
            values.append(tensors.read(received, verified=True))
    return values


def _without_views(value: object) -> Any:
    """Return a copy whose tensors have storages of their own,
    as torch.save() would save the whole of each storage."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, dict):
        return {key: _without_views(item) for key, item in value.items()}
    return value
