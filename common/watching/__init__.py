"""Watch the ranks of a job and find the cause of a failure: the parent of a node's workers, or a watcher beside a rank."""

# Modules; the rest belongs to this room.
__all__ = ["single_rank", "supervisor", "watch", "watcher", "worker"]
