"""Find groups, remove groups, prove the removal."""

import copy
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from compressnas.coupling import (
    INEXACT,
    Component,
    Coupling,
    coupling,
    in_order,
    incoming,
    is_output,
    layer_of,
    one_line,
    remove_units,
)
from compressnas.errors import InputError, RunFailed
from compressnas.folding import Folded, fold_constants
from compressnas.groups import GroupSet, Member, mask_groups, modules_with_weights, weights_of
from compressnas.inputs import Inputs, double, drawn
from compressnas.layers import CroppedConv2d, SelectLinear
from compressnas.proof import TOLERANCE, Proof, compared, count_of, is_constant, redrawn, relative_difference
from compressnas.slim import SlimArch

ROUNDING = 1e-5  # relative difference that folding a constant into a float32 bias may make

# ---------------------------------------------------------------- finding


@dataclass(frozen=True)
class Found:
    """Group sets of a network, and what is left alone: (set name, reason).

    `coupled` is what they were found in, where they are sets of output units; `approximate` names those whose removal
    changes what a norm averages over.
    """

    sets: tuple[GroupSet, ...]
    left_alone: tuple[tuple[str, str], ...] = ()
    coupled: Coupling | None = field(default=None, repr=False, compare=False)
    approximate: tuple[str, ...] = ()

    @property
    def group_sets(self) -> tuple[GroupSet, ...]:
        """`sets`, under their full name."""
        return self.sets


def find_groups(
    model: nn.Module, example: Inputs, kinds: Sequence[str] = ("coupled",), approximate: bool = False
) -> Found:
    """Group sets of the given kinds, each tried before it is offered.

    A run on channel numbers proposes; a trial on a float64 copy with random weights disposes: a few groups of the
    output sets are removed, and the result is compared with masking them. Where the finest groups of a layer do not
    come through, coarser ones are tried (channels that a view, a chunk or a grouped layer ties together).

    Args:
        model: the network; not changed.
        example: what the network is called with: a tensor (B, ...), a tuple of arguments or a mapping of named ones.
        kinds: of filter (convolutions), row (linear layers), coupled (both, incoming and outgoing weights), column
            (inputs of linear layers) and shape (kernel positions).
        approximate: whether units that a norm averages over (LayerNorm, RMSNorm, GroupNorm of one group) are offered,
            too. To remove one changes what the norm makes of the others; `remove` then measures by how much.

    Raises:
        InputError: a kind that this network has no group of, coupled beside filter or row, or a network that cannot
            be traced.
    """
    if "coupled" in kinds and {"filter", "row"} & set(kinds):
        raise InputError("groups: coupled holds what filter and row hold; name it alone or with column or shape")
    sound: list[GroupSet] = []
    left_alone: dict[str, str] = {}
    coupled = coupling(model, example) if {"filter", "row", "coupled"} & set(kinds) else None
    if coupled is not None:
        sound, left_alone = _sound_sets(model, example, coupled, approximate)
    found: list[GroupSet] = []
    for kind in kinds:
        of_kind = _sets_of_kind(model, sound, kind)
        if not of_kind:
            reasons = "; ".join(f"{name} is left alone: {reason}" for name, reason in left_alone.items())
            why = _hint(model, kind) or (f" ({reasons})" if reasons else "")
            raise InputError(f"groups: this network has no group of kind {kind}{why}")
        found += of_kind
    changing = tuple(s.name for s in found if coupled is not None and s.name in coupled.inexact)
    return Found(_ordered(model, found), tuple(left_alone.items()), coupled, changing)


def same_groups(
    model: nn.Module, example: Inputs, kinds: Sequence[str], names: Collection[str]
) -> tuple[GroupSet, ...]:
    """The group sets `names` of a network from which units of these very sets were removed; not tried once more.

    Unlike `find_groups` it has the sets of which a single unit is left.
    """
    outputs = [s for n, s in coupling(model, example).sets().items() if n in names]
    return _ordered(model, [s for kind in kinds for s in _sets_of_kind(model, outputs, kind)])


