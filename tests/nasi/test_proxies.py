"""Every proxy against a slow twin, that networks stay as they were, and the best of random cells."""

import math
from collections import Counter

import pytest
import reference
import torch
from torch import Tensor, nn

from compressnas.errors import InputError
from compressnas.measure import cost
from compressnas.nasi.proxies import PROXIES, best_of, random_cell, random_cells
from compressnas.spaces.cell import Kept
from compressnas.spaces.nasbench201 import nasbench201

CLASSES = 3


def small(norms: bool = True) -> nn.Sequential:
    """Its weights do not depend on whether there are norms."""
    torch.manual_seed(0)
    first, second, last = nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(2, 2, 1, bias=False), nn.Linear(8, CLASSES)
    layers = [first, nn.BatchNorm2d(2), nn.ReLU(), nn.AvgPool2d(2), second, nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*(m for m in (*layers, last) if norms or not isinstance(m, nn.BatchNorm2d))).double()


def batch(size: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(size, 1, 4, 4, dtype=torch.float64, generator=generator)
    return images, torch.randint(CLASSES, (size,), generator=generator)


SMALL = nasbench201(cells=1, width=2)
CONNECTED: Kept = {c.name: (n,) for c, n in zip(SMALL.choices, (3, 1, 2, 4, 3, 1), strict=True)}
NOTHING: Kept = {c.name: (0,) for c in SMALL.choices}


def cell(kept: Kept) -> nn.Module:
    torch.manual_seed(0)
    return SMALL.network(kept, (1, 8, 8), CLASSES)


def cell_batch(size: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(size, 1, 8, 8, generator=generator), torch.randint(CLASSES, (size,), generator=generator)


# ---------------------------------------------------------------- against twins


@pytest.mark.parametrize("name", ["grad_norm", "snip", "grasp"])
@pytest.mark.parametrize("training", [True, False])
def test_scores_of_the_loss(name: str, training: bool) -> None:
    """With statistics of the batch, whatever mode the network is in."""
    expected = getattr(reference, name)(small().train(), *batch())
    assert PROXIES[name](small().train(training), *batch()) == pytest.approx(expected, rel=1e-9)


def test_trace_is_equation_11() -> None:
    expected = reference.squared_batch_gradient(small().train(), *batch(), {})
    assert PROXIES["trace"](small().eval(), *batch()) == pytest.approx(expected, rel=1e-12)


def test_synflow_leaves_norms_out() -> None:
    expected = reference.synflow(small(norms=False), batch()[0])
    assert PROXIES["synflow"](small(), *batch()) == pytest.approx(expected, rel=1e-10)
    assert PROXIES["synflow"](small().float(), *batch()) == pytest.approx(expected, rel=1e-5)


def test_synflow_of_a_chain_is_its_product() -> None:
    """L layers without biases: each has the whole of 1' |W_L| ... |W_1| 1."""
    torch.manual_seed(0)
    layers = [nn.Linear(4, 3, bias=False), nn.Linear(3, 5, bias=False), nn.Linear(5, 2, bias=False)]
    network = nn.Sequential(layers[0], nn.ReLU(), nn.LayerNorm(3), layers[1], nn.BatchNorm1d(5), layers[2]).double()
    product = torch.ones(4, dtype=torch.float64)
    for layer in layers:
        product = layer.weight.detach().abs() @ product
    score = PROXIES["synflow"](network, torch.randn(6, 4), torch.zeros(6, dtype=torch.int64))
    assert score == pytest.approx(3 * float(product.sum()), rel=1e-12)


def test_synflow_does_not_overflow() -> None:
    """What float32 cannot hold: 64^40."""
    network = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(40)))
    for layer in network:
        nn.init.ones_(layer.weight)
    score = PROXIES["synflow"](network, torch.randn(2, 64), torch.zeros(2, dtype=torch.int64))
    assert score == pytest.approx(40 * 64.0**41, rel=1e-9)


def test_naswot() -> None:
    assert PROXIES["naswot"](small().eval(), *batch()) == pytest.approx(reference.naswot(small(), batch()[0]), rel=1e-9)


