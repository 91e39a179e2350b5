"""Operations of all ranks of a job together: start, form a process group, reduce, wait for each other,
and end."""

# Modules.
__all__ = ["barrier", "buckets", "collectives", "differing", "group", "norms", "store"]
