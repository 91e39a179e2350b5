"""The iterator of DpexDataLoader: requests batches ahead from the workers, gives them in order, survives the cluster."""

import functools
import itertools
import os
import warnings
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Optional

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader, _DatasetKind
from torch.utils.data._utils.pin_memory import pin_memory
from torch.utils.data.dataloader import _BaseDataLoaderIter

from common.errors import TrainingFailed, one_line
from datasets.dpex.client import Bridge, ClusterLost, IdleWorkers, Workers
from datasets.dpex.worker import End

WINDOW_BYTES = 1 << 30  # of requested batches, at most


class RayIterator(_BaseDataLoaderIter):
    """One pass over the data set, or with persistent_workers every pass, with the workers of a Ray cluster."""

    def __init__(self, loader: DataLoader, bridge: Bridge, idle_workers: IdleWorkers, stop_when_lost: bool):
        generator = torch.default_generator if loader.generator is None else loader.generator
        self._generator_state = generator.get_state()  # before the base class draws the seeds of the workers
        super().__init__(loader)
        self._bridge, self._stop_when_lost = bridge, stop_when_lost
        self._in_order, self._prefetch = getattr(loader, "in_order", True), max(1, loader.prefetch_factor or 1)
        self._worker_init_fn, self._batch_size = loader.worker_init_fn, loader.batch_size
        self._context = loader.multiprocessing_context
        self._workers: Optional[Workers] = None  # None: this pass is over, or the cluster is lost
        self._rest: Iterator = iter(())  # what torch's own workers make after that
        self._warned, self._passes = False, 0
        self._start_counting()
        try:
            self._workers = workers = idle_workers.take(bridge)
            # Not in __del__: where iterator and connection are collected together, the connection may be deleted first.
            end = workers.close if self._persistent_workers else functools.partial(idle_workers.give_back, workers)
            self._release = weakref.finalize(self, end)
            self._begin(workers)
            self._request_ahead(workers)
        except ClusterLost:
            self._go_on_here()

    def _reset(self, loader: DataLoader, first_iter: bool = False) -> None:
        """The next epoch of persistent workers."""
        super()._reset(loader, first_iter)
        self._passes += 1
        self._start_counting()
        if self._workers is None:
            self._rest = iter(self._loader_here(self._sampler_iter))
            return
        try:
            self._workers.resume()
            self._request_ahead(self._workers)
        except ClusterLost:
            self._go_on_here()

    def _start_counting(self):
        self._sent = self._next = 0  # numbers of batches
        self._requested: dict[int, tuple[int, Any]] = {}  # {number: (worker, index)}
        self._arrived: dict[int, Any] = {}  # {number: batch}
        self._has_more = [True] * self._num_workers
        self._turns, self._exhausted = itertools.cycle(range(self._num_workers)), False
        self._largest: Optional[int] = None  # bytes of a batch

    def _begin(self, workers):
        iterable = self._dataset_kind == _DatasetKind.Iterable
        task = {
            "dataset": self._dataset, "kind": self._dataset_kind, "auto_collation": self._auto_collation,
            "collate_fn": self._collate_fn, "drop_last": self._drop_last, "worker_init_fn": self._worker_init_fn,
            "num_workers": self._num_workers, "folder": os.getcwd(),
            "any_index": [None] * self._batch_size if iterable and self._batch_size else None,
        }  # fmt: skip
        workers.begin(task, self._num_workers, self._base_seed, iterable, wait=self._timeout > 0)

    # --- Requests --------------------------------------------------------------------------------------------------------

    def _window(self):
        """How many batches may be requested ahead: as many as torch would, but not more than WINDOW_BYTES."""
        if self._largest is None:
            return self._num_workers  # one each, until their size is known
        return max(1, min(self._prefetch * self._num_workers, WINDOW_BYTES // max(self._largest, 1)))

    def _request_ahead(self, workers):
        while len(self._requested) + len(self._arrived) < self._window() and any(self._has_more) and not self._exhausted:
            try:
                index = self._next_index()
            except StopIteration:
                self._exhausted = True
                return
            worker = next(number for number in self._turns if self._has_more[number])
            self._requested[self._sent] = worker, index
            self._sent += 1
            workers.fetch(self._sent - 1, worker, index)

    # --- Batches ---------------------------------------------------------------------------------------------------------

    def _next_data(self) -> Any:
        if self._workers:
            try:
                return self._from_workers(self._workers)
            except ClusterLost:
                self._go_on_here()
        return next(self._rest)

    def _from_workers(self, workers):
        while True:
            self._request_ahead(workers)
            if not self._requested and not self._arrived:
                self._finish()
                raise StopIteration
            ready = self._next if self._in_order else next(iter(self._arrived), None)
            if ready in self._arrived:
                data = self._arrived.pop(ready)
                self._next += 1
                self._request_ahead(workers)
                if isinstance(data, ExceptionWrapper):
                    data.reraise()
                return pin_memory(data, self._pin_memory_device) if self._pin_memory else data
            if self._in_order and self._next not in self._requested:  # its worker had no more
                self._next += 1
                continue
            self._receive(workers)

    def _receive(self, workers):
        message = workers.receive(self._timeout)
        if message is None:
            raise RuntimeError(f"DataLoader timed out after {self._timeout} seconds")
        verb, *words = message
        if verb == "lost":
            self._warn_of_loss(*words)
        elif verb == "failed":
            raise RuntimeError(f"DataLoader over Ray: {words[0]}")
        else:
            self._accept(*words)

    def _accept(self, number, data, size):
        if number not in self._requested:  # requested from a worker that had no more
            return
        worker, _ = self._requested.pop(number)
        if isinstance(data, End):
            self._has_more[worker] = False
            # Its earlier batches may still arrive.
            self._requested = {other: task for other, task in self._requested.items() if task[0] != worker or other < number}
            return
        self._arrived[number] = data
        self._largest = max(self._largest or 0, size)

    def _warn_of_loss(self, worker, reason):
        if not self._warned:
            self._warned = True
            consequence = "made again elsewhere"
            if self._dataset_kind != _DatasetKind.Iterable:
                consequence += "; a transform that draws from the worker's global random generator draws anew in them"
            warnings.warn(f"Ray worker {worker} was lost ({one_line(reason)}): its batches are {consequence}", stacklevel=2)

    def _finish(self):
        """The workers of a finished pass wait for the next pass of the same loader."""
        if not self._persistent_workers and self._workers:
            self._release()
            self._workers = None

    # --- Without the cluster -----------------------------------------------------------------------------------------------

    def _go_on_here(self):
        """The rest of the pass is loaded by torch's own workers on this machine."""
        if self._workers:
            self._release.detach()
            self._workers.close()
            self._workers = None
        if self._stop_when_lost:
            raise TrainingFailed(f"the Ray cluster is gone: {self._bridge.lost}; head_lost='stop' was asked for") from None
        self._bridge.warn_once()
        again = self._passes == 0 and self._dataset_kind == _DatasetKind.Iterable  # from the start, with the same seeds
        missing = (index for _, (_, index) in sorted(self._requested.items()))
        rest = iter(self._loader_here(itertools.chain(missing, self._sampler_iter), again))
        if self._dataset_kind == _DatasetKind.Iterable:
            for _ in range(self._num_yielded):
                next(rest)
            self._rest = rest
        else:
            self._rest = self._merged(sorted([*self._requested, *self._arrived]), self._arrived, rest)

    @staticmethod
    def _merged(numbers, arrived, rest):
        for number in numbers:
            yield arrived.pop(number) if number in arrived else next(rest)
        yield from rest

    def _loader_here(self, indices, again=False):
        """torch's loader for these indices; with the seeds of the cluster's workers `again`, or with new ones."""
        how: dict[str, Any] = {
            "num_workers": self._num_workers, "collate_fn": self._collate_fn, "timeout": self._timeout,
            "worker_init_fn": self._worker_init_fn, "pin_memory": self._pin_memory, "generator": torch.Generator(),
            "multiprocessing_context": self._context, "prefetch_factor": self._prefetch,
        }  # fmt: skip
        how["generator"].manual_seed(self._base_seed + 1 + self._passes)  # other draws than those that were made
        if self._dataset_kind == _DatasetKind.Iterable:
            if again:
                how["generator"].set_state(self._generator_state)
            return DataLoader(self._dataset, self._batch_size, drop_last=self._drop_last, **how)
        how["num_workers"] = min(self._num_workers, len(os.sched_getaffinity(0)))
        if self._auto_collation:
            return DataLoader(self._dataset, batch_sampler=_Once(indices), **how)
        return DataLoader(self._dataset, batch_size=None, sampler=_Once(indices), **how)


class _Once:
    """A sampler of indices from an iterator, for one pass."""

    def __init__(self, indices: Iterable):
        self._indices = indices

    def __iter__(self) -> Iterator:
        return iter(self._indices)
