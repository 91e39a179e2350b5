"""Seed the generators, so that none has to be saved: for a step by (seed, samples seen, rank or share),
between the steps by (seed, epoch, place in the epoch), and for a batch that is loaded by (seed, epoch, first
sample of the batch)."""

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch

from common.devices import work

# Places.
HEAD = -1  # before an epoch's steps
EVALUATION = -2  # after them
TAIL = -3  # after end_epoch()
BATCH = -4  # in a loader


def seed_step(seed: int, samples_seen: int, part: int) -> None:
    """Seed every generator for a step of rank or share `part`.

    For HEAD, EVALUATION and TAIL, samples_seen is the epoch.
    """
    work.seed_current_device(_seed(seed, samples_seen, part))


def states() -> tuple:
    """Return the states of the CPU's generators: Python's, numpy's and torch's."""
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def are_different(previous: tuple, current: tuple) -> bool:
    """Whether a random number was drawn between two calls of states()."""
    are_equal = (
        previous[0] == current[0]
        and all(map(np.array_equal, previous[1], current[1]))
        and torch.equal(previous[2], current[2])
    )
    return not are_equal


@contextlib.contextmanager
def seeded_batch(seed: int, epoch: int, sample: int) -> Iterator[None]:
    """Seed the CPU's generators for a batch that is loaded inside `with`,
    and restore their states afterwards."""
    saved_states = states()
    _seed(seed, (epoch << 32) + sample, BATCH)
    try:
        yield
    finally:
        random.setstate(saved_states[0])
        np.random.set_state(saved_states[1])
        torch.set_rng_state(saved_states[2])


def _seed(seed: int, number: int, part: int) -> int:
    """Mix the three numbers to one of 63 bits, seed the CPU's generators with it (Python's, numpy's and
    torch's), and return it.

    `number`: the samples seen, an epoch, or an epoch and a sample; `part`: a rank, a share, or a place.
    """
    # The constants are those of splitmix64: neighbouring numbers give seeds that have nothing in common.
    mixed = (seed * 0x9E3779B97F4A7C15 + number * 0xBF58476D1CE4E5B9 + part * 0x94D049BB133111EB) % 2**64
    mixed = ((mixed ^ (mixed >> 31)) * 0x7FB5D329728EA185) % 2**64
    generator_seed = mixed >> 1  # 63 bits, which the generators of all devices take
    random.seed(generator_seed)
    np.random.seed(generator_seed % 2**32)
    torch.default_generator.manual_seed(generator_seed)
    return generator_seed
