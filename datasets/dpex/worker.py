"""A loader's worker on a node of the Ray cluster.

It does what a worker process of torch's DataLoader does.
"""

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

from datasets.dpex.wire import MemoryHandle, memory_handle, pack, unpack
from datasets.processes import collate_in_own_memory

# far from other workers' seeds in the lower 32 bits, which are all that torch's CPU generator uses
SEED_STRIDE = 1_000_003


class EndOfStream:
    """Sent in place of a batch when this worker's IterableDataset has no more samples."""


class LoaderWorker:
    """Makes batches on request.

    Each request is complete in itself, because the worker may replace a lost one.
    """

    def __init__(self, is_replacement: bool):
        self._is_replacement = is_replacement
        self._epoch = None
        self._is_stream = self._is_collated = False
        # {(epoch, number): a batch that the training process copies from here}
        self._kept_batches: dict[tuple[int, int], list] = {}
        torch.set_num_threads(1)
        collate_in_own_memory()

    def fetch(
        self, index: list, task: Callable, worker: int, seed: int, epoch: int,
        earlier_counts: tuple[int, ...], position: int,
        keys: Optional[tuple[tuple[int, int], tuple[int, int]]] = None,
    ) -> Union[list, MemoryHandle]:  # fmt: skip
        """Return a batch, an ExceptionWrapper with the error, or EndOfStream; packed.

        A new `epoch` begins with a new copy of the data set, which `task()` returns. `earlier_counts`: how
        many batches each earlier pass over this copy has requested; `position`: how many the present pass
        has. Only an IterableDataset needs them. `keys`: (key of this batch, least key still needed): keep the
        batch in this process and return where it lies.
        """
        if is_new := epoch != self._epoch:
            self._epoch = epoch
            self._uses_new_seed = self._is_replacement
            self._is_replacement = False
        if is_new or (self._is_stream and (len(earlier_counts), position) < self._position):
            self._position = 0, 0
            self._begin_error = self._attempt(self._begin, task, worker, seed)
        batch = self._begin_error or self._attempt(
            self._next_batch, unpack(list(map(bytearray, index))), earlier_counts, position
        )
        try:
            parts = pack(batch).parts
        except Exception:
            parts = pack(self._wrap_error()).parts
        parts = [np.frombuffer(part, np.uint8) for part in parts]
        if keys is None:
            return parts
        if not self._is_collated:
            parts = [part.copy() for part in parts]  # the data set may write into its own
        key, oldest_needed = keys
        self._kept_batches = {
            kept_key: kept_parts
            for kept_key, kept_parts in self._kept_batches.items()
            if kept_key >= oldest_needed
        }
        self._kept_batches[key] = parts
        return memory_handle(parts)

    def _begin(self, task: Callable[[], Any], worker: int, seed: int) -> None:
        """Copy the data set, seed this process, call worker_init_fn and start the first pass."""
        self._worker = worker
        # The worker has its own copy, because a data set may write to itself; the object store's is shared by
        # all workers.
        self._task = unpack(list(map(bytearray, task())))
        self._is_stream = self._task["kind"] == _DatasetKind.Iterable
        # in new memory
        self._is_collated = self._task["auto_collation"] and self._task["collate_fn"] is default_collate
        with contextlib.suppress(OSError):
            os.chdir(self._task["folder"])  # paths in the data set may be relative
        # A replacement repeats a stream with the same seed. For other data sets it must not repeat the lost
        # worker's draws.
        self._seed(seed if self._is_stream or not self._uses_new_seed else seed + SEED_STRIDE * os.getpid())
        if self._task["worker_init_fn"]:
            self._task["worker_init_fn"](worker)
        self._start_pass()

    def _seed(self, seed: int) -> None:
        """Seed Python, torch and NumPy as torch's DataLoader does in a worker,
        and fill in what get_worker_info() returns."""
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

    def _next_batch(self, index: object, earlier_counts: Sequence[int], position: int) -> Any:
        """Return the batch at `position` of the pass that follows those of `earlier_counts` (fetch()). Of a
        stream, what this worker has not made of this pass and of those before is skipped."""
        for count in earlier_counts[self._position[0] :]:
            self._catch_up(count)
            self._start_pass()
            self._position = self._position[0] + 1, 0
        self._catch_up(position)
        self._position = len(earlier_counts), position + 1
        return self._fetcher.fetch(index)

    def _catch_up(self, position: int) -> None:
        """Skip an IterableDataset's batches before `position`, and their errors.

        For other data sets, do nothing.
        """
        while self._is_stream and self._position[1] < position:
            self._position = self._position[0], self._position[1] + 1
            with contextlib.suppress(Exception):
                self._fetcher.fetch(self._task["any_index"])

    def _attempt(self, action: Callable[..., Any], *arguments: object) -> Any:
        try:
            return action(*arguments)
        except StopIteration:
            return EndOfStream() if self._is_stream else self._wrap_error()
        except Exception:
            return self._wrap_error()

    def _wrap_error(self):
        return ExceptionWrapper(
            where=f"in DataLoader worker process {self._worker} (Ray, {socket.gethostname()})"
        )
