"""Channels that are constant, not absent: what they add moves into the next layers' biases before they go.

A norm whose scale is zero but whose shift is not, or a layer without weights but with a bias, makes the same value for
every input. To mask it would change the network; to fold it does not.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from compressnas.coupling import incoming
from compressnas.groups import GroupSet, Member, weights_of
from compressnas.inputs import Inputs, call, double, drawn
from compressnas.slim import SlimArch

_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm)


@dataclass(frozen=True)
class Folded:
    """What became of the constant channels that are to go.

    Attributes:
        folded: group set -> numbers of the groups whose constant now stands in the biases of what read them.
        lost: group set -> why constants of it are lost, which the masked network loses as well.
    """

    folded: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    lost: Mapping[str, str] = field(default_factory=dict)


@torch.no_grad()
def fold_constants(
    model: nn.Module, example: Inputs, sets: Sequence[GroupSet], slim: SlimArch
) -> tuple[nn.Module, Folded]:
    """Move the constants of removed groups into biases.

    Args:
        model: the network; not changed.
        example: what it is called with.
        sets: the group sets of the decision.
        slim: the decision.

    Returns:
        A network that computes the same (up to the rounding of its biases) and no longer reads these groups, and what
        was folded. `model` itself where there is nothing to fold.
    """
    weights = weights_of(model)
    constant = {}
    for group_set in sets:
        if group_set.writers and (gone := slim.removed(group_set.name)):
            flags = _independent(model, group_set, weights)
            if chosen := [g for g in gone if bool(flags[g])]:
                constant[group_set.name] = chosen
    if not constant:
        return model, Folded()
    read = {m.parameter for s in sets if s.name in constant for m in s.readers}
    values = _constants(model, example, read)
    result, folded, lost = copy.deepcopy(model), {}, {}
    for group_set in sets:
        done = []
        for group in constant.get(group_set.name, []):
            moves = [(m, _places(m, group)) for m in group_set.readers]
            moves = [(m, places) for m, places in moves if len(places)]
            found = [values[m.parameter][places] for m, places in moves]
            if any(bool(v.isnan().any()) for v in found):
                lost[group_set.name] = "what it adds is not the same everywhere"
            elif any(bool(v.any()) for v in found):
                reason = next((r for m, _ in moves if (r := _unfit(model.get_submodule(_owner(m)), m))), None)
                if reason is not None:
                    lost[group_set.name] = reason
                    continue
                for (member, places), value in zip(moves, found, strict=True):
                    _fold(result.get_submodule(_owner(member)), places, value)
                done.append(group)
        if done:
            folded[group_set.name] = tuple(done)
    return (result, Folded(folded, lost)) if folded else (model, Folded(folded, lost))


def _owner(member: Member) -> str:
    return member.parameter.rpartition(".")[0]


def _places(member: Member, group: int) -> Tensor:
    return (member.group_of == group).nonzero()[:, 0]


def _independent(model: nn.Module, group_set: GroupSet, weights: Mapping[str, Tensor]) -> Tensor:
    """(G,) bool: whatever the input, the group is the same, as no weight or no scale lets it through."""
    made = torch.zeros(group_set.size, dtype=torch.bool)
    for member in incoming(group_set)[:1]:
        made = member.sums(weights[member.parameter].abs(), group_set.size).cpu() == 0
    if len(incoming(group_set)) > 1:  # another layer adds to it
        made[:] = False
    for member in group_set.writers:
        if isinstance(model.get_submodule(_owner(member)), _NORMS) and member.parameter.endswith(".weight"):
            made |= member.sums(weights[member.parameter].abs(), group_set.size).cpu() == 0
    return made


def _constants(model: nn.Module, example: Inputs, read: set[str]) -> dict[str, Tensor]:
    """Weight -> (n,) float64: what its layer reads at each place of its input axis; NaN where that varies."""
    network = copy.deepcopy(model).double().eval()
    values: dict[str, Tensor] = {}
    for name in read:
        path = name.rpartition(".")[0]
        module = network.get_submodule(path)
        attention = network.get_submodule(path.rpartition(".")[0])
        if isinstance(attention, nn.MultiheadAttention) and module is attention.out_proj:
            values[name] = _of_heads(attention)  # which reads the weight of this layer, and never calls it
            continue

        def note(layer: nn.Module, arguments: tuple[Any, ...], name: str = name) -> None:
            tensor = arguments[0]
            spatial = len(layer.kernel_size) if isinstance(layer, nn.modules.conv._ConvNd) else 0
            rows = tensor.movedim(tensor.dim() - spatial - 1, 0).reshape(tensor.shape[-spatial - 1], -1)
            same = (rows.amax(1) - rows.amin(1)).abs() <= 1e-12 * rows.abs().amax(1)
            value = torch.where(same, rows[:, 0], torch.nan).cpu()
            if name in values:  # a layer that is used twice
                value = torch.where(values[name] == value, value, torch.nan)
            values[name] = value

        module.register_forward_pre_hook(note)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        call(network, drawn(double(example), torch.Generator().manual_seed(0)))
    finally:
        torch.set_default_dtype(before)
    missing = read - values.keys()  # read by something else than their layers, or not at all
    return values | {name: torch.full((weights_of(model)[name].shape[1],), torch.nan).double() for name in missing}


def _of_heads(attention: nn.MultiheadAttention) -> Tensor:
    """What the heads give where their values are the same at all positions: these, as what attends sums to 1."""
    if attention.in_proj_weight is not None:
        weight = attention.in_proj_weight.chunk(3)[2]
    else:
        assert attention.v_proj_weight is not None
        weight = attention.v_proj_weight
    bias = weight.new_zeros(len(weight)) if attention.in_proj_bias is None else attention.in_proj_bias.chunk(3)[2]
    return torch.where((weight == 0).all(1), bias, torch.nan).cpu()


def _unfit(layer: nn.Module, member: Member) -> str | None:
    """Why a constant cannot move into the bias of this layer."""
    if isinstance(layer, nn.Linear):
        return None
    if not isinstance(layer, nn.modules.conv._ConvNd) or layer.transposed or layer.groups > 1:
        return f"{_owner(member)} reads it, whose bias cannot take a constant"
    padded = layer.padding == "same" or (layer.padding != "valid" and any(int(p) > 0 for p in layer.padding))
    if padded and max(layer.kernel_size) > 1:
        return f"{_owner(member)} reads it with padding, where its constant ends"
    return None


def _fold(layer: nn.Module, places: Tensor, value: Tensor) -> None:
    weight, bias = layer.weight, layer.bias
    assert isinstance(weight, Tensor)
    columns = weight[:, places].double().flatten(2).sum(2) if weight.dim() > 2 else weight[:, places].double()
    added = columns @ value.to(weight.device)  # (C_out,)
    if bias is None:
        layer.bias = nn.Parameter(added.to(weight.dtype), weight.requires_grad)
    else:
        assert isinstance(bias, Tensor)
        bias.copy_((bias.double() + added).to(bias.dtype))
    weight[:, places] = 0
