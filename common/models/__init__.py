"""Networks, their moving average, and measures of image quality. This package does not depend on ranks or files."""

from common.models.average import Average
from common.models.resnet import resnet18
from common.models.restorer import Restorer, psnr, ssim

__all__ = ["Average", "Restorer", "classifiers", "psnr", "resnet18", "ssim"]
