"""Memory of large tensors is kept for the next step instead of being given back to the kernel and fetched, zeroed, again.

glibc reads these settings once, as a process starts. So they are set by whoever starts the processes that train (`make run`,
launch local, the parent of a node), never by a job itself, and what a user has set stands. By hand, where no GPU computes:

    GLIBC_TUNABLES=$(python -m common.malloc) python jobs/train.py
"""

import glob
import platform
from collections.abc import Mapping

VARIABLE = "GLIBC_TUNABLES"
OLD_GLIBC = platform.libc_ver()[0] == "glibc" and [int(part) for part in platform.libc_ver()[1].split(".")[:2]] < [2, 35]
SETTINGS = {
    # Smaller pieces come from the heap, not from a mapping of their own. An old glibc takes no more than 32 MiB.
    "glibc.malloc.mmap_threshold": 2**25 if OLD_GLIBC else 2**33,
    "glibc.malloc.trim_threshold": 2**34,  # free memory that the heap may keep at its end
    "glibc.malloc.top_pad": 2**28,  # by how much the heap grows at a time
    "glibc.malloc.hugetlb": 1,  # in pages of 2 MiB, where the kernel has them
}


def tuned(environ: Mapping) -> dict:
    """What to add to the environment of processes that train here; nothing where there is a GPU, which it does not help."""
    return {} if VARIABLE in environ or glob.glob("/dev/nvidia[0-9]*") else {VARIABLE: text()}


def text() -> str:
    return ":".join(f"{name}={value}" for name, value in SETTINGS.items())


if __name__ == "__main__":
    print(text())
