"""Groups of weights that live or die together: norms, masks, shrinking. Knows tensors and modules, nothing else."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn

_NONE = torch.zeros(0, dtype=torch.int64)
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
    return KeptFractions(model, sets, outputs)(kept)


class KeptFractions:
    """`kept_fractions` of one network for one decision after another: where its groups are is worked out once.

    The places of all axes of all parameters stand in a row; a decision is a flag for each of them.
    """

    def __init__(self, model: nn.Module, sets: Sequence[GroupSet], outputs: Sequence[GroupSet] = ()) -> None:
        self.sets = sets
        self.shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        self.layers = {name: weights[0] for name, weights in layer_weights(model).items()}
        self.starts: dict[tuple[str, int], int] = {}  # parameter and axis -> the first of its places
        self.count = 0
        held = {m.parameter for s in (*sets, *outputs) for m in (*s.members, *s.readers)}
        for name in sorted(held.union(*layer_weights(model).values())):
            for axis, size in enumerate(self.shapes[name]):
                self.starts[name, axis] = self.count
                self.count += size
        parts, first = [], 0
        for group_set in sets:
            lines = [m for m in (*group_set.members, *group_set.readers) if len(m.axes) == 1]
            places, groups = self._places(lines)
            parts.append((places, groups + first))
            first += group_set.size
        self.places, self.groups = (torch.cat(both) for both in zip(*parts, strict=True)) if parts else (_NONE, _NONE)
        self.grids = [(s.name, m) for s in sets for m in s.members if len(m.axes) > 1]
        self.chain = []  # later layers first: a unit may idle because its only readers do
        for group_set in reversed(outputs):
            reads = {id(m) for m in group_set.readers}
            made = self._places([m for m in group_set.members if id(m) not in reads])
            self.chain.append((group_set.size, *self._places(group_set.readers), *made))
        axes = [(weight, axis) for weight in self.layers.values() for axis in range(len(self.shapes[weight]))]
        self.first = torch.tensor([self.starts[which] for which in axes], dtype=torch.int64)
        self.last = self.first + torch.tensor([self.shapes[weight][axis] for weight, axis in axes], dtype=torch.int64)

    def _places(self, members: Sequence[Member]) -> tuple[Tensor, Tensor]:
        """Each place along the first axis of the members that belongs to a group, and this group -> (n,), (n,)."""
        places, groups = [_NONE], [_NONE]
        for member in members:
            group_of = member.group_of.cpu()
            inside = (group_of >= 0).nonzero()[:, 0]
            places.append(inside + self.starts[member.parameter, member.axes[0]])
            groups.append(group_of[inside])
        return torch.cat(places), torch.cat(groups)

    def __call__(self, kept: Mapping[str, Tensor]) -> dict[str, float]:
        left = torch.ones(self.count, dtype=torch.bool)
        if self.sets:
            gone = ~torch.cat([kept[s.name].cpu() for s in self.sets])
            left[self.places[gone[self.groups]]] = False
        for name, member in self.grids:
            group_of = member.group_of.cpu()
            places = kept[name].cpu()[group_of.clamp(min=0)] | (group_of < 0)
            places = places.reshape([self.shapes[member.parameter][axis] for axis in member.axes])
            for number, axis in enumerate(member.axes):
                start = self.starts[member.parameter, axis]
                left[start : start + places.shape[number]] &= places.movedim(number, 0).flatten(1).any(1)
        for size, readers, read_groups, made, made_groups in self.chain:
            read = torch.zeros(size, dtype=torch.bool)
            read[read_groups[left[readers]]] = True
            left[made[~read[made_groups]]] = False
        sums = torch.cat([torch.zeros(1, dtype=torch.int64), left.cumsum(0)])
        counts = iter((sums[self.last] - sums[self.first]).tolist())
        return {name: self._box(weight, left, counts) for name, weight in self.layers.items()}

    def _box(self, weight: str, left: Tensor, counts: Iterator[int]) -> float:
        """Fraction of a weight's places in the rows and columns that are left, kernel axes taken as intervals."""
        fraction = 1.0
        for axis, size in enumerate(self.shapes[weight]):
            count = next(counts)
            if axis > 1 and 0 < count < size:
                start = self.starts[weight, axis]
                places = left[start : start + size].nonzero()[:, 0]
                count = int(places[-1] - places[0]) + 1
            fraction *= count / size
        return fraction


def layer_weights(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Layer -> the names of its weights: one of a convolution or linear layer, those of the inputs of attention."""
    found: dict[str, tuple[str, ...]] = {name: (f"{name}.weight",) for name, _ in modules_with_weights(model)}
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            own = ("in_proj_weight",) if module.in_proj_weight is not None else PROJECTIONS
            found[name] = tuple(f"{name}.{weight}" if name else weight for weight in own)
    return found


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
