"""All spaces: what a decision builds is the supernet with the rest masked; terms, ranks, mixtures, weights, ONNX."""

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from compressnas.errors import InputError
from compressnas.export import export_onnx
from compressnas.slim import SlimArch
from compressnas.spaces import SPACES
from compressnas.spaces.cell import Cell, Choice, Kept, Space, Term, take_weights
from compressnas.spaces.cell_module import CellModule
from compressnas.spaces.operations import NOTHING, OPERATIONS, operation

SHAPE = (3, 8, 8)
TINY = {
    "nasbench201": {"cells": 1, "width": 4},
    "darts": {"cells": 3, "width": 2, "derived_cells": 3, "derived_width": 2},
    "darts affine": {"cells": 4, "width": 2, "derived_cells": 4, "derived_width": 2, "affine": True},
    "darts imagenet": {"cells": 3, "width": 2, "derived_cells": 3, "derived_width": 3, "stem": "imagenet"},
    "nasbench1shot1 S1": {"space": "S1", "cells": 1, "width": 3},
    "nasbench1shot1 S2": {"space": 2, "cells": 2, "width": 4, "affine": False},
    "nasbench1shot1 S3": {"space": "S3", "cells": 1, "width": 3},
}
EVERY = tuple(TINY)


def tiny(name: str) -> Space:
    return SPACES[name.split()[0]](**TINY[name])


def drawn(space: Space, seed: int) -> dict[str, tuple[int, ...]]:
    """A decision, connected or not."""
    draw = random.Random(seed)
    return {c.name: tuple(sorted(draw.sample(range(len(c.candidates)), c.keep))) for c in space.decisions}


def filled(network: nn.Module, seed: int = 0) -> nn.Module:
    """In float64 and eval mode, with statistics and scales that are neither 0 nor 1."""
    generator = torch.Generator().manual_seed(seed)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            for value in (module.running_var, module.weight):
                if value is not None:
                    value.data.uniform_(0.5, 1.5, generator=generator)
            for value in (module.running_mean, module.bias):
                if value is not None:
                    value.data.uniform_(-0.5, 0.5, generator=generator)
    return network.double().eval()


def images(number: int = 2, shape: tuple[int, int, int] = SHAPE) -> Tensor:
    return torch.randn(number, *shape, generator=torch.Generator().manual_seed(3)).double()


def test_every_space_is_tested() -> None:
    assert {name.split()[0] for name in EVERY} == set(SPACES)


# ---------------------------------------------------------------- supernet and derived network


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", EVERY)
def test_the_masked_supernet_is_the_derived_network(name: str, seed: int) -> None:
    space = tiny(name)
    supernet, kept = filled(space.supernet(None, SHAPE, 5)), drawn(space, seed)
    derived = space.supernet(kept, SHAPE, 5).double().eval()
    take_weights(derived, supernet)
    with torch.no_grad():
        masked, alone, other = supernet(images(), way=kept), derived(images()), filled(derived, seed=9)(images())
    assert (masked - alone).abs().max() <= 1e-10 * alone.abs().max() and alone.abs().max() > 0
    if space.connected(kept):
        assert not torch.allclose(alone, other)
    assert sum(p.numel() for p in derived.parameters()) < sum(p.numel() for p in supernet.parameters())


@pytest.mark.parametrize("name", EVERY)
def test_in_training_mode_too(name: str) -> None:
    space = tiny(name)
    supernet, kept = space.supernet(None, SHAPE, 5).double(), drawn(space, 1)
    derived = space.supernet(kept, SHAPE, 5).double()
    take_weights(derived, supernet)
    masked, alone = supernet(images(4), way=kept), derived(images(4))
    assert (masked - alone).abs().max() <= 1e-10 * alone.abs().max()


def hot(kept: Kept) -> Callable[[Choice, Sequence[Callable[[], Tensor]]], Tensor]:
    """The mixture with one-hot weights; candidates that are not kept are not computed."""

    def mix(choice: Choice, candidates: Sequence[Callable[[], Tensor]]) -> Tensor:
        assert len(candidates) == len(choice.candidates)
        first, *others = [candidates[i]() for i in kept[choice.name]]
        return sum(others, first)

    return mix


