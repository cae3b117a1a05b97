"""Norms that average over some of their channels only: what a network computes when the others are physically gone."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

Left = Mapping[str, Mapping[int, Tensor]]  # parameter -> axis -> (n,) places that stay


@contextmanager
def norms_over(model: nn.Module, left: Left) -> Iterator[None]:
    """Inside, the means and variances of LayerNorm, RMSNorm and GroupNorm of one group are those of what is left.

    Args:
        model: the network whose norms are meant.
        left: of the parameters of the norms, by name; a norm whose scale is not named averages over all.
    """
    if not left:
        yield
        return
    fast_path = torch.backends.mha.get_fastpath_enabled()  # hides the norms of an encoder layer
    tensors = (*model.named_parameters(), *model.named_buffers())
    places = {id(tensor): left[name] for name, tensor in tensors if name in left}
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        with _Norms(places):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)


class _Norms(TorchFunctionMode):
    def __init__(self, places: Mapping[int, Mapping[int, Tensor]]) -> None:
        super().__init__()
        self.places = places

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        rule = _RULES.get(func) if func.__hash__ is not None else None
        if rule is None:
            return func(*args, **(kwargs or {}))
        return rule(self.places, *args, **(kwargs or {}))


def _layer_norm(places: Mapping[int, Mapping[int, Tensor]], input: Tensor, normalized_shape: Any,
                weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:  # fmt: skip
    if id(weight) not in places:
        return F.layer_norm(input, normalized_shape, weight, bias, eps)
    return _scaled(_standardised(input, places[id(weight)], input.dim() - len(normalized_shape), eps), weight, bias)


def _group_norm(places: Mapping[int, Mapping[int, Tensor]], input: Tensor, num_groups: int,
                weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:  # fmt: skip
    if id(weight) not in places or num_groups > 1:  # which lose whole groups
        return F.group_norm(input, num_groups, weight, bias, eps)
    values = _standardised(input, places[id(weight)], 1, eps)
    shape = [-1, *[1] * (input.dim() - 2)]
    return _scaled(values, *(None if t is None else t.reshape(shape) for t in (weight, bias)))


def _rms_norm(places: Mapping[int, Mapping[int, Tensor]], input: Tensor, normalized_shape: Any,
              weight: Tensor | None = None, eps: float | None = None) -> Tensor:  # fmt: skip
    if id(weight) not in places:
        return F.rms_norm(input, normalized_shape, weight, eps)
    first = input.dim() - len(normalized_shape)
    some, dims = _some(input, places[id(weight)], first), tuple(range(first, input.dim()))
    square = some.square().mean(dims, keepdim=True)
    return _scaled(input / (square + (torch.finfo(input.dtype).eps if eps is None else eps)).sqrt(), weight, None)


def _standardised(values: Tensor, places: Mapping[int, Tensor], first: int, eps: float) -> Tensor:
    """By the mean and the variance over what is left of all axes from `first` on."""
    some, dims = _some(values, places, first), tuple(range(first, values.dim()))
    variance, mean = torch.var_mean(some, dims, correction=0, keepdim=True)
    return (values - mean) / (variance + eps).sqrt()


def _some(values: Tensor, places: Mapping[int, Tensor], first: int) -> Tensor:
    """What stands at the places of the parameter, whose first axis is axis `first` of the values."""
    for axis, stays in places.items():
        values = values.index_select(first + axis, stays.to(values.device))
    return values


def _scaled(values: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    values = values if weight is None else values * weight
    return values if bias is None else values + bias


_RULES: dict[Any, Any] = {F.layer_norm: _layer_norm, F.group_norm: _group_norm, F.rms_norm: _rms_norm}
