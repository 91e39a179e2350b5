"""The networks, and how good their pictures are. Nothing here knows of devices, ranks or files."""

from common.models.resnet import resnet18
from common.models.restorer import Restorer, psnr, ssim

__all__ = ["Restorer", "psnr", "resnet18", "ssim"]
