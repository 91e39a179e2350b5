"""How a job is sent to a platform, followed and stopped."""

from launch.submit.command import main

__all__ = ["main"]
