"""How does a trained network get to where there is none of this repository? As a folder with all that it needs."""

from launch.export.command import main

__all__ = ["main"]
