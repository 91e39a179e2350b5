"""The networks, and how good their pictures are. Nothing here knows of devices, ranks or files."""

from common.models.quality import psnr, ssim
from common.models.resnet import resnet18
from common.models.restorer import Restorer

__all__ = ["Restorer", "psnr", "resnet18", "ssim"]
