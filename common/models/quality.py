"""How alike two pictures are, one figure for each pair of a batch; pictures in [0, 1]."""

import torch
import torch.nn.functional as F

WINDOW, SIGMA = 11, 1.5  # of SSIM, as its authors chose them
K1, K2 = 0.01, 0.03


def psnr(images: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Peak signal to noise ratio in dB."""
    return -10 * torch.log10((images - targets).square().flatten(1).mean(dim=1).clamp(min=1e-10))


def ssim(images: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Structural similarity (Wang and others, 2004), over windows that lie inside the picture."""
    place = torch.arange(WINDOW, dtype=images.dtype, device=images.device) - WINDOW // 2
    weights = torch.exp(-place.square() / (2 * SIGMA**2))
    weights = (weights / weights.sum()).expand(images.shape[1], 1, WINDOW)

    def blurred(pictures):
        across = F.conv2d(pictures, weights[:, :, None, :], groups=len(weights))
        return F.conv2d(across, weights[:, :, :, None], groups=len(weights))

    mean_x, mean_y = blurred(images), blurred(targets)
    variance_x, variance_y = blurred(images.square()) - mean_x.square(), blurred(targets.square()) - mean_y.square()
    covariance = blurred(images * targets) - mean_x * mean_y
    alike = (2 * mean_x * mean_y + K1**2) * (2 * covariance + K2**2)
    unlike = (mean_x.square() + mean_y.square() + K1**2) * (variance_x + variance_y + K2**2)
    return (alike / unlike).flatten(1).mean(dim=1)
