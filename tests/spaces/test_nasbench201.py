"""NAS-Bench-201: sizes of the benchmark's networks, its notation, cells without a path, operations left out."""

import os
import random
from pathlib import Path

import pytest
import torch

from compressnas.errors import InputError
from compressnas.spaces.nasbench201 import NAMES, looked_up, nasbench201, read_table

ALL_3X3 = "|nor_conv_3x3~0|+|nor_conv_3x3~0|nor_conv_3x3~1|+|nor_conv_3x3~0|nor_conv_3x3~1|nor_conv_3x3~2|"
CHAIN = "|skip_connect~0|+|none~0|nor_conv_1x1~1|+|none~0|none~1|avg_pool_3x3~2|"
NOWHERE = "|nor_conv_3x3~0|+|nor_conv_3x3~0|nor_conv_3x3~1|+|none~0|none~1|none~2|"
SHAPE = (3, 32, 32)


def parameters(text: str) -> int:
    space = nasbench201()
    return sum(p.numel() for p in space.network(space.parsed(text).kept, SHAPE, 10).parameters())


@pytest.mark.parametrize(
    "text, count",
    [
        (ALL_3X3, 1_531_546),
        ("|nor_conv_3x3~0|+|nor_conv_3x3~0|avg_pool_3x3~1|+|skip_connect~0|nor_conv_3x3~1|skip_connect~2|", 802_426),
        ("|skip_connect~0|+|avg_pool_3x3~0|skip_connect~1|+|avg_pool_3x3~0|nor_conv_1x1~1|nor_conv_1x1~2|", 129_306),
    ],
)
def test_sizes_are_those_of_the_benchmark(text: str, count: int) -> None:
    assert parameters(text) == count


@pytest.mark.skipif("COMPRESSNAS_DATA" not in os.environ, reason="COMPRESSNAS_DATA names no folder with nas/")
def test_sizes_are_those_of_the_table() -> None:
    """Of cells all of whose operations are used: ours do not have the others, the benchmark's do."""
    table = read_table(Path(os.environ["COMPRESSNAS_DATA"]) / "nas/nasbench201.csv.gz")
    assert len(table) == 15_625
    space, compared = nasbench201(), 0
    cell = space.cells["cell"]
    for text in random.Random(0).sample(sorted(table), 60):
        kept = space.parsed(text).kept
        if len(cell.used(kept)) == len(cell.terms) - text.count("none"):
            assert parameters(text) == table[text]["params_c10"]
            compared += 1
    assert compared > 20


def test_operations_that_lead_nowhere_are_not_built() -> None:
    space = nasbench201(cells=1, width=4)
    dead_end = "|nor_conv_1x1~0|+|nor_conv_3x3~0|nor_conv_3x3~1|+|nor_conv_1x1~0|nor_conv_1x1~1|none~2|"
    assert space.cells["cell"].used(space.parsed(dead_end).kept) == {"cell.edge0", "cell.edge3", "cell.edge4"}
    same = "|nor_conv_1x1~0|+|none~0|none~1|+|nor_conv_1x1~0|nor_conv_1x1~1|none~2|"
    sizes = [
        sum(p.numel() for p in space.network(space.parsed(t).kept, SHAPE, 10).parameters()) for t in (dead_end, same)
    ]
    assert sizes[0] == sizes[1]


def test_cells_without_a_path() -> None:
    space = nasbench201(cells=1, width=4)
    assert space.connected(space.parsed(CHAIN).kept)
    nowhere = space.parsed(NOWHERE).kept
    assert not space.connected(nowhere)
    network = space.network(nowhere, SHAPE, 3).eval()
    assert torch.equal(*network(torch.randn(2, *SHAPE)).split(1))  # it sees nothing of the image


def test_the_best_cell_always_has_a_path() -> None:
    """Logits that prefer `none` everywhere, and `skip_connect` next on a chain: that chain."""
    space = nasbench201()
    alpha = {c.name: torch.tensor([5.0, 0.0, 0.0, 0.0, 0.0]) for c in space.choices}
    for name in ("cell.edge0.op", "cell.edge2.op", "cell.edge5.op"):
        alpha[name] = torch.tensor([5.0, 4.0, 0.0, 0.0, 0.0])
    found = space.best(alpha)
    assert space.connected(found)
    assert space.text(found) == "|skip_connect~0|+|none~0|skip_connect~1|+|none~0|none~1|skip_connect~2|"


def test_operations_left_out() -> None:
    space = nasbench201(exclude=["none", "avg_pool_3x3"])
    assert all(c.candidates == ("skip_connect", "nor_conv_1x1", "nor_conv_3x3") for c in space.choices)
    with pytest.raises(InputError, match=r"operation none, expected one of skip_connect"):
        space.parsed(CHAIN)
    with pytest.raises(InputError, match="unknown operation conv; expected some of none"):
        nasbench201(exclude=["conv"])
    for exclude in (NAMES, [name for name in NAMES if name != "none"]):
        with pytest.raises(InputError, match="no operation is left"):
            nasbench201(exclude=exclude)


@pytest.mark.parametrize(
    "text",
    ["", "|", ALL_3X3[:-1], ALL_3X3 + "|", ALL_3X3.replace("~2", "~1"), ALL_3X3.replace("nor_conv", "conv", 1),
     ALL_3X3.replace("+", " "), "x" + ALL_3X3, "|none~0|+|none~0|none~1|"],
)  # fmt: skip
def test_texts_that_are_no_cell(text: str) -> None:
    with pytest.raises(InputError) as caught:
        nasbench201().parsed(text)
    assert "\n" not in str(caught.value) and "expected" in str(caught.value)


def test_looking_up(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text(f"index,arch,c10_test_200\n0,{ALL_3X3},93.76\n")
    table = read_table(path)
    assert looked_up(table, ALL_3X3) == {"c10_test_200": 93.76}
    with pytest.raises(InputError, match="it lacks the cell"):
        looked_up(table, CHAIN)


@pytest.mark.parametrize("content", ["", "arch,a\n", "name,a\nx,1\n", "arch,a\nx,word\n", "arch,a\nx,1,2\n"])
def test_files_that_are_no_table(tmp_path: Path, content: str) -> None:
    path = tmp_path / "table.csv"
    path.write_text(content)
    with pytest.raises(InputError, match=r"space\.table: "):
        read_table(path)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot read"):
        read_table(tmp_path / "missing.csv")
    (tmp_path / "bad.csv.gz").write_bytes(b"\x1f\x8b\x08 no gzip")
    with pytest.raises(InputError, match=r"space\.table: "):
        read_table(tmp_path / "bad.csv.gz")
    (tmp_path / "bytes.csv").write_bytes(b"arch,a\n\xff\xfe,1\n")
    with pytest.raises(InputError, match=r"space\.table: "):
        read_table(tmp_path / "bytes.csv")