def _ordered(model: nn.Module, sets: Sequence[GroupSet]) -> tuple[GroupSet, ...]:
    """Layer by layer, what reads its inputs first."""
    return tuple(in_order(model, sorted(sets, key=lambda s: s.kind not in ("column", "shape"))))


def _hint(model: nn.Module, kind: str) -> str:
    layers = [layer for _, layer in modules_with_weights(model)]
    if kind in ("filter", "shape") and not any(isinstance(layer, nn.Conv2d) for layer in layers):
        return " (no convolution; row and column are for linear layers)"
    return ""


def _sets_of_kind(model: nn.Module, outputs: Sequence[GroupSet], kind: str) -> list[GroupSet]:
    if kind == "coupled":
        return list(outputs)
    if kind in ("column", "shape"):
        suffix, layer_type = ("in", nn.Linear) if kind == "column" else ("shape", nn.Conv2d)
        return [_own_set(f"{n}.{suffix}", m) for n, m in modules_with_weights(model) if isinstance(m, layer_type)]
    made_by = nn.modules.conv._ConvNd if kind == "filter" else nn.Linear
    chosen = [s for s in outputs if isinstance(model.get_submodule(layer_of(s.name)), made_by)]
    return [GroupSet(s.name, kind, s.size, incoming(s), s.readers, s.writers) for s in chosen]


def _own_set(name: str, layer: nn.Conv2d | nn.Linear) -> GroupSet:
    """Columns (`.in`) or kernel positions (`.shape`) of one layer: what reads a group is the group itself."""
    axes = (1,) if name.endswith(".in") else (1, 2, 3)
    size = math.prod(layer.weight.shape[a] for a in axes)
    member = Member(name.rpartition(".")[0] + ".weight", axes, torch.arange(size, device=layer.weight.device))
    return GroupSet(name, "column" if axes == (1,) else "shape", size, (member,), (member,))


def _sound_sets(
    model: nn.Module, example: Inputs, found: Coupling, approximate: bool
) -> tuple[list[GroupSet], dict[str, str]]:
    """The output sets that come through their trial, in order, and the others with the reason."""
    barred = frozenset() if approximate else found.inexact
    left_alone = dict(found.refused)
    trial = _Trial(model, example, found)
    sound: list[GroupSet] = []
    open_components = []
    for component in found.components:
        exact = {}
        for plan, sets in component.plans.items():
            exact[plan] = tuple(s for s in sets if s.name not in barred and s.size > 1)
            for s in sets:
                if s.name in barred and ":" not in s.name:
                    left_alone[s.name] = INEXACT
                elif s.size < 2 and ":" not in s.name:
                    left_alone[s.name] = "it has a single unit"
        open_components.append(Component({plan: sets for plan, sets in exact.items() if sets}))
    finest = [next(iter(c.plans.values())) for c in open_components if c.plans]
    passed = {id(sets) for sets in trial.passing(finest)}
    for component in open_components:
        if not component.plans:
            continue
        choices: list[tuple[int, tuple[GroupSet, ...], dict[str, str]]] = []
        for sets in component.plans.values():
            reasons = {} if id(sets) in passed else trial.failing(sets)
            good = tuple(s for s in sets if s.name not in reasons)
            choices.append((sum(_units(s) for s in good), good, reasons))
            if not reasons:
                break
        _, good, _ = max(choices, key=lambda choice: choice[0])
        sound += good
        done = {layer_of(s.name) for s in good}
        left_alone |= {n: r for n, r in choices[0][2].items() if layer_of(n) not in done}
    return sound, left_alone


def _units(group_set: GroupSet) -> int:
    return int((group_set.members[0].group_of >= 0).sum())


def _tried(model: nn.Module, example: Inputs, proposed: Sequence[GroupSet], coupled: Coupling) -> dict[str, str]:
    """Group sets whose trial fails, with the reason."""
    single = {s.name: "it has a single unit" for s in proposed if s.size < 2}
    return single | _Trial(model, example, coupled).failing([s for s in proposed if s.size > 1])


