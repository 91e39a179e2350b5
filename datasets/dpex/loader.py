"""DpexDataLoader: torch's DataLoader with its workers on the machines of a Ray cluster; the same samples in the same order.

    loader = DpexDataLoader(data_set, distribute_mode=True, num_workers=10, batch_size=100, shuffle=True)

distribute_mode=False is torch's own loader, num_workers=0 makes the batches in this process. Batch i of N workers is made by
worker i % N, which is seeded as torch's is, so that nothing depends on where it runs. The data set travels to each node once.

head_address: "auto" is RAY_ADDRESS, or the cluster that this machine has joined with `ray start`, or else "local"; "local" is a
cluster of our own on this machine; or host:port. head_lost: what to do when the cluster is lost, "local" to go on with workers
of this machine, "stop" to end with an error.
"""

import functools
import multiprocessing
import weakref
from typing import Any, Callable, Optional

import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from common import arguments
from common.errors import UserError
from datasets import cifar10, crops
from datasets.dpex.client import IdleWorkers, bridge
from datasets.dpex.iterator import RayIterator
from datasets.loader import DeviceLoader, WithEpoch, leave_signals_to_the_parent

DEFAULT_WORKERS = 2  # of a job without --workers


class DpexDataLoader(DataLoader):
    """See torch.utils.data.DataLoader, and the text above for the other arguments."""

    def __init__(
        self, dataset: Dataset, distribute_mode: bool = False, head_address: str = "auto", batch_size: Optional[int] = 1,
        shuffle: Optional[bool] = False, sampler: Any = None, batch_sampler: Any = None, num_workers: int = 0,
        collate_fn: Optional[Callable] = None, pin_memory: bool = False, drop_last: bool = False, timeout: float = 0,
        worker_init_fn: Optional[Callable[[int], None]] = None, multiprocessing_context: Any = None,
        generator: Optional[torch.Generator] = None, *, prefetch_factor: int = 2, persistent_workers: bool = False,
        head_lost: str = "local", **others: Any,
    ):  # fmt: skip
        if head_lost not in ("local", "stop"):
            raise UserError(
                f"head_lost={head_lost!r} is neither 'local' nor 'stop': when the cluster is lost, 'local' goes on with "
                "workers of this machine, 'stop' ends with an error"
            )
        self.distribute_mode = bool(distribute_mode) and num_workers > 0
        self.head_address, self.head_lost, self._idle_workers = head_address, head_lost, IdleWorkers()
        super().__init__(
            dataset, batch_size, shuffle, sampler, batch_sampler, num_workers, collate_fn, pin_memory, drop_last, timeout,
            worker_init_fn, multiprocessing_context, generator, prefetch_factor=prefetch_factor if num_workers else None,
            persistent_workers=persistent_workers, **others,
        )  # fmt: skip
        if self.distribute_mode:
            bridge(head_address).add_user(self)
            weakref.finalize(self, self._idle_workers.close)

    def check_worker_number_rationality(self) -> None:
        if not self.distribute_mode:  # torch counts the processors of this machine only
            super().check_worker_number_rationality()

    def _get_iterator(self):
        if not self.distribute_mode:
            return super()._get_iterator()
        process = bridge(self.head_address)
        if process.lost:
            super().check_worker_number_rationality()
            return _MultiProcessingDataLoaderIter(self)
        return RayIterator(self, process, self._idle_workers, stop_when_lost=self.head_lost == "stop")


def batches(data_set: Any, sampler: Any, workers: int = 0) -> DpexDataLoader:
    """datasets.loader.torch_batches over Ray: `data_set[epoch, ids]` gives a whole batch."""
    return DpexDataLoader(
        data_set, True, "auto", batch_size=None, sampler=WithEpoch(sampler), num_workers=workers or DEFAULT_WORKERS,
        persistent_workers=True, generator=torch.Generator(), worker_init_fn=_outlive_stop_signals,
    )  # fmt: skip


def _outlive_stop_signals(worker):
    """A job that is stopped still needs batches until it has saved. Workers on the cluster do not get its signals; those on
    this machine, after the cluster was lost, do."""
    if multiprocessing.parent_process():
        leave_signals_to_the_parent(worker)


def add_options(parser: arguments.Parser) -> None:
    """For a CIFAR job: its --workers are on the machines of the cluster."""
    arguments.explain(parser, workers=f"worker processes of each rank on the Ray cluster; 0 means {DEFAULT_WORKERS}")
    parser.reads = functools.partial(cifar10.reads, shared=False)


def cifar_loader(
    data_set: cifar10.ImageArrays, sampler: Any, device: torch.device, augment: bool, seed: int, workers: int
) -> DeviceLoader:
    """The loader of datasets.cifar10, with its batches from Ray."""
    crop_and_flip = functools.partial(crops.crop_and_flip, seed=seed) if augment else None
    return DeviceLoader(batches(data_set, sampler, workers), sampler, device, cifar10.MEAN, cifar10.STD, crop_and_flip)