@pytest.mark.parametrize("name", [name for name in EVERY if "darts" not in name])
def test_a_one_hot_mixture_is_the_masked_supernet(name: str) -> None:
    space = tiny(name)
    supernet, kept = filled(space.supernet(None, SHAPE, 5)), space.best(logits(space, 2))
    with torch.no_grad():
        mixed, masked = supernet(images(), way=hot(kept)), supernet(images(), way=kept)
    assert (mixed - masked).abs().max() <= 1e-10 * masked.abs().max()


@pytest.mark.parametrize("name", EVERY)
def test_a_mixture_is_asked_for_every_choice_that_is_drawn(name: str) -> None:
    space, asked = tiny(name), set[str]()

    def mix(choice: Choice, candidates: Sequence[Callable[[], Tensor]]) -> Tensor:
        asked.add(choice.name)
        values = [one() for one in candidates]
        assert len({value.shape for value in values}) == 1
        return torch.stack(values).mean(0)

    supernet = filled(space.supernet(None, SHAPE, 5))
    assert supernet(images(), way=mix).shape == (2, 5)
    assert asked == {choice.name for choice in space.choices}


@pytest.mark.parametrize("name", EVERY)
def test_a_supernet_needs_a_way(name: str) -> None:
    with pytest.raises(InputError, match="decision or a mixture"):
        tiny(name).supernet(None, SHAPE, 5)(images(1).float())


@pytest.mark.parametrize("shape", [(1, 7, 9), (3, 5, 6), (2, 1, 1)])
@pytest.mark.parametrize("name", [name for name in EVERY if name != "nasbench201"])
def test_images_of_any_size(name: str, shape: tuple[int, int, int]) -> None:
    space = tiny(name)
    kept = drawn(space, 5)
    for network in (space.network(kept, shape, 3), space.supernet(kept, shape, 3)):
        assert network.eval()(images(2, shape).float()).shape == (2, 3)


@pytest.mark.parametrize(
    "name, shape", [("nasbench201", (3, 8, 8)), ("darts", (3, 10, 9)), ("nasbench1shot1 S1", (3, 7, 7))]
)
def test_the_derived_network_goes_to_onnx(name: str, shape: tuple[int, int, int], tmp_path: Path) -> None:
    space = tiny(name)
    network = filled(space.network(space.best(logits(space, 0)), shape, 4)).float()
    check = export_onnx(network, images(5, shape).float(), tmp_path / "derived.onnx")
    assert check.max_abs_diff <= check.tolerance


def test_weights_of_another_supernet_are_refused() -> None:
    space, other = tiny("nasbench1shot1 S1"), SPACES["nasbench1shot1"](cells=1, width=4)
    derived = space.supernet(drawn(space, 0), SHAPE, 5)
    with pytest.raises(InputError, match=r"stem\.0\.weight: expected shape \(3, 3, 3, 3\) in the supernet, got shape"):
        take_weights(derived, other.supernet(None, SHAPE, 5))
    with pytest.raises(InputError, match="got nothing"):
        take_weights(derived, nn.Linear(2, 2))


# ---------------------------------------------------------------- decisions


