"""NASI's Algorithm 1: how steps are put together, what is drawn, what is found, resume."""

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from reference import nasi_delta
from torch import Tensor

from compressnas.errors import InputError
from compressnas.nasi.search import Found, ascent, limits_of, nasi_search
from compressnas.progress import Progress
from compressnas.recipe import Nasi
from compressnas.spaces import nasbench201
from compressnas.spaces.cell import Space
from compressnas.train import make_work


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(6, 3, 8, 8, generator=generator), torch.randint(4, (6,), generator=generator)


def found(
    space: Space,
    folder: Path | None = None,
    seed: int = 0,
    images: Callable[[int], tuple[Tensor, Tensor]] = batch,
    **settings: object,
) -> Found:
    work = make_work("cpu", seed, None, Progress(quiet=True), folder)
    return nasi_search(space, (3, 8, 8), 4, images, Nasi.model_validate({"kind": "nasi", **settings}), work)


SMALL = nasbench201(cells=1, width=4)


@pytest.mark.parametrize("mu", [0.0, 1.0, 2.0])
def test_ascent_is_equation_17(mu: float) -> None:
    torch.manual_seed(0)
    traces = [3.0, 100.0, 0.0, 7.0, 50.0]
    gradients = {"a": torch.randn(5, 4, dtype=torch.float64), "b": torch.randn(5, 2, dtype=torch.float64)}
    gradients["a"][2], gradients["b"][2] = 0, 0  # nothing came through
    limits = limits_of(traces, "adaptive", 20.0)
    expected = nasi_delta(traces, gradients, limits, mu, xi=0.5)
    delta = ascent(traces, gradients, limits, mu, xi=0.5)
    for name in gradients:
        torch.testing.assert_close(delta[name], expected[name], rtol=1e-12, atol=0)


def test_first_steps_without_a_gradient_are_passed_over() -> None:
    gradients = {"a": torch.tensor([[0.0, 0.0], [1.0, -1.0]])}
    delta = ascent([0.0, 1.0], gradients, [9.0, 9.0], mu=1)
    torch.testing.assert_close(delta["a"], torch.tensor([0.5, -0.5], dtype=torch.float64) / 2**0.5)


def test_limits() -> None:
    assert limits_of([1.0, 2.0, 6.0], "fixed", 5.0) == [5.0, 5.0, 5.0]
    assert limits_of([1.0, 2.0, 6.0], "adaptive", 5.0) == [5.0, 3.0, 8 / 3]  # equation 40


def test_geometric_limits_pass_over_traces_of_zero() -> None:
    assert limits_of([4.0, 0.0, 9.0], "geometric", 5.0) == pytest.approx([6.0, 6.0, 6.0])
    assert limits_of([0.0, 0.0], "geometric", 5.0) == [0.0, 0.0]


@pytest.mark.parametrize("mu", [0.0, 2.0])
def test_checked_decisions_keep_to_nu(mu: float) -> None:
    """By falling alpha, each with the trace of the network that is derived from it; the last one is kept."""
    unchecked = found(SMALL, steps=4, mu=mu, nu="geometric")
    limit = unchecked.limits[-1]
    result = found(SMALL, steps=4, mu=mu, nu="geometric", checks=10_000)
    decisions = [kept for kept, _ in result.checked]
    assert decisions == list(itertools.islice(SMALL.ranked(unchecked.alpha), len(decisions)))
    assert [trace <= limit for _, trace in result.checked] == [False] * (len(decisions) - 1) + [True]
    assert result.kept == decisions[-1]
    assert result.limits == unchecked.limits and result.traces == unchecked.traces


def test_where_no_checked_decision_keeps_to_nu_the_smallest_trace_is_taken() -> None:
    result = found(SMALL, steps=2, nu="fixed", nu_0=0.0, checks=7)
    assert len(result.checked) == 7
    assert result.kept == min(result.checked, key=lambda one: one[1])[0]


def test_the_same_seed_finds_the_same(tmp_path: Path) -> None:
    first, again, other = (found(SMALL, seed=seed, steps=4) for seed in (0, 0, 1))
    assert first.kept == again.kept and first.traces == again.traces
    assert first.traces != other.traces


def test_resumed_is_undisturbed(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    found(SMALL, tmp_path / "checkpoint", steps=3)
    resumed, whole = found(SMALL, tmp_path / "checkpoint", steps=6), found(SMALL, steps=6)
    assert resumed.traces == whole.traces
    assert all(torch.equal(resumed.alpha[name], whole.alpha[name]) for name in whole.alpha)


def test_nu_0_is_the_mean_trace_where_none_is_given() -> None:
    result = found(SMALL, steps=2, nu="fixed", nu_0=None, nu_samples=3)
    assert result.limits[0] == result.limits[1] > 0


@pytest.mark.parametrize("seed", range(5))
def test_what_is_found_computes_something(seed: int) -> None:
    result = found(SMALL, seed=seed, steps=2, mu=0)
    assert SMALL.connected(result.kept)


def test_parameterisations_differ() -> None:
    standard, ntk = (found(SMALL, steps=2, parameterisation=name) for name in ("standard", "ntk"))
    assert standard.traces != ntk.traces


def test_a_trace_that_is_not_finite_is_told() -> None:
    def damaged(step: int) -> tuple[Tensor, Tensor]:
        images, labels = batch(step)
        return images.fill_(float("nan")), labels

    with pytest.raises(InputError, match=r"search, step 1: the trace norm is nan"):
        found(SMALL, images=damaged, steps=2)
