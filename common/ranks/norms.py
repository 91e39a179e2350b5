"""Batch norms over the samples of all ranks, with torch's kernels on NVIDIA GPUs and with plain operations
elsewhere.

Unlike torch.nn.SyncBatchNorm, these need the same number of samples on every rank, so the host does not wait
for the GPU (but with momentum=None, whose mean needs the number of batches).
"""

import argparse
import inspect
import sys
from typing import Any, Optional

import torch
from torch import Tensor, distributed, nn

from common import arguments, devices, progress
from common.ranks import collectives

# For DistributedDataParallel: each rank keeps statistics of its own, instead of getting rank 0's in every
# step. Torch 2.15 has given the argument another name.
_HAS_NEW_NAME = "forward_sync_buffers" in inspect.signature(nn.parallel.DistributedDataParallel).parameters
OWN_STATISTICS: dict[str, Any] = {"forward_sync_buffers" if _HAS_NEW_NAME else "broadcast_buffers": False}

MIN_SAMPLES = 16  # of a rank: statistics of fewer are too rough


def add_options(parser: arguments.Parser) -> None:
    """Add --sync_bn."""
    arguments.group(parser, "several processes").add_argument(
        "--sync_bn",
        type=arguments.boolean,
        help=f"batch norms over the samples of all processes; unset: where each has fewer than {MIN_SAMPLES}",
    )


def over_all_ranks(args: argparse.Namespace) -> bool:
    """Return whether norms are over all ranks: by --sync_bn or, if unset, for batches below MIN_SAMPLES."""
    if distributed.get_world_size() <= 1:
        return False
    if args.sync_bn is None:
        return args.batch_size < MIN_SAMPLES
    return args.sync_bn


def synchronised(model: nn.Module) -> nn.Module:
    """Return the model with every batch norm over all ranks; the model itself may be one.

    Names in its state_dict stay.

    Norms of a kind that is not known here stay as they are, and a warning names them.
    """
    # one for a norm that has several names
    replacements = {norm: _synchronised_norm(norm) for norm in model.modules()}
    for module in [*replacements]:
        for name, child in module._modules.items():
            if child is not None:
                setattr(module, name, replacements[child])
    model = replacements[model]
    unknown = {
        type(layer).__name__
        for layer in model.modules()
        if isinstance(layer, KINDS) and not isinstance(layer, SynchronisedNorm)
    }
    if unknown and distributed.get_rank() == 0:
        progress.say(
            f"warning: {', '.join(sorted(unknown))}: norms of this kind have the statistics of their "
            "own process alone"
        )
    return model


def _synchronised_norm(norm: nn.Module) -> nn.Module:
    """Return the norm over all ranks that has this norm's weights and options,
    or `norm` if it is none of a known kind."""
    norm_class = SYNCHRONISED.get(type(norm))
    timm = sys.modules.get("timm.layers")  # loaded if a network is timm's
    if timm is not None and type(norm) is timm.BatchNormAct2d:
        norm_class = SynchronisedNormAct2d
    if norm_class is None:
        return norm
    replacement = norm_class(0)
    replacement.__dict__.update(norm.__dict__)
    return replacement


class SynchronisedNorm(nn.Module):
    """A batch norm whose statistics in training are over all ranks.

    Its second base is the class of the norm in evaluation.
    """

    eps: float
    momentum: Optional[float]
    weight: Optional[torch.Tensor]
    bias: Optional[torch.Tensor]
    running_mean: Optional[torch.Tensor]
    running_var: Optional[torch.Tensor]
    num_batches_tracked: Optional[torch.Tensor]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return super().forward(input)
        if input.numel() // input.shape[1] * distributed.get_world_size() < 2:
            raise ValueError(
                f"a batch norm needs more than one value for each channel in training: {[*input.shape]}"
            )
        factor = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if factor is None:  # the mean of all batches
                factor = 1 / int(self.num_batches_tracked)
        return _OverAllRanks.apply(
            input, self.weight, self.bias, self.running_mean, self.running_var, self.eps, factor or 0.0
        )


class SynchronisedNorm1d(SynchronisedNorm, nn.BatchNorm1d):  # pyright: ignore[reportIncompatibleVariableOverride]
    pass


