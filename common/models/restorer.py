"""A small network that removes blur from pictures, and two measures of how similar two pictures are (PSNR,
SSIM)."""

import torch
import torch.nn.functional as F
from torch import nn

from common import devices

# Of SSIM, as its authors chose them.
WINDOW = 11
SIGMA = 1.5
K1 = 0.01
K2 = 0.03


class ResidualBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return features + self.second(torch.relu(self.first(features)))


class Restorer(nn.Module):
    """Maps pictures in [-1, 1], of any size, to sharper ones of the same size.

    Untrained, it changes nothing.
    """

    def __init__(self, width: int = 48):
        super().__init__()
        self.head = nn.Conv2d(12, width, 3, padding=1)
        self.body = nn.Sequential(*(ResidualBlock(width) for _ in range(6)))
        self.tail = nn.Conv2d(width, 12, 3, padding=1)
        for parameter in self.tail.parameters():
            nn.init.zeros_(parameter)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        height, width = images.shape[2:]
        padded = F.pad(images, (0, width % 2, 0, height % 2), mode="replicate")
        features = self.head(F.pixel_unshuffle(padded, 2))
        residual = F.pixel_shuffle(self.tail(self.body(features)), 2)
        return images + residual[:, :, :height, :width]


def psnr(images: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the peak signal-to-noise ratio in dB, at most 100, of each pair of a batch of pictures in [0,
    1]."""
    return -10 * torch.log10((images - targets).square().flatten(1).mean(dim=1).clamp(min=1e-10))


def ssim(images: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the structural similarity (Wang et al., 2004) of each pair of a batch of pictures in [0, 1],
    without padding."""
    offsets = torch.arange(WINDOW, dtype=images.dtype, device=images.device) - WINDOW // 2
    weights = torch.exp(-offsets.square() / (2 * SIGMA**2))
    weights = (weights / weights.sum()).expand(images.shape[1], 1, WINDOW)

    def blurred(pictures: torch.Tensor) -> torch.Tensor:
        with devices.full_precision():
            across = F.conv2d(pictures, weights[:, :, None, :], groups=len(weights))
            return F.conv2d(across, weights[:, :, :, None], groups=len(weights))

    mean_x = blurred(images)
    mean_y = blurred(targets)
    variance_x = blurred(images.square()) - mean_x.square()
    variance_y = blurred(targets.square()) - mean_y.square()
    covariance = blurred(images * targets) - mean_x * mean_y
    alike = (2 * mean_x * mean_y + K1**2) * (2 * covariance + K2**2)
    unlike = (mean_x.square() + mean_y.square() + K1**2) * (variance_x + variance_y + K2**2)
    return (alike / unlike).flatten(1).mean(dim=1)
