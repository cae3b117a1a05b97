"""The curvature of switches is that of the slow definition: multiply what reads a group, differentiate twice."""

import pytest
import torch
from torch import Tensor, nn

from compressnas.bayes.switches import switch_curvature
from compressnas.bayes.variance import switch_evidence, switch_gamma
from compressnas.groups import GroupSet, scale_groups, weights_of
from compressnas.surgery import find_groups


class Residual(nn.Module):
    """Convolutions of all kinds, a channel that is read twice, a flattened one, norms."""

    def __init__(self, attention: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Sequential(nn.Conv2d(2, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU())
        self.body = nn.Sequential(nn.Conv2d(6, 4, 3, 2, 1), nn.ReLU(), nn.ConvTranspose2d(4, 6, 3, 2, 1, 1))
        self.plain, self.grouped = nn.Conv2d(6, 4, 3, padding=1), nn.Conv2d(4, 4, 3, groups=2, padding=1)
        self.last, self.head = nn.Linear(4 * 64, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.body(x)
        x = self.grouped(self.plain(x).relu()).relu()
        y: Tensor = self.head(self.last(x.flatten(1)).relu())
        return y


def slow(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Per-sample derivatives of the loss by each switch, by central differences, squared and averaged."""
    result = {}
    for s in find_groups(model, x[:1]).sets:
        each = torch.zeros(s.size, len(x), dtype=torch.float64)
        for g in range(s.size):
            for sign in (1, -1):
                other = model
                weights = weights_of(other)
                before = {m.parameter: weights[m.parameter].clone() for m in s.readers}
                factors = torch.ones(s.size, dtype=torch.float64)
                factors[g] += sign * 1e-6
                scale_groups(s.readers, weights, factors)
                with torch.no_grad():
                    losses = nn.functional.cross_entropy(other(x), y, reduction="none")
                    for name, value in before.items():
                        weights[name].copy_(value)
                each[g] += sign * losses / 2e-6
        result[s.name] = each.square().mean(1)
    return result


def _read_by_grouped(group_set: GroupSet) -> bool:
    return any(m.parameter.startswith("grouped") for m in group_set.readers)


def test_it_is_the_mean_square_of_the_derivative_by_the_switch() -> None:
    model = Residual().double().eval()
    x, y = torch.randn(6, 2, 8, 8, dtype=torch.float64), torch.randint(3, (6,))
    expected = slow(model, x, y)
    sets = [s for s in find_groups(model, x[:1]).sets if not _read_by_grouped(s)]
    assert [s.name for s in sets] == ["stem.0.out", "body.0.out", "grouped.out", "last.out"]
    found = switch_curvature(
        model, sets, [(x[:4], y[:4]), (x[4:], y[4:])], torch.Generator().manual_seed(0), nn.functional.cross_entropy
    )
    for s in sets:
        torch.testing.assert_close(found[s.name], expected[s.name], rtol=1e-6, atol=1e-12)


def test_the_exact_one_is_the_mean_over_targets_as_the_network_draws_them() -> None:
    model = Residual().double().eval()
    x = torch.randn(2, 2, 8, 8, dtype=torch.float64)
    sets = [s for s in find_groups(model, x[:1]).sets if not _read_by_grouped(s)]
    found = switch_curvature(model, sets, [(x, torch.zeros(2).long())], torch.Generator(), exact=True)
    p = model(x).softmax(1).detach()
    each = [[slow(model, x[i : i + 1], torch.tensor([c])) for c in range(3)] for i in range(2)]
    for s in sets:
        expected = sum(p[i, c] * each[i][c][s.name] for i in range(2) for c in range(3)) / 2
        torch.testing.assert_close(found[s.name], expected, rtol=1e-6, atol=1e-12)


def test_frozen_weights_hold_their_groups_too() -> None:
    model = Residual().eval()
    x, y = torch.randn(6, 2, 8, 8), torch.randint(3, (6,))
    sets = find_groups(model, x[:1]).sets

    def found() -> dict[str, Tensor]:
        return switch_curvature(model, sets, [(x, y)], torch.Generator().manual_seed(0), nn.functional.cross_entropy)

    expected = found()
    model.body.requires_grad_(False)
    model.grouped.requires_grad_(False)
    for name, value in found().items():
        torch.testing.assert_close(value, expected[name])
    assert not model.grouped.weight.requires_grad and not model.body[0].weight.requires_grad


def test_attention_is_held_by_its_heads() -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(8, 4, 12, batch_first=True)
    x, y = torch.randn(3, 5, 8), torch.randn(3, 5, 8)
    sets = find_groups(model, x).sets
    assert {s.size for s in sets} == {4, 12}
    found = switch_curvature(model, sets, [(x, y)], torch.Generator().manual_seed(0))
    assert all(bool((value > 0).all()) for value in found.values())


def test_where_samples_cannot_be_told_apart_it_is_right_on_average() -> None:
    model = Residual().double().eval()
    x, y = torch.randn(4, 2, 8, 8, dtype=torch.float64), torch.randint(3, (4,))
    expected = slow(model, x, y)
    sets = [s for s in find_groups(model, x[:1]).sets if _read_by_grouped(s)]
    assert [s.name for s in sets] == ["plain.out"]
    generator = torch.Generator().manual_seed(0)
    draws = [switch_curvature(model, sets, [(x, y)], generator, nn.functional.cross_entropy) for _ in range(600)]
    for s in sets:
        values = torch.stack([d[s.name] for d in draws])
        error = (values.mean(0) - expected[s.name]).abs() / (values.std(0) / len(values) ** 0.5 + 1e-12)
        assert float(error.max()) < 4.5


def test_drawn_targets_need_no_labels() -> None:
    model = Residual().eval()
    sets = find_groups(model, torch.randn(1, 2, 8, 8)).sets
    found = switch_curvature(
        model, sets, [(torch.randn(8, 2, 8, 8), torch.zeros(8, dtype=torch.int64))], torch.Generator().manual_seed(0)
    )
    assert all(
        value.shape == (s.size,) and bool((value >= 0).all()) for s, value in zip(sets, found.values(), strict=True)
    )
    with pytest.raises(ValueError, match="at least one batch"):
        switch_curvature(model, sets, [], torch.Generator())


def test_gamma_of_a_switch_maximises_its_evidence() -> None:
    precision = torch.tensor([0.2, 1.0, 1.5, 7.0, 300.0], dtype=torch.float64)
    gammas = torch.linspace(0, 2, 200_001, dtype=torch.float64)
    variance = gammas + 1 / precision[:, None]
    evidence = -0.5 * (1 / variance + variance.log())
    best, where = evidence.max(1)
    torch.testing.assert_close(switch_gamma(precision), gammas[where], rtol=0, atol=1e-4)
    torch.testing.assert_close(switch_evidence(precision), best - evidence[:, 0], rtol=1e-6, atol=1e-9)
