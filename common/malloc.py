"""Settings that keep the memory of large tensors for the next step, instead of returning it to the kernel at every step.

glibc reads them once, when a process starts. So they are set by what starts the processes that train (`make run`, launch
local, the parent of a node), never by a job itself, and a user's own setting is kept. By hand, where no GPU computes:

    GLIBC_TUNABLES=$(python -m common.malloc) python jobs/train.py
"""

import platform
from collections.abc import Mapping

from common import drivers

VARIABLE = "GLIBC_TUNABLES"
OLD_GLIBC = platform.libc_ver()[0] == "glibc" and [int(part) for part in platform.libc_ver()[1].split(".")[:2]] < [2, 35]
SETTINGS = {
    # Smaller blocks come from the heap, not from a separate mapping. An old glibc allows no more than 32 MiB.
    "glibc.malloc.mmap_threshold": 2**25 if OLD_GLIBC else 2**33,
    "glibc.malloc.trim_threshold": 2**34,  # free memory that the heap may keep at its end
    "glibc.malloc.top_pad": 2**28,  # by how much the heap grows at a time
    "glibc.malloc.hugetlb": 1,  # use pages of 2 MiB, where the kernel has them
}


def tuned(environ: Mapping[str, str]) -> dict[str, str]:
    """What to add to the environment of processes that train here; nothing where there is a GPU, as it would not help."""
    return {} if VARIABLE in environ or drivers.gpus() else {VARIABLE: text()}


def text() -> str:
    return ":".join(f"{name}={value}" for name, value in SETTINGS.items())


if __name__ == "__main__":
    print(text())
