"""Send a job to a platform, follow it, and stop it."""

from launch.submit.command import main

__all__ = ["main"]
