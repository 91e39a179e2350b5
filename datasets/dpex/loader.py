"""DpexDataLoader: torch's DataLoader with its workers on the machines of a Ray cluster; the same samples in the same order.

    loader = DpexDataLoader(data_set, distribute_mode=True, num_workers=10, batch_size=100, shuffle=True)

distribute_mode=False is torch's own loader, num_workers=0 the single process. Batch i of N workers is made by worker i % N,
which is seeded as torch's is, so that nothing depends on where it runs. The data set travels to each node once.

head_address: "auto", which is RAY_ADDRESS, or the cluster that this machine has joined with `ray start`, or else "local", one
of its own on this machine; or host:port. head_lost: what to do when the cluster is gone, "local" to go on without, or "stop".
"""

import functools
import itertools
import multiprocessing
import os
import warnings
import weakref

import torch
from torch.utils.data import DataLoader, _DatasetKind
from torch.utils.data._utils.pin_memory import pin_memory
from torch.utils.data.dataloader import _BaseDataLoaderIter, _MultiProcessingDataLoaderIter

from common import arguments
from common.errors import TrainingFailed, UserError, one_line
from datasets import cifar10, crops
from datasets.dpex.link import ClusterGone, Links, porter
from datasets.loader import DeviceLoader, WithEpoch, leave_signals_to_the_parent

WINDOW_BYTES = 1 << 30  # of batches that are on their way, at most
WORKERS = 2  # of a job that was not told a number


class DpexDataLoader(DataLoader):
    """See torch.utils.data.DataLoader; what this one has besides is said above."""

    def __init__(self, dataset, distribute_mode=False, head_address="auto", batch_size=1, shuffle=False, sampler=None,
                 batch_sampler=None, num_workers=0, collate_fn=None, pin_memory=False, drop_last=False, timeout=0,
                 worker_init_fn=None, multiprocessing_context=None, generator=None, *, prefetch_factor=2,
                 persistent_workers=False, head_lost="local", **others):  # fmt: skip
        if head_lost not in ("local", "stop"):
            raise UserError(f"head_lost={head_lost!r}: 'local' goes on on this machine when the cluster is gone, 'stop' stops")
        self.distribute_mode = bool(distribute_mode) and num_workers > 0
        self.head_address, self.head_lost, self._links = head_address, head_lost, Links()
        super().__init__(
            dataset, batch_size, shuffle, sampler, batch_sampler, num_workers, collate_fn, pin_memory, drop_last, timeout,
            worker_init_fn, multiprocessing_context, generator, prefetch_factor=prefetch_factor if num_workers else None,
            persistent_workers=persistent_workers, **others,
        )  # fmt: skip
        if self.distribute_mode:
            porter(head_address).used_by(self)
            weakref.finalize(self, self._links.close)

    def check_worker_number_rationality(self):
        if not self.distribute_mode:  # the processors of other machines are not counted here
            super().check_worker_number_rationality()

    def _get_iterator(self):
        if not self.distribute_mode:
            return super()._get_iterator()
        process = porter(self.head_address)
        if process.lost:
            super().check_worker_number_rationality()
            return _MultiProcessingDataLoaderIter(self)
        return _RayDataLoaderIter(self, process)


