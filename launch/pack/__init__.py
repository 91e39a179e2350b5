"""How many small photographs become a few large files."""

from launch.pack.command import main

__all__ = ["main"]
