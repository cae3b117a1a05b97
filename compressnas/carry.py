"""An optimizer goes on after a removal."""

import copy
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn

from compressnas.errors import InputError
from compressnas.inputs import Inputs
from compressnas.slim import SlimArch
from compressnas.surgery import origins


def carry_optimizer(
    optimizer: torch.optim.Optimizer, model: nn.Module, example_inputs: Inputs, slim: SlimArch, small: nn.Module
) -> torch.optim.Optimizer:
    """The optimizer of `model`, made one of `small`: momenta and the like of the weights that are left go on.

    Learning rates and other settings stay with their parameter group. Parameters that are not the model's (of a loss,
    say) stay in it. A learning-rate scheduler holds the old optimizer: build it anew, or set its `optimizer`.

    Args:
        optimizer: of any class that keeps its state by parameter, in tensors of the parameter's shape or in numbers.
        model: the network before the removal.
        example_inputs: what `remove` was given.
        slim: the decision; where the proof says that sets were left alone, `slim.without` these.
        small: what `remove` returned.

    Returns:
        A new optimizer of the same class; the given one is untouched.

    Raises:
        InputError: `small` is not what removing `slim` from `model` gives.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    left, places = dict(small.named_parameters()), origins(model, example_inputs, slim)
    wrong = [n for n in left if n not in places or places[n].shape != left[n].shape]
    if wrong:
        shape = tuple(left[wrong[0]].shape)
        raise InputError(f"small is not what removing slim from model leaves: {wrong[0]} has shape {shape}")
    carried = copy.copy(optimizer)
    carried.state = defaultdict(dict)
    carried.param_groups = []
    for group in optimizer.param_groups:
        own: list[nn.Parameter] = []
        for parameter in group["params"]:
            name = names.get(id(parameter))
            new = parameter if name is None else left[name]
            own.append(new)
            if parameter in optimizer.state:
                state = optimizer.state[parameter]
                carried.state[new] = {
                    key: _left(value, parameter, None if name is None else places[name]) for key, value in state.items()
                }
        carried.param_groups.append({**group, "params": own})
    return carried


def _left(value: Any, parameter: Tensor, places: Tensor | None) -> Any:
    """What is left of one entry of an optimizer's state; 0 for weights that are there and masked."""
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    if places is None or value.shape != parameter.shape:
        return value.clone()
    flat = value.reshape(-1)[places.clamp(min=0).to(value.device)]  # shaped like the small parameter
    return torch.where(places.to(value.device) >= 0, flat, torch.zeros_like(flat))
