"""A barrier for work of unknown length, such as fetching data:
no rank continues before all ranks have finished.

It uses no collective: rank 0 looks in the job's store who is ready, so it can name the rank that all wait
for, and the others look whether it has seen all. A rank that has died or hangs is not its matter: parent
processes and watchers see that.
"""

import io
import json
import time
from typing import Any, Callable

import torch

from common.alive import heartbeat
from common.errors import TrainingFailed, UserError, one_line
from common.progress import Waiting
from common.ranks.collectives import GROUP, broadcast, rank_and_size

POLL_SECONDS = 0.1


def on_every_rank(name: str, work: Callable[[], Any]) -> Any:
    """Return this rank's `work()` once it has ended on every rank; if one fails, all raise an error.

    `name`: what the ranks wait for, such as "data"; another for each call in a job.
    """
    rank, world_size = rank_and_size()
    if world_size == 1:
        return work()
    board = Board(GROUP.store, name, rank)
    try:
        result = work()
    except Exception as error:
        board.post_failure(error)
        raise
    board.wait(world_size)
    return result


def from_rank_0(choose: Callable[[], Any], name: str = "checkpoint") -> Any:
    """Call choose() on rank 0, whose disk has the checkpoints;
    every rank returns its result or raises its UserError.

    The result may hold tensors and plain values. `name`: what the other ranks wait for.
    """
    if rank_and_size()[1] == 1:
        return choose()

    def encode():
        answer: dict[str, Any] = {"refused": None}
        buffer = io.BytesIO()
        try:
            answer["found"] = choose() if rank_and_size()[0] == 0 else None
        except UserError as error:
            answer["refused"] = str(error)
        torch.save(answer, buffer)
        return buffer.getvalue()

    from common.weights import tensors

    content = on_every_rank(name, encode)  # no collective waits for it, as fetching may take long
    answer = tensors.read(broadcast(content), verified=True)
    if answer["refused"]:
        raise UserError(answer["refused"])
    return answer["found"]


class Board:
    """A few keys in the job's store: which ranks are ready, and why one has failed."""

    def __init__(self, store: Any, name: str, rank: int):
        self._store = store
        self._name = name
        self._rank = rank

    def _key(self, *words: object) -> str:
        return "/".join(["anyrank", self._name, *map(str, words)])

    def _count(self, *words: object) -> int:
        return self._store.add(self._key(*words), 0)  # torch 2.1 has no Store.check, and get would wait

    def post_failure(self, error: BaseException) -> None:
        """Let the other ranks end: their wait() raises this error."""
        failure = {
            "code": getattr(error, "exit_code", 1),
            "text": f"rank {self._rank}: {one_line(error)[:1000]}",
        }
        self._store.set(self._key("failure"), json.dumps(failure))
        self._store.add(self._key("failed"), 1)

    def wait(self, world_size: int) -> None:
        """Wait until all ranks are ready; raise an error if one fails.

        Rank 0 prints which rank it waits for.
        """
        self._store.add(self._key("ready", self._rank), 1)
        waiting = Waiting()
        pulse = heartbeat.of_this_process()
        polls = 0
        keys: list[tuple[object, ...]] = [("all",)]
        if self._rank == 0:
            keys = [("ready", rank) for rank in range(1, world_size)]
        for key in keys:
            while not self._count(*key):
                if self._count("failed"):
                    failure = json.loads(self._store.get(self._key("failure")))
                    error_type = UserError if failure["code"] == 2 else TrainingFailed
                    raise error_type(f"no {self._name}: {failure['text']}")
                polls += 1
                pulse.set("fetch", polls)  # a rank that waits is not stuck
                if self._rank == 0 and waiting.claim_line():
                    print(f"waiting for rank {key[-1]} to have its {self._name}", flush=True)
                time.sleep(max(POLL_SECONDS, world_size / 2560))  # all ranks ask one store
        self._store.add(self._key("all"), 1)
        pulse.set("start", 0)
