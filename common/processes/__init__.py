"""The processes of a job: the workers of a node, their parent, the other nodes, and what all ranks do together."""

__all__ = [
    "barrier",
    "channel",
    "collectives",
    "group",
    "naming",
    "network",
    "norms",
    "store",
]  # modules; the rest belongs to this room
