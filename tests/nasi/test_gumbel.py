"""Draws against the softmax and one after the other, and the gradient against autograd."""

import pytest
import torch
from torch import Tensor

from compressnas.nasi.gumbel import Drawn, draw

DRAWS = 4000


def counts(alpha: Tensor, keep: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return sum((draw(alpha, keep, 1.0, generator).hot for _ in range(DRAWS)), torch.zeros(len(alpha)))


@pytest.mark.parametrize("alpha", [[0.0] * 5, [0.0, 1.0, -1.0, 2.0], [0.3, -0.3]])
@pytest.mark.parametrize("tau", [0.1, 5.0])
def test_candidates_are_drawn_with_the_chance_of_the_softmax(alpha: list[float], tau: float) -> None:
    """Chi-square at a level of about 1e-4. The temperature changes nothing in what is drawn."""
    logits = torch.tensor(alpha)
    generator = torch.Generator().manual_seed(0)
    found = sum((draw(logits, 1, tau, generator).hot for _ in range(DRAWS)), torch.zeros(len(alpha)))
    expected = DRAWS * logits.softmax(0)
    assert float(((found - expected) ** 2 / expected).sum()) < len(alpha) - 1 + 4 * (2 * (len(alpha) - 1)) ** 0.5 + 8


def test_several_are_drawn_without_replacement() -> None:
    """As one after the other: the chance of a pair is p_i p_j / (1 - p_i) + p_j p_i / (1 - p_j)."""
    alpha = torch.tensor([0.0, 1.0, -0.5, 0.4])
    p = alpha.softmax(0).tolist()
    chance = [sum(p[i] * p[j] * (1 / (1 - p[i]) + 1 / (1 - p[j])) for j in range(4) if j != i) for i in range(4)]
    assert sum(chance) == pytest.approx(2)
    for count, expected in zip(counts(alpha, keep=2).tolist(), chance, strict=True):
        spread = (DRAWS * expected * (1 - expected)) ** 0.5
        assert abs(count - DRAWS * expected) < 4 * spread


@pytest.mark.parametrize("keep", [1, 2, 4])
def test_as_many_are_drawn_as_stay(keep: int) -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        drawn = draw(torch.zeros(4), keep, 0.5, generator)
        assert sorted(drawn.hot.tolist()) == [0.0] * (4 - keep) + [1.0] * keep
        assert float(drawn.soft.sum()) == pytest.approx(1)
        largest = drawn.soft.topk(keep).indices
        assert bool((drawn.hot[largest] == 1).all())


def test_a_seed_draws_the_same() -> None:
    one, two = (draw(torch.zeros(5), 1, 1.0, torch.Generator().manual_seed(7)) for _ in range(2))
    assert torch.equal(one.hot, two.hot) and torch.equal(one.soft, two.soft)


def test_dtype_is_that_of_the_logits() -> None:
    drawn = draw(torch.zeros(5, dtype=torch.float64), 1, 1.0, torch.Generator().manual_seed(0))
    assert drawn.hot.dtype == drawn.soft.dtype == torch.float64


@pytest.mark.parametrize("tau", [0.2, 1.0, 3.0])
@pytest.mark.parametrize("keep", [1, 2])
def test_gradient_is_that_of_the_softmax(tau: float, keep: int) -> None:
    """Of sum_k by_weight_k softmax((alpha + g) / tau)_k, with the noise g of the draw."""
    alpha = torch.tensor([0.1, -1.0, 0.7, 0.0], dtype=torch.float64)
    drawn = draw(alpha, keep, tau, torch.Generator().manual_seed(0))
    noise = tau * drawn.soft.log() - alpha  # but for a constant, which the softmax does not see
    by_weight = torch.tensor([3.0, -2.0, 0.5, 10.0], dtype=torch.float64)
    alpha.requires_grad_()
    (((alpha + noise) / tau).softmax(0) @ by_weight).backward()
    torch.testing.assert_close(drawn.gradient(by_weight), alpha.grad, rtol=1e-12, atol=1e-12)


def test_equal_weights_have_no_gradient() -> None:
    drawn = Drawn(torch.tensor([1.0, 0.0]), torch.tensor([0.25, 0.75]), 1.0)
    assert not drawn.gradient(torch.tensor([2.0, 2.0])).any()
