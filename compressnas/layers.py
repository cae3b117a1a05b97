"""Layers that a removal puts in place of ordinary ones: they read less of their input."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class SelectLinear(nn.Linear):
    """A linear layer that reads only some of its input features.

    Weight (N, len(indices)); input (..., C) with C > max(indices).
    """

    indices: Tensor
    of: int

    def __init__(self, dense: nn.Linear, indices: Tensor) -> None:
        """Take over the columns `indices` (sorted, int64) of `dense`, and its bias."""
        kept = int(indices.numel())
        super().__init__(kept, dense.out_features, dense.bias is not None, dense.weight.device, dense.weight.dtype)
        chosen = dense.indices[indices] if isinstance(dense, SelectLinear) else indices
        self.of = dense.of if isinstance(dense, SelectLinear) else dense.in_features
        self.register_buffer("indices", chosen.clone())
        with torch.no_grad():
            self.weight.copy_(dense.weight[:, indices])
            if dense.bias is not None:
                self.bias.copy_(dense.bias)

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input.index_select(-1, self.indices), self.weight, self.bias)

    def whole(self) -> nn.Linear:
        """The linear layer that reads every feature again, with zeros where this one reads nothing."""
        dense = nn.Linear(self.of, self.out_features, self.bias is not None, self.weight.device, self.weight.dtype)
        with torch.no_grad():
            dense.weight.zero_()
            dense.weight[:, self.indices] = self.weight
            if self.bias is not None:
                dense.bias.copy_(self.bias)
        return dense

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, selected from {self.of}"


class CroppedConv2d(nn.Conv2d):
    """A convolution whose kernel lost border rows or columns: the input is padded, or cropped, unevenly instead.

    Input (B, C, H, W) as for the whole kernel; the output has the size that the whole kernel gives.
    """

    pads: tuple[int, int, int, int]  # left, right, top, bottom; negative: cropped

    def __init__(self, dense: nn.Conv2d, rows: tuple[int, int], columns: tuple[int, int]) -> None:
        """Keep kernel rows `rows[0]:rows[1]` and columns `columns[0]:columns[1]` of `dense`, which pads with zeros."""
        (top, bottom), (left, right) = rows, columns
        super().__init__(
            dense.in_channels,
            dense.out_channels,
            (bottom - top, right - left),
            dense.stride,  # type: ignore[arg-type]
            0,
            dense.dilation,  # type: ignore[arg-type]
            dense.groups,
            dense.bias is not None,
            "zeros",
            dense.weight.device,
            dense.weight.dtype,
        )
        before: Sequence[int] = dense._reversed_padding_repeated_twice
        pad_left, pad_right, pad_top, pad_bottom = dense.pads if isinstance(dense, CroppedConv2d) else before
        (height, width), (step_y, step_x) = dense.kernel_size, dense.dilation
        self.pads = (
            pad_left - left * step_x,
            pad_right - (width - right) * step_x,
            pad_top - top * step_y,
            pad_bottom - (height - bottom) * step_y,
        )
        with torch.no_grad():
            self.weight.copy_(dense.weight[:, :, top:bottom, left:right])
            if dense.bias is not None and self.bias is not None:
                self.bias.copy_(dense.bias)

    def forward(self, input: Tensor) -> Tensor:
        if min(self.pads) < 0 < max(self.pads):  # padded first: the crop may reach into the padding
            input = F.pad(input, [max(pad, 0) for pad in self.pads])
            return super().forward(F.pad(input, [min(pad, 0) for pad in self.pads]))
        return super().forward(F.pad(input, self.pads))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, pads={self.pads}"  # type: ignore[no-untyped-call]
