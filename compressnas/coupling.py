"""Which units live and die together, as group sets; and their removal. It rests on the channel numbers of tags.py."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from compressnas.errors import InputError
from compressnas.groups import GroupSet, Member
from compressnas.inputs import Inputs, call, described
from compressnas.tags import PLANS, Slice, Trace, trace

INEXACT = "a norm averages over its units: what is left would be scaled differently"


@dataclass(frozen=True)
class Component:
    """Layers whose units depend on each other, and the ways in which their units can be taken together.

    Attributes:
        plans: plan -> its group sets, finest first; a plan that says the same as an earlier one is left out.
    """

    plans: Mapping[str, tuple[GroupSet, ...]]


@dataclass(frozen=True)
class Coupling:
    """What is coupled in a network.

    Attributes:
        components: every layer's units are in one of them, or in `refused`.
        refused: set name -> why (some of) its units must stay.
        inexact: names of sets that can be removed only approximately.
    """

    components: tuple[Component, ...]
    refused: Mapping[str, str]
    inexact: frozenset[str]
    trace: Trace

    def sets(self) -> dict[str, GroupSet]:
        """Every group set under every plan, by name."""
        return {s.name: s for component in self.components for sets in component.plans.values() for s in sets}

    def finest(self) -> list[GroupSet]:
        """The finest group set of each layer, in the order of the components."""
        return [s for component in self.components for s in next(iter(component.plans.values()), ())]


def layer_of(set_name: str) -> str:
    """`stem.0` for `stem.0.out` or `stem.0.out:whole`."""
    return set_name.rpartition(".")[0]


def is_output(set_name: str) -> bool:
    """Whether the set holds the output units of a layer."""
    return set_name.rpartition(".")[2].partition(":")[0] == "out"


def output_sets(model: nn.Module, example: Inputs) -> list[GroupSet]:
    """The finest coupled group set of each layer whose output units might be removed, in order of registration.

    Members are the incoming weights of a unit (of its own layer first), then the outgoing ones; readers the outgoing
    ones, writers the biases, norms and bare parameters. A layer that no layer reads is left out: its units are the
    classes.

    Raises:
        InputError: the network cannot be traced.
    """
    return in_order(model, coupling(model, example).finest())


def incoming(group_set: GroupSet) -> tuple[Member, ...]:
    """The weights that make a unit: one layer's, or several where their outputs are added."""
    return tuple(m for m in group_set.members if m not in group_set.readers)


def in_order(model: nn.Module, sets: Iterable[GroupSet]) -> list[GroupSet]:
    order = {name: number for number, (name, _) in enumerate(model.named_modules())}
    return sorted(sets, key=lambda s: order[layer_of(s.name)])


