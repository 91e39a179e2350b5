"""ResNet-18 for 32x32 images: 11,173,962 parameters, named as in the ModelArts sample,
so that its weights load here."""

from torch import Tensor, nn

FEW_CHANNELS = 8  # channels


class PointwiseConv2d(nn.Conv2d):
    """A 1x1 convolution.

    With few channels it strides by slicing: torch 2.15's gradient corrupts memory on AVX2-only CPUs.
    """

    def forward(self, x: Tensor) -> Tensor:
        rows, columns = self.stride
        if self.in_channels >= FEW_CHANNELS:
            return super().forward(x)
        return nn.functional.conv2d(x[:, :, ::rows, ::columns], self.weight)


class BasicBlock(nn.Module):
    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.residual_function = nn.Sequential(
            nn.Conv2d(in_channels, out_channels, kernel_size=3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(out_channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(out_channels, out_channels, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(out_channels),
        )
        self.shortcut = nn.Sequential()
        if stride != 1 or in_channels != out_channels:
            projection = PointwiseConv2d(in_channels, out_channels, kernel_size=1, stride=stride, bias=False)
            self.shortcut = nn.Sequential(projection, nn.BatchNorm2d(out_channels))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.residual_function(x) + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self, num_classes: int, width: int) -> None:
        super().__init__()
        stem = nn.Conv2d(3, width, kernel_size=3, padding=1, bias=False)
        self.conv1 = nn.Sequential(stem, nn.BatchNorm2d(width), nn.ReLU(inplace=True))
        self.conv2 = self._stage(width, width, stride=1)
        self.conv3 = self._stage(width, 2 * width, stride=2)
        self.conv4 = self._stage(2 * width, 4 * width, stride=2)
        self.conv5 = self._stage(4 * width, 8 * width, stride=2)
        self.avg_pool = nn.AdaptiveAvgPool2d((1, 1))
        self.dense_layer = nn.Linear(8 * width, num_classes)

    @staticmethod
    def _stage(in_channels: int, out_channels: int, stride: int) -> nn.Sequential:
        return nn.Sequential(
            BasicBlock(in_channels, out_channels, stride), BasicBlock(out_channels, out_channels, stride=1)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv5(self.conv4(self.conv3(self.conv2(self.conv1(x)))))
        return self.dense_layer(self.avg_pool(x).flatten(1))


def resnet18(num_classes: int = 10, width: int = 64) -> ResNet:
    """Return a ResNet-18 for images of 32x32 pixels. `width`: channels of its first stage."""
    return ResNet(num_classes, width)
