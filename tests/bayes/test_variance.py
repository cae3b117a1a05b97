"""The variance updates against exact fractions, their limits, and the minimum that they promise."""

import math

import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compressnas.bayes import variance

POSITIVE = st.floats(1e-12, 1e12)
GAMMA = st.sampled_from([0.0, math.inf, 1e-300, 1e300]) | POSITIVE
FINITE_GAMMA = st.sampled_from([0.0, 1e-300, 1e300]) | POSITIVE
PRECISION = st.sampled_from([0.0, 1e-300, 1e300]) | POSITIVE


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def close(value: Tensor, expected: float) -> bool:
    return float(value) == pytest.approx(expected, rel=1e-12, abs=0)


@settings(deadline=None)
@given(FINITE_GAMMA, PRECISION)
def test_posterior_variance(gamma: float, precision: float) -> None:
    assert close(
        variance.posterior_variance(f64(gamma), f64(precision)), reference.posterior_variance(gamma, precision)
    )


@settings(deadline=None)
@given(GAMMA, PRECISION)
def test_slope(gamma: float, precision: float) -> None:
    assert close(variance.slope(f64(gamma), f64(precision)), reference.slope(gamma, precision))


@settings(deadline=None)
@given(POSITIVE, POSITIVE)
def test_slope_is_algorithm_1s_omega_squared(gamma: float, precision: float) -> None:
    """omega = sqrt(gamma - C) / gamma, where rounding leaves something of gamma - C."""
    posterior = float(variance.posterior_variance(f64(gamma), f64(precision)))
    if gamma - posterior > 1e-3 * gamma:
        omega = math.sqrt(gamma - posterior) / gamma
        assert float(variance.slope(f64(gamma), f64(precision)).sqrt()) == pytest.approx(omega, rel=1e-9)


@settings(deadline=None)
@given(st.lists(GAMMA, min_size=1, max_size=4))
def test_overlapping_gamma(gammas: list[float]) -> None:
    assert close(variance.overlapping_gamma(f64(*gammas)), reference.combined_variance(gammas))


@settings(deadline=None)
@given(GAMMA, st.lists(GAMMA, max_size=3), PRECISION)
def test_overlapping_slope_has_the_posterior_of_all_priors(gamma: float, others: list[float], precision: float) -> None:
    """1/gamma_j - C/gamma_j^2 with C from the combined prior; other groups may be gone (0) or free (infinity)."""
    rest = (1 / f64(*others)).sum() if others else f64(0.0)
    found = variance.overlapping_slope(f64(gamma), rest, f64(precision))
    assert close(found, reference.overlapping_slope(gamma, others, precision))


@settings(deadline=None)
@given(GAMMA, GAMMA)
def test_gated_gamma(own: float, predecessors: float) -> None:
    assert close(variance.gated_gamma(f64(own), f64(predecessors)), reference.gated_variance(own, predecessors))


@settings(deadline=None)
@given(st.lists(POSITIVE, min_size=1, max_size=5), st.floats(1e-6, 1e6))
def test_group_gamma_is_where_the_bound_is_lowest(slopes: list[float], size: float) -> None:
    """gamma_g minimises ||w||^2/gamma + gamma sum a, and the minimum is 2 omega ||w||."""
    total = math.fsum(slopes)
    omega = variance.omega_from_slopes(f64(total))
    gamma = float(variance.group_gamma(f64(size), omega))

    def bound(log_gamma: float) -> float:
        return size**2 / math.exp(log_gamma) + math.exp(log_gamma) * total

    best = math.log(gamma)
    assert bound(best) == pytest.approx(2 * float(omega) * size, rel=1e-12)
    assert reference.smallest(bound, best - 20, best + 20) == pytest.approx(best, abs=1e-5)


def test_group_gamma_without_norm_or_without_omega() -> None:
    gamma = variance.group_gamma(f64(0, 0, 2, 3), f64(0, 5, 0, 2))
    assert gamma.tolist() == [0, 0, math.inf, 1.5]


def test_omega_takes_rounding_below_zero_for_zero() -> None:
    assert variance.omega_from_slopes(f64(-1e-18, 4)).tolist() == [0, 2]


def test_the_scales_of_the_curvature() -> None:
    curvature = f64(-3, 0, 2)
    assert variance.scaled_curvature(curvature, 1e-2, "consistent", 50).tolist() == [0, 0, 200]
    assert variance.scaled_curvature(curvature, 1e-2, "paper", 50).tolist() == [0, 0, 2]
    assert variance.scaled_curvature(curvature, 1e-2, "summed", 50).tolist() == [0, 0, 100]
    assert variance.scaled_curvature(curvature, 0.0, "consistent", 50).isfinite().all()
    with pytest.raises(ValueError, match="one of summed, consistent, paper, got 'mean'"):
        variance.scaled_curvature(curvature, 1e-2, "mean", 50)


def test_updates_keep_their_precision_in_float32() -> None:
    """The forms that run in training must not cancel: 1/gamma - C/gamma^2 as printed loses everything here."""
    gamma, precision = torch.tensor([1e-6]), torch.tensor([1e-4])
    assert float(variance.slope(gamma, precision)) == pytest.approx(1e-4, rel=1e-6)
    assert float(1 / gamma - 1 / (1 / gamma + precision) / gamma**2) == 0


def test_repeated_updates_settle_at_the_mean_square_under_strong_curvature() -> None:
    """With much curvature gamma tends to mean(w^2), whatever it starts from."""
    weights, precision = f64(0.3, -0.2, 0.1), f64(1e9, 2e9, 3e9)
    gamma = f64(1.0)
    for _ in range(100):
        slopes = variance.slope(gamma.expand(3), precision)
        gamma = variance.group_gamma(weights.norm()[None], variance.omega_from_slopes(slopes.sum()[None]))
    assert float(gamma) == pytest.approx(float(weights.square().mean()), rel=1e-6)
