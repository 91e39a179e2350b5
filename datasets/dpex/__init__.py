"""A replacement for torch's DataLoader whose workers run on the machines of a Ray cluster."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datasets.dpex.loader import DpexDataLoader, add_options, batches, cifar_loader

__all__ = ["DpexDataLoader", "add_options", "batches", "cifar_loader"]


def __getattr__(name: str) -> Any:
    """Import the loader on first use: it needs torch, without which the processes that talk to Ray start
    faster."""
    if name in __all__:
        from datasets.dpex import loader

        return getattr(loader, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
