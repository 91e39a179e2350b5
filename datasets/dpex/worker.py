"""What runs on the other machines for datasets.dpex: one worker of a loader, with the manners of torch's own."""

import contextlib
import os
import random
import socket

import numpy as np
import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import _DatasetKind
from torch.utils.data._utils import worker as torchs

from datasets.dpex.wire import pack, unpack


class End:
    """In place of a batch: this worker's IterableDataset has no more."""


class Worker:
    """A worker process: made once, begun at every epoch, asked for one batch after the other."""

    def __init__(self):
        torch.set_num_threads(1)

    def begin(self, header, buffers, worker_id, seed, passes, skip):
        """`passes` over an IterableDataset, and then `skip` batches: what a worker which was lost has delivered."""
        self._id, self._failed = worker_id, None
        try:
            # A copy of its own, to write into as torch's workers may: the one in the object store is the whole node's.
            self._task = unpack(header, [bytearray(buffer) for buffer in buffers])
            with contextlib.suppress(OSError):
                os.chdir(self._task["folder"])  # paths in the data set may be relative
            self._seed(seed)
            if self._task["worker_init_fn"]:
                self._task["worker_init_fn"](worker_id)
            self.resume()
            for _ in range(passes):
                with contextlib.suppress(StopIteration):
                    while True:
                        self._fetcher.fetch(self._task["any_index"])
                self.resume()
            for _ in range(skip):
                self._fetcher.fetch(self._task["any_index"])
        except Exception:
            self._failed = self._wrapped()

    def resume(self):
        """Another epoch with what there is: persistent_workers."""
        task = self._task
        self._fetcher = _DatasetKind.create_fetcher(
            task["kind"], task["dataset"], task["auto_collation"], task["collate_fn"], task["drop_last"]
        )

    def fetch(self, index):
        """A batch, the error that it ended in, or the End; packed."""
        found = self._failed or self._fetch(unpack(index[0], [bytearray(buffer) for buffer in index[1:]]))
        try:
            header, buffers, _ = pack(found)
        except Exception:
            header, buffers, _ = pack(self._wrapped())
        return [header, *(np.frombuffer(buffer, np.uint8) for buffer in buffers)]

    def _fetch(self, index):
        try:
            return self._fetcher.fetch(index)
        except StopIteration:
            return End() if self._task["kind"] == _DatasetKind.Iterable else self._wrapped()
        except Exception:
            return self._wrapped()

    def _seed(self, seed):
        """As torch seeds its workers."""
        random.seed(seed)
        torch.manual_seed(seed)
        np.random.seed(torchs._generate_state(seed - self._id, self._id))
        torchs._worker_info = torchs.WorkerInfo(
            id=self._id, num_workers=self._task["num_workers"], seed=seed, dataset=self._task["dataset"]
        )

    def _wrapped(self):
        return ExceptionWrapper(where=f"in DataLoader worker process {self._id} (Ray, {socket.gethostname()})")
