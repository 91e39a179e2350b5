"""A job as one file, or as a folder, for a training console."""

from launch.bundle.command import bundle, main

__all__ = ["bundle", "main"]
