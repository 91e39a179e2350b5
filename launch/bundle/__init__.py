"""Bundle a job as one file, or one folder, that needs nothing else of this repository."""

from launch.bundle import requirements
from launch.bundle.command import bundle, main
from launch.bundle.imports import option_names

__all__ = ["bundle", "main", "option_names", "requirements"]
