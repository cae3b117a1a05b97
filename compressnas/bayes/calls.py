"""Calls: what the weights of a network were applied to, and per-sample gradients from that."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from compressnas.bayes.scores import differentiable, samples_of
from compressnas.inputs import Inputs, call


@dataclass(frozen=True)
class Call:
    """One call of a linear map or a convolution.

    Attributes:
        weight: (N, C), (N, C / groups, *kernel), or transposed (C, N / groups, *kernel).
        inputs: (B, ..., C), or (B, C, *positions).
        stride, padding, dilation: of a convolution, one entry (two for padding, before and after) per kernel axis;
            none for a linear map.
    """

    weight: Tensor
    inputs: Tensor
    stride: tuple[int, ...] = ()
    padding: tuple[tuple[int, int], ...] = ()
    dilation: tuple[int, ...] = ()
    groups: int = 1
    transposed: bool = False


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Call:
    return Call(weight, input.detach())


def _conv(input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0,
          dilation: Any = 1, groups: int = 1) -> Call:  # fmt: skip
    spatial = weight.dim() - 2
    dilations = _each(dilation, spatial)
    if padding == "same":
        gaps = [d * (k - 1) for d, k in zip(dilations, weight.shape[2:], strict=True)]
        pads = tuple((gap // 2, gap - gap // 2) for gap in gaps)
    else:
        pads = tuple((p, p) for p in _each(0 if padding == "valid" else padding, spatial))
    return Call(weight, input.detach(), _each(stride, spatial), pads, dilations, groups)


def of_convolution(layer: nn.Module, inputs: Tensor) -> tuple[Call, tuple[int, ...]]:
    """The call of a convolution with zero padding on (B, C, *size), and how many positions it has along each axis."""
    assert isinstance(layer, nn.modules.conv._ConvNd)
    one = _conv(inputs, layer.weight, None, layer.stride, layer.padding, layer.dilation, layer.groups)
    axes = zip(inputs.shape[2:], one.padding, one.dilation, layer.kernel_size, one.stride, strict=True)
    return one, tuple((size + sum(pad) - gap * (kernel - 1) - 1) // step + 1 for size, pad, gap, kernel, step in axes)


def _conv_transpose(input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0,
                    output_padding: Any = 0, groups: int = 1, dilation: Any = 1) -> Call:  # fmt: skip
    spatial = weight.dim() - 2
    pads = tuple((p, p) for p in _each(padding, spatial))
    return Call(weight, input.detach(), _each(stride, spatial), pads, _each(dilation, spatial), groups, True)


def _each(value: Any, count: int) -> tuple[int, ...]:
    """One number for every kernel axis, as torch takes them."""
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * count if len(values) == 1 else values


_RULES: dict[Any, Callable[..., Call]] = {
    F.linear: _linear,
    **dict.fromkeys((torch.conv1d, torch.conv2d, torch.conv3d), _conv),
    **dict.fromkeys((torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d), _conv_transpose),
}


class Calls(TorchFunctionMode):
    """Writes down every call of a linear map or convolution whose weight is a parameter.

    Attributes:
        of: weight name -> its calls, each with where its output stands in the autograd graph: not the output, which
            later layers may overwrite, and which need not live as long.
        unclear: parameters that something else reads, too, or on rows that are no samples.
    """

    def __init__(self, model: nn.Module, samples: int) -> None:
        super().__init__()
        self.samples = samples
        self.names = {id(p): name for name, p in model.named_parameters()}  # shared ones have one name
        self.of: dict[str, list[tuple[Call, GradientEdge]]] = {}
        self.unclear: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = [t for t in tree_leaves(out) if isinstance(t, Tensor) and t.requires_grad]
        if not made:
            return out  # shapes, dtypes, what is computed without gradients
        read = {self.names[id(t)] for t in tree_leaves((args, kwargs)) if id(t) in self.names}
        if func in _RULES:
            one = _RULES[func](*args, **(kwargs or {}))
            name = self.names.get(id(one.weight))
            batched = one.inputs.dim() >= one.weight.dim() > 1  # not a single unbatched sample
            rows_are_samples = batched and out.shape[0] == self.samples
            if name is not None and rows_are_samples:
                self.of.setdefault(name, []).append((one, get_gradient_edge(out)))
                read.discard(name)
        self.unclear |= read
        return out


def forward(model: nn.Module, inputs: Inputs) -> tuple[Any, list[Tensor], Calls]:
    """What the network returns, its tensors that depend on weights, and how it used its weights."""
    calls = Calls(model, samples_of(inputs))
    with calls:
        output = call(model, inputs)
    return output, differentiable(output, calls.samples), calls


def per_sample_gradients(call: Call, inputs: Tensor, gradients: Tensor) -> Tensor:
    """dL_b/dW -> (B, *weight shape).

    A transposed convolution is the gradient of a convolution that reads its output: inputs and gradients swap places.

    Args:
        inputs: (B, ..., C), or (B, C, *positions).
        gradients: dL/d output, (B, ..., N), or (B, N, *positions).
    """
    if call.weight.dim() == 2:
        return torch.einsum("b...n,b...c->bnc", gradients, inputs)
    read, placed = (gradients, inputs) if call.transposed else (inputs, gradients)
    columns = patches(call, read, placed.shape[2:])  # (B, C * kernel, L)
    batch, groups, places = len(inputs), call.groups, columns.shape[-1]
    columns = columns.reshape(batch, groups, -1, places)  # (B, groups, C / groups * kernel, L)
    placed = placed.reshape(batch, groups, -1, places)  # (B, groups, N / groups, L)
    return torch.einsum("bgnl,bgsl->bgns", placed, columns).reshape(batch, *call.weight.shape)


def patches(call: Call, values: Tensor, positions: Sequence[int]) -> Tensor:
    """What the kernel reads at each position: (B, C, *size) -> (B, C * kernel, L); im2col for any number of axes."""
    spatial = len(call.stride)
    values = F.pad(values, [pad for pads in reversed(call.padding) for pad in pads])
    for axis, (size, step, gap) in enumerate(zip(call.weight.shape[2:], call.stride, call.dilation, strict=True)):
        windows = values.unfold(2 + axis, gap * (size - 1) + 1, step)[..., ::gap]
        values = windows.narrow(2 + axis, 0, positions[axis])  # padding of a transposed one may leave room for more
    kernel, places = range(2 + spatial, 2 + 2 * spatial), range(2, 2 + spatial)
    return values.permute(0, 1, *kernel, *places).reshape(len(values), -1, math.prod(positions))


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
