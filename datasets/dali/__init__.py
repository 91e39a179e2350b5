"""The same batches through NVIDIA DALI."""

from datasets.dali.batches import DaliBatches, add_options, cifar_loader, give_memory_back

__all__ = ["DaliBatches", "add_options", "cifar_loader", "give_memory_back"]