class _Trial:
    """A float64 copy of a network with random weights, on which removals are tried.

    Of each group set the first two groups and the last one go: that shifts what is sliced from either end, and what is
    split in halves.
    """

    def __init__(self, model: nn.Module, example: Inputs, coupled: Coupling) -> None:
        self.coupled = coupled
        self.network = redrawn(model)
        self.example = double(example)
        self.inputs = drawn(self.example, torch.Generator().manual_seed(1))
        self._known: dict[tuple[str, ...], str | None] = {}  # names of sets -> their reason

    def reason(self, sets: Sequence[GroupSet]) -> str | None:
        """Why removing a few groups of all of these sets at once is not the same as masking them."""
        names = tuple(s.name for s in sets)
        if names not in self._known:
            self._known[names] = self._reason(sets)
        return self._known[names]

    def _reason(self, sets: Sequence[GroupSet]) -> str | None:
        kept = {s.name: tuple(range(2, s.size - 1) if s.size > 3 else range(1, s.size)) for s in sets}
        slim = SlimArch(kept, {s.name: s.size for s in sets})
        try:
            whole, (small, removal) = (
                _masked(self.network, sets, slim),
                _removed(self.network, self.example, slim, coupled=self.coupled),
            )
            difference, *_ = compared(whole, small, self.inputs, self.coupled, [s.name for s in sets], removal.units)
        except Exception as error:  # what a network raises when its widths move is not ours to know
            return f"removing units fails: {one_line(error)}"
        return None if difference <= TOLERANCE else f"removing units changes the output by {difference:.1e}"

    def passing(self, parts: Sequence[tuple[GroupSet, ...]]) -> list[tuple[GroupSet, ...]]:
        """The parts that come through, found by halving: a network that is understood costs one trial."""
        if not parts:
            return []
        if self.reason([s for part in parts for s in part]) is None:
            return list(parts)
        if len(parts) == 1:
            return []
        half = len(parts) // 2
        return self.passing(parts[:half]) + self.passing(parts[half:])

    def failing(self, sets: Sequence[GroupSet]) -> dict[str, str]:
        """The sets that do not come through, with the reason."""
        passed = {part[0].name for part in self.passing([(s,) for s in sets])}
        return {s.name: str(self.reason([s])) for s in sets if s.name not in passed}


# ---------------------------------------------------------------- masking and removing


def masked(model: nn.Module, example: Inputs, slim: SlimArch) -> nn.Module:
    """A copy of the network in which everything that reads a removed group is zero.

    Raises:
        InputError: the decision names a group set that the network does not have, or of another size.
    """
    return _masked(model, _sets_named(model, coupling(model, example), slim), slim)


def _masked(model: nn.Module, decided: Sequence[GroupSet], slim: SlimArch) -> nn.Module:
    result = copy.deepcopy(model)
    _mask(result, decided, slim)
    return result


def _mask(network: nn.Module, decided: Sequence[GroupSet], slim: SlimArch) -> None:
    weights = weights_of(network)
    for group_set in decided:
        mask_groups(group_set.readers, weights, slim.kept[group_set.name], group_set.size)


def _sets_named(model: nn.Module, coupled: Coupling, slim: SlimArch) -> list[GroupSet]:
    """The group sets that the decision names. Raises InputError where the network has none of that name and size."""
    known = coupled.sets()
    for name, layer in modules_with_weights(model):
        if isinstance(layer, nn.Linear | nn.Conv2d):
            own = _own_set(f"{name}.in" if isinstance(layer, nn.Linear) else f"{name}.shape", layer)
            known[own.name] = own
    for name, size in slim.sizes.items():
        if name not in known:
            raise InputError(f"the decision names group set {name}, which this network does not have: {sorted(known)}")
        if known[name].size != size:
            raise InputError(f"group set {name} has {known[name].size} groups here, {size} in the decision")
    return [known[name] for name in slim.sizes]


