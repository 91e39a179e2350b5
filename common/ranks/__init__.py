"""What all ranks of a job do together: they start, meet, add up, wait for each other, and end."""

# Modules.
__all__ = ["barrier", "collectives", "group", "norms", "store"]
