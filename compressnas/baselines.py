"""Criteria to compare with: how important each group of a network is, by torch-pruning's importances.

With the pieces of its group format in `_tp_group` this is the only file that knows torch_pruning.
"""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
import torch_pruning as tp
from torch import Tensor, nn
from torch_pruning.dependency import Dependency, Group, Node

from compressnas.errors import InputError
from compressnas.groups import GroupSet, Member
from compressnas.inputs import call, map_tensors, tensors_of

Loss = Callable[[Any, Any], Tensor]  # output, targets -> scalar


@dataclass(frozen=True)
class Evidence:
    """What a criterion may look at besides the weights.

    Attributes:
        data: (inputs, targets) batches, for `taylor`.
        loss: (output, targets) -> scalar; cross-entropy where it is not given.
        batches: how many batches are read.
        seed: for `random`.
    """

    data: Iterable[Any] | None = None
    loss: Loss | None = None
    batches: int = 16
    seed: int = 0


Scores = dict[str, Tensor]  # group set -> (G,), larger is better; the mean of a set is 1
Criterion = Callable[[nn.Module, Sequence[GroupSet], Evidence], Scores]


def scores(method: str, model: nn.Module, sets: Sequence[GroupSet], evidence: Evidence) -> Scores:
    """How important each group is, relative to the mean of its set, so that layers can be compared.

    Args:
        method: a name in CRITERIA.

    Raises:
        InputError: no such method, or one that needs data and has none.
    """
    if method not in CRITERIA:
        raise InputError(f"method {method!r}: expected one of {', '.join(CRITERIA)}")
    raw = CRITERIA[method](model, sets, evidence)
    return {name: value / value.mean().clamp(min=1e-30) for name, value in raw.items()}


def _by(importance: Callable[[Group], Any]) -> Criterion:
    """A criterion that is an importance of torch-pruning, summed over the coupled weights of a group."""

    def criterion(model: nn.Module, sets: Sequence[GroupSet], evidence: Evidence) -> Scores:
        modules = dict(model.named_modules())
        return {s.name: _importance(importance, modules, s) for s in sets}

    return criterion


def _importance(importance: Callable[[Group], Any], modules: Mapping[str, nn.Module], group_set: GroupSet) -> Tensor:
    found = importance(_tp_group(modules, group_set))
    device = group_set.members[0].group_of.device
    if found is None:  # no layer of a kind that it knows, such as batch norm for `bn_scale`
        return torch.ones(group_set.size, device=device)
    values: Tensor = found.detach().to(device, torch.float32)
    return values[: group_set.size]  # several units of one group are summed at the place of the group


def _tp_group(modules: Mapping[str, nn.Module], group_set: GroupSet) -> Group:
    """The group set in torch-pruning's form: (layer, how it is cut, indices with the group that each belongs to)."""
    group = Group()
    for member in (*group_set.members, *group_set.writers):
        path, _, what = member.parameter.rpartition(".")
        module = modules[path]
        if isinstance(module, nn.MultiheadAttention) and what.endswith("proj_weight"):
            module, what = _as_linear(getattr(module, what)), "weight"
        cut = _cut(module, member, what)
        if cut is None:
            continue
        node = Node(module, None, path)
        places = (member.group_of >= 0).nonzero()[:, 0].tolist()
        group.add_dep(Dependency(cut, cut, node, node), places)
        group[len(group) - 1].root_idxs = member.group_of[member.group_of >= 0].tolist()
    return group


def _as_linear(weight: nn.Parameter) -> nn.Linear:
    """A linear layer with this weight (N, C)."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = weight
    return layer


def _cut(module: nn.Module, member: Member, what: str) -> Any:
    """torch-pruning's function that would cut this axis, by which its importances tell what they look at."""
    if what != "weight":
        return None
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        return tp.prune_batchnorm_out_channels
    if isinstance(module, nn.Linear):
        return tp.prune_linear_out_channels if member.axes == (0,) else tp.prune_linear_in_channels
    if isinstance(module, nn.modules.conv._ConvNd) and not module.transposed:
        return tp.prune_conv_out_channels if member.axes == (0,) else tp.prune_conv_in_channels
    return None


def group_norm(model: nn.Module, example: Tensor, strength: float) -> Callable[[], None]:
    """torch-pruning's group norm regulariser (Fang et al., DepGraph, arXiv 2301.12900, section 3.3).

    Args:
        strength: the paper's lambda.

    Returns:
        What adds the gradient of the penalty to that of the loss, as the weights are then.
    """
    model.eval()
    importance = tp.importance.GroupMagnitudeImportance(normalizer=None)
    regulariser = tp.pruner.GroupNormPruner(model, example, importance, reg=strength)
    regulariser.update_regularizer()
    return lambda: regulariser.regularize(model)


def _taylor(model: nn.Module, sets: Sequence[GroupSet], evidence: Evidence) -> Scores:
    """|w dL/dw| over the coupled weights (Molchanov et al. 2019), from a few batches."""
    if evidence.data is None:
        raise InputError("method taylor: expected data=, batches of (inputs, targets) to take gradients from")
    network = copy.deepcopy(model).eval().requires_grad_(True)
    device = next(network.parameters()).device
    seen = 0
    for inputs, targets in islice(evidence.data, evidence.batches):
        inputs, targets = (map_tensors(value, lambda t: t.to(device)) for value in (inputs, targets))
        output = call(network, inputs)
        loss = evidence.loss(output, targets) if evidence.loss else F.cross_entropy(tensors_of(output)[0], targets)
        loss.backward()  # type: ignore[no-untyped-call]
        seen += 1
    if not seen:
        raise InputError("method taylor: data= holds no batch")
    return _by(tp.importance.TaylorImportance(group_reduction="sum", normalizer=None))(network, sets, evidence)


def _random(model: nn.Module, sets: Sequence[GroupSet], evidence: Evidence) -> Scores:
    generator = torch.Generator().manual_seed(evidence.seed)
    return {s.name: torch.rand(s.size, generator=generator).to(s.members[0].group_of.device) for s in sets}


def _magnitude(p: int) -> Criterion:
    return _by(tp.importance.MagnitudeImportance(p=p, group_reduction="mean", normalizer=None))


CRITERIA: dict[str, Criterion] = {
    "magnitude": _magnitude(2),
    "magnitude_l1": _magnitude(1),
    "bn_scale": _by(tp.importance.BNScaleImportance(group_reduction="mean", normalizer=None)),
    "fpgm": _by(tp.importance.FPGMImportance(group_reduction="mean", normalizer=None)),
    "taylor": _taylor,
    "random": _random,
}
