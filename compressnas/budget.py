"""What a network may cost, and which groups to drop so that it costs no more."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from compressnas.coupling import Coupling, coupling, in_order
from compressnas.groups import GroupSet, KeptFractions, layer_weights, weights_of
from compressnas.inputs import Inputs
from compressnas.measure import cost
from compressnas.recipe import Target

Meter = Callable[[Mapping[str, Tensor]], float]  # group set -> (G,) bool, what stays -> what the network then costs


@dataclass(frozen=True)
class Budget:
    """A limit on FLOPs (fvcore's count) or parameters; math.inf without a target."""

    kind: str
    limit: float

    @staticmethod
    def of(target: Target | None, dense: nn.Module, example: Inputs) -> "Budget":
        """The limit that a target means for the dense network: a value below 1 is a fraction of its cost."""
        if target is None:
            return Budget("flops", math.inf)
        whole = cost(dense, example)
        return Budget(*target.limit({"flops": whole.flops, "params": whole.params}))

    def meter(
        self, model: nn.Module, sets: Sequence[GroupSet], example: Inputs, coupled: Coupling | None = None
    ) -> Meter:
        """What `model` costs with only some of its groups, from each layer's cost now and the part of it that stays.

        `coupled` is `coupling(model, example)`, where it is known already.
        """
        if self.kind == "flops":
            return _meter(model, sets, cost(model, example).by_layer, example, coupled)
        weights = weights_of(model)
        layers = {name: sum(weights[n].numel() for n in own) for name, own in layer_weights(model).items()}
        in_layers = _meter(model, sets, layers, example, coupled)
        return lambda kept: in_layers(kept) + _others_left(model, sets, kept)

    @staticmethod
    def flops_meter(model: nn.Module, sets: Sequence[GroupSet], example: Inputs) -> Meter:
        """`meter` in FLOPs, whatever the budget is in."""
        return _meter(model, sets, cost(model, example).by_layer, example)


def _meter(
    model: nn.Module,
    sets: Sequence[GroupSet],
    layers: Mapping[str, int],
    example: Inputs,
    coupled: Coupling | None = None,
) -> Meter:
    fractions = KeptFractions(model, sets, in_order(model, (coupled or coupling(model, example)).finest()))

    def meter(kept: Mapping[str, Tensor]) -> float:
        left = fractions(kept)
        return sum(value * left.get(name, 1.0) for name, value in layers.items())

    return meter


def _others_left(model: nn.Module, sets: Sequence[GroupSet], kept: Mapping[str, Tensor]) -> int:
    """How many parameters are left besides the layers' weights: biases go with their unit, the rest stays."""
    weights = {name for own in layer_weights(model).values() for name in own}
    left = {n: torch.ones_like(p, dtype=torch.bool) for n, p in model.named_parameters() if n not in weights}
    for group_set in sets:
        for member in group_set.writers:
            if member.parameter in left:
                own = left[member.parameter]
                own &= member.spread(kept[group_set.name].to(own.device, torch.float32), own, 1.0) > 0
    return sum(int(flags.sum()) for flags in left.values())


def fewest(meter: Meter, alive: Mapping[str, Tensor], scores: Mapping[str, Tensor], limit: float) -> dict[str, Tensor]:
    """Drop the groups with the lowest score per cost until `meter` is at most `limit`, or as near as can be.

    The cost of a group is what the network saves when it alone goes. The best group of each set stays, and the best of
    what was dropped comes back where it fits.

    Args:
        alive: group set -> (G,) bool, what there is to drop from.
        scores: group set -> (G,), larger is better.

    Returns:
        Group set -> (G,) bool, what stays.
    """
    whole = meter(alive)
    order: list[tuple[float, str, int]] = []
    for name, flags in alive.items():
        present = flags.nonzero()[:, 0].tolist()
        best = max(present, key=lambda i: float(scores[name][i]))
        one_less = {**alive, name: flags.clone()}
        one_less[name][present[0]] = False
        saved = max(whole - meter(one_less), 1e-9)
        order += [(float(scores[name][i]) / saved, name, i) for i in present if i != best]
    order.sort()

    def after(count: int) -> dict[str, Tensor]:
        left = {name: flags.clone() for name, flags in alive.items()}
        for _, name, index in order[:count]:
            left[name][index] = False
        return left

    low, high = 0, len(order)  # the fewest drops that are enough lie in between
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if meter(after(middle)) <= limit else (middle + 1, high)
    left, full = after(low), set()
    for _, name, index in reversed(order[:low]):  # the last to go may have cost more than was asked
        if name not in full:
            left[name][index] = True
            if meter(left) > limit:
                left[name][index] = False
                full.add(name)
    return left


def uniform(
    meter: Meter,
    alive: Mapping[str, Tensor],
    scores: Mapping[str, Tensor],
    limit: float,
    sizes: Mapping[str, int] | None = None,
) -> dict[str, Tensor]:
    """Keep the same fraction of every set, the best groups of each, as large as `meter` at most `limit` allows.

    Args:
        sizes: of what it is a fraction, by default of the groups that are alive; with the sizes of the dense network
            several small steps do not add up their roundings.
    """

    def keep(fraction: float) -> dict[str, Tensor]:
        left = {}
        for name, flags in alive.items():
            present = int(flags.sum())
            count = min(max(1, round(fraction * (sizes[name] if sizes else present))), present)
            left[name] = torch.zeros_like(flags)
            left[name][scores[name].masked_fill(~flags, -math.inf).topk(count).indices] = True
        return left

    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if meter(keep(middle)) <= limit else (low, middle)
    return keep(low)