def logits(space: Space, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {c.name: torch.randn(len(c.candidates), generator=generator) for c in space.choices}


@pytest.mark.parametrize("name", EVERY)
def test_texts_and_decisions_go_both_ways(name: str) -> None:
    space = tiny(name)
    for seed in range(20):
        kept = drawn(space, seed)
        parsed = space.parsed(space.text(kept))
        assert parsed == space.slim(kept) and space.text(parsed.kept) == space.text(kept)
    saved = space.slim(kept, method="nasi", seed=3)
    assert SlimArch.from_json(saved.to_json()) == saved


@pytest.mark.parametrize("name", EVERY)
def test_the_best_decision_has_the_largest_logits(name: str) -> None:
    space = tiny(name)
    alpha = logits(space, 4)
    kept = space.best(alpha)
    assert set(kept) == {c.name for c in space.decisions} and space.connected(kept)
    if "none" in space.decisions[0].candidates:
        return  # may have no path
    for choice in space.choices:
        taken = sorted({i for c in space.decisions if c.logits == choice.name for i in kept[c.name]})
        assert taken == sorted(alpha[choice.name].topk(len(taken)).indices.tolist())


def test_ranked_is_every_decision_in_order() -> None:
    """Against sorting all of them; `none` is a candidate, so that some compute nothing."""
    space = SPACES["nasbench201"](exclude=["avg_pool_3x3"])
    alpha = logits(space, 5)
    sums = {space.text(kept): total_alpha(space, alpha, kept) for kept in space.all() if space.connected(kept)}
    ranked = [space.text(kept) for kept in space.ranked(alpha)]
    assert sorted(ranked) == sorted(sums)  # each once
    values = [sums[text] for text in ranked]
    assert all(later <= earlier + 1e-9 for earlier, later in itertools.pairwise(values))


def test_ranked_gives_the_first_ones_of_a_large_space_at_once() -> None:
    space = tiny("darts")
    alpha = logits(space, 6)
    first = list(itertools.islice(space.ranked(alpha), 50))
    assert len({space.text(kept) for kept in first}) == len({str(kept) for kept in first}) == 50
    values = [total_alpha(space, alpha, kept) for kept in first]
    assert all(later <= earlier + 1e-9 for earlier, later in itertools.pairwise(values))
    for kept in first:
        for choice in space.choices:  # the two terms of a node never take the same
            taken = [i for c in space.decisions if c.logits == choice.name for i in kept[c.name]]
            assert len(set(taken)) == len(taken)


def total_alpha(space: Space, alpha: Mapping[str, Tensor], kept: Kept) -> float:
    return sum(float(alpha[c.logits].double()[list(kept[c.name])].sum()) for c in space.decisions)


@pytest.mark.parametrize("name", [name for name in EVERY if "darts" not in name])
def test_names_are_drawn_as_they_are_decided(name: str) -> None:
    space = tiny(name)
    assert space.choices == space.decisions
    assert all(c.logits == c.name and c.rank == 0 for c in space.choices)


def test_of_equal_logits_the_first_are_taken() -> None:
    assert Choice("c", ("a", "b", "c"), 2, "c").best(torch.zeros(3)) == (0, 1)
    assert Choice("c", ("a", "b", "c"), 1, "c", rank=1).best(torch.tensor([1.0, 1.0, 0.0])) == (1,)
    assert Choice("c", ("a",), 1, "c", rank=1).best(torch.zeros(1)) == (0,)  # there is no second one


# ---------------------------------------------------------------- cells


def test_sums_concatenations_and_what_is_read() -> None:
    """out = concat of two of (twice in, none, in + second node), each read as it is."""
    cell = Cell(1, (
        (Term("a", (0,)), Term("b", (0,))),
        (Term("c", (0,), (NOTHING, "skip_connect")),),
        (Term("d", (0, 1, 2), reads=2),),
        (Term("out", (1, 2, 3), reads=2, join="concat"),),
    ))  # fmt: skip
    assert [c.name for c in cell.choices] == ["c.op", "d.input", "out.input"] and cell.choices == cell.decisions
    value = torch.ones(1, 1, 1, 1)
    kept = {"c.op": (1,), "d.input": (0, 1), "out.input": (0, 2)}
    supernet, derived = (CellModule(cell, operation_of_one, one) for one in (None, kept))
    assert supernet(value, way=kept).flatten().tolist() == [2, 0, 3]
    assert supernet(value, way=hot(kept)).flatten().tolist() == [2, 0, 3]
    assert derived(value).flatten().tolist() == [2, 3]
    assert cell.used(kept) == {"a", "b", "d", "out"}


def operation_of_one(name: str, /, *, stride: int) -> nn.Module:
    return operation(name, 1, stride=stride)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_keep_channels_and_halve_places(name: str, stride: int) -> None:
    made = operation(name, 3, stride=stride)
    for height, width in ((4, 6), (5, 7), (1, 2)):
        value = made(torch.randn(2, 3, height, width))
        assert value.shape == (2, 3, -(-height // stride), -(-width // stride))
    assert all(norm.affine for norm in made.modules() if isinstance(norm, nn.BatchNorm2d))
    plain = operation(name, 3, affine=False, stride=stride)
    assert not any(norm.affine for norm in plain.modules() if isinstance(norm, nn.BatchNorm2d))
