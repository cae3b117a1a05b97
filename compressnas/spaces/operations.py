"""Candidate operations of cells. All take (B, C, H, W) and keep C and, but for stride, H and W."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

NOTHING = "none"  # the operation that gives zeros


class Zero(nn.Module):
    """Zeros of the input's shape, whatever is in it."""

    def forward(self, images: Tensor) -> Tensor:
        return torch.zeros_like(images)


class ReluConvBn(nn.Sequential):
    """ReLU, convolution without bias, batch norm: the unit that cells are made of."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1, affine: bool = True) -> None:
        super().__init__(
            nn.ReLU(),
            nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False),
            nn.BatchNorm2d(outputs, affine=affine),
        )


OPERATIONS: dict[str, Callable[[int, bool], nn.Module]] = {  # (channels, whether batch norm has scale and bias)
    NOTHING: lambda channels, affine: Zero(),
    "skip_connect": lambda channels, affine: nn.Identity(),
    "nor_conv_1x1": lambda channels, affine: ReluConvBn(channels, channels, 1, affine=affine),
    "nor_conv_3x3": lambda channels, affine: ReluConvBn(channels, channels, 3, affine=affine),
    "avg_pool_3x3": lambda channels, affine: nn.AvgPool2d(3, stride=1, padding=1, count_include_pad=False),
}


def operation(name: str, channels: int, affine: bool = True) -> nn.Module:
    """A candidate operation, of stride 1."""
    return OPERATIONS[name](channels, affine)
