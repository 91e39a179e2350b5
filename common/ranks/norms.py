"""Batch norms over the samples of all ranks, with torch's kernels on NVIDIA GPUs and with plain operations elsewhere.

Unlike torch.nn.SyncBatchNorm, these need the same number of samples on every rank, so the host never waits for the GPU.
"""

import argparse
import inspect
from typing import Any

import torch
from torch import distributed, nn

from common import arguments, devices
from common.ranks import collectives

# For DistributedDataParallel: each rank keeps statistics of its own, instead of getting rank 0's in every step.
_NEW_NAME = "forward_sync_buffers" in inspect.signature(nn.parallel.DistributedDataParallel).parameters  # since torch 2.15
OWN_STATISTICS: dict[str, Any] = {"forward_sync_buffers" if _NEW_NAME else "broadcast_buffers": False}

FEW = 16  # samples of a rank: statistics of fewer are too rough


def add_options(parser: arguments.Parser) -> None:
    arguments.group(parser, "several processes").add_argument(
        "--sync_bn",
        type=arguments.boolean,
        help=f"batch norms over the samples of all processes; unset: where each has fewer than {FEW}",
    )


def over_all_ranks(args: argparse.Namespace) -> bool:
    """Whether batch norms are over all ranks: as --sync_bn says; unset, if a rank's batch is below FEW. Never with one rank."""
    return distributed.get_world_size() > 1 and (args.batch_size < FEW if args.sync_bn is None else args.sync_bn)


def synchronised(model: nn.Module) -> nn.Module:
    """Replace every BatchNorm2d in the model by a SynchronisedNorm, and return the model; names in its state_dict stay."""
    for module in model.modules():
        for name, child in module.named_children():
            if type(child) is nn.BatchNorm2d:
                setattr(module, name, SynchronisedNorm.like(child))
    return model


class SynchronisedNorm(nn.BatchNorm2d):
    """A BatchNorm2d whose statistics in training are over all ranks; in evaluation it is a BatchNorm2d."""

    @classmethod
    def like(cls, norm: nn.BatchNorm2d) -> "SynchronisedNorm":
        made = cls(norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats)
        made.__dict__.update(norm.__dict__)
        return made

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return super().forward(input)
        if self.momentum is None or self.running_mean is None or self.num_batches_tracked is None:
            raise ValueError("a norm over all ranks needs a momentum and running statistics")
        self.num_batches_tracked.add_(1)
        return _OverAllRanks.apply(input, self.weight, self.bias, self.running_mean, self.running_var, self.eps, self.momentum)


class _OverAllRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> torch.Tensor:
        images, weight, bias, running_mean, running_var, eps, momentum = inputs
        kernels = GpuKernels if devices.of(images.device).norm_kernels else CpuKernels
        mine = torch.cat(kernels.statistics(images, eps))
        ranks = torch.empty(distributed.get_world_size(), len(mine), dtype=mine.dtype, device=mine.device)
        collectives.All().all_gather(ranks.view(-1), mine).wait()
        means, scales = ranks.chunk(2, dim=1)
        mean, scale = kernels.joined(images, means, scales, running_mean, running_var, eps, momentum)
        ctx.kernels = kernels
        ctx.save_for_backward(images, weight, mean, scale)
        return kernels.normalised(images, weight, bias, mean, scale, eps)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        images, weight, mean, scale = ctx.saved_tensors
        own = devices.of(images.device).norm_kernels
        gradient = gradients[0].contiguous(memory_format=torch.channels_last) if own else gradients[0]
        total, product, of_weight, of_bias = ctx.kernels.reduced(gradient, images, mean, scale, weight)
        sums = torch.cat([total, product])
        distributed.all_reduce(sums)
        total, product = sums.chunk(2)
        of_images = ctx.kernels.gradient(gradient, images, mean, scale, weight, total, product)
        return of_images, of_weight, of_bias, None, None, None, None


class GpuKernels:
    """Calls the kernels of torch.nn.SyncBatchNorm. `scale` is one over the standard deviation."""

    @staticmethod
    def statistics(images, eps):
        return torch.batch_norm_stats(images, eps)

    @staticmethod
    def joined(images, means, scales, running_mean, running_var, eps, momentum):
        counts = torch.full((len(means),), images.numel() // images.shape[1], dtype=means.dtype, device=means.device)
        return torch.batch_norm_gather_stats_with_counts(
            images, means, scales, running_mean, running_var, momentum, eps, counts
        )

    @staticmethod
    def normalised(images, weight, bias, mean, scale, eps):
        return torch.batch_norm_elemt(images, weight, bias, mean, scale, eps)

    @staticmethod
    def reduced(gradient, images, mean, scale, weight):
        return torch.batch_norm_backward_reduce(gradient, images, mean, scale, weight, True, True, True)

    @staticmethod
    def gradient(gradient, images, mean, scale, weight, total, product):
        size = distributed.get_world_size()
        counts = torch.full((size,), images.numel() // images.shape[1], dtype=torch.int32, device=images.device)
        return torch.batch_norm_backward_elemt(gradient, images, mean, scale, weight, total, product, counts)


class CpuKernels:
    @staticmethod
    def statistics(images, eps):
        variance, mean = torch.var_mean(_exact(images), dim=(0, 2, 3), correction=0)
        return mean, (variance + eps).rsqrt()

    @staticmethod
    def joined(images, means, scales, running_mean, running_var, eps, momentum):
        mean = means.mean(dim=0)
        variance = (scales**-2 - eps).mean(dim=0) + (means - mean).square().mean(dim=0)
        count = len(means) * images.numel() // images.shape[1]
        running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        running_var.lerp_((variance * (count / (count - 1))).to(running_var.dtype), momentum)
        return mean, (variance + eps).rsqrt()

    @staticmethod
    def normalised(images, weight, bias, mean, scale, eps):
        return nn.functional.batch_norm(images, mean, scale**-2 - eps, weight, bias, training=False, eps=eps)

    @staticmethod
    def reduced(gradient, images, mean, scale, weight):
        total = gradient.sum(dim=(0, 2, 3), dtype=mean.dtype)
        product = (_exact(gradient) * (_exact(images) - mean.view(1, -1, 1, 1))).sum(dim=(0, 2, 3))
        return total, product, product * scale, total

    @staticmethod
    def gradient(gradient, images, mean, scale, weight, total, product):
        count = distributed.get_world_size() * images.numel() // images.shape[1]
        total, product, mean, scale, weight = (
            vector.view(1, -1, 1, 1) for vector in (total / count, product / count, mean, scale, weight)
        )
        centred = _exact(images) - mean
        return ((_exact(gradient) - total - centred * scale**2 * product) * scale * weight).to(images.dtype)


def _exact(tensor):
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
