"""What a network is called with: one tensor, a tuple of positional arguments, or a mapping of named ones."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

Inputs = Tensor | tuple[Any, ...] | list[Any] | Mapping[str, Any]


def call(model: nn.Module, inputs: Inputs) -> Any:
    """model(x), model(*arguments) or model(**named)."""
    if isinstance(inputs, Tensor):
        return model(inputs)
    return model(**inputs) if isinstance(inputs, Mapping) else model(*inputs)


def map_tensors(inputs: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same structure with `change` applied to each tensor."""
    if isinstance(inputs, Tensor):
        return change(inputs)
    if isinstance(inputs, Mapping):
        return {key: map_tensors(value, change) for key, value in inputs.items()}
    if isinstance(inputs, tuple | list):
        values = [map_tensors(value, change) for value in inputs]
        return type(inputs)(*values) if hasattr(inputs, "_fields") else type(inputs)(values)  # of a named tuple
    return inputs


def tensors_of(outputs: Any) -> list[Tensor]:
    """All tensors in what a network takes or returns: tuples, lists, mappings, dataclasses and the like."""
    if isinstance(outputs, Tensor):
        return [outputs]
    if isinstance(outputs, Mapping):
        outputs = list(outputs.values())
    elif not isinstance(outputs, tuple | list):
        outputs = list(vars(outputs).values()) if hasattr(outputs, "__dict__") else []
    return [tensor for value in outputs for tensor in tensors_of(value)]


def described(inputs: Inputs) -> str:
    """The shapes, for messages: `(1, 3, 32, 32)`."""
    return ", ".join(str(tuple(tensor.shape)) for tensor in tensors_of(inputs)) or "no tensor"


def double(inputs: Any) -> Any:
    """Floating-point tensors in float64; whole numbers stay what they are."""
    return map_tensors(inputs, lambda t: t.double() if t.is_floating_point() else t)


def drawn(inputs: Any, generator: torch.Generator) -> Any:
    """Random float64 tensors in place of the floating-point ones, of a batch of two where all are batches of one.

    A removal that mixes up the batch shows from two on.
    """
    tensors = tensors_of(inputs)
    twice = all(tensor.dim() > 0 and tensor.shape[0] == 1 for tensor in tensors)

    def draw(tensor: Tensor) -> Tensor:
        if twice:
            tensor = torch.cat([tensor, tensor])
        if not tensor.is_floating_point():
            return tensor
        return torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor.device)

    return map_tensors(inputs, draw)
