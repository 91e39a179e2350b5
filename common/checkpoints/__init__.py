"""Save and restore a run: checkpoints, the folder and bucket that hold them,
and records of the steps that were taken."""

# Modules.
__all__ = [
    "checkpoint", "evidence", "names", "parts", "position", "pretrained", "publisher", "restore",
    "run_bucket", "run_folder", "saver", "starts", "weights",
]  # fmt: skip
