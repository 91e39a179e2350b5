"""Photographs in a few large files: how a pack is read, how it arrives from a bucket,
and how training begins meanwhile."""

# Modules.
__all__ = ["arrival", "packed", "process"]
