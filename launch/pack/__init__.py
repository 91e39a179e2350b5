"""Pack many small photographs into a few large files."""

from launch.pack.command import main

__all__ = ["main"]