def one_line(error: BaseException) -> str:
    """The first line an exception has to say."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


# ---------------------------------------------------------------- group sets


def coupling(model: nn.Module, example: Inputs) -> Coupling:
    """What is coupled in the network, from one run on channel numbers.

    Raises:
        InputError: the network cannot be traced.
    """
    try:
        found = trace(model, lambda network: call(network, example))
    except Exception as error:  # whatever the network itself raises
        raise InputError(
            f"the network cannot be traced at an input of shape {described(example)}: {one_line(error)}"
        ) from error
    roots = {plan: _roots(found, plan) for plan in PLANS}
    parameters = {name: number for number, (name, _) in enumerate(model.named_parameters())}
    slices = sorted(found.slices, key=lambda s: (parameters.get(s.name, len(parameters)), s.axis))
    views = {plan: _View(found, slices, plan, roots[plan], parameters) for plan in PLANS}
    component_of = _components(slices, [roots[plan] for plan in PLANS])
    components: list[Component] = []
    for number in sorted(set(component_of.values())):
        own = [s for i, s in enumerate(slices) if component_of[i] == number and s.role == "unit"]
        plans: dict[str, tuple[GroupSet, ...]] = {}
        for plan, view in views.items():
            sets = tuple(s for unit in own if (s := view.group_set(unit)) is not None)
            same = any(_same(sets, others) for others in plans.values())
            if sets and not same:
                suffix = "" if plan == "free" else f":{plan}"
                plans[plan] = tuple(
                    GroupSet(s.name + suffix, s.kind, s.size, s.members, s.readers, s.writers) for s in sets
                )
        if plans:
            components.append(Component(plans))
    inexact = {s.name for c in components for plan, sets in c.plans.items() for s in sets if views[plan].is_inexact(s)}
    refused = {}
    for unit in slices:
        if unit.role == "unit" and (reason := views["free"].why_refused(unit)):
            refused[_set_name(unit)] = reason
    return Coupling(tuple(components), refused, frozenset(inexact), found)


def _roots(found: Trace, plan: str) -> Tensor:
    """(number of tags,) the class of every tag under a plan."""
    classes = found.under(plan)
    return torch.tensor([classes.find(tag) for tag in range(len(classes.parent))])


def _components(slices: Sequence[Slice], roots: Sequence[Tensor]) -> dict[int, int]:
    """Number of a slice -> its component: slices that share a class under any plan."""
    parent = list(range(len(slices)))

    def find(i: int) -> int:
        while parent[i] != i:
            i = parent[i]
        return i

    for of_plan in roots:
        first: dict[int, int] = {}
        for number, one in enumerate(slices):
            for root in of_plan[one.ids].unique().tolist():
                if root:
                    a, b = find(first.setdefault(root, number)), find(number)
                    parent[max(a, b)] = min(a, b)
    return {number: find(number) for number in range(len(slices))}


def _set_name(unit: Slice) -> str:
    return f"{unit.name.removesuffix('.weight')}.out"


def _same(one: Sequence[GroupSet], other: Sequence[GroupSet]) -> bool:
    def what(sets: Sequence[GroupSet]) -> list[object]:
        return [
            (s.name.partition(":")[0], s.size, [(m.parameter, m.axes, m.group_of.tolist()) for m in s.members])
            for s in sets
        ]

    return what(one) == what(other)


class _View:
    """The classes of one plan, as group sets."""

    def __init__(
        self, found: Trace, slices: Sequence[Slice], plan: str, roots: Tensor, parameters: Mapping[str, int]
    ) -> None:
        classes = found.under(plan)
        self.roots, self.parameters = roots, parameters
        self.slices = [s for s in slices if plan in s.plans]
        self.reasons: dict[int, str] = {}
        for tag, reason in classes.reasons.items():
            self.reasons.setdefault(int(roots[tag]), reason)
        self.inexact = set(roots[torch.tensor(sorted(classes.inexact), dtype=torch.int64)].tolist()) - {0}
        self.primary: dict[int, Slice] = {}  # class -> the first layer that makes it
        readers: set[int] = set()
        for one in self.slices:
            classes_here = roots[one.ids].unique().tolist()
            if one.role == "unit":
                for root in classes_here:
                    self.primary.setdefault(root, one)
            if one.role == "input":
                readers |= set(classes_here)
        self.readers = readers

    def _free(self, root: int) -> bool:
        return root != 0 and root not in self.reasons and root in self.readers

    def group_set(self, unit: Slice) -> GroupSet | None:
        """The groups that `unit` is the first to make."""
        own: dict[int, int] = {}
        for root in self.roots[unit.ids].tolist():
            if self._free(root) and self.primary.get(root) is unit:
                own.setdefault(root, len(own))
        if not own:
            return None
        made: list[Member] = []
        read: list[Member] = []
        ridden: list[Member] = []
        for one in sorted(self.slices, key=lambda s: s is not unit):
            group_of = torch.tensor([own.get(root, -1) for root in self.roots[one.ids].tolist()])
            if not bool((group_of >= 0).any()):
                continue
            where = {"unit": made, "through": made, "input": read, "rider": ridden}[one.role]
            if one.name in self.parameters:
                where.append(Member(one.name, (one.axis,), group_of))
        return GroupSet(_set_name(unit), "coupled", len(own), (*made, *read), tuple(read), tuple(ridden))

    def is_inexact(self, group_set: GroupSet) -> bool:
        name, axes = group_set.members[0].parameter, group_set.members[0].axes
        unit = next(s for s in self.slices if s.name == name and s.axis == axes[0])
        return bool(set(self.roots[unit.ids].tolist()) & self.inexact)

    def why_refused(self, unit: Slice) -> str | None:
        """Why units of a layer are in no group set; None where all are, or where it makes what nothing reads."""
        roots = self.roots[unit.ids].tolist()
        stuck = [root for root in roots if not self._free(root)]
        reasons = {root: self.reasons.get(root, "nothing reads it") for root in stuck}
        if not stuck or (not any(root in self.readers for root in roots) and len(stuck) == len(roots)):
            return None
        count = f"{len(stuck)} of its {len(roots)} units: " if len(stuck) < len(roots) else ""
        return count + max(reasons.values(), key=list(reasons.values()).count)


# ---------------------------------------------------------------- removal


def remove_units(network: nn.Module, known: Coupling, units: Mapping[str, tuple[int, ...]]) -> None:
    """Remove units of all sets at once, so that every index counts in the network as it was. In place.

    Args:
        network: the network that `known` describes, or a copy of it.
        units: set name -> numbers of the groups that go.
    """
    units = {name: indices for name, indices in units.items() if indices}
    found, sets = known.trace, known.sets()
    gone = torch.zeros(len(found.classes.parent), dtype=torch.bool)  # of every tag
    for plan in PLANS:
        of_plan = {n: i for n, i in units.items() if (n.partition(":")[2] or "free") == plan}
        if of_plan:
            roots, tags_of = _roots(found, plan), {(s.name, s.axis): s.ids for s in found.slices}
            leaving = torch.zeros_like(gone)
            for name, indices in of_plan.items():
                first = sets[name].members[0]
                ids = tags_of[first.parameter, first.axes[0]]
                leaving[roots[ids[torch.isin(first.group_of, torch.tensor(indices))]]] = True
            leaving[0] = False
            gone |= leaving[roots]
    _cut(network, found, gone)


def _cut(network: nn.Module, found: Trace, gone: Tensor) -> None:
    """Take everything that has a tag in `gone` out of the network's parameters and buffers."""
    keep: dict[str, dict[int, Tensor]] = {}  # parameter -> axis -> what stays
    groups: dict[str, int] = {}  # weight of a convolution -> its groups from now on
    for one in found.slices:
        leaving = gone[one.ids]
        if bool(leaving.any()):
            keep.setdefault(one.name, {})[one.axis] = (~leaving).nonzero()[:, 0]
        kind, count = found.convs.get(one.name, ("plain", 1))
        if kind == "through" or (kind == "grouped" and one.role == "unit"):
            groups[one.name] = int((~leaving).reshape(count, -1).any(1).sum())
    replaced: dict[int, Tensor] = {}
    for prefix, module in network.named_modules():
        tensors = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        before = {name: tensor.shape for name, tensor in tensors}
        for name, tensor in tensors:
            full = f"{prefix}.{name}" if prefix else name
            if full in keep and id(tensor) not in replaced:
                replaced[id(tensor)] = _without(tensor, keep[full])
            if id(tensor) in replaced:
                setattr(module, name, replaced[id(tensor)])
        _told(module, before, groups.get(f"{prefix}.weight" if prefix else "weight"))


