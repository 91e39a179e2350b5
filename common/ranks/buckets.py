"""The buckets in which DistributedDataParallel adds the ranks' gradients: the same in every start,
so that the sums are, too.

A gradient's place in its bucket decides in which order Gloo adds the ranks' values, and from three ranks on
that order decides the last bits. DDP fills its buckets anew after the first backward pass of a process, in
the order in which that pass comes to the weights: it would add the first step of each start in another order
than all later ones. So here DDP gets a first backward pass of zeros before the first step. It comes to the
weights in the reverse of their order, as that of most networks does.

Uses what DDP itself calls of its reducer, prepare_for_backward and _autograd_hook, and its
_get_ddp_logging_data; tried with torch 2.1 and 2.15.
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
    """Fix the buckets of all networks in DistributedDataParallel over all ranks; return warnings.

    All ranks call it before the first step. A warning is about a network that keeps its buckets. It does
    nothing with one or two ranks, nor for networks that are not on CPUs, where equal bits are not promised.
    """
    if collectives.rank_and_size()[1] <= ALIKE_IN_ANY_ORDER:
        return []
    networks = [
        network for network in _networks_over_all_ranks() if not devices.is_accelerator(network.device)
    ]
    if not collectives.are_equal(repr([_shapes(network) for network in networks]).encode()):
        return [_warning("the ranks have different networks in DistributedDataParallel")]
    warnings = []
    for network in networks:
        description = f"{type(network.module).__name__} is in DistributedDataParallel"
        if network.static_graph:
            warnings.append(_warning(f"{description} with static_graph=True"))
        elif network._get_ddp_logging_data().get("comm_hook"):  # which might not expect zeros
            warnings.append(_warning(f"{description} with a communication hook"))
        elif not network.find_unused_parameters:  # with it, DDP keeps its first buckets
            fix(network)
    return warnings


def _warning(problem: str) -> str:
    return (
        f"warning: {problem}, so the first step of each start is added in another order: a restart changes "
        "bits"
    )


def _networks_over_all_ranks() -> list[DistributedDataParallel]:
    """Return the networks in the same order on each rank; the Run may not know all of a script's."""
    gc.collect()  # a network that nobody uses any more would be found on some ranks alone
    networks = [
        candidate for candidate in gc.get_objects() if issubclass(type(candidate), DistributedDataParallel)
    ]
    of_all_ranks = [
        network for network in networks if network.process_group.size() == collectives.rank_and_size()[1]
    ]
    return sorted(of_all_ranks, key=_shapes)


def _shapes(network: DistributedDataParallel) -> list[tuple[int, ...]]:
    return [tuple(weight.shape) for weight in network.module.parameters()]


def fix(network: DistributedDataParallel) -> None:
    """Fix the buckets of this network.

    Its weights and their gradients stay as they are, and no hook of a weight is called.
    """
    weights = list(network.module.parameters())
    gradients = [weight.grad for weight in weights]
    for weight in weights:
        weight.grad = None  # DDP takes it for 0
    for module in network.modules():
        # DDP expects that its gradients are, too
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            module.weight.grad = torch.zeros_like(module.weight).to_sparse()

    _run_backward_pass_of_zeros(network)

    for weight, gradient in zip(weights, gradients):
        weight.grad = gradient


def _run_backward_pass_of_zeros(network: DistributedDataParallel) -> None:
    network.reducer.prepare_for_backward([])  # as at the end of a forward pass
    count = network._get_ddp_logging_data()["num_parameter_tensors"]
    _AllWeights.apply(network.reducer, count, torch.zeros((), requires_grad=True)).backward()


class _AllWeights(torch.autograd.Function):
    """Tells DDP in its backward pass that the gradients of all weights have come,
    that of the last weight first."""

    @staticmethod
    def forward(ctx: Any, reducer: Any, count: int, loss: torch.Tensor) -> torch.Tensor:
        ctx.reducer = reducer
        ctx.count = count
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        for index in reversed(range(ctx.count)):
            ctx.reducer._autograd_hook(index)
        return None, None, None
