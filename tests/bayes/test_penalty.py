"""The group Lasso and its proximal step against the objective that they minimise."""

import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compressnas.bayes.penalty import group_lasso, proximal_factors

SIZE = st.floats(1e-3, 1e3)


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_value_against_a_loop() -> None:
    weights, omega = [[3.0, 4.0], [0.0, 0.0], [1.0, -2.0]], [0.5, 7.0, 2.0]
    expected = 0.1 * sum(o * reference.norm(w) for o, w in zip(omega, weights, strict=True))
    norms = f64(*(reference.norm(w) for w in weights))
    assert float(group_lasso(norms, f64(*omega), 0.1)) == pytest.approx(expected, rel=1e-14)


@settings(deadline=None)
@given(SIZE, SIZE, SIZE)
def test_factor_minimises_the_proximal_objective_along_the_group(size: float, omega: float, lam: float) -> None:
    """argmin over x = s w of ||x - w||^2 / 2 + step lam omega ||x||, found by search."""
    step = 0.1

    def objective(s: float) -> float:
        return 0.5 * (s - 1) ** 2 * size + step * lam * omega * abs(s)  # divided by ||w||

    factor = float(proximal_factors(f64(size), f64(omega), lam, step))
    assert factor == pytest.approx(reference.smallest(objective, -2, 2), abs=1e-5)


def test_no_other_point_is_better() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = f64(0.4, -0.3, 1.2)
    for strength in (0.2, 1.0, 5.0):
        best = weight * proximal_factors(weight.norm()[None], f64(strength), 1.0, 0.5)
        others = (
            torch.randn(2000, 3, generator=generator, dtype=torch.float64) * 10 ** torch.linspace(-6, 0, 2000)[:, None]
        )

        def objective(x: Tensor, strength: float = strength) -> Tensor:
            return 0.5 * (x - weight).square().sum(-1) + 0.5 * strength * x.norm(dim=-1)

        assert bool((objective(best) <= objective(best + others) + 1e-12).all())
        assert bool((objective(best) <= objective(others) + 1e-12).all())


def test_small_groups_reach_exact_zero_and_stay_there() -> None:
    norms, omega = f64(1.0, 0.05, 0.1, 0.0), f64(1.0, 1.0, 1.0, 0.0)
    factors = proximal_factors(norms, omega, 1.0, 0.1)
    assert factors.tolist() == [0.9, 0, 0, 0]
    assert proximal_factors(norms * factors, omega, 0.0, 0.1).tolist() == [1, 0, 0, 0]


def test_a_step_of_zero_or_no_weight_changes_nothing() -> None:
    norms, omega = f64(1.0, 1e-30), f64(3.0, 2.0)
    assert proximal_factors(norms, omega, 1.0, 0.0).tolist() == [1, 1]
    assert proximal_factors(norms, f64(0, 0), 1.0, 0.1).tolist() == [1, 1]


def test_infinite_omega_empties() -> None:
    assert proximal_factors(f64(5.0, 0.0), f64(torch.inf, torch.inf), 1.0, 0.1).tolist() == [0, 0]