def test_naswot_of_a_relu_that_is_used_twice() -> None:
    relu = nn.ReLU()
    twice = nn.Sequential(nn.Linear(4, 6), relu, nn.Linear(6, 6), relu)
    images, labels = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)), torch.zeros(3, dtype=torch.int64)
    assert PROXIES["naswot"](twice, images, labels) == pytest.approx(reference.naswot(twice, images), rel=1e-9)


def test_naswot_of_equal_images_is_minus_infinity() -> None:
    images, labels = batch()
    images[1] = images[0]
    assert PROXIES["naswot"](small(), images, labels) == reference.naswot(small(), images) == -math.inf


def test_jacob_cov() -> None:
    expected = reference.jacob_cov(small(), batch()[0])
    assert PROXIES["jacob_cov"](small().eval(), *batch()) == pytest.approx(expected, rel=1e-9)


def test_params_and_flops() -> None:
    found = cost(cell(CONNECTED), cell_batch()[0])
    assert PROXIES["params"](cell(CONNECTED), *cell_batch()) == found.params
    assert PROXIES["flops"](cell(CONNECTED), *cell_batch()) == found.flops > 0


def test_batch_norm_and_cells() -> None:
    """A network of the space, in float32."""
    for name in ("grad_norm", "snip"):
        expected = getattr(reference, name)(cell(CONNECTED).train(), *cell_batch())
        assert PROXIES[name](cell(CONNECTED), *cell_batch()) == pytest.approx(expected, rel=1e-4)


# ---------------------------------------------------------------- networks stay as they were


def prepared() -> nn.Module:
    """With whatever can be changed: gradients, running statistics, flags, frozen parameters."""
    network = cell(CONNECTED)
    network.train()(cell_batch()[0]).sum().backward()
    second = list(network.modules())[1]
    second.eval()
    next(network.parameters()).requires_grad_(False)
    return network


def everything(network: nn.Module) -> list[object]:
    tensors = [value.clone() for value in network.state_dict().values()]
    gradients = [None if p.grad is None else p.grad.clone() for p in network.parameters()]
    flags = [m.training for m in network.modules()] + [p.requires_grad for p in network.parameters()]
    hooks = [len(m._forward_hooks) for m in network.modules()]
    return [*tensors, *gradients, *flags, *hooks, [id(p) for p in network.parameters()]]


def same(before: list[object], after: list[object]) -> bool:
    pairs = list(zip(before, after, strict=True))
    return all(torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b for a, b in pairs)


@pytest.mark.parametrize("name", PROXIES)
def test_network_stays_as_it_was(name: str) -> None:
    network, (images, labels) = prepared(), cell_batch()
    before, given, state = everything(network), images.clone(), torch.get_rng_state()
    first = PROXIES[name](network, images, labels)
    assert isinstance(first, float) and math.isfinite(first)
    assert same(before, everything(network))
    assert torch.equal(images, given) and not images.requires_grad and torch.equal(torch.get_rng_state(), state)
    assert PROXIES[name](network, images, labels) == first


class Broken(nn.Linear):
    """Fails on its way."""

    def forward(self, values: Tensor) -> Tensor:
        raise RuntimeError("broken")


@pytest.mark.parametrize("name", [name for name in PROXIES if name != "params"])  # it runs nothing
def test_network_stays_as_it_was_after_an_error(name: str) -> None:
    network = prepared()
    network.classifier = Broken(8, CLASSES)  # behind all the others
    before = everything(network)
    with pytest.raises(RuntimeError, match="broken"):
        PROXIES[name](network, *cell_batch())
    assert same(before, everything(network))


def test_dropout_is_off() -> None:
    network = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(16, 4), nn.ReLU(), nn.Linear(4, CLASSES)).double()
    for name, proxy in PROXIES.items():
        assert proxy(network.train(), *batch()) == proxy(network.eval(), *batch()), name


# ---------------------------------------------------------------- where there is little to score


@pytest.mark.parametrize("name", PROXIES)
def test_outputs_that_do_not_depend_on_the_input(name: str) -> None:
    score = PROXIES[name](cell(NOTHING), *cell_batch())
    assert math.isfinite(score) or score == -math.inf
    assert (score == -math.inf) == (name in ("naswot", "jacob_cov"))


