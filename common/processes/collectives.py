"""What all ranks do together on the CPU, apart from the gradients: add, compare, send and gather bytes.

Everything goes through a Gloo group: the main one where that is Gloo, else a second one.
"""

import datetime
import hashlib
import json
import socket
from typing import Any, Optional

import numpy as np
import torch
from torch import distributed

from common.errors import UserError
from common.processes.channel import first_difference

TIMEOUT = datetime.timedelta(minutes=30)  # of a collective; the parents notice a dead peer within seconds


class Group:
    """What the ranks of the process group share in addition to it."""

    def __init__(self):
        self.store: Optional[distributed.Store] = None  # keys and values that all ranks see
        self._control = None

    def control(self) -> Any:
        """The Gloo group; the first call is a collective of all ranks."""
        if distributed.get_backend() == "gloo":
            return distributed.group.WORLD
        if self._control is None:
            self._control = distributed.new_group(backend="gloo", timeout=TIMEOUT)
        return self._control


GROUP = Group()


def rank_and_size() -> tuple[int, int]:
    """(this process's rank, the number of ranks); (0, 1) in a job without a process group."""
    grouped = distributed.is_available() and distributed.is_initialized()
    return (distributed.get_rank(), distributed.get_world_size()) if grouped else (0, 1)


def reduce(values: list, operation: str) -> list[float]:
    """Element by element over all ranks, in float64. `operation`: a name of torch's ReduceOp."""
    tensor = torch.tensor(values, dtype=torch.float64)
    distributed.all_reduce(tensor, op=getattr(distributed.ReduceOp, operation), group=GROUP.control())
    return tensor.tolist()


def broadcast(content: bytes) -> bytes:
    """Rank 0's bytes on every rank, verified by a digest; `content` of the other ranks is ignored."""
    length, digest = torch.tensor([len(content)]), _tensor(hashlib.sha256(content).digest())
    distributed.broadcast(length, 0, group=GROUP.control())
    distributed.broadcast(digest, 0, group=GROUP.control())
    body = _tensor(content) if distributed.get_rank() == 0 else torch.zeros(int(length), dtype=torch.uint8)
    if len(body):
        distributed.broadcast(body, 0, group=GROUP.control())
    received = body.numpy().tobytes()
    if hashlib.sha256(received).digest() != digest.numpy().tobytes():
        raise RuntimeError("the bytes that rank 0 sent arrived changed")
    return received


def gather(content: bytes) -> list[bytes]:
    """The bytes of every rank, in the order of their ranks."""
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(distributed.get_world_size())]
    distributed.all_gather(lengths, torch.tensor([len(content)]), group=GROUP.control())
    mine = torch.zeros(int(max(lengths)), dtype=torch.uint8)
    mine[: len(content)] = _tensor(content)
    everyone = [torch.zeros_like(mine) for _ in lengths]
    distributed.all_gather(everyone, mine, group=GROUP.control())
    return [bytes(tensor[: int(length)].numpy()) for tensor, length in zip(everyone, lengths)]


def _tensor(content):
    return torch.from_numpy(np.frombuffer(bytearray(content), dtype=np.uint8))


def compare(facts: dict) -> None:
    """Stop every rank, naming two that differ, unless all have the same facts."""
    if distributed.get_world_size() == 1:
        return
    mine = {"host": socket.gethostname(), **{name: str(value) for name, value in facts.items()}}
    first, *others = [json.loads(content) for content in gather(json.dumps(mine).encode())]
    for name in facts:
        for rank, other in enumerate(others, 1):
            if other[name] != first[name]:
                ours, theirs = first_difference(first[name], other[name])
                raise UserError(
                    f"{name} differs: {ours} on rank 0 (host {first['host']}), {theirs} on rank {rank} (host {other['host']})"
                )


def one_device_each(identity: str) -> None:
    """Stop every rank, naming two that compute on one GPU. `identity`: the same only for the same GPU of the same host."""
    mine = json.dumps([socket.gethostname(), identity])
    everyone = [tuple(json.loads(content)) for content in gather(mine.encode())]
    first: dict[tuple, int] = {}
    for rank, place in enumerate(everyone):
        other = first.setdefault(place, rank)
        if other != rank and place[1]:
            raise UserError(
                f"ranks {other} and {rank} compute on the same GPU of host {place[0]}: give each process its own "
                "(srun --gpus-per-task=1, or as many processes as GPUs)"
            )
