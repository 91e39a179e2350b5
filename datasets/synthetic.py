"""Images without a data set: ten classes of coloured pattern, shifted and noisy, which a network can learn in seconds.

For trying a job out where there is no data and no network (--custom_data true). What accuracy they give means nothing.
"""

import numpy as np

SEED = 20210901  # of the pictures themselves, so that every run sees the same ones


def cifar_like(count, split):
    """`count` images shaped like CIFAR-10's, (count, 3, 32, 32) uint8, and their labels; fewer are the first of more."""
    number = {"train": 1, "test": 2}[split]
    patterns = np.random.default_rng(SEED).uniform(-1, 1, (10, 3, 8, 8)).repeat(4, axis=2).repeat(4, axis=3)
    labels = np.random.default_rng([SEED, number, 1]).integers(0, 10, count)
    shifts = np.random.default_rng([SEED, number, 2]).integers(-4, 5, (count, 2))
    noise = np.random.default_rng([SEED, number, 3]).standard_normal((count, 3, 32, 32), dtype=np.float32)
    images = np.stack([np.roll(patterns[label], shift, axis=(1, 2)) for label, shift in zip(labels, shifts)])
    return np.clip(128 + 32 * images + 64 * noise, 0, 255).astype(np.uint8), labels.astype(np.int64)