class SynchronisedNorm2d(SynchronisedNorm, nn.BatchNorm2d):  # pyright: ignore[reportIncompatibleVariableOverride]
    pass


class SynchronisedNorm3d(SynchronisedNorm, nn.BatchNorm3d):  # pyright: ignore[reportIncompatibleVariableOverride]
    pass


class SynchronisedNormAct2d(SynchronisedNorm2d):
    """A BatchNormAct2d, which is timm's norm with a dropout and an activation behind it."""

    drop: nn.Module
    act: nn.Module

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.act(self.drop(super().forward(input)))


SYNCHRONISED = {
    nn.BatchNorm1d: SynchronisedNorm1d,
    nn.BatchNorm2d: SynchronisedNorm2d,
    nn.BatchNorm3d: SynchronisedNorm3d,
}
KINDS = tuple(SYNCHRONISED)


class _OverAllRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> torch.Tensor:
        images, weight, bias, running_mean, running_var, eps, momentum = inputs
        kernels = GpuKernels if devices.kind_of(images.device).has_sync_batch_norm else CpuKernels
        images = kernels.to_layout(images)
        own_statistics = torch.cat(kernels.statistics(images, eps))
        gathered = torch.empty(
            distributed.get_world_size(),
            len(own_statistics),
            dtype=own_statistics.dtype,
            device=own_statistics.device,
        )
        collectives.AllRanks().all_gather(gathered.view(-1), own_statistics).wait()
        means, scales = gathered.chunk(2, dim=1)
        mean, scale = kernels.combine(images, means, scales, running_mean, running_var, eps, momentum)
        ctx.kernels = kernels
        ctx.save_for_backward(images, weight, mean, scale)
        return kernels.normalise(images, weight, bias, mean, scale, eps)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        images, weight, mean, scale = ctx.saved_tensors
        gradient = ctx.kernels.to_layout(gradients[0])
        sum_dy, sum_dy_xmu, of_weight, of_bias = ctx.kernels.reduce_gradient(
            gradient, images, mean, scale, weight
        )
        sums = torch.cat([sum_dy, sum_dy_xmu])
        distributed.all_reduce(sums)
        sum_dy, sum_dy_xmu = sums.chunk(2)
        of_images = ctx.kernels.gradient(gradient, images, mean, scale, weight, sum_dy, sum_dy_xmu)
        if weight is None:
            of_weight = of_bias = None
        return of_images, of_weight, of_bias, None, None, None, None


