"""Memory of large tensors is kept for the next step instead of being given back to the kernel and fetched, zeroed, again.

glibc reads these settings once, as a process starts. So they are set by whoever starts the processes that train (`make run`,
launch local, the parent of a node), never by a job itself, and what a user has set stands. By hand:

    GLIBC_TUNABLES=$(python -m common.malloc) python jobs/train.py
"""

VARIABLE = "GLIBC_TUNABLES"
SETTINGS = {
    "glibc.malloc.mmap_threshold": 8 * 2**30,  # smaller pieces come from the heap, not from a mapping of their own
    "glibc.malloc.trim_threshold": 16 * 2**30,  # free memory that the heap may keep at its end
    "glibc.malloc.top_pad": 2**28,  # by how much the heap grows at a time
    "glibc.malloc.hugetlb": 1,  # in pages of 2 MiB, where the kernel has them
}


def tuned(environ):
    """What to add to the environment of processes that train here; nothing where a GPU computes, which it does not help."""
    import torch  # not to be waited for by who only wants the text

    return {} if VARIABLE in environ or torch.cuda.is_available() else {VARIABLE: text()}


def text():
    return ":".join(f"{name}={value}" for name, value in SETTINGS.items())


if __name__ == "__main__":
    print(text())