@dataclass(frozen=True)
class Removal:
    """What became of a decision.

    Attributes:
        units: group set -> indices of the units that are physically gone, decided or left without a reader.
        selected: linear layer -> how many of its input features it still reads, by selection.
        cropped: convolution -> its kernel size before and after.
        masks: parameter of the removed network -> 0/1, for weights that stay zero without being removed.
    """

    units: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    selected: Mapping[str, int] = field(default_factory=dict)
    cropped: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    masks: Mapping[str, Tensor] = field(default_factory=dict)


def _planned(coupled: Coupling, decided: Sequence[GroupSet]) -> set[str]:
    """Layers whose units the decision speaks of; under a coarser plan that is all layers of the component."""
    names = {s.name for s in decided if is_output(s.name)}
    layers = {layer_of(name) for name in names}
    for component in coupled.components:
        of_plan = [sets for plan, sets in component.plans.items() if plan != "free"]
        if any(s.name in names for sets in of_plan for s in sets):
            layers |= {layer_of(s.name) for sets in component.plans.values() for s in sets}
    return layers


def _removed(
    model: nn.Module, example: Inputs, slim: SlimArch, select_inputs: bool = True, coupled: Coupling | None = None
) -> tuple[nn.Module, Removal]:
    """The network without the removed groups, a function of the decision alone: incidental zeros do not matter.

    What is idle is read off a pattern network of ones, masked by the decision; the real one follows step by step.
    """
    coupled = coupled or coupling(model, example)
    decided = _sets_named(model, coupled, slim)
    planned = _planned(coupled, decided)
    sets = [s for s in coupled.finest() if layer_of(s.name) not in planned]
    sets = list(_ordered(model, [*sets, *(s for s in decided if is_output(s.name))]))
    small, pattern = _masked(model, decided, slim), copy.deepcopy(model)
    with torch.no_grad():
        for parameter in pattern.parameters():
            parameter.fill_(1.0)
    _mask(pattern, decided, slim)
    only = {n: frozenset(slim.removed(n) if n in slim.sizes else ()) for n in coupled.inexact}
    units = _idle_units(pattern, sets, only)
    if undecided := [s for s in sets if units.get(s.name) and s.name not in slim.sizes]:  # idle, but never tried
        unsound = _tried(model, example, undecided, coupled)
        units = _idle_units(pattern, [s for s in sets if s.name not in unsound], only)
    for network in (small, pattern):
        remove_units(network, coupled, units)
    selected = _select_inputs((small, pattern)) if select_inputs else {}
    cropped = _crop_kernels((small, pattern), slim)
    masks = {n: w.clone() for n, w in weights_of(pattern).items() if bool((w == 0).any())}
    trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    for name, parameter in small.named_parameters():  # what was replaced has forgotten it
        parameter.requires_grad_(trained[name])
    return small, Removal(units, selected, cropped, masks)


def _idle_units(
    pattern: nn.Module, sets: Sequence[GroupSet], only: Mapping[str, frozenset[int]]
) -> dict[str, tuple[int, ...]]:
    """Units whose every reader is zero, and those that only such units read, and so on. One unit of a set stays.

    Of the sets in `only` none but these: a norm averages over the others, read or not.
    """
    weights = {name: weight.clone() for name, weight in weights_of(pattern).items()}
    idle: dict[str, tuple[int, ...]] = {}
    changed = True
    while changed:
        changed = False
        for group_set in sets:
            shapes = {m.parameter: torch.ones_like(weights[m.parameter]) for m in group_set.readers}
            read, readable = (
                torch.stack([m.sums(values[m.parameter].abs(), group_set.size) for m in group_set.readers]).sum(0)
                for values in (weights, shapes)
            )
            gone = ((read == 0) & (readable > 0)).nonzero()[:, 0].tolist()  # what nothing could read is used elsewhere
            if group_set.name in only:
                gone = [unit for unit in gone if unit in only[group_set.name]]
            if len(gone) == group_set.size:
                gone = gone[1:]
            if len(gone) > len(idle.get(group_set.name, ())):
                idle[group_set.name], changed = tuple(gone), True
                kept = sorted(set(range(group_set.size)) - set(gone))
                mask_groups((*incoming(group_set), *group_set.writers), weights, kept, group_set.size)
    return idle


