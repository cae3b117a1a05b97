"""NAS-Bench-1Shot1 (Zela et al., arXiv 2001.10422): the parts S1, S2 and S3 of NAS-Bench-101 (arXiv 1902.09635).

A node is one of three operations on the sum of its parents, of which it has a given number. What reads the cell's input
does so through a 1 x 1 convolution of its own. The output is the concatenation of its parents.

Two things are as in the benchmark's search networks, and not as in NAS-Bench-101. All nodes of a cell have the same
number of channels, whatever the cell, where NAS-Bench-101 divides those of the output by the number of its parents. And
where the cell's input is a parent of the output, it is one more part of the concatenation, where NAS-Bench-101 adds it
to the other parts. In the supernet, parts that are no parents are zero; the derived network does not have them, and is
otherwise the same, so that it takes its weights from the supernet. Behind the last cell are the mean over places and a
linear layer, as in NAS-Bench-101.
"""

import re
from collections.abc import Sequence
from functools import partial

from torch import Tensor, nn

from compressnas.errors import InputError
from compressnas.slim import SlimArch
from compressnas.spaces.cell import Cell, Kept, Space, Term, operation_of, read_by, slim_of
from compressnas.spaces.cell_module import CellModule, Mix
from compressnas.spaces.operations import ConvBnRelu, operation, without

PARENTS = {  # how many each node has, the output last
    "S1": (1, 2, 2, 2, 2),
    "S2": (1, 1, 2, 2, 3),
    "S3": (1, 1, 1, 2, 2, 2),
}
LETTERS = {"m": "maxpool3x3", "1": "conv1x1-bn-relu", "3": "conv3x3-bn-relu"}
NAMES = tuple(LETTERS.values())
STACKS = 3


def nasbench1shot1(
    space: str | int = "S1", cells: int = 3, width: int = 16, exclude: Sequence[str] = (), affine: bool = True
) -> Space:
    """The space. Its text is the letters of the operations, and the rows of the adjacency matrix: `3m31:010010|...`.

    Args:
        space: S1, S2 or S3, or its number.
        cells: in each of the three stacks.
        width: channels of a node in the first stack.
        exclude: operations that are no candidates.
        affine: whether batch norms have a scale and a bias.

    Raises:
        InputError: a space or an operation that is unknown, or no operation that is left.
    """
    name = f"S{space}" if isinstance(space, int) else space
    if name not in PARENTS:
        raise InputError(f"space: {space}, expected one of {', '.join(PARENTS)}")
    names, (*counts, last) = without(NAMES, exclude), PARENTS[name]
    terms = [Term(f"cell.node{k}", tuple(range(k)), names, reads=count) for k, count in enumerate(counts, start=1)]
    output = Term("cell.output", tuple(range(len(counts) + 1)), reads=last, join="concat")
    cell = Cell(inputs=1, nodes=tuple((term,) for term in (*terms, output)))
    network = partial(NasBench1Shot1, cell, cells=cells, width=width, affine=affine)
    return Space(
        f"nasbench1shot1 {name}", {"cell": cell}, network, network, partial(_text, cell), partial(_parsed, cell, name)
    )


class NasBench1Shot1(nn.Module):
    """The network of one cell or, with `kept` None, of all of them.

    Args:
        shape: (C, H, W) of one image.

    Attributes:
        columns: parameter of a network with a decision -> the input channels of the supernet's that it has.
    """

    def __init__(
        self, cell: Cell, kept: Kept | None, shape: tuple[int, int, int], classes: int, *, cells: int, width: int,
        affine: bool,
    ) -> None:  # fmt: skip
        super().__init__()
        output = cell.terms[-1]
        parts = output.inputs if kept is None else read_by(output, kept)
        self.columns: dict[str, tuple[int, ...]] = {}
        self.stem = ConvBnRelu(shape[0], width, 3)
        self.pool_between = nn.MaxPool2d(2, ceil_mode=True)
        self.cells, inputs = nn.ModuleList(), width
        for number in range(STACKS * cells):
            before, channels = width * 2 ** ((number - 1) // cells), width * 2 ** (number // cells)
            make = partial(operation, channels=channels, affine=affine)
            made = CellModule(cell, make, kept, reading=partial(_projection, inputs, channels, affine))
            if number:
                weights = [name for name, one in made.readings.named_parameters() if one.dim() == 4]
                self.columns |= {f"cells.{number}.readings.{name}": _channels(parts, before) for name in weights}
            self.cells.append(made)
            inputs = len(parts) * channels
        self.starts = tuple(range(cells, STACKS * cells, cells))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(inputs, classes)
        self.columns["classifier.weight"] = _channels(parts, channels)

    def forward(self, images: Tensor, way: Mix | Kept | None = None) -> Tensor:
        """(B, C, H, W) -> (B, classes)."""
        values: Tensor = self.stem(images)
        for number, cell in enumerate(self.cells):
            values = cell(self.pool_between(values) if number in self.starts else values, way=way)
        logits: Tensor = self.classifier(self.pool(values).flatten(1))
        return logits


def _projection(inputs: int, channels: int, affine: bool, term: Term, source: int) -> nn.Module | None:
    return ConvBnRelu(inputs, channels, 1, affine=affine) if source == 0 else None


def _channels(parts: Sequence[int], width: int) -> tuple[int, ...]:
    """Channels of some parts of a concatenation."""
    return tuple(part * width + channel for part in parts for channel in range(width))


# ---------------------------------------------------------------- the notation


def _text(cell: Cell, kept: Kept) -> str:
    """`3m31:010010|001100|...`: operations of the nodes, then what each vertex, from the input on, is a parent of."""
    letters = {name: letter for letter, name in LETTERS.items()}
    parents = [read_by(term, kept) for term in cell.terms]  # of vertex 1, 2, ...
    rows = [[int(vertex in read) for read in parents] for vertex in range(len(parents) + 1)]
    chosen = "".join(letters[operation_of(term, kept)] for term in cell.terms if term.operations)
    return chosen + ":" + "|".join("0" + "".join(map(str, row)) for row in rows)


def _parsed(cell: Cell, space: str, text: str) -> SlimArch:
    """The cell of a text. Raises InputError."""
    size = len(cell.terms) + 1
    if not re.fullmatch(rf"[m13]{{{size - 2}}}:[01]{{{size}}}(\|[01]{{{size}}}){{{size - 1}}}", text):
        form = f"{size - 2} letters of m, 1 and 3, a colon, and {size} rows of {size} zeros and ones with | between"
        raise InputError(f"cell {text!r}: expected {form}")
    letters, rows = text.split(":")
    matrix = rows.split("|")
    kept = {}
    for vertex, term in enumerate(cell.terms, start=1):
        parents = tuple(source for source in range(size) if matrix[source][vertex] == "1")
        if len(parents) != term.reads or not set(parents) <= set(term.inputs):
            among = f"{term.reads} of the vertices {', '.join(map(str, term.inputs))}"
            raise InputError(f"cell {text!r}: vertex {vertex} reads {parents}, expected {among} in {space}")
        kept[f"{term.name}.input"] = tuple(term.inputs.index(source) for source in parents)
        if term.operations:
            name = LETTERS[letters[vertex - 1]]
            if name not in term.operations:
                raise InputError(f"cell {text!r}: operation {name}, expected one of {', '.join(term.operations)}")
            kept[f"{term.name}.op"] = (term.operations.index(name),)
    found = slim_of({"cell": cell}, kept)
    if _text(cell, found.kept) != text:
        raise InputError(f"cell {text!r}: a vertex reads itself or one behind it; expected ones above the diagonal")
    return found
