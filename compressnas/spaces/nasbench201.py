"""NAS-Bench-201 (Dong and Yang, arXiv 2001.00326): 6 edges between 4 nodes, 5 operations, 15,625 cells.

The macro structure is the benchmark's: a 3 x 3 stem, three stages of N cells at widths C, 2C and 4C, a residual block
of stride 2 between stages, batch norm, ReLU, mean over places, a linear layer.
"""

import csv
import gzip
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from torch import Tensor, nn

from compressnas.errors import InputError
from compressnas.slim import SlimArch
from compressnas.spaces.cell import Cell, Kept, Space, Term
from compressnas.spaces.cell_module import CellModule, Mix
from compressnas.spaces.operations import ReluConvBn, operation, without

EDGES = ((1, 0), (2, 0), (2, 1), (3, 0), (3, 1), (3, 2))  # (node, what it reads), as in the benchmark's text
NAMES = ("none", "skip_connect", "nor_conv_1x1", "nor_conv_3x3", "avg_pool_3x3")


def nasbench201(cells: int = 5, width: int = 16, exclude: Sequence[str] = (), affine: bool = True) -> Space:
    """The space.

    Args:
        cells: N, cells in each of the three stages.
        width: C, channels of the first stage.
        exclude: operations that are no candidates.
        affine: whether batch norms have a scale and a bias, as the benchmark's networks have.

    Raises:
        InputError: an operation that is unknown, or none that is left to compute anything.
    """
    names = without(NAMES, exclude)
    terms = [Term(f"cell.edge{n}", (source,), names) for n, (_, source) in enumerate(EDGES)]
    nodes = tuple(
        tuple(term for term, (node, _) in zip(terms, EDGES, strict=True) if node == number) for number in (1, 2, 3)
    )
    cell = Cell(inputs=1, nodes=nodes)
    network = partial(NasBench201, cell, cells=cells, width=width, affine=affine)
    return Space("nasbench201", {"cell": cell}, network, network, partial(_text, names), partial(_parsed, names))


class NasBench201(nn.Module):
    """The benchmark's network, of one cell or, with `kept` None, of all of them.

    Args:
        shape: (C, H, W) of one image.
    """

    def __init__(
        self, cell: Cell, kept: Kept | None, shape: tuple[int, int, int], classes: int, *, cells: int, width: int,
        affine: bool,
    ) -> None:  # fmt: skip
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(shape[0], width, 3, padding=1, bias=False), nn.BatchNorm2d(width))
        self.cells = nn.ModuleList()
        for stage in range(3):
            channels = width * 2**stage
            if stage:
                self.cells.append(Reduction(channels // 2, channels, affine))
            for _ in range(cells):
                self.cells.append(CellModule(cell, partial(operation, channels=channels, affine=affine), kept))
        self.last = nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU())
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(channels, classes)

    def forward(self, images: Tensor, way: Mix | Kept | None = None) -> Tensor:
        """(B, C, H, W) -> (B, classes)."""
        values: Tensor = self.stem(images)
        for cell in self.cells:
            values = cell(values, way=way) if isinstance(cell, CellModule) else cell(values)
        logits: Tensor = self.classifier(self.pool(self.last(values)).flatten(1))
        return logits


class Reduction(nn.Module):
    """Between stages: a residual block of stride 2, with mean pooling and a 1 x 1 convolution around it."""

    def __init__(self, inputs: int, outputs: int, affine: bool) -> None:
        super().__init__()
        self.block = nn.Sequential(
            ReluConvBn(inputs, outputs, 3, stride=2, affine=affine), ReluConvBn(outputs, outputs, 3, affine=affine)
        )
        self.around = nn.Sequential(nn.AvgPool2d(2, ceil_mode=True), nn.Conv2d(inputs, outputs, 1, bias=False))

    def forward(self, values: Tensor) -> Tensor:
        result: Tensor = self.block(values) + self.around(values)
        return result


# ---------------------------------------------------------------- the benchmark's text and table


def _text(names: Sequence[str], kept: Kept) -> str:
    """`|nor_conv_3x3~0|+|none~0|skip_connect~1|+|...|`."""
    chosen = [f"{names[kept[f'cell.edge{n}.op'][0]]}~{source}" for n, (_, source) in enumerate(EDGES)]
    ends_of = list(zip(chosen, EDGES, strict=True))
    by_node = ["|".join(one for one, (node, _) in ends_of if node == number) for number in (1, 2, 3)]
    return "+".join(f"|{edges}|" for edges in by_node)


def _parsed(names: Sequence[str], text: str) -> SlimArch:
    """The cell of a text. Raises InputError."""
    found = re.findall(r"([a-z0-9_]+)~(\d)", text)
    kept = {}
    for number, ((name, source), edge) in enumerate(zip(found, EDGES, strict=False)):
        if name not in names:
            raise InputError(f"cell {text!r}: operation {name}, expected one of {', '.join(names)}")
        if int(source) == edge[1]:
            kept[f"cell.edge{number}.op"] = (names.index(name),)
    if len(found) != len(EDGES) or len(kept) != len(EDGES) or _text(names, kept) != text:
        raise InputError(f"cell {text!r}: expected a text such as |none~0|+|none~0|none~1|+|none~0|none~1|none~2|")
    return SlimArch(kept, dict.fromkeys(kept, len(names)))


def read_table(path: str | Path) -> Mapping[str, Mapping[str, float]]:
    """The benchmark's results: cell -> column -> figure.

    Args:
        path: CSV, gzipped or not, with a column `arch` and columns of figures (accuracies in %).

    Raises:
        InputError: the file cannot be read or is no such table.
    """
    opened = gzip.open if str(path).endswith(".gz") else open
    try:
        with opened(path, "rt", encoding="utf-8", newline="") as lines:
            rows = list(csv.DictReader(lines))
        table = {row.pop("arch"): {k: float(v) for k, v in row.items() if k != "index"} for row in rows}
    except OSError as error:
        raise InputError(f"space.table: cannot read {path}: {error.strerror or error}") from error
    except (KeyError, ValueError, TypeError, EOFError, csv.Error) as error:
        raise InputError(f"space.table: {path}: expected a CSV with a column arch and figures: {error}") from error
    if not table:
        raise InputError(f"space.table: {path} has no rows")
    return table


def looked_up(table: Mapping[str, Mapping[str, float]], text: str) -> Mapping[str, float]:
    """The figures of one cell. Raises InputError where the table lacks it."""
    if text not in table:
        raise InputError(f"space.table: it lacks the cell {text} ({len(table):,} cells are in it)")
    return table[text]
