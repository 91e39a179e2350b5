"""Watch the ranks of a job and find the cause of a failure, in the parent of a node's workers or in a watcher of a rank."""

# The modules that other packages may import.
__all__ = ["single_rank", "supervisor", "watch", "watcher", "worker"]