class _RayDataLoaderIter(_BaseDataLoaderIter):
    """One pass, or with persistent_workers each of them, over the data set with the workers of one link."""

    def __init__(self, loader, process):
        chosen = torch.default_generator if loader.generator is None else loader.generator
        self._generator_state = chosen.get_state()  # from which its seeds are drawn
        super().__init__(loader)
        self._process, self._link = process, None
        self._in_order, self._prefetch = getattr(loader, "in_order", True), max(1, loader.prefetch_factor)
        self._stop_when_lost, self._worker_init_fn = loader.head_lost == "stop", loader.worker_init_fn
        self._batch_size, self._context = loader.batch_size, loader.multiprocessing_context
        self._rest, self._warned, self._passes = None, False, 0
        self._count()
        try:
            self._link = loader._links.take(process)
            # By a finalizer, not by __del__: of what is garbage together, the connection may be thrown away first.
            self._leave = weakref.finalize(self, self._link.close if self._persistent_workers else self._give_back(loader))
            self._begin()
            self._fill()
        except ClusterGone:
            self._go_on_here()

    def _reset(self, loader, first_iter=False):
        """The next epoch of persistent workers."""
        super()._reset(loader, first_iter)
        self._passes += 1
        self._count()
        if self._rest is not None:
            self._rest = iter(self._here(self._sampler_iter))
            return
        try:
            self._link.resume()
            self._fill()
        except ClusterGone:
            self._go_on_here()

    def _count(self):
        self._sent = self._next = 0
        self._asked, self._arrived = {}, {}  # number: (worker, index), and number: batch
        self._at_work = [True] * self._num_workers
        self._turns, self._largest, self._exhausted = itertools.cycle(range(self._num_workers)), None, False

    def _begin(self):
        iterable = self._dataset_kind == _DatasetKind.Iterable
        task = {
            "dataset": self._dataset, "kind": self._dataset_kind, "auto_collation": self._auto_collation,
            "collate_fn": self._collate_fn, "drop_last": self._drop_last, "worker_init_fn": self._worker_init_fn,
            "num_workers": self._num_workers, "folder": os.getcwd(),
            "any_index": [None] * self._batch_size if iterable and self._batch_size else None,
        }  # fmt: skip
        self._link.begin(task, self._num_workers, self._base_seed, iterable, wait=self._timeout > 0)

    # --- Asking ahead ----------------------------------------------------------------------------------------------------

    def _window(self):
        """How many batches may be on their way: as many as torch would have, but not too many bytes."""
        if self._largest is None:
            return self._num_workers  # one each, until it is known how large they are
        return max(1, min(self._prefetch * self._num_workers, WINDOW_BYTES // max(self._largest, 1)))

    def _fill(self):
        while len(self._asked) + len(self._arrived) < self._window() and any(self._at_work) and not self._exhausted:
            try:
                index = self._next_index()
            except StopIteration:
                self._exhausted = True
                return
            worker = next(turn for turn in self._turns if self._at_work[turn])
            self._asked[self._sent] = worker, index
            self._sent += 1
            self._link.fetch(self._sent - 1, worker, index)

    # --- Receiving -------------------------------------------------------------------------------------------------------

    def _next_data(self):
        if self._rest is None:
            try:
                return self._from_workers()
            except ClusterGone:
                self._go_on_here()
        return next(self._rest)

    def _from_workers(self):
        while True:
            self._fill()
            if not self._asked and not self._arrived:
                self._over()
                raise StopIteration
            ready = self._next if self._in_order else next(iter(self._arrived), None)
            if ready in self._arrived:
                data = self._arrived.pop(ready)
                self._next += 1
                self._fill()
                if isinstance(data, torch._utils.ExceptionWrapper):
                    data.reraise()
                return pin_memory(data, self._pin_memory_device) if self._pin_memory else data
            if self._in_order and self._next not in self._asked:  # its worker had come to its end
                self._next += 1
                continue
            self._receive()

    def _receive(self):
        found = self._link.receive(self._timeout)
        if found is None:
            raise RuntimeError(f"DataLoader timed out after {self._timeout} seconds")
        verb, *words = found
        if verb == "lost":
            self._tell_of_the_loss(*words)
        elif verb == "failed":
            raise RuntimeError(f"DataLoader over Ray: {words[0]}")
        else:
            number, data, size = words
            if number not in self._asked:  # behind the end of its worker
                return
            worker, _ = self._asked.pop(number)
            if type(data).__name__ == "End" and type(data).__module__ == "datasets.dpex.worker":
                self._at_work[worker] = False
                # What it was asked before may still be on its way.
                self._asked = {other: task for other, task in self._asked.items() if task[0] != worker or other < number}
                return
            self._arrived[number] = data
            self._largest = max(self._largest or 0, size)

    def _tell_of_the_loss(self, worker, reason):
        if not self._warned:
            self._warned = True
            again = "made again elsewhere"
            if self._dataset_kind != _DatasetKind.Iterable:
                again += "; a transform that draws from the worker's global random generator draws anew in them"
            warnings.warn(f"Ray worker {worker} was lost ({one_line(reason)}): its batches are {again}", stacklevel=2)

    def _over(self):
        """The workers of a finished pass wait for the next one of the same loader."""
        if not self._persistent_workers and self._link:
            self._leave()
            self._link = None

    def _give_back(self, loader):
        return functools.partial(loader._links.give_back, self._link)

    # --- Without the cluster -----------------------------------------------------------------------------------------------

    def _go_on_here(self):
        """What has not been given yet is loaded by torch's own workers, on this machine."""
        if self._link:
            self._leave.detach()
            self._link.close()
            self._link = None
        if self._stop_when_lost:
            raise TrainingFailed(f"the Ray cluster is gone: {self._process.lost}; head_lost='stop' was asked for") from None
        self._process.say_once()
        again = self._passes == 0 and self._dataset_kind == _DatasetKind.Iterable  # from the start, with the same seeds
        owed = (index for _, (_, index) in sorted(self._asked.items()))
        rest = iter(self._here(itertools.chain(owed, self._sampler_iter), again))
        if self._dataset_kind == _DatasetKind.Iterable:
            for _ in range(self._num_yielded):
                next(rest)
            self._rest = rest
        else:
            self._rest = self._merged(sorted([*self._asked, *self._arrived]), self._arrived, rest)

    @staticmethod
    def _merged(numbers, arrived, rest):
        for number in numbers:
            yield arrived.pop(number) if number in arrived else next(rest)
        yield from rest

    def _here(self, indices, again=False):
        """torch's loader of these; its seeds are `again` those of the cluster's workers, or new ones."""
        how = {
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
    """Indices that are known one by one, and only once."""

    def __init__(self, indices):
        self._indices = indices

    def __iter__(self):
        return iter(self._indices)


def batches(data_set, sampler, workers=0):
    """datasets.loader.torch_batches over Ray: `data_set[epoch, ids]` gives a whole batch."""
    return DpexDataLoader(
        data_set, True, "auto", batch_size=None, sampler=WithEpoch(sampler), num_workers=workers or WORKERS,
        persistent_workers=True, generator=torch.Generator(), worker_init_fn=_keep_until_the_job_has_saved,
    )  # fmt: skip


def _keep_until_the_job_has_saved(worker):
    """Of processes on this machine, which get the job's signals, too; Ray's are no children of ours."""
    if multiprocessing.parent_process():
        leave_signals_to_the_parent(worker)


def add_options(parser):
    """For a CIFAR job: its --workers are on the machines of the cluster."""
    arguments.explain(parser, workers="worker processes of each rank on the Ray cluster; 0 means 2")
    parser.reads = functools.partial(cifar10.reads, shared=False)


def cifar_loader(data_set, sampler, device, augment, seed, workers):
    """The loader of datasets.cifar10, with its batches from Ray."""
    crop_and_flip = functools.partial(crops.crop_and_flip, seed=seed) if augment else None
    return DeviceLoader(batches(data_set, sampler, workers), sampler, device, cifar10.MEAN, cifar10.STD, crop_and_flip)
