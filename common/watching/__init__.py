"""Who of a job is alive, and who is to blame where one is not: the parent of a node's workers, or a watcher beside a rank."""

# Modules; the rest belongs to this room.
__all__ = ["single_rank", "supervisor", "watch", "watcher", "worker"]
