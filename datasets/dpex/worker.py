"""A loader's worker on a node of the Ray cluster. It does what a worker process of torch's DataLoader does."""

import contextlib
import os
import random
import socket
from collections.abc import Sequence
from typing import Any, Callable, Optional, Union

import numpy as np
import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import _DatasetKind, default_collate
from torch.utils.data._utils import worker as torch_worker

from datasets.dpex.wire import Left, leave, pack, unpack
from datasets.processes import collate_in_own_memory

OTHER = 1_000_003  # far from other workers' seeds in the lower 32 bits, which are all that torch's CPU generator uses


class End:
    """Sent in place of a batch when this worker's IterableDataset has no more samples."""


class LoaderWorker:
    """Makes batches on request. Each request is complete in itself, because the worker may replace a lost one (`again`)."""

    def __init__(self, again: bool):
        self._again = again
        self._epoch = None
        self._is_stream = self._is_collated = False
        self._left: dict[tuple[int, int], list] = {}  # {(epoch, number): a batch that the training process copies from here}
        torch.set_num_threads(1)
        collate_in_own_memory()

    def fetch(
        self, index: list, task: Callable, worker: int, seed: int, epoch: int, counts: tuple[int, ...], place: int,
        left: Optional[tuple[tuple[int, int], tuple[int, int]]] = None,
    ) -> Union[list, Left]:  # fmt: skip
        """Return a batch, an ExceptionWrapper with the error, or End; packed.

        A new `epoch` begins with a new copy of the data set, which `task()` returns. `counts`: how many batches each earlier
        pass over this copy has requested; `place`: how many the present pass has. Only an IterableDataset needs them.
        `left`: keep the batch in this process and return where it lies: (its key, the least key that is still needed).
        """
        if is_new := epoch != self._epoch:
            self._epoch = epoch
            self._draws_anew = self._again
            self._again = False
        if is_new or (self._is_stream and (len(counts), place) < self._place):
            self._place = 0, 0
            self._failed = self._attempt(self._begin, task, worker, seed)
        batch = self._failed or self._attempt(self._next, unpack(list(map(bytearray, index))), counts, place)
        try:
            parts = pack(batch).parts
        except Exception:
            parts = pack(self._wrapped()).parts
        parts = [np.frombuffer(part, np.uint8) for part in parts]
        if left is None:
            return parts
        if not self._is_collated:
            parts = [part.copy() for part in parts]  # the data set may write into its own
        key, needed = left
        self._left = {one: its for one, its in self._left.items() if one >= needed}
        self._left[key] = parts
        return leave(parts)

    def _begin(self, task: Callable[[], Any], worker: int, seed: int) -> None:
        self._worker = worker
        # The worker has its own copy, because a data set may write to itself; the object store's is shared by all workers.
        self._task = unpack(list(map(bytearray, task())))
        self._is_stream = self._task["kind"] == _DatasetKind.Iterable
        self._is_collated = self._task["auto_collation"] and self._task["collate_fn"] is default_collate  # in new memory
        with contextlib.suppress(OSError):
            os.chdir(self._task["folder"])  # paths in the data set may be relative
        # A replacement repeats a stream with the same seed. For other data sets it must not repeat the lost worker's draws.
        self._seed(seed if self._is_stream or not self._draws_anew else seed + OTHER * os.getpid())
        if self._task["worker_init_fn"]:
            self._task["worker_init_fn"](worker)
        self._start_pass()

    def _seed(self, seed: int) -> None:
        """Seed Python, torch and NumPy as torch's DataLoader does in a worker, and fill in what get_worker_info() returns."""
        random.seed(seed)
        torch.manual_seed(seed)
        np.random.seed(torch_worker._generate_state(seed - self._worker, self._worker))
        torch_worker._worker_info = torch_worker.WorkerInfo(
            id=self._worker, num_workers=self._task["num_workers"], seed=seed, dataset=self._task["dataset"]
        )

    def _start_pass(self):
        task = self._task
        self._fetcher = _DatasetKind.create_fetcher(
            task["kind"], task["dataset"], task["auto_collation"], task["collate_fn"], task["drop_last"]
        )

    def _next(self, index: object, counts: Sequence[int], place: int) -> Any:
        for count in counts[self._place[0] :]:
            self._catch_up(count)
            self._start_pass()
            self._place = self._place[0] + 1, 0
        self._catch_up(place)
        self._place = len(counts), place + 1
        return self._fetcher.fetch(index)

    def _catch_up(self, place: int) -> None:
        """Skip an IterableDataset's batches before `place`, and their errors. For other data sets, do nothing."""
        while self._is_stream and self._place[1] < place:
            self._place = self._place[0], self._place[1] + 1
            with contextlib.suppress(Exception):
                self._fetcher.fetch(self._task["any_index"])

    def _attempt(self, action: Callable[..., Any], *arguments: object) -> Any:
        try:
            return action(*arguments)
        except StopIteration:
            return End() if self._is_stream else self._wrapped()
        except Exception:
            return self._wrapped()

    def _wrapped(self):
        return ExceptionWrapper(where=f"in DataLoader worker process {self._worker} (Ray, {socket.gethostname()})")
