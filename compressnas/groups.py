"""Groups of weights that live or die together: norms, masks, shrinking. Knows tensors and modules, nothing else."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn

Layer = nn.modules.conv._ConvNd | nn.Linear
PROJECTIONS = ("q_proj_weight", "k_proj_weight", "v_proj_weight")  # of nn.MultiheadAttention


@dataclass(frozen=True)
class Member:
    """The weights of one parameter that belong to the groups of a set.

    Attributes:
        parameter: name of the parameter, as `model.named_parameters()` has it.
        axes: the axes of the parameter that tell groups apart, increasing: (0,) for filters, (1, 2, 3) for kernel
            positions. All weights along the other axes belong to one group.
        group_of: (product of the sizes along `axes`,) int64, the group of each place; -1 for a place that belongs to
            no group of this set (another operand of a concatenation).
    """

    parameter: str
    axes: tuple[int, ...]
    group_of: Tensor

    def sums(self, values: Tensor, groups: int) -> Tensor:
        """Sum `values` (shaped like the parameter) within each group -> (G,)."""
        rest = [a for a in range(values.dim()) if a not in self.axes]
        places = (values.sum(rest) if rest else values).reshape(-1)  # (product of axes,)
        if self._identity and places.shape[0] == groups:
            return places
        inside = self.group_of >= 0
        return places.new_zeros(groups).index_add_(0, self.group_of[inside], places[inside])

    def spread(self, per_group: Tensor, like: Tensor, outside: float) -> Tensor:
        """(G,) -> a tensor that broadcasts against `like`; `outside` where a place belongs to no group."""
        places = per_group
        if not (self._identity and self.group_of.shape[0] == per_group.shape[0]):
            places = per_group[self.group_of.clamp(min=0)]
            places = torch.where(self.group_of >= 0, places, torch.full_like(places, outside))
        return places.reshape([n if a in self.axes else 1 for a, n in enumerate(like.shape)])

    @cached_property
    def _identity(self) -> bool:
        """Place i belongs to group i: no gathering is needed."""
        return bool((self.group_of == torch.arange(len(self.group_of), device=self.group_of.device)).all())


@dataclass(frozen=True)
class GroupSet:
    """All groups along one coupled axis.

    Attributes:
        name: module path + `.out`, `.in` or `.shape`.
        kind: filter, row, column, shape or coupled.
        size: number of groups G.
        members: the weights that make up the groups; their norm is what the penalty sees.
        readers: the weights that read the groups' outputs, and that a mask sets to zero: for a set of outputs the next
            layers' weights, for columns and kernel positions the members themselves.
        writers: the weights and biases that go with a removal.
    """

    name: str
    kind: str
    size: int
    members: tuple[Member, ...]
    readers: tuple[Member, ...] = ()
    writers: tuple[Member, ...] = field(default=())


Weights = Mapping[str, Tensor]


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters by name, without autograd."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def squared_norms(group_set: GroupSet, weights: Weights) -> Tensor:
    """||w_g||^2 -> (G,)."""
    sums = [m.sums(weights[m.parameter].square(), group_set.size) for m in group_set.members]
    return torch.stack(sums).sum(0)


def norms(group_set: GroupSet, weights: Weights) -> Tensor:
    """||w_g||_2 -> (G,). 0 where every weight is 0 (or too small for its square to be a number)."""
    return squared_norms(group_set, weights).sqrt()


def group_sums(group_set: GroupSet, values: Weights) -> Tensor:
    """Sum of `values` (tensors shaped like the parameters) over each group -> (G,)."""
    return torch.stack([m.sums(values[m.parameter], group_set.size) for m in group_set.members]).sum(0)


def group_sizes(group_set: GroupSet, weights: Weights) -> Tensor:
    """Number of weights in each group -> (G,)."""
    return group_sums(group_set, {m.parameter: torch.ones_like(weights[m.parameter]) for m in group_set.members})


@torch.no_grad()
def scale_groups(members: Sequence[Member], weights: Weights, factors: Tensor) -> None:
    """Multiply the weights of each group by its factor (G,), in place."""
    for member in members:
        weight = weights[member.parameter]
        weight.mul_(member.spread(factors.to(weight), weight, 1.0))


def mask_groups(members: Sequence[Member], weights: Weights, kept: Sequence[int], size: int) -> None:
    """Set the weights of every group that is not in `kept` to zero, in place."""
    factors = torch.zeros(size)
    factors[list(kept)] = 1.0
    for member in members:
        scale_groups([member], weights, factors.to(weights[member.parameter].device))


def kept_fractions(
    model: nn.Module, sets: Sequence[GroupSet], kept: Mapping[str, Tensor], outputs: Sequence[GroupSet] = ()
) -> dict[str, float]:
    """What part of each layer's weights, and so of its FLOPs, is left when only the kept groups stay.

    Layers are convolutions, linear layers and attention with projections of its own (nn.MultiheadAttention).

    Rows, columns and border rows and columns of kernels that are gone count as removed; single kernel positions do not.

    Args:
        kept: group set -> (G,) bool.
        outputs: the sets of output units of the network: units that nothing reads any more count as removed, too.

    Returns:
        layer -> fraction in 0..1.
    """
    weights, layers = weights_of(model), layer_weights(model)
    axes_left: dict[str, list[Tensor]] = {}  # parameter -> for each axis, (size,) bool: what is not gone
    held = {m.parameter for s in (*sets, *outputs) for m in (*s.members, *s.readers)}
    for name in held.union(*layers.values()):
        shape, device = weights[name].shape, weights[name].device
        axes_left[name] = [torch.ones(n, dtype=torch.bool, device=device) for n in shape]
    for group_set in sets:
        for member in {id(m): m for m in (*group_set.members, *group_set.readers)}.values():
            weight, left = weights[member.parameter], axes_left[member.parameter]
            places = member.spread(kept[group_set.name].to(weight), weight, 1.0) > 0  # broadcasts against the weight
            for axis in member.axes:
                others = [a for a in range(weight.dim()) if a != axis]
                left[axis] &= places.sum(others).bool().expand(weight.shape[axis])
    for group_set in reversed(outputs):  # later layers first: a unit may idle because its only readers do
        read = torch.zeros(group_set.size, dtype=torch.bool, device=next(iter(weights.values())).device)
        for reader in group_set.readers:
            read[reader.group_of[axes_left[reader.parameter][reader.axes[0]] & (reader.group_of >= 0)]] = True
        for member in group_set.members:
            if member not in group_set.readers:
                alive = axes_left[member.parameter][member.axes[0]]
                alive &= (member.group_of < 0) | read[member.group_of.clamp(min=0)]
    return {name: _box(weights[of_layer[0]], axes_left[of_layer[0]]) for name, of_layer in layers.items()}


def layer_weights(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Layer -> the names of its weights: one of a convolution or linear layer, those of the inputs of attention."""
    found: dict[str, tuple[str, ...]] = {name: (f"{name}.weight",) for name, _ in modules_with_weights(model)}
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            own = ("in_proj_weight",) if module.in_proj_weight is not None else PROJECTIONS
            found[name] = tuple(f"{name}.{weight}" if name else weight for weight in own)
    return found


