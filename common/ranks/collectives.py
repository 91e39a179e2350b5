"""Collectives of all ranks: AllRanks for tensors such as gradients, functions for few values or bytes."""

import datetime
import hashlib
import json
import os
import socket
import sys
import time
from typing import Any, NoReturn

import numpy as np
import torch
from torch import distributed

from common import devices, moments
from common.alive import patience
from common.alive.stops import STOPS, Interrupted
from common.errors import UserError

POLL_SECONDS = 0.001


class RanksChanged(Exception):
    """The process group is no longer valid: a member was lost or has joined (common/elastic)."""


class Stopped(Exception):
    """The run must save and end: the platform stops it, too few nodes remain,
    or silent ones may still run (common/elastic)."""


class Group:
    """Objects of this rank that go with the process group: the store, the watcher, the elastic members,
    a Gloo group."""

    def __init__(self):
        self.store: Any = None  # a distributed.Store: keys and values that all ranks see
        self.watcher: Any = None  # a WatcherConnection, in one of several ranks without a parent process
        # elastic's Members, in an elastic job: then the process group has this rank alone
        self.members: Any = None
        self._gloo_group = None

    def gloo_group(self) -> Any:
        """Return the Gloo group; the first call may create it, which is a collective of all ranks."""
        if distributed.get_backend() == "gloo":
            return distributed.group.WORLD
        if self._gloo_group is None:
            self._gloo_group = distributed.new_group(backend="gloo", timeout=longest_timeout())
        return self._gloo_group


GROUP = Group()


def longest_timeout() -> datetime.timedelta:
    """Return the timeout of collectives, 30 minutes or more:
    parent processes or watchers notice a dead rank within seconds."""
    return datetime.timedelta(seconds=max(1800.0, 2 * patience.limit()))


def has_process_group() -> bool:
    return distributed.is_available() and distributed.is_initialized()


def rank_and_size() -> tuple[int, int]:
    """Return (this process's rank, the number of ranks); (0, 1) in a job without a process group."""
    return (distributed.get_rank(), distributed.get_world_size()) if has_process_group() else (0, 1)


class AllRanks:
    """The ranks of the process group, with asynchronous collectives.

    Elastic's Members has the same interface.
    """

    def __init__(self) -> None:
        self.rank, self.size = rank_and_size()

    def has_changed(self) -> bool:
        """Return whether a rank was lost or has joined, which does not happen in this group."""
        return False

    def all_to_all(
        self, received: torch.Tensor, sent: torch.Tensor, received_sizes: list[int], sent_sizes: list[int]
    ) -> Any:
        return distributed.all_to_all_single(received, sent, received_sizes, sent_sizes, async_op=True)

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor) -> Any:
        if devices.TORCH < (2, 4) and distributed.get_backend() == "gloo":
            # in torch 2.1, Gloo has no other form
            return distributed.all_gather(list(output.chunk(self.size)), tensor, async_op=True)
        return distributed.all_gather_into_tensor(output, tensor, async_op=True)

    def all_reduce(self, tensor: torch.Tensor) -> Any:
        return distributed.all_reduce(tensor, async_op=True)

    def sum(self, tensor: torch.Tensor) -> None:
        """Replace the tensor with its sum over the ranks."""
        _wait_for(self.all_reduce(tensor))

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors of all ranks, in the order of the ranks; all must have the same size."""
        gathered = [torch.zeros_like(tensor) for _ in range(self.size)]
        _wait_for(distributed.all_gather(gathered, tensor, async_op=True))
        return gathered


def _wait_for(work: Any) -> None:
    """Wait for a collective.

    If a stop signal may end this process alone, poll, so that the signal can end the wait.
    """
    try:
        while STOPS.may_end and not work.is_completed():
            STOPS.interrupt()
            time.sleep(POLL_SECONDS)
    except Interrupted:
        moments.listen(ExitAtOnce())
        raise
    work.wait()


class ExitAtOnce:
    """Ends the process without waiting for the threads of a process group whose other members may never
    come."""

    def leaving(self, code: object) -> NoReturn:
        """End the process now, with the exit code that `code` would give sys.exit() (common/moments.py)."""
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else int(code is not None))


def current() -> Any:
    """Return the ranks that take part at present: AllRanks, or elastic's Members."""
    return GROUP.members or AllRanks()


