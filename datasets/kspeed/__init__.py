"""A memcached cache that jobs and nodes share, so that each photograph is read from storage only once."""

from typing import Any

from datasets.kspeed.cache import SampleCache
from datasets.kspeed.drop_in import KSpeedCallable, KSpeedFolder
from datasets.kspeed.samples import through_cache
from datasets.kspeed.servers import name_of
from datasets.kspeed.values import NOT_STORED, STORED, TOO_LARGE

__all__ = [
    "NOT_STORED", "STORED", "TOO_LARGE", "KSpeedCallable", "KSpeedFolder", "KSpeedImageFolder", "SampleCache",
    "name_of", "samples", "through_cache",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Create KSpeedImageFolder on first use: it needs torchvision, and nothing else here does."""
    if name == "KSpeedImageFolder":
        from datasets.kspeed import drop_in

        return drop_in.image_folder()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
