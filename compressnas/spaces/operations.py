"""Candidate operations of cells, and units that cells are made of. All take (B, C, H, W).

A candidate keeps C and, but for stride, H and W; with stride 2 they become H/2 and W/2, rounded up.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compressnas.errors import InputError

NOTHING = "none"  # the operation that gives zeros
SAME = "skip_connect"  # the one that gives what it takes


class Zero(nn.Module):
    """Zeros of the input's shape, whatever is in it."""

    def __init__(self, stride: int = 1) -> None:
        super().__init__()
        self.stride = stride

    def forward(self, images: Tensor) -> Tensor:
        return torch.zeros_like(images[:, :, :: self.stride, :: self.stride])


class ReluConvBn(nn.Sequential):
    """ReLU, convolution without bias, batch norm: the unit of cells in NAS-Bench-201 and DARTS."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1, affine: bool = True) -> None:
        super().__init__(
            nn.ReLU(),
            nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False),
            nn.BatchNorm2d(outputs, affine=affine),
        )


class ConvBnRelu(nn.Sequential):
    """Convolution without bias, batch norm, ReLU: the unit of cells in NAS-Bench-101."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1, affine: bool = True) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False),
            nn.BatchNorm2d(outputs, affine=affine),
            nn.ReLU(),
        )


class DilConv(nn.Sequential):
    """ReLU, depthwise convolution, 1 x 1 convolution, batch norm (DARTS: of dilation 2, half of a separable one)."""

    def __init__(self, channels: int, kernel: int, stride: int, dilation: int, affine: bool) -> None:
        padding = dilation * (kernel - 1) // 2
        super().__init__(
            nn.ReLU(),
            nn.Conv2d(channels, channels, kernel, stride, padding, dilation, groups=channels, bias=False),
            nn.Conv2d(channels, channels, 1, bias=False),
            nn.BatchNorm2d(channels, affine=affine),
        )


class SepConv(nn.Sequential):
    """A depthwise separable convolution, applied twice; the first has the stride (DARTS)."""

    def __init__(self, channels: int, kernel: int, stride: int, affine: bool) -> None:
        super().__init__(DilConv(channels, kernel, stride, 1, affine), DilConv(channels, kernel, 1, 1, affine))


class FactorizedReduce(nn.Module):
    """Half as high and wide, rounded up, by two 1 x 1 convolutions that read every other place each (DARTS)."""

    def __init__(self, inputs: int, outputs: int, affine: bool = True) -> None:
        super().__init__()
        self.even = nn.Conv2d(inputs, outputs // 2, 1, stride=2, bias=False)
        self.odd = nn.Conv2d(inputs, outputs - outputs // 2, 1, stride=2, bias=False)
        self.norm = nn.BatchNorm2d(outputs, affine=affine)

    def forward(self, images: Tensor) -> Tensor:
        height, width = images.shape[2:]
        if height % 2 or width % 2:  # so that the two convolutions see as many places
            images = F.pad(images, (0, width % 2, 0, height % 2))
        images = F.relu(images)
        result: Tensor = self.norm(torch.cat([self.even(images), self.odd(images[:, :, 1:, 1:])], dim=1))
        return result


OPERATIONS: dict[str, Callable[[int, int, bool], nn.Module]] = {  # (channels, stride, whether norms have a scale)
    NOTHING: lambda channels, stride, affine: Zero(stride),
    SAME: lambda channels, stride, affine: (
        nn.Identity() if stride == 1 else FactorizedReduce(channels, channels, affine)
    ),
    "nor_conv_1x1": lambda channels, stride, affine: ReluConvBn(channels, channels, 1, stride, affine),
    "nor_conv_3x3": lambda channels, stride, affine: ReluConvBn(channels, channels, 3, stride, affine),
    "avg_pool_3x3": lambda channels, stride, affine: nn.AvgPool2d(3, stride, padding=1, count_include_pad=False),
    "max_pool_3x3": lambda channels, stride, affine: nn.MaxPool2d(3, stride, padding=1),
    "sep_conv_3x3": lambda channels, stride, affine: SepConv(channels, 3, stride, affine),
    "sep_conv_5x5": lambda channels, stride, affine: SepConv(channels, 5, stride, affine),
    "dil_conv_3x3": lambda channels, stride, affine: DilConv(channels, 3, stride, 2, affine),
    "dil_conv_5x5": lambda channels, stride, affine: DilConv(channels, 5, stride, 2, affine),
    "maxpool3x3": lambda channels, stride, affine: nn.MaxPool2d(3, stride, padding=1),
    "conv1x1-bn-relu": lambda channels, stride, affine: ConvBnRelu(channels, channels, 1, stride, affine),
    "conv3x3-bn-relu": lambda channels, stride, affine: ConvBnRelu(channels, channels, 3, stride, affine),
}


def operation(name: str, channels: int, affine: bool = True, stride: int = 1) -> nn.Module:
    """A candidate operation."""
    return OPERATIONS[name](channels, stride, affine)


def without(names: Sequence[str], exclude: Sequence[str]) -> tuple[str, ...]:
    """The candidates that are left. Raises InputError for a name that is not among them, or where none computes."""
    unknown = sorted(set(exclude) - set(names))
    if unknown:
        raise InputError(f"space.exclude: unknown operation {', '.join(unknown)}; expected some of {', '.join(names)}")
    left = tuple(name for name in names if name not in exclude)
    if not set(left) - {NOTHING}:
        raise InputError("space.exclude: no operation is left that leads from the input to the output")
    return left
