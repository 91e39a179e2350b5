"""Export a trained network as a folder that can be used without this repository."""

from launch.export.command import main

__all__ = ["main"]
