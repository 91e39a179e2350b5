"""The order of the samples: a function of (seed, epoch), whatever the number of ranks,
loader workers or restarts.

`batch_size` is per device. One step of all ranks together takes `global_batch` = batch_size x ranks samples:
step k of an epoch is order[k*G:(k+1)*G], and rank r takes its r-th contiguous slice. So for an equal G the
steps see the same sets of samples at every world size, and a run can stop after any sample and go on with the
next one.
"""

from collections.abc import Iterator
from typing import Union

import numpy as np

from common.errors import TooFewSamples, UserError


class EpochSampler:
    """Batches of sample ids for training: shuffled anew each epoch,
    the incomplete last global batch dropped."""

    def __init__(self, num_samples: int, batch_size: int, seed: int):
        self.num_samples = num_samples
        self.seed = seed
        self.own_shares = range(1)
        self.shares = 1
        self._parts = "ranks"
        self.set_global_batch(batch_size)
        self.start_at(epoch=0, consumed=0)

    def shard(self, rank: int, world_size: int) -> None:
        """From here on, yield this rank's slice of every global batch,
        whose size becomes a rank's batch x `world_size`."""
        self._deal(range(rank, rank + 1), world_size, "ranks", self.global_batch // self.shares * world_size)

    def deal(self, own_shares: range, shares: int, global_batch: int) -> None:
        """From here on, yield `own_shares` of every global batch, which is cut into `shares` equal ones."""
        self._deal(own_shares, shares, "shares", global_batch)

    def _deal(self, own_shares: range, shares: int, parts: str, global_batch: int) -> None:
        _require_within(own_shares, shares, parts)
        self.own_shares = own_shares
        self.shares = shares
        self._parts = parts
        self.set_global_batch(global_batch)

    def set_global_batch(self, global_batch: int) -> None:
        """Set the samples per step of all ranks; UserError unless all parts are equal and there are so many
        samples."""
        if global_batch % self.shares:
            allowed = [size for size in range(1, global_batch + 1) if global_batch % size == 0]
            raise UserError(
                f"a global batch of {global_batch} does not divide among {self.shares} {self._parts}; "
                f"use one of {allowed} {self._parts}, or another --batch_size"
            )
        if global_batch > self.num_samples:
            parts = ""
            advice = "lower --batch_size"
            if self.shares > 1:
                parts = f" ({global_batch // self.shares} x {self.shares} {self._parts})"
                advice = "lower --batch_size or use fewer ranks"
            reason = f"{self.num_samples} samples are fewer than one global batch of {global_batch}{parts}"
            raise TooFewSamples(f"an epoch would have no step: {reason}; {advice}")
        self.global_batch = global_batch

    def start_at(self, epoch: int, consumed: int) -> None:
        """Continue in this epoch after `consumed` samples; nothing is read to skip them."""
        self.epoch = epoch
        self.consumed = consumed

    @property
    def samples_per_epoch(self) -> int:
        """Number of samples that this epoch trains on: `consumed`, and whole global batches of the rest."""
        return self.consumed + (self.num_samples - self.consumed) // self.global_batch * self.global_batch

    @property
    def batches_before(self) -> int:
        """Number of batches of this epoch that were taken before it was resumed."""
        return self.consumed // self.global_batch

    def step_ids(self, epoch: int, consumed: int) -> np.ndarray:
        """Return the ids of all ranks' samples in the step that follows the first `consumed` samples of
        `epoch`."""
        return self._order(epoch)[consumed : consumed + self.global_batch]

    def _order(self, epoch: int) -> np.ndarray:
        return np.random.default_rng(self.seed + epoch).permutation(self.num_samples)

    def __iter__(self) -> Iterator[np.ndarray]:
        order = self._order(self.epoch)
        size = self.global_batch // self.shares
        for start in range(self.consumed, self.samples_per_epoch, self.global_batch):
            yield order[start + self.own_shares.start * size : start + self.own_shares.stop * size]

    def __len__(self) -> int:
        return (self.samples_per_epoch - self.consumed) // self.global_batch


class EverySample(EpochSampler):
    """Like EpochSampler, with a last batch of the remaining samples.

    If they do not divide among the ranks, the first samples of the epoch fill it up, as in torch's
    DistributedSampler: the other ranks would wait for a rank with fewer samples."""

    def set_global_batch(self, global_batch: int) -> None:
        """Set the samples per step of all ranks. Any number will do, since the last batch may be smaller."""
        self.global_batch = global_batch

    @property
    def samples_per_epoch(self) -> int:
        """Number of samples of an epoch: all of them."""
        return self.num_samples

    def __iter__(self) -> Iterator[np.ndarray]:
        # resize() repeats it
        order = np.resize(self._order(self.epoch), -(-self.num_samples // self.shares) * self.shares)
        for start in range(self.consumed, len(order), self.global_batch):
            batch = order[start : start + self.global_batch]
            size = len(batch) // self.shares
            yield batch[self.own_shares.start * size : self.own_shares.stop * size]

    def __len__(self) -> int:
        return -(-(self.num_samples - self.consumed) // self.global_batch)


class InOrder:
    """Batches of sample ids for evaluation: every sample once, in order; the last batch may be shorter."""

    epoch = 0

    def __init__(self, num_samples: int, batch_size: int):
        self.num_samples = num_samples
        self.batch_size = batch_size
        self.shard(0, 1)

    def shard(self, rank: int, world_size: int, whole_batches: bool = False) -> None:
        """From here on, yield every world_size-th sample; with `whole_batches`, every world_size-th batch, so
        that batches have the same samples at every number of ranks. All ranks together see each sample
        exactly once."""
        _require_within(range(rank, rank + 1), world_size, "ranks")
        self.rank = rank
        self.world_size = world_size
        self.whole_batches = whole_batches

    def __iter__(self) -> Iterator[np.ndarray]:
        if self.whole_batches:
            for start in range(
                self.rank * self.batch_size, self.num_samples, self.world_size * self.batch_size
            ):
                yield np.arange(start, min(start + self.batch_size, self.num_samples))
            return
        rank_ids = np.arange(self.rank, self.num_samples, self.world_size)
        for start in range(0, len(rank_ids), self.batch_size):
            yield rank_ids[start : start + self.batch_size]

    def __len__(self) -> int:
        if self.whole_batches:
            return len(
                range(self.rank * self.batch_size, self.num_samples, self.world_size * self.batch_size)
            )
        return -(-len(range(self.rank, self.num_samples, self.world_size)) // self.batch_size)


def _require_within(indices: range, count: int, parts: str) -> None:
    if not 0 <= indices.start <= indices.stop <= count:
        wrong = indices.start if len(indices) == 1 else f"{indices.start} to {indices.stop - 1}"
        raise UserError(f"there is no {parts[:-1]} {wrong} of {count} {parts}, which are counted from 0")


Sampler = Union[EpochSampler, InOrder]
