"""Save and restore a run: checkpoints, the folder and bucket that hold them, and records of the steps that were taken."""

# Modules.
__all__ = [
    "bucket_run", "checkpoint", "evidence", "manifest", "names", "output", "parts", "position", "publisher", "restore", "saver",
    "starts",
]  # fmt: skip