def _without(tensor: Tensor, axes: Mapping[int, Tensor]) -> Tensor:
    new = tensor.detach()
    for axis, places in axes.items():
        new = new.index_select(axis, places.to(new.device))
    if new.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        new = new.contiguous(memory_format=torch.channels_last)
    return nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new


def _told(module: nn.Module, before: Mapping[str, torch.Size], groups: int | None) -> None:
    """A module's own numbers follow the shapes of its parameters."""
    weight = getattr(module, "weight", None)
    if isinstance(module, nn.modules.conv._ConvNd):
        module.groups = groups or module.groups
        ins, outs = (0, 1) if module.transposed else (1, 0)
        across = module.weight.shape[ins], module.weight.shape[outs]
        module.in_channels = across[0] if module.transposed else across[0] * module.groups
        module.out_channels = across[1] * module.groups if module.transposed else across[1]
    elif isinstance(module, nn.Linear):
        module.out_features, module.in_features = module.weight.shape
    elif isinstance(module, nn.Embedding):
        module.embedding_dim = module.weight.shape[1]
    elif isinstance(module, nn.modules.batchnorm._NormBase):
        vector = weight if isinstance(weight, Tensor) else module.running_mean
        module.num_features = module.num_features if vector is None else len(vector)
    elif isinstance(module, nn.LayerNorm) and isinstance(weight, Tensor):
        module.normalized_shape = tuple(weight.shape)
    elif isinstance(module, nn.GroupNorm) and isinstance(weight, Tensor) and len(weight) != before["weight"][0]:
        if module.num_groups > 1:
            module.num_groups = module.num_groups * len(weight) // before["weight"][0]
        module.num_channels = len(weight)
    elif isinstance(module, nn.PReLU) and module.weight.numel() > 1:
        module.num_parameters = module.weight.numel()
