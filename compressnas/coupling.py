"""Which units live and die together, as group sets; and their removal. It rests on the channel numbers of tags.py."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from compressnas.errors import InputError
from compressnas.groups import GroupSet, Member
from compressnas.inputs import Inputs, call, described
from compressnas.layers import PrunedAttention
from compressnas.tags import OUTPUT, PLANS, Slice, Trace
from compressnas.tracing import trace

INEXACT = "a norm averages over its units: what is left would be scaled differently; approximate may take them"


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
        trace: what the run on channel numbers found.
        roots: plan -> (number of tags,) the class of every tag; a plan that says the same as `free` is left out.
    """

    components: tuple[Component, ...]
    refused: Mapping[str, str]
    inexact: frozenset[str]
    trace: Trace
    roots: Mapping[str, Tensor]

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
    parameters = {name: number for number, (name, _) in enumerate(model.named_parameters())}
    slices = sorted(found.slices, key=lambda s: (parameters.get(s.name, len(parameters)), s.axis))
    views = {plan: _View(found, slices, plan, parameters) for plan in PLANS if found.differs(plan)}
    component_of = _components(slices, [view.roots for view in views.values()])
    plans_of: dict[int, dict[str, list[GroupSet]]] = {}
    for plan, view in views.items():
        for number, group_set in view.group_sets().items():
            plans_of.setdefault(component_of[number], {}).setdefault(plan, []).append(group_set)
    components: list[Component] = []
    for _, by_plan in sorted(plans_of.items()):
        plans: dict[str, tuple[GroupSet, ...]] = {}
        for plan, sets in by_plan.items():
            if not any(_same(sets, others) for others in plans.values()):
                plans[plan] = tuple(sets)
        components.append(Component(plans))
    inexact = {s.name for c in components for plan, sets in c.plans.items() for s in sets if views[plan].is_inexact(s)}
    refused = {}
    for unit in slices:
        if unit.role == "unit" and (reason := views["free"].why_refused(unit)):
            refused[_set_name(unit)] = reason
    roots = {plan: view.roots for plan, view in views.items()}
    return Coupling(tuple(components), refused, frozenset(inexact), found, roots)


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
            for root in torch.unique(of_plan[one.ids]).tolist():
                if root:
                    a, b = find(first.setdefault(root, number)), find(number)
                    parent[max(a, b)] = min(a, b)
    return {number: find(number) for number in range(len(slices))}


def _set_name(unit: Slice) -> str:
    module, _, what = unit.name.rpartition(".")  # nn.MultiheadAttention calls its weights in_proj_weight and the like
    return f"{module if what.endswith('weight') else unit.name}.out"


def _same(one: Sequence[GroupSet], other: Sequence[GroupSet]) -> bool:
    def what(sets: Sequence[GroupSet]) -> list[object]:
        return [
            (s.name.partition(":")[0], s.size, [(m.parameter, m.axes, m.group_of.tolist()) for m in s.members])
            for s in sets
        ]

    return what(one) == what(other)


class _View:
    """The classes of one plan, as group sets."""

    def __init__(self, found: Trace, slices: Sequence[Slice], plan: str, parameters: Mapping[str, int]) -> None:
        classes = found.under(plan)
        self.plan, self.parameters, self.all_slices = plan, parameters, slices
        self.roots = torch.tensor([classes.find(tag) for tag in range(len(classes.parent))])  # (number of tags,)
        self.slices = [s for s in slices if plan in s.plans]
        self.reasons: dict[int, str] = {}
        for tag, reason in classes.reasons.items():
            self.reasons.setdefault(int(self.roots[tag]), reason)
        self.inexact = set(self.roots[torch.tensor(sorted(classes.inexact), dtype=torch.int64)].tolist()) - {0}
        self.is_read = torch.zeros(len(self.roots), dtype=torch.bool)
        for one in self.slices:
            if one.role == "input":
                self.is_read[self.roots[one.ids]] = True
        self.is_free = self.is_read.clone()
        self.is_free[[0, *self.reasons]] = False
        self._keep_what_a_norm_has_a_part_of()

    def group_sets(self) -> dict[int, GroupSet]:
        """Number of the slice that is the first to make them -> the groups that it makes."""
        owner = torch.full((len(self.roots),), -1)  # class -> number of the slice
        place = torch.full((len(self.roots),), -1)  # class -> number of its group
        sizes: dict[int, int] = {}
        for number, one in enumerate(self.all_slices):
            if one.role != "unit" or self.plan not in one.plans:
                continue
            roots = self.roots[one.ids]
            own = dict.fromkeys(roots[self.is_free[roots] & (owner[roots] < 0)].tolist())
            if own:
                classes = torch.tensor(list(own))
                owner[classes], place[classes], sizes[number] = number, torch.arange(len(own)), len(own)
        members: dict[int, dict[str, list[tuple[bool, Member]]]] = {
            n: {"made": [], "read": [], "rides": []} for n in sizes
        }
        for number, one in enumerate(self.all_slices):
            if self.plan not in one.plans or one.name not in self.parameters:
                continue
            roots = self.roots[one.ids]
            owners, places = owner[roots], place[roots]
            role = {"unit": "made", "through": "made", "input": "read", "rider": "rides"}[one.role]
            for which in torch.unique(owners[owners >= 0]).tolist():
                group_of = torch.where(owners == which, places, -1)
                members[which][role].append((number != which, Member(one.name, (one.axis,), group_of)))
        suffix = "" if self.plan == "free" else f":{self.plan}"
        result = {}
        for number, size in sizes.items():
            made, read, rides = (
                tuple(member for _, member in sorted(members[number][role], key=lambda pair: pair[0]))
                for role in ("made", "read", "rides")
            )
            name = _set_name(self.all_slices[number]) + suffix
            result[number] = GroupSet(name, "coupled", size, (*made, *read), read, rides)
        return result

    def _keep_what_a_norm_has_a_part_of(self) -> None:
        """Units of a layer that a norm averages over stay where others of the layer can go exactly."""
        for unit in self.slices:
            if unit.role == "unit":
                roots = self.roots[unit.ids]
                free = roots[self.is_free[roots]].tolist()
                normed = [root for root in free if root in self.inexact]
                if len(normed) < len(free):
                    self.is_free[normed] = False
                    self.reasons |= dict.fromkeys(normed, INEXACT)

    def is_inexact(self, group_set: GroupSet) -> bool:
        name, axes = group_set.members[0].parameter, group_set.members[0].axes
        unit = next(s for s in self.slices if s.name == name and s.axis == axes[0])
        roots = self.roots[unit.ids]
        return bool(set(roots[self.is_free[roots]].tolist()) & self.inexact)

    def why_refused(self, unit: Slice) -> str | None:
        """Why units of a layer are in no group set; None where all are, or where it makes what nothing reads."""
        roots = self.roots[unit.ids]
        stuck = roots[~self.is_free[roots]].tolist()
        reasons = [self.reasons.get(root, "nothing reads it") for root in stuck]
        if not stuck or (set(reasons) <= {OUTPUT, "nothing reads it"} and not bool(self.is_read[roots].any())):
            return None
        count = f"{len(stuck)} of its {len(roots)} units: " if len(stuck) < len(roots) else ""
        return count + max(dict.fromkeys(reasons), key=reasons.count)


