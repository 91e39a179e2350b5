"""Networks, their moving average, and measures of image quality.

This package does not depend on ranks or files.
"""

from common.models.resnet import resnet18

__all__ = ["average", "classifiers", "of_timm", "resnet18", "restorer"]
