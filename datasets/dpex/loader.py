"""DpexDataLoader: torch's DataLoader with its workers on the machines of a Ray cluster;
the same samples in the same order.

    loader = DpexDataLoader(data_set, distribute_mode=True, num_workers=10, batch_size=100, shuffle=True)

Positional arguments are those of torch's DataLoader; the arguments of this class are given by name.
distribute_mode=False is torch's own loader, num_workers=0 makes the batches in this process. Worker i % N of
N workers makes batch i. Workers are seeded as in torch, so the batches do not depend on where they are made.
The data set is sent to each node once.

head_address: "auto" is RAY_ADDRESS, else the cluster that this machine has joined with `ray start`, else
"local"; "local" is a cluster started on this machine; or host:port. head_lost, when the cluster is lost:
"local" to go on with workers of this machine, "stop" to end with an error.
"""

import dataclasses
import itertools
import multiprocessing
import os
import warnings
import weakref
from collections.abc import Iterator
from typing import Any, Callable, Optional, TypeVar

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader, Dataset, _DatasetKind
from torch.utils.data._utils.pin_memory import pin_memory
from torch.utils.data.dataloader import _BaseDataLoaderIter, _MultiProcessingDataLoaderIter

from common import arguments
from common.errors import TrainingFailed, UserError
from common.machine.child import START_SECONDS
from datasets import cifar10
from datasets.dpex.client import Bridge, ClusterLost, Workers, get_bridge
from datasets.dpex.worker import EndOfStream
from datasets.loader import DeviceLoader, WithEpoch, WithSampleErrors
from datasets.processes import begin_worker

DEFAULT_WORKERS = 2  # of a job with --workers 0

Sample = TypeVar("Sample", covariant=True)


class DpexDataLoader(DataLoader[Sample]):
    """See torch.utils.data.DataLoader; the docstring of this module describes the other arguments."""

    def __init__(
        self, dataset: Dataset[Sample], batch_size: Optional[int] = 1, shuffle: Optional[bool] = None,
        sampler: Any = None, batch_sampler: Any = None, num_workers: int = 0,
        collate_fn: Optional[Callable] = None, pin_memory: bool = False, drop_last: bool = False,
        timeout: float = 0, worker_init_fn: Optional[Callable[[int], None]] = None,
        multiprocessing_context: Any = None, generator: Optional[torch.Generator] = None, *,
        distribute_mode: bool = False, head_address: str = "auto", head_lost: str = "local", **kwargs: Any,
    ):  # fmt: skip
        if isinstance(batch_size, bool):  # the order of the original Dpex, where distribute_mode comes second
            raise UserError(
                f"batch_size={batch_size}: arguments without a name are in the order of torch's DataLoader; "
                f"give distribute_mode={batch_size} by its name, and head_address too"
            )
        if head_lost not in ("local", "stop"):
            raise UserError(
                f"head_lost={head_lost!r} is neither 'local' nor 'stop': when the cluster is lost, 'local' "
                "goes on with workers of this machine, 'stop' ends with an error"
            )
        self.distribute_mode = bool(distribute_mode) and num_workers > 0
        self.head_address = head_address
        self.head_lost = head_lost
        self._idle_workers: list[Workers] = []  # left by earlier passes
        super().__init__(
            dataset, batch_size, shuffle, sampler, batch_sampler, num_workers, collate_fn, pin_memory,
            drop_last, timeout, worker_init_fn, multiprocessing_context, generator, **kwargs,
        )  # fmt: skip
        self._bridge = get_bridge(head_address) if self.distribute_mode else None

    def check_worker_number_rationality(self) -> None:
        """Have torch warn of more workers than processors only where the workers run on this machine."""
        if not self.distribute_mode:  # torch counts the processors of this machine only
            super().check_worker_number_rationality()

    def _get_iterator(self) -> _BaseDataLoaderIter:
        if not self.distribute_mode:
            return super()._get_iterator()
        self._bridge = current_bridge = get_bridge(self.head_address)
        if current_bridge.loss_reason:
            if self.head_lost == "stop":
                raise _cluster_lost_error(current_bridge)
            super().check_worker_number_rationality()
            return _MultiProcessingDataLoaderIter(self)
        return RayIterator(self, current_bridge, self._idle_workers, stop_when_lost=self.head_lost == "stop")


def _cluster_lost_error(bridge: Bridge) -> TrainingFailed:
    return TrainingFailed(f"the Ray cluster is lost: {bridge.loss_reason}; head_lost='stop' was asked for")


@dataclasses.dataclass
class Pass:
    """State of one pass over the data set: which batches were requested from the workers,
    and which have arrived."""

    has_more: list[bool]  # for each worker; False once its IterableDataset has ended
    worker_cycle: Iterator[int]  # the workers in turn
    is_exhausted: bool = False  # the sampler has no more indices
    next_request: int = 0  # number of the next batch to request
    next_yield: int = 0  # number of the next batch to give, if in order
    # {number: (worker, index)}, until given
    requested: dict[int, tuple[int, Any]] = dataclasses.field(default_factory=dict)
    arrived: dict[int, Any] = dataclasses.field(default_factory=dict)  # {number: batch}


