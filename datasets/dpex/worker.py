"""One worker of a loader, as it runs on a node of the Ray cluster. It does what a worker process of torch's DataLoader does."""

import contextlib
import functools
import os
import random
import socket
from typing import Any, Optional

import numpy as np
import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import _DatasetKind
from torch.utils.data._utils import worker as torch_worker
from torch.utils.data._utils.collate import default_collate_fn_map as COLLATED

from common import malloc
from datasets.dpex.near import Sender
from datasets.dpex.wire import pack, unpack
from datasets.memory import LARGE, Memory

ORIGINAL = COLLATED[torch.Tensor]


def stacked(memory: Memory, batch: list, **how: Any) -> Any:
    """What torch's default_collate makes of tensors, in memory that the training process will see; torch would take new memory.

    Its documentation names COLLATED as the place for such a function."""
    first = batch[0]
    alike = all(type(one) is torch.Tensor and (one.shape, one.dtype) == (first.shape, first.dtype) for one in batch)
    plain = first.layout == torch.strided and first.device.type == "cpu" and not first.is_quantized
    size = len(batch) * first.nbytes if alike and plain and not any(one.requires_grad for one in batch) else 0
    if size < LARGE:
        return ORIGINAL(batch, **how)
    try:
        room = memory.take(size)
    except OSError:
        return ORIGINAL(batch, **how)
    made = torch.frombuffer(room, dtype=first.dtype).view(len(batch), *first.shape)
    return torch.stack(batch, out=made)


class End:
    """Sent in place of a batch: this worker's IterableDataset has no more."""


class Worker:
    """Created once; `begin` or `resume` at each epoch, then `fetch` for one batch after the other."""

    def __init__(self):
        torch.set_num_threads(1)
        malloc.keep()
        self._memory = Memory()

    def begin(
        self, header: bytes, buffers: list, worker_id: int, near: Optional[str], seed: int, passes: int, skip: int
    ) -> None:
        """A new copy of the data set. It replaces a lost worker, which had made `passes` over an IterableDataset and
        delivered `skip` batches of the next. `near`: where to send batches on the training process's own machine."""
        self._id, self._failed, self._near = worker_id, None, Sender(near, self._memory)
        COLLATED[torch.Tensor] = functools.partial(stacked, self._memory) if self._near.connected else ORIGINAL
        try:
            # A copy of its own, because a data set may be written to: all workers of the node share the object store's.
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

    def resume(self) -> None:
        """Another epoch with the same copy of the data set: persistent_workers."""
        task = self._task
        self._fetcher = _DatasetKind.create_fetcher(
            task["kind"], task["dataset"], task["auto_collation"], task["collate_fn"], task["drop_last"]
        )

    def fetch(self, index: list, key: int) -> Optional[list]:
        """A batch, the error that it ended in, or End; packed. None where it went the near way, under this key."""
        batch = self._failed or self._fetch(unpack(index[0], [bytearray(buffer) for buffer in index[1:]]))
        try:
            packed = pack(batch)
        except Exception:
            packed = pack(self._wrapped())
        if self._near.send(key, packed):
            return None
        return [packed.header, *(np.frombuffer(buffer, np.uint8) for buffer in packed.buffers)]

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
        np.random.seed(torch_worker._generate_state(seed - self._id, self._id))
        torch_worker._worker_info = torch_worker.WorkerInfo(
            id=self._id, num_workers=self._task["num_workers"], seed=seed, dataset=self._task["dataset"]
        )

    def _wrapped(self):
        return ExceptionWrapper(where=f"in DataLoader worker process {self._id} (Ray, {socket.gethostname()})")
