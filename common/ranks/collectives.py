"""Collectives of all ranks on the CPU, other than those for gradients: add, compare and send bytes.

They use a Gloo group: the default group if its backend is Gloo, else a second group.
"""

import datetime
import hashlib
import json
import os
import socket
import sys
import time
from typing import Any, NoReturn, Optional

import numpy as np
import torch
from torch import distributed

from common import devices, moments, patience
from common.errors import UserError
from common.naming import first_difference
from common.stops import STOPS, Interrupted

POLL_SECONDS = 0.001


class Changed(Exception):
    """The process group is no longer valid: a member was lost or has joined (common/elastic)."""


class Stopped(Exception):
    """The run must save and end: the platform stops it, too few nodes remain, or silent ones may still run (common/elastic)."""


class Group:
    """What this rank has besides the process group: the store, the watcher, the elastic members, a Gloo group."""

    def __init__(self):
        self.store: Optional[distributed.Store] = None  # keys and values that all ranks see
        self.watcher: Any = None  # of a rank without a parent: watcher.Beside
        self.members: Any = None  # elastic's Members, in an elastic job: then the process group has this rank alone
        self._control = None

    def control(self) -> Any:
        """Return the Gloo group; the first call is a collective of all ranks."""
        if distributed.get_backend() == "gloo":
            return distributed.group.WORLD
        if self._control is None:
            self._control = distributed.new_group(backend="gloo", timeout=longest())
        return self._control


GROUP = Group()


def longest() -> datetime.timedelta:
    """Return the time that a collective may take; the parents notice a dead peer within seconds."""
    return datetime.timedelta(seconds=max(1800.0, 2 * patience.limit()))


def grouped() -> bool:
    return distributed.is_available() and distributed.is_initialized()


def rank_and_size() -> tuple[int, int]:
    """Return (this process's rank, the number of ranks); (0, 1) in a job without a process group."""
    return (distributed.get_rank(), distributed.get_world_size()) if grouped() else (0, 1)


class All:
    """The ranks of the process group, with asynchronous collectives. Elastic's Members has the same interface."""

    def __init__(self) -> None:
        self.rank, self.size = rank_and_size()

    def changed(self) -> bool:
        """Whether they are no longer those of before."""
        return False

    def all_to_all(self, taken: torch.Tensor, given: torch.Tensor, taken_sizes: list[int], given_sizes: list[int]) -> Any:
        return distributed.all_to_all_single(taken, given, taken_sizes, given_sizes, async_op=True)

    def all_gather(self, everything: torch.Tensor, own: torch.Tensor) -> Any:
        if devices.TORCH < (2, 4) and distributed.get_backend() == "gloo":  # that of 2.1 has no other form
            return distributed.all_gather(list(everything.chunk(self.size)), own, async_op=True)
        return distributed.all_gather_into_tensor(everything, own, async_op=True)

    def all_reduce(self, tensor: torch.Tensor) -> Any:
        return distributed.all_reduce(tensor, async_op=True)

    def sum(self, tensor: torch.Tensor) -> None:
        """Add up the tensors of all ranks, in place."""
        _wait_for(self.all_reduce(tensor))

    def gather(self, own: torch.Tensor) -> list[torch.Tensor]:
        """Gather the tensors of all ranks, in their order; all have the same size."""
        everyone = [torch.zeros_like(own) for _ in range(self.size)]
        _wait_for(distributed.all_gather(everyone, own, async_op=True))
        return everyone


def _wait_for(work):
    """Wait in Python, where a signal is seen: this rank may be able to stop while another one keeps it waiting."""
    try:
        while STOPS.may_end and not work.is_completed():
            time.sleep(POLL_SECONDS)
    except Interrupted:
        moments.listen(AtOnce())
        raise
    work.wait()


class AtOnce:
    """Ends the process without waiting for the threads of a process group whose other members may never come."""

    def leaving(self, code: object) -> NoReturn:
        """The process ends (common/moments.py)."""
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else int(code is not None))


def current() -> Any:
    """Return the ranks that take part at present: All, or elastic's Members."""
    return GROUP.members or All()


def reduce(values: list, operation: str) -> list[float]:
    """Element by element over all ranks, in float64. `operation`: a name of torch's ReduceOp."""
    tensor = torch.tensor(values, dtype=torch.float64)
    distributed.all_reduce(tensor, op=getattr(distributed.ReduceOp, operation), group=GROUP.control())
    return tensor.tolist()


def broadcast(content: bytes, source: int = 0) -> bytes:
    """Return the bytes of the rank `source` on every rank, verified by a digest; `content` of the other ranks is ignored."""
    length, digest = torch.tensor([len(content)]), _tensor(hashlib.sha256(content).digest())
    distributed.broadcast(length, source, group=GROUP.control())
    distributed.broadcast(digest, source, group=GROUP.control())
    body = _tensor(content) if distributed.get_rank() == source else torch.zeros(int(length), dtype=torch.uint8)
    if len(body):
        distributed.broadcast(body, source, group=GROUP.control())
    received = body.numpy().tobytes()
    if hashlib.sha256(received).digest() != digest.numpy().tobytes():
        raise RuntimeError(f"the bytes that rank {source} sent arrived changed")
    return received


def _tensor(content):
    return torch.from_numpy(np.frombuffer(bytearray(content), dtype=np.uint8))


def _digest(content):
    """Return a whole number of 63 bits, which is not 0."""
    return int.from_bytes(hashlib.sha256(content.encode()).digest()[:8], "big") >> 1 or 1


def compare(facts: dict) -> None:
    """Stop every rank, naming two that differ, unless all have the same facts; the cost does not grow with their number."""
    if distributed.get_world_size() == 1:
        return
    mine = {name: str(value) for name, value in facts.items()}
    digest = _digest(json.dumps(mine))
    extremes = torch.tensor([digest, -digest])
    distributed.all_reduce(extremes, op=distributed.ReduceOp.MAX, group=GROUP.control())
    if extremes[0] == -extremes[1]:
        return
    first = json.loads(broadcast(json.dumps({**mine, "host": socket.gethostname()}).encode()))
    name = next((name for name in facts if mine[name] != first[name]), None)
    rank, size = rank_and_size()
    lowest = torch.tensor([size if name is None else rank])
    distributed.all_reduce(lowest, op=distributed.ReduceOp.MIN, group=GROUP.control())
    other = json.loads(broadcast(json.dumps({**mine, "host": socket.gethostname()}).encode(), int(lowest)))
    name = next(name for name in facts if other[name] != first[name])
    ours, theirs = first_difference(first[name], other[name])
    raise UserError(
        f"{name} differs: {ours} on rank 0 (host {first['host']}), {theirs} on rank {int(lowest)} (host {other['host']})"
    )


def one_device_each(identity: str) -> None:
    """Stop every rank, naming two that compute on one GPU. `identity`: the same only for the same GPU of the same host."""
    mine = torch.tensor([_digest(json.dumps([socket.gethostname(), identity])) if identity else 0])
    everyone = [torch.zeros_like(mine) for _ in range(distributed.get_world_size())]
    distributed.all_gather(everyone, mine, group=GROUP.control())
    first: dict[int, int] = {}
    for rank, place in enumerate(map(int, everyone)):
        other = first.setdefault(place, rank)
        if other != rank and place:
            host = broadcast(socket.gethostname().encode(), rank).decode()
            raise UserError(
                f"ranks {other} and {rank} compute on the same GPU of host {host}: give each process its own "
                "(srun --gpus-per-task=1, or as many processes as GPUs)"
            )
