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
        return (func if rule is None else rule(self.places, func))(*args, **(kwargs or {}))


def _layer_norm(places: Mapping[int, Mapping[int, Tensor]], func: Any) -> Any:
    def apply(input: Tensor, normalized_shape: Any, weight: Tensor | None = None, bias: Tensor | None = None,
              eps: float = 1e-5) -> Tensor:  # fmt: skip
        if id(weight) not in places:
            result: Tensor = func(input, normalized_shape, weight, bias, eps)
            return result
        first = input.dim() - len(normalized_shape)
        some, dims = _some(input, places[id(weight)], first), tuple(range(first, input.dim()))
        variance, mean = torch.var_mean(some, dims, correction=0, keepdim=True)
        return _scaled((input - mean) / (variance + eps).sqrt(), weight, bias)

    return apply


def _rms_norm(places: Mapping[int, Mapping[int, Tensor]], func: Any) -> Any:
    def apply(input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
        if id(weight) not in places:
            result: Tensor = func(input, normalized_shape, weight, eps)
            return result
        first = input.dim() - len(normalized_shape)
        some, dims = _some(input, places[id(weight)], first), tuple(range(first, input.dim()))
        square = some.square().mean(dims, keepdim=True)
        return _scaled(input / (square + (torch.finfo(input.dtype).eps if eps is None else eps)).sqrt(), weight, None)

    return apply


def _group_norm(places: Mapping[int, Mapping[int, Tensor]], func: Any) -> Any:
    def apply(input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None,
              eps: float = 1e-5) -> Tensor:  # fmt: skip
        if id(weight) not in places or num_groups > 1:  # which lose whole groups
            result: Tensor = func(input, num_groups, weight, bias, eps)
            return result
        some, dims = _some(input, places[id(weight)], 1), tuple(range(1, input.dim()))
        variance, mean = torch.var_mean(some, dims, correction=0, keepdim=True)
        shape = [-1, *[1] * (input.dim() - 2)]
        weight, bias = (None if t is None else t.reshape(shape) for t in (weight, bias))
        return _scaled((input - mean) / (variance + eps).sqrt(), weight, bias)

    return apply


def _some(values: Tensor, places: Mapping[int, Tensor], first: int) -> Tensor:
    """What stands at the places of the parameter, whose first axis is axis `first` of the values."""
    for axis, stays in places.items():
        values = values.index_select(first + axis, stays.to(values.device))
    return values


def _scaled(values: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    values = values if weight is None else values * weight
    return values if bias is None else values + bias


_RULES = {F.layer_norm: _layer_norm, F.group_norm: _group_norm, F.rms_norm: _rms_norm}
