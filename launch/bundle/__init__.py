"""How a job becomes one file, or one folder, that needs nothing else of this repository."""

from launch.bundle.command import PACKAGES, bundle, main, option_names

__all__ = ["PACKAGES", "bundle", "main", "option_names"]
