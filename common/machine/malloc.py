"""glibc settings that keep the memory of large tensors for the next step, instead of returning it to the kernel at every step.

glibc reads the settings once, when a process starts, so the program that starts the training processes sets them (`make run`,
launch local, the parent of a node). To set them by hand, where no GPU computes:

    GLIBC_TUNABLES=$(python -m common.machine.malloc) python jobs/train.py
"""

import ctypes
import os
import platform
from collections.abc import Mapping

VARIABLE = "GLIBC_TUNABLES"
OLD_GLIBC = platform.libc_ver()[0] == "glibc" and [int(part) for part in platform.libc_ver()[1].split(".")[:2]] < [2, 35]
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3  # of malloc.h
SETTINGS = {
    # Blocks below this size come from the heap, not from a separate mapping. An old glibc allows no more than 32 MiB.
    "glibc.malloc.mmap_threshold": 2**25 if OLD_GLIBC else 2**33,
    "glibc.malloc.trim_threshold": 2**34,  # free memory that the heap may keep at its end
    "glibc.malloc.top_pad": 2**28,  # by how much the heap grows at a time
    "glibc.malloc.hugetlb": 1,  # use pages of 2 MiB, where the kernel has them
}


def tuned(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the GLIBC_TUNABLES of training processes as a dict, empty if `environ` has them or there is an NVIDIA GPU."""
    from common.machine import drivers

    return {} if VARIABLE in environ or drivers.gpus() else {VARIABLE: text()}


def keep() -> None:
    """Set three of SETTINGS, at most to the values there, by mallopt(); not if GLIBC_TUNABLES is set, or without glibc."""
    if VARIABLE in os.environ or platform.libc_ver()[0] != "glibc":
        return
    mallopt = ctypes.CDLL(None).mallopt
    for parameter, value in ((M_MMAP_THRESHOLD, 2**25), (M_TRIM_THRESHOLD, 2**31 - 1), (M_TOP_PAD, 2**26)):
        mallopt(parameter, value)


def text() -> str:
    return ":".join(f"{name}={value}" for name, value in SETTINGS.items())


if __name__ == "__main__":
    print(text())
