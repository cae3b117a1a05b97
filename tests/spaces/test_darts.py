"""DARTS's space: sizes of published networks, genotypes, pairs by rank, what a node reads, how images shrink."""

import pytest
import torch
from torch import nn

from compressnas.errors import InputError
from compressnas.spaces.darts import NAMES, darts
from compressnas.spaces.genotype import genotype_text, read_genotype
from compressnas.spaces.operations import DilConv, FactorizedReduce, SepConv

DARTS_V2 = """Genotype(
    normal=[('sep_conv_3x3', 0), ('sep_conv_3x3', 1), ('sep_conv_3x3', 0), ('sep_conv_3x3', 1), ('sep_conv_3x3', 1),
            ('skip_connect', 0), ('skip_connect', 0), ('dil_conv_3x3', 2)], normal_concat=[2, 3, 4, 5],
    reduce=[('max_pool_3x3', 0), ('max_pool_3x3', 1), ('skip_connect', 2), ('max_pool_3x3', 1), ('max_pool_3x3', 0),
            ('skip_connect', 2), ('skip_connect', 2), ('max_pool_3x3', 1)], reduce_concat=[2, 3, 4, 5])"""
P_DARTS = """Genotype(
    normal=[('skip_connect', 0), ('dil_conv_3x3', 1), ('skip_connect', 0), ('sep_conv_3x3', 1), ('sep_conv_3x3', 1),
            ('sep_conv_3x3', 3), ('sep_conv_3x3', 0), ('dil_conv_5x5', 4)], normal_concat=range(2, 6),
    reduce=[('avg_pool_3x3', 0), ('sep_conv_5x5', 1), ('sep_conv_3x3', 0), ('dil_conv_5x5', 2), ('max_pool_3x3', 0),
            ('dil_conv_3x3', 1), ('dil_conv_3x3', 1), ('dil_conv_5x5', 3)], reduce_concat=range(2, 6))"""
SHAPE = (3, 8, 8)


def network(text: str, shape: tuple[int, int, int] = SHAPE, classes: int = 4, **settings: object) -> nn.Module:
    space = darts(**settings)  # type: ignore[arg-type]
    return space.network(space.parsed(text).kept, shape, classes)


# ---------------------------------------------------------------- published networks


@pytest.mark.parametrize("text, millions", [(DARTS_V2, 3.349), (P_DARTS, 3.434)])
def test_sizes_on_cifar_are_those_that_are_printed(text: str, millions: float) -> None:
    """3.3 M (arXiv 1806.09055) and 3.4 M (P-DARTS, arXiv 1904.12760)."""
    made = network(text, (3, 32, 32), 10)
    assert round(sum(p.numel() for p in made.parameters()) / 1e6, 3) == millions


@pytest.mark.parametrize("text, millions", [(DARTS_V2, 4.719), (P_DARTS, 4.944)])
def test_sizes_on_imagenet_are_those_that_are_printed(text: str, millions: float) -> None:
    """4.7 M and 4.9 M."""
    made = network(text, (3, 224, 224), 1000, derived_cells=14, derived_width=48, stem="imagenet")
    assert round(sum(p.numel() for p in made.parameters()) / 1e6, 3) == millions


def test_where_images_shrink() -> None:
    """Derived: at the two reduction cells, by stride. Supernet: before them, by a pool; no operation has a stride."""
    sizes = []
    derived = network(P_DARTS, derived_cells=6, derived_width=4)
    for cell in derived.cells:
        cell.register_forward_hook(lambda _, inputs, output: sizes.append((output.shape[1], output.shape[2])))
    derived(torch.zeros(2, 3, 16, 16))
    assert sizes == [(16, 16), (16, 16), (32, 8), (32, 8), (64, 4), (64, 4)]
    supernet = darts(cells=6, width=4).supernet(None, SHAPE, 4)
    assert not any(isinstance(m, FactorizedReduce) for m in supernet.modules())
    assert {m.stride for m in supernet.modules() if isinstance(m, nn.Conv2d)} == {(1, 1)}
    assert supernet.pooled == (2, 4)


def test_norms() -> None:
    """Pooling has one in the supernet only; those of the supernet have no scale, unless it is asked for."""
    space = darts(cells=3, width=2)
    supernet, derived = space.supernet(None, SHAPE, 4), network(DARTS_V2, derived_cells=3, derived_width=2)
    for cells, behind in ((supernet.cells, nn.Sequential), (derived.cells, nn.MaxPool2d)):
        assert {type(m) for name, m in cells.named_modules() if name.endswith("max_pool_3x3")} == {behind}
    in_cells = [m for m in supernet.cells.modules() if isinstance(m, nn.BatchNorm2d)]
    assert in_cells and not any(m.affine for m in in_cells)
    assert all(m.affine for m in derived.modules() if isinstance(m, nn.BatchNorm2d))


def test_what_separable_convolutions_are_made_of() -> None:
    convolutions = [m for m in SepConv(4, 5, 2, True).modules() if isinstance(m, nn.Conv2d)]
    assert [(m.kernel_size[0], m.stride[0], m.groups) for m in convolutions] == [
        (5, 2, 4), (1, 1, 1), (5, 1, 4), (1, 1, 1),
    ]  # fmt: skip
    wide = DilConv(4, 3, 1, 2, True)[1]
    assert (wide.dilation, wide.padding) == ((2, 2), (2, 2))


# ---------------------------------------------------------------- what is drawn, what is decided


def test_a_node_draws_one_operation_and_one_input() -> None:
    choices = {c.name: c for c in darts().choices}
    assert len(choices) == 16 and all(c.keep == 1 for c in choices.values())
    assert choices["normal.node2.op"].candidates == NAMES and "none" not in NAMES
    assert choices["reduce.node5.input"].candidates == ("0", "1", "2", "3", "4")
    assert len(darts().decisions) == 32


