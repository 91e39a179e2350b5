"""The number of cores that this process may use.

A container may see many cores but be limited to the time of a few.
"""

import contextlib
import math
import os
from pathlib import Path
from typing import Optional


def count() -> int:
    """Return the number of cores that this process may use, at least 1."""
    visible = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(visible, quota() or visible)


def quota(root: str = "/sys/fs/cgroup") -> Optional[int]:
    """Return this container's limit in cores, rounded up (docker --cpus), or None.

    `root`: the folder of its control groups.
    """
    for names in (["cpu.max"], ["cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"]):  # cgroup v2, then v1
        with contextlib.suppress(OSError, ValueError):
            microseconds, period = (
                int(word) for name in names for word in Path(root, name).read_text().split()
            )
            return max(1, math.ceil(microseconds / period)) if microseconds > 0 else None
    return None
