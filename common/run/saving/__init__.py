"""What is kept of a run, and how a start goes on from it: checkpoints, the folder and the bucket that hold them, evidence."""

# Modules.
__all__ = ["bucket_run", "checkpoint", "evidence", "facts", "output", "restore", "saver", "starts"]