@pytest.mark.parametrize("name", PROXIES)
def test_networks_without_weights(name: str) -> None:
    score = PROXIES[name](nn.Flatten(), torch.randn(4, CLASSES), torch.zeros(4, dtype=torch.int64))
    assert not math.isnan(score)


@pytest.mark.parametrize("name", PROXIES)
def test_a_figure_that_is_not_a_number_is_the_lowest(name: str) -> None:
    network = cell(CONNECTED)
    with torch.no_grad():
        network.classifier.weight.fill_(math.nan)
    score = PROXIES[name](network, *cell_batch())
    assert score == -math.inf or name in ("naswot", "params", "flops")


# ---------------------------------------------------------------- cells

TWO = nasbench201(cells=1, width=2, exclude=["nor_conv_1x1", "nor_conv_3x3", "avg_pool_3x3"])  # none or the input
EACH = [kept for kept in TWO.all() if TWO.connected(kept)]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_every_connected_cell_is_as_likely() -> None:
    """Chi-square, at a level of about 1e-4."""
    generator, draws = seeded(), 3000
    found = Counter(tuple(random_cell(TWO, generator).items()) for _ in range(draws))
    assert set(found) == {tuple(kept.items()) for kept in EACH}
    expected, freedom = draws / len(EACH), len(EACH) - 1
    assert sum((n - expected) ** 2 / expected for n in found.values()) < freedom + 4 * (2 * freedom) ** 0.5


def test_random_cells_are_different_and_connected() -> None:
    cells = random_cells(SMALL, 200, seeded())
    assert len({tuple(kept.items()) for kept in cells}) == 200
    assert all(SMALL.connected(kept) for kept in cells)
    assert cells == random_cells(SMALL, 200, seeded()) != random_cells(SMALL, 200, seeded(1))


def test_all_cells_of_a_space_and_no_more() -> None:
    cells = random_cells(TWO, len(EACH), seeded())
    assert sorted(tuple(kept.items()) for kept in cells) == sorted(tuple(kept.items()) for kept in EACH)
    with pytest.raises(InputError, match=f"{len(EACH) + 1} different cells .* were asked for, {len(EACH)} were found"):
        random_cells(TWO, len(EACH) + 1, seeded())


def test_best_of() -> None:
    steps: list[object] = []

    def score(network: nn.Module) -> float:
        return PROXIES["params"](network, *cell_batch())

    def step(advance: int = 1, **fields: str | float | int) -> None:
        steps.append((advance, fields["best"]))

    ranking = best_of(SMALL, score, 12, seeded(), cell, step)
    assert len(ranking.cells) == len(ranking.scores) == len(steps) == 12
    assert list(ranking.cells) == random_cells(SMALL, 12, seeded())
    assert list(ranking.scores) == [score(cell(kept)) for kept in ranking.cells]
    assert ranking.best == ranking.cells[ranking.scores.index(max(ranking.scores))]
    assert steps[-1] == (1, f"{max(ranking.scores):.4g}")
    assert best_of(SMALL, score, 12, seeded(), cell) == ranking


def test_best_of_equal_ones_is_the_first() -> None:
    ranking = best_of(SMALL, lambda network: 1.0, 4, seeded(), cell)
    assert ranking.best == ranking.cells[0]


def test_best_of_passes_over_cells_without_a_score() -> None:
    scores = iter([-math.inf, math.nan, 2.0, 1.0])
    ranking = best_of(SMALL, lambda network: next(scores), 4, seeded(), cell)
    assert ranking.best == ranking.cells[2] and ranking.scores == (-math.inf, -math.inf, 2.0, 1.0)


def test_best_of_nothing() -> None:
    with pytest.raises(InputError, match="samples: 0, expected 1 or more"):
        best_of(SMALL, lambda network: 1.0, 0, seeded(), cell)
    with pytest.raises(InputError, match="none of 3 cells has a score"):
        best_of(SMALL, lambda network: math.nan, 3, seeded(), cell)