# ---------------------------------------------------------------- removal


def remove_units(network: nn.Module, known: Coupling, units: Mapping[str, tuple[int, ...]]) -> None:
    """Remove units of all sets at once, so that every index counts in the network as it was. In place.

    Args:
        network: the network that `known` describes, or a copy of it.
        units: set name -> numbers of the groups that go.
    """
    _cut(network, known.trace, _leaving(known, units))


def left_of_riders(known: Coupling, units: Mapping[str, tuple[int, ...]]) -> dict[str, dict[int, Tensor]]:
    """What stays of biases, norms and bare parameters when these units go: parameter -> axis -> (n,) its places.

    Those that lose nothing are left out.
    """
    gone = _leaving(known, units)
    left: dict[str, dict[int, Tensor]] = {}
    for one in known.trace.slices:
        if one.role == "rider" and bool(gone[one.ids].any()):
            left.setdefault(one.name, {})[one.axis] = (~gone[one.ids]).nonzero()[:, 0]
    return left


def _leaving(known: Coupling, units: Mapping[str, tuple[int, ...]]) -> Tensor:
    """(number of tags,) bool: what goes with these units, set name -> numbers of its groups."""
    units = {name: indices for name, indices in units.items() if indices}
    found, sets = known.trace, known.sets()
    gone = torch.zeros(len(found.classes.parent), dtype=torch.bool)
    tags_of = {(s.name, s.axis): s.ids for s in found.slices}
    for plan, roots in known.roots.items():
        of_plan = {n: i for n, i in units.items() if (n.partition(":")[2] or "free") == plan}
        if of_plan:
            leaving = torch.zeros_like(gone)
            for name, indices in of_plan.items():
                first = sets[name].members[0]
                ids = tags_of[first.parameter, first.axes[0]]
                leaving[roots[ids[torch.isin(first.group_of, torch.tensor(indices))]]] = True
            leaving[0] = False
            gone |= leaving[roots]
    return gone


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
    _attention_told(network)


def _attention_told(network: nn.Module) -> None:
    """Attention layers whose heads no longer fill their width become a kind of their own."""
    new: dict[int, PrunedAttention] = {}
    for path, module in list(network.named_modules(remove_duplicate=False)):
        if isinstance(module, PrunedAttention):
            module.told()
        elif isinstance(module, nn.MultiheadAttention) and not _fits_torch(module):
            network.set_submodule(path, new.setdefault(id(module), PrunedAttention(module)))


def _fits_torch(attention: nn.MultiheadAttention) -> bool:
    """Whether the parameters still have the shapes that torch wants: heads as wide together as the inputs."""
    width, fused = attention.embed_dim, attention.in_proj_weight
    reads = [(width, width)] if fused is None else [(3 * width, width)]
    own = [attention.q_proj_weight] if fused is None else [fused]
    if fused is None:
        reads += [(width, attention.kdim), (width, attention.vdim)]
        own += [attention.k_proj_weight, attention.v_proj_weight]
    return [tuple(weight.shape) for weight in (*own, attention.out_proj.weight)] == [*reads, (width, width)]


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
    elif isinstance(module, nn.LayerNorm | nn.RMSNorm) and isinstance(weight, Tensor):
        module.normalized_shape = tuple(weight.shape)
    elif isinstance(module, nn.GroupNorm) and "weight" in before and len(module.weight) != before["weight"][0]:
        if module.num_groups > 1:
            module.num_groups = module.num_groups * len(module.weight) // before["weight"][0]
        module.num_channels = len(module.weight)
    elif isinstance(module, nn.PReLU) and module.weight.numel() > 1:
        module.num_parameters = module.weight.numel()
