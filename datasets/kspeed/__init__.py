"""Photographs through a cache that jobs and nodes share."""

from datasets.kspeed.samples import KSpeedCallable, KSpeedFolder, through_cache

__all__ = ["KSpeedCallable", "KSpeedFolder", "KSpeedImageFolder", "through_cache"]


def __getattr__(name):
    """KSpeedImageFolder is made when it is first asked for: it needs torchvision, and nothing else here does."""
    if name == "KSpeedImageFolder":
        from datasets.kspeed import samples

        return samples.KSpeedImageFolder
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
