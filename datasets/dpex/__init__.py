"""torch's DataLoader with its workers on the machines of a Ray cluster."""

__all__ = ["DpexDataLoader", "add_options", "batches", "cifar_loader"]


def __getattr__(name):
    """Made when first asked for: the processes of this room that talk to Ray have no use for torch."""
    if name in __all__:
        from datasets.dpex import loader

        return getattr(loader, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