def test_the_two_best_stay_paired_by_rank() -> None:
    space = darts()
    alpha = {c.name: -torch.arange(len(c.candidates), dtype=torch.float32) for c in space.choices}
    alpha["normal.node4.op"] = torch.tensor([0.0, 1, 2, 9, 3, 8, 4])  # sep_conv_3x3, dil_conv_3x3
    alpha["normal.node4.input"] = torch.tensor([0.0, 2, 3, 1])
    alpha["normal.node2.input"] = torch.tensor([0.0, 1])  # both stay, in this order
    pairs = read_genotype(space.text(space.best(alpha)), NAMES)["normal"]
    assert pairs[:2] == (("max_pool_3x3", 1), ("avg_pool_3x3", 0))
    assert pairs[4:6] == (("sep_conv_3x3", 2), ("dil_conv_3x3", 1))


def test_a_node_is_the_sum_of_both_pairs() -> None:
    """Masked, the same operation on two inputs: with the same weights in the supernet, apart in the derived cell."""
    space = darts(cells=3, width=2, derived_cells=3, derived_width=2)
    kept = space.parsed(DARTS_V2).kept
    cell = space.supernet(kept, SHAPE, 4).cells[0].cell
    assert {"normal_node2_first", "normal_node2_second"} <= set(cell.terms)
    first, second = (cell.terms[f"normal_node2_{rank}"]["sep_conv_3x3"] for rank in ("first", "second"))
    assert first is not second
    inputs = [torch.randn(2, 2, 8, 8) for _ in range(2)]
    cell.train()
    assert torch.allclose(cell(*inputs)[:, :2], first(inputs[0]) + second(inputs[1]))  # nodes are concatenated


def test_operations_left_out() -> None:
    space = darts(exclude=["max_pool_3x3", "avg_pool_3x3"])
    assert space.choices[1].candidates == NAMES[2:]
    with pytest.raises(InputError, match="reduce, pair 1: operation max_pool_3x3, expected one of skip_connect"):
        space.parsed(DARTS_V2)
    only = darts(exclude=NAMES[1:])
    found = only.best({c.name: torch.zeros(len(c.candidates)) for c in only.choices})
    assert only.text(found).count("max_pool_3x3") == 16  # there is no second best


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"exclude": ["none"]}, "unknown operation none; expected some of max_pool_3x3"),
        ({"exclude": NAMES}, "no operation is left"),
        ({"stem": "mnist"}, "stem: mnist, expected one of cifar, imagenet"),
        ({"cells": 2}, "cells: 2, expected at least 3"),
        ({"derived_cells": 0}, "derived_cells: 0, expected at least 3"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        darts(**settings)  # type: ignore[arg-type]


def test_a_derived_network_needs_a_decision() -> None:
    with pytest.raises(InputError, match="needs a decision"):
        darts().network(None, SHAPE, 4)


# ---------------------------------------------------------------- genotypes


def test_texts_of_others_are_read_and_written() -> None:
    for text in (DARTS_V2, P_DARTS):
        pairs = read_genotype(text, NAMES)
        written = darts().text(darts().parsed(text).kept)
        assert written == genotype_text(pairs) and read_genotype(written, NAMES) == pairs
    assert " ".join(P_DARTS.split()) == written.replace("Genotype(", "Genotype( ")
    assert pairs["reduce"][3] == ("dil_conv_5x5", 2)


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("'skip_connect', 0", "'none', 0", "normal, pair 1: operation none, expected one of max_pool_3x3"),
        ("'skip_connect', 0", "3, 0", "normal, pair 1: operation 3, expected"),
        ("'sep_conv_3x3', 3", "'sep_conv_3x3', 4", "normal, pair 6: reads node 4, expected one of 0 to 3"),
        ("'dil_conv_5x5', 3", "'dil_conv_5x5', -1", "reduce, pair 8: reads node -1, expected one of 0 to 4"),
        ("'dil_conv_5x5', 3", "'dil_conv_5x5', True", "reads node True"),
        ("'dil_conv_5x5', 3", "'dil_conv_5x5'", "reduce, pair 8: expected an operation and a node"),
        ("('skip_connect', 0), ('dil_conv_3x3', 1), ", "", "normal: expected a list of 8 pairs"),
        ("normal_concat=range(2, 6)", "normal_concat=range(2, 10**9)", "expected a text such as Genotype"),
        ("normal_concat=range(2, 6)", "normal_concat=range(2, 1000000000)", "normal_concat: expected the nodes 2, 3"),
        ("reduce_concat=range(2, 6)", "reduce_concat=[3, 4, 5]", "reduce_concat: expected the nodes 2, 3, 4, 5"),
        ("reduce_concat=range(2, 6)", "reduce_concat=5", "expected a text such as Genotype"),
        (", reduce_concat=range(2, 6)", "", "expected a text such as Genotype"),
        ("Genotype(", "__import__('os').system(", "expected a text such as Genotype"),
        ("Genotype(", "Genotype(1, ", "expected a text such as Genotype"),
        ("range(2, 6))", "range(2, 6)", "expected a text such as Genotype"),
        ("('skip_connect', 0)", "print()", "expected a text such as Genotype"),
    ],
)
def test_texts_that_are_no_genotype(old: str, new: str, message: str) -> None:
    assert old in P_DARTS
    with pytest.raises(InputError) as caught:
        darts().parsed(P_DARTS.replace(old, new, 1))
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "x", "\0", "(" * 10_000, "Genotype", "Genotype(**x)", "|none~0|"])
def test_texts_that_are_anything(text: str) -> None:
    with pytest.raises(InputError, match="expected a text such as Genotype"):
        darts().parsed(text)