def reduce(values: list, operation: str) -> list[float]:
    """Return the values reduced element by element over all ranks, in float64.

    `operation`: a name of torch's ReduceOp.
    """
    tensor = torch.tensor(values, dtype=torch.float64)
    distributed.all_reduce(tensor, op=getattr(distributed.ReduceOp, operation), group=GROUP.gloo_group())
    return tensor.tolist()


def broadcast(content: bytes, source: int = 0) -> bytes:
    """Return the bytes of the rank `source` on every rank, verified by a digest;
    `content` of the other ranks is ignored."""
    length = torch.tensor([len(content)])
    digest = _tensor(hashlib.sha256(content).digest())
    distributed.broadcast(length, source, group=GROUP.gloo_group())
    distributed.broadcast(digest, source, group=GROUP.gloo_group())
    body = (
        _tensor(content) if distributed.get_rank() == source else torch.zeros(int(length), dtype=torch.uint8)
    )
    if len(body):
        distributed.broadcast(body, source, group=GROUP.gloo_group())
    received = body.numpy().tobytes()
    if hashlib.sha256(received).digest() != digest.numpy().tobytes():
        raise RuntimeError(f"the bytes that rank {source} sent arrived changed")
    return received


def _tensor(content: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(bytearray(content), dtype=np.uint8))


def are_equal(content: bytes) -> bool:
    """Return whether all ranks have the same bytes. All ranks must call it: it is one all_reduce."""
    digest = int.from_bytes(hashlib.sha256(content).digest()[:8], "big") >> 1  # as an int64
    extremes = torch.tensor([digest, -digest])
    distributed.all_reduce(extremes, op=distributed.ReduceOp.MAX, group=GROUP.gloo_group())
    return bool(extremes[0] == -extremes[1])


def require_equal(facts: dict) -> None:
    """Raise UserError on every rank, naming two that differ, unless all have the same facts.

    Equal ones take one all_reduce.
    """
    if distributed.get_world_size() == 1:
        return
    own_facts = {name: str(value) for name, value in facts.items()}
    if are_equal(json.dumps(own_facts).encode()):
        return
    encoded = json.dumps({**own_facts, "host": socket.gethostname()}).encode()
    first_facts = json.loads(broadcast(encoded))
    name = next((name for name in facts if own_facts[name] != first_facts[name]), None)
    rank, size = rank_and_size()
    (lowest,) = map(int, reduce([size if name is None else rank], "MIN"))
    lowest_facts = json.loads(broadcast(encoded, lowest))
    name = next(name for name in facts if lowest_facts[name] != first_facts[name])
    from common.world.naming import first_difference

    first_value, lowest_value = first_difference(first_facts[name], lowest_facts[name])
    raise UserError(
        f"{name} differs: {first_value} on rank 0 (host {first_facts['host']}), {lowest_value} on rank "
        f"{lowest} (host {lowest_facts['host']})"
    )


def require_one_device_each(identity: str) -> None:
    """Raise UserError on every rank if two compute on one GPU.

    `identity`: names the GPU on its host; "" for a CPU.
    """
    rank, size = rank_and_size()
    key = f"anyrank/device/{socket.gethostname()}/{identity}"
    is_second = bool(identity) and GROUP.store.add(key, 1) > 1
    if not is_second:
        GROUP.store.set(f"{key}/rank", str(rank))
    (second,) = map(int, reduce([rank if is_second else size], "MIN"))
    if second == size:
        return
    message = json.dumps([int(GROUP.store.get(f"{key}/rank")), socket.gethostname()])
    first, host = json.loads(broadcast(message.encode(), second))
    raise UserError(
        f"ranks {min(first, second)} and {max(first, second)} compute on the same GPU of host {host}: "
        "give each process its own (srun --gpus-per-task=1, or as many processes as GPUs)"
    )
