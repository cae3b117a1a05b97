"""The gradient along the drawn path against double backward through the whole mixture, in float64."""

from collections.abc import Callable, Mapping
from functools import partial

import pytest
import reference
import torch
from torch import Tensor, nn

from compressnas.nasi.gradient import decided_trace, drawn_trace, trace_gradient
from compressnas.nasi.gumbel import draw
from compressnas.nasi.ntk import batch_gradient, freeze_statistics, initialise
from compressnas.nasi.proxies import random_cells
from compressnas.spaces import SPACES
from compressnas.spaces.cell import Cell, Choice, Term, take_weights
from compressnas.spaces.cell_module import CellModule, Mix
from compressnas.spaces.nasbench201 import NAMES, nasbench201
from compressnas.spaces.operations import operation

CLASSES = 3
SMALL = nasbench201(cells=2, width=2)
Hot = Mapping[str, Tensor]

# ---------------------------------------------------------------- supernets


PAIRS = Cell(  # a node after two of two, one after two of three, one after one of the last three and another as it is
    inputs=2,
    nodes=(
        (Term("pairs.first", (0, 1), NAMES, reads=2),),
        (Term("pairs.second", (0, 1, 2), NAMES, reads=2),),
        (Term("pairs.third", (1, 2, 3), ("skip_connect", "nor_conv_3x3"), reads=1), Term("pairs.rest", (3,))),
    ),
)