def _select_inputs(networks: tuple[nn.Module, nn.Module]) -> dict[str, int]:
    """Put a SelectLinear where whole columns are zero."""
    selected = {}
    for name, layer in list(modules_with_weights(networks[1])):
        if isinstance(layer, nn.Linear):
            read = layer.weight.abs().sum(0).nonzero()[:, 0]
            if 0 < len(read) < layer.in_features:
                selected[name] = len(read)
                for network in networks:
                    dense = network.get_submodule(name)
                    assert isinstance(dense, nn.Linear)  # the two networks are twins
                    network.set_submodule(name, SelectLinear(dense, read))
    return selected


def without_selection(small: nn.Module) -> nn.Module:
    """A copy that reads every input feature again: each SelectLinear becomes a linear layer with zero columns."""
    result = copy.deepcopy(small)
    for name, layer in list(result.named_modules()):
        if isinstance(layer, SelectLinear):
            result.set_submodule(name, layer.whole())
    return result


def _crop_kernels(
    networks: tuple[nn.Module, nn.Module], slim: SlimArch
) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Put a CroppedConv2d where border rows or columns of every kernel are zero."""
    cropped: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    for name, layer in list(modules_with_weights(networks[1])):
        if not isinstance(layer, nn.Conv2d) or f"{name}.shape" not in slim.sizes or layer.padding_mode != "zeros":
            continue
        used = layer.weight.abs().sum((0, 1))  # (kh, kw)
        rows, columns = used.sum(1).nonzero()[:, 0].tolist(), used.sum(0).nonzero()[:, 0].tolist()
        if not rows or (len(range(rows[0], rows[-1] + 1)), len(range(columns[0], columns[-1] + 1))) == used.shape:
            continue
        for network in networks:
            dense = network.get_submodule(name)
            assert isinstance(dense, nn.Conv2d)  # the two networks are twins
            small = CroppedConv2d(dense, (rows[0], rows[-1] + 1), (columns[0], columns[-1] + 1))
            network.set_submodule(name, small)
        cropped[name] = (tuple(layer.kernel_size), (rows[-1] + 1 - rows[0], columns[-1] + 1 - columns[0]))
    return cropped


def origins(model: nn.Module, example: Inputs, slim: SlimArch) -> dict[str, Tensor]:
    """Where the weights of the removed network come from: parameter -> flat indices into the original one's.

    A network whose weights are their own indices goes through the same removal. So do its buffers that carry channels,
    the statistics of norms.
    """
    coupled = coupling(model, example)
    numbered = copy.deepcopy(model).double()
    carried = {one.name for one in coupled.trace.slices}
    buffers = {n for n, b in numbered.named_buffers() if n in carried and b.is_floating_point()}
    tensors = {**dict(numbered.named_parameters()), **{n: numbered.get_buffer(n) for n in buffers}}
    with torch.no_grad():
        for tensor in tensors.values():
            tensor.copy_(torch.arange(1, tensor.numel() + 1, dtype=torch.float64).reshape(tensor.shape))
    small, _ = _removed(numbered, double(example), slim, coupled=coupled)
    left = weights_of(small) | {n: small.get_buffer(n) for n in buffers}
    return {name: tensor.long() - 1 for name, tensor in left.items()}  # -1: masked, not removed


# ---------------------------------------------------------------- proving


Remove = Callable[[nn.Module, Inputs, SlimArch, bool], tuple[nn.Module, Removal]]


def remove(
    model: nn.Module,
    example: Inputs,
    slim: SlimArch,
    images: Inputs,
    select_inputs: bool = True,
    remover: Remove | None = None,
) -> tuple[nn.Module, SlimArch, Removal, Proof]:
    """Remove what was decided, and prove that the result is the masked network.

    A difference is bisected to the group sets that cause it; they are left alone and the rest is proved again. So are
    units that a norm averages over, unless the decision was taken with `approximate`.

    Args:
        model: the network; not changed.
        example: what the network is called with, to follow its channels.
        slim: the decision.
        images: real inputs for the proof, like the example.
        select_inputs: whether unread input features of linear layers are removed by selection.
        remover: what removes, instead of what this file does; tests put a faulty one here.

    Returns:
        The removed network, the decision as it was realised, what became of it, the proof.

    Raises:
        InputError: the decision does not fit the network.
        RunFailed: there is something to remove, and no part of it can be proved.
    """
    coupled = coupling(model, example)
    decided = _sets_named(model, coupled, slim)
    dense, (model, folded) = model, fold_constants(model, example, decided, slim)
    changed = relative_difference(dense, model, images) if folded.folded else 0.0
    if not changed <= ROUNDING:
        model, folded = (
            dense,
            Folded(lost=dict.fromkeys(folded.folded, f"to fold it would change the output by {changed:.1e}")),
        )
    if folded.folded:
        coupled = coupling(model, example)  # there are biases that were none before
    remover = remover or partial(_removed, coupled=coupled)
    asked = [name for name in slim.sizes if slim.removed(name)]
    reasons: dict[str, str] = {}
    last: list[tuple[SlimArch, nn.Module, Removal, float, bool, float]] = []  # the largest part of it that is proved

    def failure(names: Sequence[str]) -> str | None:
        decision = slim.without(set(asked) - set(names))
        try:
            small, removal = remover(model, example, decision, select_inputs)
            whole = _masked(model, decided, decision)
            difference, change, left = compared(whole, small, images, coupled, names, removal.units)
            if change and not slim.origin.get("approximate"):
                return INEXACT
            if constant := difference <= TOLERANCE and is_constant(small, images):
                other = redrawn(model)
                small_other, _ = remover(other, double(example), decision, select_inputs)
                difference = relative_difference(_masked(other, decided, decision), small_other, images, left)
        except Exception as error:  # what a network raises when its widths move is not ours to know
            return f"removal fails: {one_line(error)}"
        if not difference <= TOLERANCE:
            return f"removal changes the output by {difference:.1e} (relative)"
        last[:] = [(decision, small, removal, difference, constant, change)]
        return None

    def add(accepted: list[str], names: list[str]) -> list[str]:
        reason = failure(accepted + names)
        if reason is None:
            return accepted + names
        if len(names) == 1:
            reasons[names[0]] = reason
            return accepted
        half = len(names) // 2
        return add(add(accepted, names[:half]), names[half:])

    if asked and not add([], asked):
        raise RunFailed("nothing could be proved: " + "; ".join(f"{n}: {r}" for n, r in reasons.items()))
    if not asked and (reason := failure([])) is not None:
        raise RunFailed(f"the network without its removed groups differs from the masked one: {reason}")
    decision, small, removal, difference, constant, change = last[0]
    changing = tuple(name for name in asked if name in coupled.inexact and decision.removed(name)) if change else ()
    verdict = "approximate" if changing else "partly" if reasons else "equal"
    alone, count = tuple(reasons.items()), count_of(images)
    proof = Proof(verdict, difference, count, alone, TOLERANCE, folded, constant, changing, change)
    return small, decision, removal, proof


def removed_network(
    model: nn.Module,
    example: Inputs,
    sets: Sequence[GroupSet],
    alive: Mapping[str, Tensor],
    coupled: Coupling | None = None,
) -> nn.Module:
    """The network without the groups that are not alive, not proved: to see what it would cost."""
    kept = {s.name: tuple(alive[s.name].nonzero()[:, 0].tolist()) for s in sets}
    return _removed(model, example, SlimArch(kept, {s.name: s.size for s in sets}), coupled=coupled)[0]