class GpuKernels:
    """Calls the kernels of torch.nn.SyncBatchNorm. All ranks have equally many samples.

    In both classes `scale` is one over the standard deviation of a channel, `sum_dy` the sum of the gradient
    over all but the channels, and `sum_dy_xmu` that of the gradient times the distance of the images from
    their mean."""

    @staticmethod
    def to_layout(images: torch.Tensor) -> torch.Tensor:
        """Return the images, or their gradient, in a memory layout that the kernels take."""
        return (
            images.contiguous(memory_format=torch.channels_last) if images.ndim == 4 else images.contiguous()
        )

    @staticmethod
    def statistics(images: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Return (mean, scale) of each channel of this rank's images."""
        return torch.batch_norm_stats(images, eps)

    @staticmethod
    def combine(
        images: Tensor,
        means: Tensor,
        scales: Tensor,
        running_mean: Optional[Tensor],
        running_var: Optional[Tensor],
        eps: float,
        momentum: float,
    ) -> tuple[Tensor, Tensor]:
        """Return (mean, scale) of all ranks from `means` and `scales` of each; update the running statistics,
        if any."""
        # only its type is used: that of the counts
        dtype_source = means if running_mean is None else running_mean
        samples_of_a_rank = images.numel() // images.shape[1]
        counts = torch.full((len(means),), samples_of_a_rank, dtype=dtype_source.dtype, device=means.device)
        return torch.batch_norm_gather_stats_with_counts(
            dtype_source, means, scales, running_mean, running_var, momentum, eps, counts
        )

    @staticmethod
    def normalise(
        images: Tensor,
        weight: Optional[Tensor],
        bias: Optional[Tensor],
        mean: Tensor,
        scale: Tensor,
        eps: float,
    ) -> Tensor:
        return torch.batch_norm_elemt(images, weight, bias, mean, scale, eps)

    @staticmethod
    def reduce_gradient(
        gradient: Tensor, images: Tensor, mean: Tensor, scale: Tensor, weight: Optional[Tensor]
    ) -> tuple[Tensor, ...]:
        """Return (sum_dy, sum_dy_xmu, gradient of the weight, gradient of the bias) of this rank's images."""
        has_weight = weight is not None
        return torch.batch_norm_backward_reduce(
            gradient, images, mean, scale, weight, True, has_weight, has_weight
        )

    @staticmethod
    def gradient(
        gradient: Tensor,
        images: Tensor,
        mean: Tensor,
        scale: Tensor,
        weight: Optional[Tensor],
        sum_dy: Tensor,
        sum_dy_xmu: Tensor,
    ) -> Tensor:
        """Return the gradient of the images. The two sums are those of all ranks."""
        num_ranks = distributed.get_world_size()
        samples_of_a_rank = images.numel() // images.shape[1]
        counts = torch.full((num_ranks,), samples_of_a_rank, dtype=torch.int32, device=images.device)
        return torch.batch_norm_backward_elemt(
            gradient, images, mean, scale, weight, sum_dy, sum_dy_xmu, counts
        )


class CpuKernels:
    """Computes the same as GpuKernels with plain operations, in float32 or better."""

    @staticmethod
    def to_layout(images: torch.Tensor) -> torch.Tensor:
        return images

    @staticmethod
    def statistics(images: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        variance, mean = torch.var_mean(
            _at_least_float32(images), dim=_all_but_channels(images), correction=0
        )
        return mean, (variance + eps).rsqrt()

    @staticmethod
    def combine(
        images: Tensor,
        means: Tensor,
        scales: Tensor,
        running_mean: Optional[Tensor],
        running_var: Optional[Tensor],
        eps: float,
        momentum: float,
    ) -> tuple[Tensor, Tensor]:
        mean = means.mean(dim=0)
        variance = (scales**-2 - eps).mean(dim=0) + (means - mean).square().mean(dim=0)
        count = len(means) * images.numel() // images.shape[1]
        if running_mean is not None and running_var is not None:
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
            running_var.lerp_((variance * (count / (count - 1))).to(running_var.dtype), momentum)
        return mean, (variance + eps).rsqrt()

    @staticmethod
    def normalise(
        images: Tensor,
        weight: Optional[Tensor],
        bias: Optional[Tensor],
        mean: Tensor,
        scale: Tensor,
        eps: float,
    ) -> Tensor:
        return nn.functional.batch_norm(images, mean, scale**-2 - eps, weight, bias, training=False, eps=eps)

    @staticmethod
    def reduce_gradient(
        gradient: Tensor, images: Tensor, mean: Tensor, scale: Tensor, weight: Optional[Tensor]
    ) -> tuple[Tensor, ...]:
        dims = _all_but_channels(images)
        centred = _at_least_float32(images) - _along_channels(mean, images)
        sum_dy = gradient.sum(dim=dims, dtype=mean.dtype)
        sum_dy_xmu = (_at_least_float32(gradient) * centred).sum(dim=dims)
        return sum_dy, sum_dy_xmu, sum_dy_xmu * scale, sum_dy

    @staticmethod
    def gradient(
        gradient: Tensor,
        images: Tensor,
        mean: Tensor,
        scale: Tensor,
        weight: Optional[Tensor],
        sum_dy: Tensor,
        sum_dy_xmu: Tensor,
    ) -> Tensor:
        count = distributed.get_world_size() * images.numel() // images.shape[1]
        mean_dy = _along_channels(sum_dy / count, images)
        mean_dy_xmu = _along_channels(sum_dy_xmu / count, images)
        factor = _along_channels(scale if weight is None else scale * weight, images)
        scale = _along_channels(scale, images)
        centred = _at_least_float32(images) - _along_channels(mean, images)
        of_images = (_at_least_float32(gradient) - mean_dy - centred * scale**2 * mean_dy_xmu) * factor
        return of_images.to(images.dtype)


def _all_but_channels(images: torch.Tensor) -> list[int]:
    return [0, *range(2, images.ndim)]


def _along_channels(vector: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
    return vector.view(1, -1, *[1] * (images.ndim - 2))


def _at_least_float32(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
