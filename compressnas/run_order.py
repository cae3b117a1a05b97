"""Layers that can be fitted and batch norms of a network, in the order in which they run, and who reads them."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from compressnas.coupling import one_line
from compressnas.errors import InputError
from compressnas.inputs import Inputs, call, described, tensors_of
from compressnas.interface import take

CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
WIDEST = 8192  # inputs of a layer, channels times kernel, whose second moments are worked with


@dataclass(frozen=True)
class Step:
    """A layer or a batch norm, in the order in which the network runs.

    Attributes:
        read_by: the batch norm of its own that alone reads what the layer makes, so that neither a constant in that
            matters nor a factor.
    """

    name: str
    is_norm: bool
    read_by: str | None = None


def steps_of(model: nn.Module, inputs: Inputs) -> list[Step]:
    """The layers that can be fitted, and the batch norms."""
    order: list[tuple[str, Tensor | None, Any, Any]] = []  # name, its input, what made that, what makes its output
    hooks: list[Any] = []

    def note(name: str, inputs: tuple[Any, ...], output: Any) -> None:
        given = inputs[0] if inputs else None  # its grad_fn may be another later on, when something writes into it
        order.append((name, given, getattr(given, "grad_fn", None), getattr(output, "grad_fn", None)))

    for name, module in model.named_modules():
        if isinstance(module, (*CONVS, nn.Linear, *NORMS)):
            hooks.append(module.register_forward_hook(lambda _, i, o, name=name: note(name, i, o)))
    try:
        outputs = _outputs_of_first(model, inputs, order)
    finally:
        for hook in hooks:
            hook.remove()
    modules, runs = dict(model.named_modules()), [name for name, *_ in order]
    parameters = [id(p) for m in modules.values() for p in m._parameters.values()]
    readers = _readers(outputs)
    norm_of = {
        origin: name
        for name, _, origin, made in order
        if isinstance(modules[name], NORMS) and origin is not None and readers[made] and _is_read_by(origin, made)
    }
    steps = []
    for name, given, _, origin in order:
        module, norm = modules[name], norm_of.get(origin)
        if runs.count(name) > 1 or given is None:
            continue
        if isinstance(module, NORMS):
            steps.append(Step(name, is_norm=True))
        elif _can_be_fitted(module, parameters):
            alone = norm is not None and runs.count(norm) == 1 and readers[origin] == 1
            channels_first = isinstance(module, CONVS) or given.dim() == 2  # where a batch norm looks for them
            steps.append(Step(name, is_norm=False, read_by=norm if alone and channels_first else None))
    return steps


def _outputs_of_first(model: nn.Module, inputs: Inputs, order: list[Any]) -> Any:
    """What the network makes of the first sample, with its graph; without one where it runs only so."""
    for with_graph in (True, False):
        order.clear()
        try:
            with torch.set_grad_enabled(with_graph):
                return call(model, take(inputs, torch.arange(1)))
        except Exception as error:  # whatever a network raises
            if not with_graph:
                raise InputError(f"data: the network does not run on {described(inputs)}: {one_line(error)}") from error


def _is_read_by(origin: Any, node: Any) -> bool:
    return any(following is origin for following, _ in node.next_functions)


def _readers(outputs: Any) -> Counter[Any]:
    """How often what each node of the autograd graph makes is read, on the way to the outputs."""
    reads: Counter[Any] = Counter()
    waiting = [t.grad_fn for t in tensors_of(outputs) if t.grad_fn is not None]
    reads.update(waiting)
    seen = set(waiting)
    while waiting:
        for node, _ in waiting.pop().next_functions:
            if node is None:
                continue
            reads[node] += 1
            if node not in seen:
                seen.add(node)
                waiting.append(node)
    return reads


def _can_be_fitted(module: nn.Module, parameters: list[int]) -> bool:
    weight = module._parameters.get("weight")  # a parametrised one is no parameter
    if weight is None or not weight.requires_grad or parameters.count(id(weight)) > 1:
        return False
    if type(module) not in (*CONVS, nn.Linear):  # a subclass may do something else with its weight
        return False
    plain = not isinstance(module, CONVS) or (module.groups == 1 and module.padding_mode == "zeros")
    return plain and weight[0].numel() <= WIDEST
