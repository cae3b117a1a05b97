"""What goes into a network and comes out of it, as a plain list of named tensors; and more samples like given ones."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from compressnas.errors import InputError
from compressnas.inputs import Inputs, call, described, map_tensors


class TensorsOnly(nn.Module):
    """A network that takes and gives tensors only, in the order of `input_tensors` and `named_tensors`.

    What else it is called with (numbers, flags, None) is that of the example.
    """

    def __init__(self, network: nn.Module, example: Inputs) -> None:
        super().__init__()
        self.network = network
        self.example = example
        self.training = network.training

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        given = iter(tensors)
        outputs = call(self.network, map_tensors(self.example, lambda _: next(given)))
        return tuple(tensor for _, tensor in named_tensors(outputs))


def input_tensors(inputs: Inputs) -> list[Tensor]:
    """The tensors that a network is called with, in order."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(inputs, note)
    return found


def input_names(model: nn.Module, inputs: Inputs) -> list[str]:
    """A name for each of `input_tensors`: the argument's in `forward`, with `_0`, `_key` where it holds several."""
    if isinstance(inputs, Mapping):
        arguments = {str(name): value for name, value in inputs.items()}
    else:
        values = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
        arguments = dict(zip(_positional(model, len(values)), values, strict=True))
    return _unique([name for argument, value in arguments.items() for name, _ in named_tensors(value, argument)])


def _positional(model: nn.Module, count: int) -> list[str]:
    """Names for so many positional arguments of `forward`."""
    names: list[str] = []
    for parameter in inspect.signature(model.forward).parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            names += [f"{parameter.name}_{i}" for i in range(count - len(names))]
        elif parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            names.append(parameter.name)
    if len(names) < count:
        raise InputError(f"example_inputs has {count} arguments, {type(model).__name__}.forward takes {len(names)}")
    return names[:count]


def named_tensors(value: Any, name: str = "") -> list[tuple[str, Tensor]]:
    """All tensors in what a network takes or returns, with their path: `logits`, `hidden_0`; `output` for a lone one.

    The order is that of `compressnas.inputs.tensors_of`.
    """
    if isinstance(value, Tensor):
        return [(name or "output", value)]
    if isinstance(value, Mapping):
        inner = [(str(key), part) for key, part in value.items()]
    elif isinstance(value, tuple | list):
        name = name or "output"
        inner = [(str(i), part) for i, part in enumerate(value)]
    else:
        inner = list(vars(value).items()) if hasattr(value, "__dict__") else []
    return [pair for key, part in inner for pair in named_tensors(part, f"{name}_{key}" if name else key)]


def output_names(outputs: Any, taken: list[str]) -> list[str]:
    """A name for each tensor of `outputs`, none of them in `taken`."""
    return _unique([name for name, _ in named_tensors(outputs)], taken)


def _unique(names: list[str], taken: list[str] | None = None) -> list[str]:
    found: list[str] = []
    for name in names:
        while name in found or name in (taken or ()):
            name += "_out"
        found.append(name)
    return found


# ---------------------------------------------------------------- samples


def samples(inputs: Inputs) -> int:
    """The batch size: the first dimension of the first tensor that has one.

    Raises:
        InputError: there is no such tensor, or its batch is empty.
    """
    sizes = [tensor.shape[0] for tensor in input_tensors(inputs) if tensor.dim()]
    if not sizes or sizes[0] < 1:
        raise InputError(f"example_inputs holds {described(inputs)}, expected a tensor of at least one sample")
    return sizes[0]


def is_batched(inputs: Inputs) -> list[bool]:
    """Of each tensor, whether its first dimension is the batch: whether it has the size of `samples`."""
    size = samples(inputs)
    return [tensor.dim() > 0 and tensor.shape[0] == size for tensor in input_tensors(inputs)]


def take(inputs: Inputs, rows: Tensor, batched: Sequence[bool] | None = None) -> Any:
    """The samples `rows` (N,) int64, which may repeat; what has no batch dimension stays as it is.

    `batched` is `is_batched(inputs)`, unless it was found on another number of samples.
    """
    flags = iter(is_batched(inputs) if batched is None else batched)
    return map_tensors(inputs, lambda t: t[rows.to(t.device)] if next(flags) else t)


def more_samples(inputs: Inputs, count: int, seed: int = 0) -> Any:
    """`count` samples: the given ones first, then random ones like them.

    A random sample is a given one with every number scaled by a factor drawn from 0..1, which keeps signs, zeros and
    ranges (masks stay masks); a tensor of zeros is drawn from a normal distribution instead. Whole numbers repeat.
    """
    generator = torch.Generator().manual_seed(seed)
    size = samples(inputs)
    more = max(count - size, 0)

    def extended(tensor: Tensor) -> Tensor:
        if not tensor.dim() or tensor.shape[0] != size:
            return tensor
        extra = tensor.detach()[torch.arange(more, device=tensor.device) % size]
        if tensor.is_floating_point():
            if bool((tensor == 0).all()):
                drawn = torch.randn(extra.shape, generator=generator)
                extra = drawn.to(extra)
            else:
                drawn = torch.rand(extra.shape, generator=generator).to(extra)
                extra = torch.where(extra.isfinite(), extra * drawn, extra)  # 0 times an infinite mask is no number
        return torch.cat([tensor.detach()[:count], extra])

    return map_tensors(inputs, extended)
