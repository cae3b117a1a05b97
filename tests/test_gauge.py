"""A budget is about everything a network computes, whatever the meter of its layers knows."""

import math

import pytest
import torch
from torch import Tensor, nn

from compressnas.budget import Budget
from compressnas.gauge import Gauge
from compressnas.measure import cost
from compressnas.recipe import Target
from compressnas.surgery import find_groups, removed_network


class Encoder(nn.Module):
    """Half of what it computes are norms and products of activations."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before, self.after = nn.Linear(4, 8), nn.Linear(8, 3)
        layer = nn.TransformerEncoderLayer(8, 4, 24, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.after(self.encoder(self.before(x)).mean(1))
        return y


EXAMPLE = torch.randn(1, 40, 4)


@pytest.mark.parametrize("kind", ["flops", "params"])
@pytest.mark.parametrize("fraction", [0.8, 0.6])
def test_groups_go_until_the_network_itself_is_within_the_limit(kind: str, fraction: float) -> None:
    model = Encoder().eval()
    sets = find_groups(model, EXAMPLE).sets
    gauge = Gauge(Budget.of(Target(**{kind: fraction}), model, EXAMPLE), model, sets, EXAMPLE)
    alive = {s.name: torch.ones(s.size, dtype=torch.bool) for s in sets}
    dense = float(getattr(cost(model, EXAMPLE), kind))
    costs = [dense]
    for name, index in [(s.name, i) for i in range(1, 24) for s in sets if i < s.size]:
        if gauge.met(alive):
            break
        alive[name][index] = False
        costs.append(float(getattr(cost(removed_network(model, EXAMPLE, sets, alive), EXAMPLE), kind)))
    assert costs[-1] <= fraction * dense
    assert costs[-3] > fraction * dense  # it is not counted after every unit


def test_the_worst_groups_go_and_the_network_is_within_the_limit() -> None:
    model = Encoder().eval()
    sets = find_groups(model, EXAMPLE).sets
    gauge = Gauge(Budget.of(Target(flops=0.6), model, EXAMPLE), model, sets, EXAMPLE)
    alive = {s.name: torch.ones(s.size, dtype=torch.bool) for s in sets}
    left = gauge.fewest(alive, {s.name: torch.arange(s.size) + 1.0 for s in sets})
    assert gauge.met(left) and all(bool(flags[-1]) for flags in left.values())
    found = cost(removed_network(model, EXAMPLE, sets, left), EXAMPLE).flops / cost(model, EXAMPLE).flops
    assert 0.5 <= found <= 0.6


def test_without_a_limit_it_is_always_met() -> None:
    model = Encoder().eval()
    sets = find_groups(model, EXAMPLE).sets
    gauge = Gauge(Budget.of(None, model, EXAMPLE), model, sets, EXAMPLE)
    assert gauge.limit == math.inf and gauge.met({s.name: torch.ones(s.size, dtype=torch.bool) for s in sets})
