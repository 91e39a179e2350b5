"""What each rank has of its own, such as gradients that were not yet averaged: brought to rank 0."""

import io
from typing import Any

import torch

from common.ranks import collectives
from common.weights import tensors


def of_other_ranks(own: object) -> list[Any]:
    """Return, on rank 0, what the other ranks have, from rank 1 on; an empty list if all have the same, and on the other ranks.
    `own`: tensors and plain values. A collective of all ranks."""
    rank, size = collectives.rank_and_size()
    file = io.BytesIO()
    torch.save(_without_views(own), file)
    content = file.getvalue()
    if collectives.are_equal(content):
        return []
    found = []
    for source in range(1, size):
        received = collectives.broadcast(content, source)
        if rank == 0:
            found.append(tensors.read(received, verified=True))
    return found


def _without_views(value: object) -> Any:
    """Return a copy whose tensors have storages of their own, as torch.save() would save the whole of each storage."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, dict):
        return {key: _without_views(item) for key, item in value.items()}
    return value
