"""Photographs as a few large files."""

from launch.pack.command import main

__all__ = ["main"]
