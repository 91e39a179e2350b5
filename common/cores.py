"""How many cores this process may use. A container may have many before its eyes and the time of few."""

import contextlib
import math
import os
from typing import Optional


def count() -> int:
    seen = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(seen, quota() or seen)


def quota(root: str = "/sys/fs/cgroup") -> Optional[int]:
    """Of how many cores this container may use the time (docker --cpus, a limit of Kubernetes'), or None."""
    for names in (["cpu.max"], ["cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"]):  # the second two of an old kernel
        with contextlib.suppress(OSError, ValueError):
            microseconds, period = (int(word) for name in names for word in _words(os.path.join(root, name)))
            return max(1, math.ceil(microseconds / period)) if microseconds > 0 else None
    return None


def _words(path):
    with open(path) as file:
        return file.read().split()
