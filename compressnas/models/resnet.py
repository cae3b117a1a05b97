"""ResNets for images of CIFAR's size: a 3 x 3 stem, no pooling after it (He et al., arXiv 1512.03385, section 4.2).

Parameters are named as in the checkpoints that are around: conv1, bn1, layer1.0.conv1, ..., linear, and with shortcut B
layer2.0.shortcut.0 and .1. Weights are drawn as the layers themselves draw them.
"""

from collections.abc import Sequence
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

Shortcut = Literal["A", "B"]
Shape = tuple[int, int, int]


class PaddedShortcut(nn.Module):
    """Option A: every second pixel, and zeros for the channels that are new, half of them on either side."""

    def __init__(self, channels: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.before = (outputs - channels) // 2
        self.after = outputs - channels - self.before

    def forward(self, images: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, outputs, H / stride, W / stride), sizes rounded up."""
        strided = images[:, :, :: self.stride, :: self.stride]
        return F.pad(strided, (0, 0, 0, 0, self.before, self.after))


class Block(nn.Module):
    """Two 3 x 3 convolutions with batch norm, and a shortcut around them."""

    def __init__(self, channels: int, outputs: int, stride: int, shortcut: Shortcut) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != outputs:
            self.shortcut = (
                PaddedShortcut(channels, outputs, stride)
                if shortcut == "A"
                else nn.Sequential(nn.Conv2d(channels, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
            )
        self.relu2 = nn.ReLU()

    def forward(self, images: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, outputs, H / stride, W / stride), sizes rounded up."""
        inner = self.relu1(self.bn1(self.conv1(images)))
        result: Tensor = self.relu2(self.bn2(self.conv2(inner)) + self.shortcut(images))
        return result


class ResNet(nn.Module):
    """A stem, one layer of blocks per width, each but the first at half the resolution, mean pooling, a linear layer.

    Args:
        shape: (C, H, W) of one image; any size.
        classes: number of outputs.
        widths: channels of each layer.
        blocks: blocks in each layer.
        shortcut: how a block whose width or resolution changes is bridged.
    """

    def __init__(self, shape: Shape, classes: int, *, widths: Sequence[int], blocks: int, shortcut: Shortcut) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(shape[0], widths[0], 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(widths[0])
        self.relu = nn.ReLU()
        self.depth = len(widths)
        channels = widths[0]
        for number, width in enumerate(widths, start=1):
            strides = [1 if number == 1 else 2, *[1] * (blocks - 1)]
            inputs = [channels, *[width] * (blocks - 1)]
            layer = [Block(c, width, stride, shortcut) for c, stride in zip(inputs, strides, strict=True)]
            self.add_module(f"layer{number}", nn.Sequential(*layer))
            channels = width
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.linear = nn.Linear(channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, classes)."""
        result: Tensor = self.relu(self.bn1(self.conv1(images)))
        for number in range(1, self.depth + 1):
            result = self.get_submodule(f"layer{number}")(result)
        result = self.linear(self.flatten(self.pool(result)))
        return result


def resnet20(shape: Shape, classes: int, shortcut: Shortcut = "A") -> ResNet:
    """ResNet-20: three layers of three blocks; 269,722 parameters with option A on 3 channels and 10 classes."""
    return ResNet(shape, classes, widths=(16, 32, 64), blocks=3, shortcut=shortcut)


def resnet56(shape: Shape, classes: int, shortcut: Shortcut = "A") -> ResNet:
    """ResNet-56: three layers of nine blocks; 853,018 parameters with option A on 3 channels and 10 classes."""
    return ResNet(shape, classes, widths=(16, 32, 64), blocks=9, shortcut=shortcut)


def resnet18_cifar(shape: Shape, classes: int, shortcut: Shortcut = "B") -> ResNet:
    """ResNet-18: four layers of two blocks; 11,173,962 parameters with option B on 3 channels and 10 classes."""
    return ResNet(shape, classes, widths=(64, 128, 256, 512), blocks=2, shortcut=shortcut)
