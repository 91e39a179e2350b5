"""Who is alive, who waits for what, and who is to blame? A rank reports its status;
its node's parent or a watcher reads it."""

# Modules, and a room.
__all__ = [
    "heartbeat",
    "judge",
    "loop",
    "parent",
    "patience",
    "stops",
    "supervisor",
    "watcher",
    "wire",
    "worker",
]