class Pairs(nn.Module):
    """Two cells with the same choices, of several inputs."""

    def __init__(self, width: int = 2) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width))
        self.around = nn.Conv2d(3, width, 1)
        make = partial(operation, channels=width)
        self.one, self.two = CellModule(PAIRS, make), CellModule(PAIRS, make)
        self.last = nn.Sequential(nn.BatchNorm2d(width), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(width, CLASSES)

    def forward(self, images: Tensor, way: Mix) -> Tensor:
        first, second = self.stem(images), self.around(images)
        third = self.one(first, second, way=way)
        logits: Tensor = self.head(self.last(self.two(second, third, way=way)))
        return logits


SUPERNETS: dict[str, tuple[Callable[[], nn.Module], tuple[Choice, ...]]] = {
    "edges": (lambda: SMALL.supernet(None, (3, 8, 8), CLASSES), SMALL.choices),
    "pairs": (Pairs, PAIRS.choices),
}


def prepared(kind: str, training: bool, parameterisation: str = "standard") -> tuple[nn.Module, Mapping[str, float]]:
    network = SUPERNETS[kind][0]()
    scales = initialise(network, parameterisation, torch.Generator().manual_seed(0))
    for module in network.modules():  # scales and biases of norms that say something
        if isinstance(module, nn.BatchNorm2d):
            with torch.no_grad():
                generator = torch.Generator().manual_seed(1)
                module.weight.uniform_(0.5, 1.5, generator=generator)
                module.bias.normal_(generator=generator)
                module.running_mean.normal_(generator=generator)
                module.running_var.uniform_(0.5, 1.5, generator=generator)
    return network.double().train(training), scales


def batch(size: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    images = torch.randn(size, 3, 8, 8, dtype=torch.float64, generator=generator)
    return images, torch.randint(CLASSES, (size,), generator=generator)


def drawn(kind: str, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    choices = SUPERNETS[kind][1]
    return {
        c.name: draw(torch.zeros(len(c.candidates), dtype=torch.float64), c.keep, 1.0, generator).hot for c in choices
    }


def edges(*names: str) -> dict[str, Tensor]:
    """The cell of an operation for each edge."""
    return {
        c.name: torch.eye(5, dtype=torch.float64)[NAMES.index(n)] for c, n in zip(SMALL.choices, names, strict=True)
    }


def agree(network: nn.Module, hot: Hot, scales: Mapping[str, float]) -> dict[str, Tensor]:
    """The gradient, after it has been compared."""
    images, labels = batch()
    trace, found = trace_gradient(network, images, labels, hot, scales)
    expected_trace, expected = reference.trace_gradient_by_double_backward(network, images, labels, hot, scales)
    assert trace == pytest.approx(expected_trace, rel=1e-9, abs=0)
    assert drawn_trace(network, images, labels, hot, scales) == trace
    assert found.keys() == expected.keys()
    whole, other = (torch.cat([one[name] for name in hot]) for one in (found, expected))
    assert float((whole - other).norm()) <= 1e-9 * float(other.norm()) + 1e-11 * trace  # what is 0 but for rounding
    return found


# ---------------------------------------------------------------- against double backward


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", SUPERNETS)
def test_as_double_backward(kind: str, training: bool) -> None:
    network, scales = prepared(kind, training)
    assert not scales
    sampled: set[str] = set()
    for seed in range(12):
        hot = drawn(kind, seed)
        found = agree(network, hot, scales)
        assert any(float(one.norm()) > 0 for one in found.values())
        sampled |= {c.candidates[int(k)] for c in SUPERNETS[kind][1] for k in hot[c.name].nonzero()}
    assert sampled >= set(NAMES)  # the zero operation among them


@pytest.mark.parametrize("kind", SUPERNETS)
@pytest.mark.parametrize("training", [True, False])
def test_as_double_backward_in_the_ntk_parameterisation(kind: str, training: bool) -> None:
    network, scales = prepared(kind, training, "ntk")
    assert scales
    for seed in range(4):
        agree(network, drawn(kind, seed), scales)


def test_as_double_backward_with_frozen_statistics() -> None:
    network, scales = prepared("pairs", training=True)
    with torch.no_grad():
        everything = {c.name: torch.ones(len(c.candidates)).double() for c in PAIRS.choices}

        def all_of(choice: Choice, candidates: list[Callable[[], Tensor]]) -> Tensor:
            return sum((weight * one() for weight, one in zip(everything[choice.name], candidates, strict=True)))  # type: ignore

        freeze_statistics(_Given(network, all_of), batch()[0])
    agree(network, drawn("pairs", 1), scales)


class _Given(nn.Module):
    """A supernet with its way."""

    def __init__(self, network: nn.Module, way: Mix) -> None:
        super().__init__()
        self.network, self.way = network, way

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.network(images, way=self.way)
        return logits


# ---------------------------------------------------------------- cells through which nothing comes


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "names",
    [
        ("none",) * 6,
        ("nor_conv_3x3", "none", "none", "none", "none", "none"),  # leads nowhere
        ("none", "none", "nor_conv_3x3", "none", "skip_connect", "nor_conv_1x1"),  # comes from nowhere
    ],
)
def test_disconnected_cells(names: tuple[str, ...], training: bool) -> None:
    """What is behind the cells still has a trace; with batch norm 0 divided by 0 is nowhere."""
    network, scales = prepared("edges", training)
    found = agree(network, edges(*names), scales)
    assert all(bool(one.isfinite().all()) for one in found.values())


def test_nothing_behind_a_disconnected_cell_has_no_gradient() -> None:
    """A cell that is the whole network."""
    cell = Cell(1, ((Term("cell.a", (0,), NAMES),), (Term("cell.b", (1,), NAMES),)))

    class Only(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = CellModule(cell, partial(operation, channels=3, affine=False))

        def forward(self, images: Tensor, way: Mix) -> Tensor:
            logits: Tensor = self.cell(images, way=way).mean((2, 3))
            return logits

    nothing, conv = (torch.eye(5, dtype=torch.float64)[NAMES.index(n)] for n in ("none", "nor_conv_3x3"))
    network = Only().double()
    for hot in ({"cell.a.op": nothing, "cell.b.op": nothing}, {"cell.a.op": conv, "cell.b.op": nothing}):
        trace, found = trace_gradient(network, *batch(), hot)
        assert trace == 0 and not any(bool(one.any()) for one in found.values())
        expected_trace, expected = reference.trace_gradient_by_double_backward(network, *batch(), hot, {})
        assert expected_trace == 0 and not any(bool(one.any()) for one in expected.values())
    agree(network, {"cell.a.op": conv, "cell.b.op": conv}, {})


# ---------------------------------------------------------------- by the way


@pytest.mark.parametrize("training", [True, False])
def test_supernet_stays_as_it_was(training: bool) -> None:
    network, scales = prepared("edges", training)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    trace_gradient(network, *batch(), drawn("edges", 0), scales)
    drawn_trace(network, *batch(), drawn("edges", 0), scales)
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in network.parameters())
    assert all(m.track_running_stats and m.training == training for m in network.modules() if hasattr(m, "momentum"))


def test_float32_is_close() -> None:
    network, scales = prepared("edges", training=True)
    hot, (images, labels) = drawn("edges", 0), batch()
    _, exact = trace_gradient(network, images, labels, hot, scales)
    single = {name: one.float() for name, one in hot.items()}
    _, found = trace_gradient(network.float(), images.float(), labels, single, scales)
    assert all(one.dtype == torch.float32 for one in found.values())
    whole, other = (torch.cat([one[name].double() for name in hot]) for one in (found, exact))
    assert float((whole - other).norm()) < 1e-3 * float(other.norm())


def test_only_the_drawn_path_is_in_the_trace() -> None:
    """T of a supernet is T of the derived network with the same weights."""
    network, scales = prepared("edges", training=True)
    names = ("nor_conv_3x3", "none", "nor_conv_1x1", "skip_connect", "avg_pool_3x3", "nor_conv_3x3")
    kept = {c.name: (NAMES.index(n),) for c, n in zip(SMALL.choices, names, strict=True)}
    derived = SMALL.network(kept, (3, 8, 8), CLASSES).double().train()
    derived.load_state_dict({name: network.state_dict()[name] for name in derived.state_dict()})
    images, labels = batch()
    expected = reference.squared_batch_gradient(derived, images, labels, {})
    assert drawn_trace(network, images, labels, edges(*names), scales) == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("name", ["nasbench201", "darts", "nasbench1shot1"])
def test_the_trace_of_a_decision_is_that_of_its_derived_network(name: str) -> None:
    """All else masked in the supernet, against the derived network with the same weights, batch norms in training."""
    sizes = {"nasbench201": {"cells": 1, "width": 2}, "darts": {"cells": 3, "width": 2}}
    space = SPACES[name](**sizes.get(name, {"space": "S1", "cells": 1, "width": 2}))
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(3, 3, 8, 8, generator=generator, dtype=torch.float64)
    labels = torch.tensor([0, 2, 1])
    supernet = space.supernet(None, (3, 8, 8), CLASSES)
    initialise(supernet, "standard", generator)
    supernet = supernet.double().train()
    for kept in random_cells(space, 3, generator):
        derived = space.supernet(kept, (3, 8, 8), CLASSES).double().train()
        take_weights(derived, supernet)
        expected = batch_gradient(derived, images, labels)
        assert decided_trace(supernet, images, labels, kept) == pytest.approx(expected, rel=1e-10)