class RayIterator(_BaseDataLoaderIter):
    """One pass over the data set, or with persistent_workers every pass, with the workers of a Ray cluster.

    It requests batches ahead, gives them in order unless in_order=False allows another, and handles the loss
    of the cluster."""

    def __init__(self, loader: DataLoader, bridge: Bridge, idle_workers: list[Workers], stop_when_lost: bool):
        generator = torch.default_generator if loader.generator is None else loader.generator
        self._generator_state = generator.get_state()  # before the base class draws the seeds of the workers
        super().__init__(loader)
        self._bridge = bridge
        self._stop_when_lost = stop_when_lost
        self._in_order = getattr(loader, "in_order", True) or self._dataset_kind == _DatasetKind.Iterable
        self._prefetch = max(1, loader.prefetch_factor or 1)
        self._worker_init_fn = loader.worker_init_fn
        self._batch_size = loader.batch_size
        self._context = loader.multiprocessing_context
        self._workers: Optional[Workers] = None  # None: this pass is over, or the cluster is lost
        self._local_batches: Iterator = iter(())  # batches of torch's own workers, once the cluster is lost
        self._has_warned = False
        self._pass_number = 0
        self._started: set[int] = set()  # workers that have delivered something since their start
        self._pass = self._new_pass()
        try:
            workers = idle_workers.pop() if idle_workers else None
            if workers is None or not workers.is_usable():
                workers = Workers(bridge)
            self._workers = workers
            self._release = weakref.finalize(self, idle_workers.append, workers)
            self._begin(workers)
            self._request_ahead(workers)
        except ClusterLost:
            self._continue_locally()

    def _reset(self, loader: DataLoader, first_iter: bool = False) -> None:
        """Begin the next epoch of persistent workers.

        Once the cluster is lost, torch's workers on this machine make it.
        """
        super()._reset(loader, first_iter)
        self._pass_number += 1
        self._pass = self._new_pass()
        if self._workers is None:
            if self._stop_when_lost:
                raise _cluster_lost_error(self._bridge)
            self._local_batches = iter(self._local_loader(self._sampler_iter))
            return
        try:
            self._workers.resume()
            self._request_ahead(self._workers)
        except ClusterLost:
            self._continue_locally()

    def _new_pass(self):
        return Pass([True] * self._num_workers, itertools.cycle(range(self._num_workers)))

    def _begin(self, workers: Workers) -> None:
        iterable = self._dataset_kind == _DatasetKind.Iterable
        task = {
            "dataset": self._dataset, "kind": self._dataset_kind, "auto_collation": self._auto_collation,
            "collate_fn": self._collate_fn, "drop_last": self._drop_last,
            "worker_init_fn": self._worker_init_fn, "num_workers": self._num_workers, "folder": os.getcwd(),
            "any_index": [None] * self._batch_size if iterable and self._batch_size else None,
        }  # fmt: skip
        workers.begin(task, self._num_workers, int(self._base_seed))

    # --- Requests -------------------------------------------------------------------------------------------

    def _request_ahead(self, workers: Workers, extra: int = 0) -> None:
        """Request batches until `extra` more than the workers' prefetch are requested,
        or no index is left."""
        current_pass = self._pass
        window = self._prefetch * self._num_workers + extra
        while (
            len(current_pass.requested) < window
            and any(current_pass.has_more)
            and not current_pass.is_exhausted
        ):
            try:
                index = self._next_index()
            except StopIteration:
                current_pass.is_exhausted = True
                return
            worker = next(number for number in current_pass.worker_cycle if current_pass.has_more[number])
            current_pass.requested[current_pass.next_request] = worker, index
            current_pass.next_request += 1
            workers.fetch(current_pass.next_request - 1, worker, index)

    # --- Batches --------------------------------------------------------------------------------------------

    def _next_data(self) -> Any:
        if self._workers:
            try:
                return self._next_from_workers(self._workers)
            except ClusterLost:
                self._continue_locally()
        return next(self._local_batches)

    def _next_from_workers(self, workers: Workers) -> Any:
        """Return the next batch of the workers, or raise its error; StopIteration at the end of the pass."""
        current_pass = self._pass
        while True:
            self._request_ahead(workers)
            if not current_pass.requested:
                if not self._persistent_workers:
                    self._release()  # they wait for the next pass of the same loader
                    self._workers = None
                raise StopIteration
            ready = current_pass.next_yield if self._in_order else next(iter(current_pass.arrived), None)
            if ready in current_pass.arrived:
                # first, so that this batch is not lost if the cluster is
                self._request_ahead(workers, extra=1)
                data = current_pass.arrived.pop(ready)
                del current_pass.requested[ready]
                current_pass.next_yield += 1
                if isinstance(data, ExceptionWrapper):
                    data.reraise()
                return pin_memory(data, self._pin_memory_device) if self._pin_memory else data
            if self._in_order and current_pass.next_yield not in current_pass.requested:
                # its worker had no more
                current_pass.next_yield += 1
                continue
            self._receive(workers)

    def _receive(self, workers: Workers) -> None:
        """Wait for a message of the workers, and record the batch that it brings or the end of a worker's
        stream."""
        current_pass = self._pass
        worker = next(
            (
                owner
                for number, (owner, _) in current_pass.requested.items()
                if number not in current_pass.arrived
            ),
            None,
        )
        start_seconds = (
            START_SECONDS if worker not in self._started else 0
        )  # the timeout is for batches, not for starting workers
        message = workers.receive(self._timeout + start_seconds if self._timeout else None)
        if message is None:
            raise RuntimeError(f"DataLoader timed out after {self._timeout} seconds")
        verb, *fields = message
        if verb == "failed":
            raise RuntimeError(f"DataLoader over Ray: {fields[0]}")
        if verb == "lost":
            self._started.discard(fields[0])
            self._warn_once_of_lost_worker(*fields)
            return
        number, data = fields
        if number not in current_pass.requested:  # requested from a worker that had no more
            return
        worker, _ = current_pass.requested[number]
        self._started.add(worker)
        if isinstance(data, EndOfStream):
            current_pass.has_more[worker] = False
            for other_number, (owner, _) in list(current_pass.requested.items()):
                if owner == worker and other_number not in current_pass.arrived:
                    del current_pass.requested[other_number]
        else:
            current_pass.arrived[number] = data

    def _warn_once_of_lost_worker(self, worker: int, reason: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            consequence = ""
            if self._dataset_kind != _DatasetKind.Iterable:
                consequence = (
                    "; a transform that draws from the worker's global random generator draws anew in them"
                )
            warnings.warn(
                f"Ray worker {worker} was lost ({reason}): its batches are made again{consequence}",
                stacklevel=2,
            )

    # --- Without the cluster --------------------------------------------------------------------------------

    def _continue_locally(self):
        """Load the rest of the pass with torch's own workers on this machine;
        TrainingFailed with head_lost="stop"."""
        if self._workers:
            self._release.detach()
            self._workers.close()
            self._workers = None
        if self._stop_when_lost:
            raise _cluster_lost_error(self._bridge) from None
        self._bridge.warn_once()
        repeats_seeds = (
            self._pass_number == 0 and self._dataset_kind == _DatasetKind.Iterable
        )  # from the start, with the same seeds
        remaining = (index for _, (_, index) in sorted(self._pass.requested.items()))
        self._local_batches = iter(
            self._local_loader(itertools.chain(remaining, self._sampler_iter), repeats_seeds)
        )
        if self._dataset_kind == _DatasetKind.Iterable:
            for _ in range(self._num_yielded):
                next(self._local_batches)

    def _local_loader(self, indices: Any, repeats_seeds: bool = False) -> DataLoader:
        """Return torch's loader for these indices.

        An IterableDataset starts anew, perhaps with the cluster's seeds.
        """
        options: dict[str, Any] = {
            "num_workers": self._num_workers, "collate_fn": self._collate_fn, "timeout": self._timeout,
            "worker_init_fn": self._worker_init_fn, "pin_memory": self._pin_memory,
            "generator": torch.Generator(), "multiprocessing_context": self._context,
            "prefetch_factor": self._prefetch,
        }  # fmt: skip
        options["generator"].manual_seed(
            self._base_seed + 1 + self._pass_number
        )  # so that earlier random draws do not come again
        if self._dataset_kind == _DatasetKind.Iterable:
            if repeats_seeds:
                options["generator"].set_state(self._generator_state)
            return DataLoader(self._dataset, self._batch_size, drop_last=self._drop_last, **options)
        options["num_workers"] = min(self._num_workers, len(os.sched_getaffinity(0)))
        if self._auto_collation:
            return DataLoader(self._dataset, batch_sampler=indices, **options)
        return DataLoader(self._dataset, batch_size=None, sampler=indices, **options)


def batches(data_set: Any, sampler: Any, workers: int = 0) -> DpexDataLoader:
    """Return a loader over Ray whose batches are `data_set[epoch, ids]`,
    for each batch of ids of the sampler."""
    return DpexDataLoader(
        WithSampleErrors(data_set, sampler), None, sampler=WithEpoch(sampler), distribute_mode=True,
        persistent_workers=True, num_workers=workers or DEFAULT_WORKERS, generator=torch.Generator(),
        worker_init_fn=_outlive_stop_signals,
    )  # fmt: skip


def _outlive_stop_signals(worker: int) -> None:
    """In a worker process of this machine, ignore stop signals:
    a stopped job needs batches until it has saved."""
    if multiprocessing.parent_process():
        begin_worker(worker)


def add_options(parser: arguments.Parser) -> None:
    """Say in a CIFAR job's help that --workers are processes on the Ray cluster."""
    arguments.explain(
        parser, workers=f"worker processes of each rank on the Ray cluster; 0 means {DEFAULT_WORKERS}"
    )


def cifar_loader(
    data_set: cifar10.ImageArrays, sampler: Any, device: torch.device, augment: bool, seed: int, workers: int
) -> DeviceLoader:
    """Return cifar10.loader() with batches that are made on the Ray cluster."""
    return cifar10.loader(data_set, sampler, device, augment, seed, workers, batches)