def _box(weight: Tensor, left: Sequence[Tensor]) -> float:
    """Fraction of a weight's places in the rows and columns that are left, kernel axes taken as intervals."""
    fraction = 1.0
    for axis, alive in enumerate(left):
        places = alive.nonzero()[:, 0]
        count = len(places) if axis < 2 else int(places[-1] - places[0]) + 1 if len(places) else 0
        fraction *= count / weight.shape[axis]
    return fraction


def modules_with_weights(model: nn.Module) -> Iterator[tuple[str, Layer]]:
    """Convolutions and linear layers with a weight of their own, by name, in the order in which they are registered.

    A weight that is computed, or that two layers share, is none of a layer's own.
    """
    owners = Counter(id(m.weight) for m in model.modules() if isinstance(m, Layer))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for name, module in model.named_modules():
        if not isinstance(module, Layer):
            continue
        if owners[id(module.weight)] == 1 and names.get(id(module.weight)) == f"{name}.weight":
            yield name, module


def structure(model: nn.Module) -> str:
    """Widths such as 20-50-800-500: units of every layer but the last, and the inputs of the first linear layer."""
    widths: list[int] = []
    seen_linear = False
    for _, layer in modules_with_weights(model):
        if isinstance(layer, nn.Linear):
            widths += [layer.out_features] if seen_linear else [layer.in_features, layer.out_features]
            seen_linear = True
        else:
            widths.append(layer.out_channels)
    return "-".join(str(width) for width in widths[:-1])
