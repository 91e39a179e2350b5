"""Batches of photographs, pairs and CIFAR-10 through NVIDIA DALI:
the same samples in the same order as other loaders."""

from datasets.dali.arrays import add_options, cifar_loader
from datasets.dali.batches import DaliBatches, PairBatches
from datasets.dali.pipeline import give_memory_back, need_dali
from datasets.dali.template import ExternalInputIterator, externalSourcePipeline

__all__ = [
    "DaliBatches", "ExternalInputIterator", "PairBatches", "add_options", "cifar_loader",
    "externalSourcePipeline", "give_memory_back", "need_dali",
]  # fmt: skip
