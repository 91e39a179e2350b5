"""Which batches NVIDIA DALI makes: of photographs, pairs and CIFAR-10, the same samples in the same order as other loaders."""

from datasets.dali.arrays import add_options, cifar_loader
from datasets.dali.batches import DaliBatches
from datasets.dali.pairs import PairBatches
from datasets.dali.pipeline import give_memory_back

__all__ = [
    "DaliBatches", "ExternalInputIterator", "PairBatches", "add_options", "cifar_loader", "externalSourcePipeline",
    "give_memory_back",
]  # fmt: skip


def __getattr__(name):
    """The names of the Template repository, which are for scripts of users."""
    if name in ("ExternalInputIterator", "externalSourcePipeline"):
        from datasets.dali import template

        return getattr(template, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
