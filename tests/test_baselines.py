"""Magnitude pruning: the budget is met as nearly as can be, and the largest units stay."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from compressnas.baselines import Evidence
from compressnas.decide import choose
from compressnas.errors import InputError
from compressnas.measure import cost
from compressnas.models import BUILDERS
from compressnas.recipe import Target
from compressnas.slim import SlimArch
from compressnas.surgery import remove

EXAMPLE = torch.zeros(1, 1, 28, 28)
SCOPES = ("uniform", "global")


def lenet(name: str) -> nn.Module:
    torch.manual_seed(5)
    return BUILDERS[name]((1, 28, 28), 10)


def decided(model: nn.Module, scope: str, **target: float) -> SlimArch:
    return chosen(model, scope, **target)[0]


def chosen(model: nn.Module, scope: str, **target: float) -> tuple[SlimArch, dict[str, Any]]:
    evidence = Evidence(seed=4)
    return choose(model, EXAMPLE, "magnitude", Target(**target), None, 1, evidence, (), 1, scope)


def realised(model: nn.Module, slim: SlimArch) -> nn.Module:
    images = torch.randn(3, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    small, same, _, proof = remove(model, EXAMPLE, slim, images)
    assert proof.verdict == "equal" and same == slim
    return small


def by_hand(name: str, kind: str, widths: list[int]) -> int:
    """FLOPs (one per multiply-add) or parameters of a LeNet with other widths."""
    if name == "lenet5":
        a, b, c = widths
        flops = 24 * 24 * 25 * a + 8 * 8 * 25 * a * b + 16 * b * c + 10 * c
        return flops if kind == "flops" else 26 * a + (25 * a + 1) * b + (16 * b + 1) * c + 10 * (c + 1)
    a, b = widths
    return 784 * a + a * b + 10 * b + (0 if kind == "flops" else a + b + 10)


TARGETS = [{"flops": 0.05}, {"flops": 0.3}, {"flops": 0.8}, {"flops": 150_000}, {"params": 0.1}, {"params": 20_000}]


@pytest.mark.parametrize("name", ["lenet5", "lenet300_100"])
@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_the_budget_is_met_and_used(name: str, scope: str, target: dict[str, float]) -> None:
    model = lenet(name)
    ((kind, value),) = target.items()
    limit = value if value >= 1 else value * getattr(cost(model, EXAMPLE), kind)
    slim = decided(model, scope, **target)
    widths = [len(kept) for kept in slim.kept.values()]
    assert getattr(cost(realised(model, slim), EXAMPLE), kind) == by_hand(name, kind, widths) <= limit
    one_more = [[w + (i == j) for j, w in enumerate(widths)] for i in range(len(widths))]
    if scope == "uniform":
        one_more.append([w + 1 for w in widths])  # its next step may widen several layers
    assert any(by_hand(name, kind, more) > limit for more in one_more)  # the next step would be one too far


UNITS = {"conv1": ("conv2", 20), "conv2": ("fc1", 50), "fc2": ("fc3", 100)}  # layer -> what reads it, its units


@pytest.mark.parametrize("layer", UNITS)
@pytest.mark.parametrize("scope", SCOPES)
def test_the_largest_units_of_a_layer_stay(layer: str, scope: str) -> None:
    model = lenet("lenet300_100" if layer == "fc2" else "lenet5")
    reader, units = UNITS[layer]
    order = torch.randperm(units)  # from the smallest unit to the largest
    factors = torch.empty(units)
    factors[order] = 1.2 ** torch.arange(units)
    incoming, outgoing = (model.get_submodule(name).weight.data for name in (layer, reader))
    incoming.mul_(factors.reshape(-1, *[1] * (incoming.dim() - 1)))
    outgoing.transpose(0, 1).unflatten(0, (units, -1)).mul_(factors.reshape(-1, *[1] * outgoing.dim()))
    kept = decided(model, scope, flops=0.3).kept[f"{layer}.out"]
    assert 0 < len(kept) < units
    assert kept == tuple(sorted(order[-len(kept) :].tolist()))


def test_uniform_keeps_the_same_fraction_of_every_layer() -> None:
    slim = decided(lenet("lenet5"), "uniform", flops=0.25)
    fractions = [len(slim.kept[name]) / size for name, size in slim.sizes.items()]
    assert max(fractions) - min(fractions) < 0.06 and 0 < min(fractions) < 1


def test_the_decision_says_where_it_came_from_and_repeats() -> None:
    model = lenet("lenet300_100")
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    slim, facts = chosen(model, "global", flops=0.3)
    reached = cost(realised(model, slim), EXAMPLE).flops
    assert slim.origin == {
        "method": "magnitude", "scope": "global", "seed": 4, "round_to": 1,
        "target_flops": pytest.approx(0.3 * 266200), "reached_flops": reached,
    }  # fmt: skip
    assert chosen(model, "global", flops=0.3)[0].to_json() == slim.to_json()
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert set(facts) == set(slim.sizes) == {"fc1.out", "fc2.out"}
    for name, fact in facts.items():
        assert fact["size"] == len(fact["norm"]) == slim.sizes[name]
        assert all(math.isfinite(norm) and norm >= 0 for norm in fact["norm"])


@pytest.mark.parametrize("scope", SCOPES)
def test_a_budget_below_the_smallest_network_leaves_one_unit_of_every_layer(scope: str) -> None:
    slim = decided(lenet("lenet5"), scope, flops=10)
    assert [len(kept) for kept in slim.kept.values()] == [1, 1, 1]


@pytest.mark.parametrize("scope", SCOPES)
def test_a_budget_above_the_dense_network_removes_nothing(scope: str) -> None:
    slim = decided(lenet("lenet300_100"), scope, flops=1e9)
    assert not any(slim.removed(name) for name in slim.sizes)


def test_a_network_without_hidden_units_is_refused() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
    with pytest.raises(InputError, match="no group of kind coupled"):
        decided(model, "uniform", flops=0.5)
