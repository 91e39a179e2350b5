"""The processes of a job: the workers of a node, their parent, the other nodes, and what all ranks do together."""

# Modules; the rest belongs to this room.
__all__ = [
    "alone", "barrier", "channel", "collectives", "group", "hub", "messages", "naming", "network", "norms", "secret", "store",
    "supervisor", "tree", "watch", "worker",
]  # fmt: skip
