"""The buckets in which DistributedDataParallel adds the ranks' gradients: the same in every start, so that the sums are, too.

A gradient's place in its bucket decides in which order Gloo adds the ranks' values, and from three ranks on that order decides
the last bits. DDP fills its buckets anew after the first backward pass of a process, in the order in which that pass comes to
the weights: it would add the first step of each start in another order than all later ones. So here DDP gets a first backward
pass of zeros before the first step. It comes to the weights in the reverse of their order, as that of most networks does.

Uses what DDP itself calls of its reducer: prepare_for_backward, _autograd_hook and _get_ddp_logging_data, tried with torch 2.1
and 2.15.
"""

import gc
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from common import devices
from common.ranks import collectives

ALIKE_IN_ANY_ORDER = 2  # ranks: a + b is b + a


def fix_all() -> list[str]:
    """Fix the buckets of each network of this process that is in DistributedDataParallel on a CPU, and return warnings. All
    ranks call it before the first step. On other devices equal bits are not promised, so there it does nothing."""
    if collectives.rank_and_size()[1] <= ALIKE_IN_ANY_ORDER:
        return []
    warnings = []
    for network in _all_networks():
        if devices.is_accelerator(network.device):
            continue
        if network.static_graph:
            warnings.append(
                f"warning: {type(network.module).__name__} is in DistributedDataParallel with static_graph=True, which adds "
                "the first steps of each start in another order: a restart changes bits"
            )
        elif not network.find_unused_parameters:  # with it, DDP keeps its first buckets
            fix(network)
    return warnings


def fix(network: DistributedDataParallel) -> None:
    """Fix the buckets of this network. Its weights and their gradients stay as they are, and no hook of a weight is called."""
    weights = list(network.module.parameters())
    gradients = [weight.grad for weight in weights]
    for weight in weights:
        weight.grad = None  # DDP takes it for 0
    for module in network.modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:  # DDP expects that its gradients are, too
            module.weight.grad = torch.zeros_like(module.weight).to_sparse()

    network.reducer.prepare_for_backward([])  # as at the end of a forward pass
    count = network._get_ddp_logging_data()["num_parameter_tensors"]
    _FirstPass.apply(network.reducer, count, torch.zeros((), requires_grad=True)).backward()

    for weight, gradient in zip(weights, gradients):
        weight.grad = gradient


class _FirstPass(torch.autograd.Function):
    """A backward pass in which DDP is told that the gradients of all weights have come, that of the last weight first."""

    @staticmethod
    def forward(ctx: Any, reducer: Any, count: int, loss: torch.Tensor) -> torch.Tensor:
        ctx.reducer = reducer
        ctx.count = count
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        for number in reversed(range(ctx.count)):
            ctx.reducer._autograd_hook(number)
        return None, None, None


def _all_networks() -> list[DistributedDataParallel]:
    """Return the networks in DDP over all ranks, also those that no Run knows, in the same order on each rank."""
    gc.collect()  # a network that nobody uses any more would be found on some ranks alone
    found = [one for one in gc.get_objects() if issubclass(type(one), DistributedDataParallel)]
    of_all_ranks = [network for network in found if network.process_group.size() == collectives.rank_and_size()[1]]
    return sorted(of_all_ranks, key=lambda network: [tuple(weight.shape) for weight in network.module.parameters()])
