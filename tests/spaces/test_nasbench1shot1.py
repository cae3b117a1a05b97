"""NAS-Bench-1Shot1: sizes of the spaces, parents, channels, the notation."""

import itertools
from math import comb, prod

import pytest
import torch
from torch import nn

from compressnas.errors import InputError
from compressnas.spaces.nasbench1shot1 import NAMES, PARENTS, nasbench1shot1

SHAPE = (3, 8, 8)
CELL = "3m31:011000|001100|000111|000011|000000|000000"  # in S1; nothing reads vertex 4
CELL_S2 = "13m1:011010|000100|000101|000011|000001|000000"


@pytest.mark.parametrize("space, parents", [("S1", 180), ("S2", 360), ("S3", 5400)])
def test_sizes_of_the_spaces(space: str, parents: int) -> None:
    """Ways to choose parents, those that leave a vertex unread included; times the operations."""
    found = nasbench1shot1(space)
    counts = [comb(len(c.candidates), c.keep) for c in found.decisions]
    assert prod(counts) == parents * 3 ** (len(PARENTS[space]) - 1)
    assert sum(PARENTS[space]) <= 9  # edges that NAS-Bench-101 allows
    assert all(found.connected(kept) for kept in itertools.islice(found.all(), 300))


def test_a_choice_keeps_as_many_inputs_as_the_node_has_parents() -> None:
    space = nasbench1shot1("S2")
    keep = {c.name: (len(c.candidates), c.keep) for c in space.choices if c.name.endswith("input")}
    assert keep == {
        "cell.node2.input": (2, 1), "cell.node3.input": (3, 2), "cell.node4.input": (4, 2), "cell.output.input": (5, 3),
    }  # fmt: skip
    alpha = {c.name: torch.arange(len(c.candidates), dtype=torch.float32) for c in space.choices}
    assert space.best(alpha)["cell.output.input"] == (2, 3, 4)


def test_channels() -> None:
    """Of the output: of each of its parents, in the derived network; of all that may be, in the supernet."""
    space = nasbench1shot1("S1", cells=2, width=4)
    kept = space.parsed(CELL).kept
    for network, parts in ((space.network(kept, SHAPE, 5), 2), (space.network(None, SHAPE, 5), 5)):
        projections = [m[0] for m in network.cells[2].readings["cell_node1"].values()]
        assert [(m.in_channels, m.out_channels) for m in projections] == [(parts * 4, 8)]
        assert network.classifier.in_features == parts * 16
        assert network.starts == (2, 4) and len(network.cells) == 6


def test_what_reads_the_input_has_a_projection_of_its_own() -> None:
    space = nasbench1shot1(2, cells=1, width=4)
    network = space.network(space.parsed(CELL_S2).kept, SHAPE, 5)
    readings = network.cells[0].readings
    assert {term for term, read in readings.items() if len(read)} == {"cell_node1", "cell_node2", "cell_node4"}
    at_output = CELL_S2.replace("011010", "011011").replace("000101", "000100")
    readings = space.network(space.parsed(at_output).kept, SHAPE, 5).cells[0].readings
    assert {term for term, read in readings.items() if len(read)} >= {"cell_node1", "cell_output"}


def test_nodes_that_nothing_reads_are_not_built() -> None:
    space = nasbench1shot1("S1", cells=1, width=4)
    kept = space.parsed(CELL).kept
    assert space.cells["cell"].used(kept) == {"cell.node1", "cell.node2", "cell.node3", "cell.output"}
    assert not len(space.network(kept, SHAPE, 5).cells[0].terms["cell_node4"])


def test_macro_structure() -> None:
    network = nasbench1shot1("S3", cells=1, width=4).network(None, SHAPE, 5)
    sizes = []
    for cell in network.cells:
        cell.register_forward_pre_hook(lambda _, inputs: sizes.append(inputs[0].shape[2]))
    network(torch.zeros(2, *SHAPE), way=lambda choice, candidates: candidates[0]())
    assert sizes == [8, 4, 2]
    assert {type(m) for m in network.cells[0].terms["cell_node1"].modules()} >= {nn.MaxPool2d, nn.Conv2d}


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"space": "S4"}, "space: S4, expected one of S1, S2, S3"),
        ({"space": 0}, "space: 0, expected one of S1, S2, S3"),
        ({"exclude": ["none"]}, "unknown operation none; expected some of maxpool3x3"),
        ({"exclude": NAMES}, "no operation is left"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        nasbench1shot1(**settings)  # type: ignore[arg-type]


def test_operations_left_out() -> None:
    space = nasbench1shot1(exclude=["maxpool3x3"])
    assert space.choices[0].candidates == NAMES[1:]
    with pytest.raises(InputError, match="operation maxpool3x3, expected one of conv1x1-bn-relu"):
        space.parsed(CELL)


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "expected 4 letters"),
        (CELL.replace("3m31", "3m3"), "expected 4 letters"),
        (CELL.replace("m", "x"), "expected 4 letters"),
        (CELL + "|000000", "expected 4 letters"),
        (CELL + "\n", "expected 4 letters"),
        (CELL.replace("011000", "001000"), "vertex 1 reads (), expected 1 of the vertices 0 in S1"),
        (CELL.replace("001100", "001110"), "vertex 4 reads"),
        (CELL.replace("|000000|000000", "|000010|000000"), "vertex 4 reads"),
        (CELL.replace("|000000|000000", "|100000|000000"), "above the diagonal"),
    ],
)
def test_texts_that_are_no_cell(text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        nasbench1shot1("S1").parsed(text)
    assert message in str(caught.value) and "\n" not in str(caught.value)
