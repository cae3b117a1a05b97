"""The space of DARTS (Liu et al., arXiv 1806.09055), as NASI searches it (arXiv 2109.00817, appendix B.2).

A network is a stack of normal and reduction cells. A cell reads the two cells before it, has four nodes, and gives
their concatenation. In the supernet a node is one operation on one node before it, drawn independently of each other;
in the derived network it is the sum of two: of the best operation on the best input, and of the second ones. There is
no operation `none`.

The supernet keeps the size of images within cells, also in reduction cells, and has a max-pool before those. The
derived networks are those of DARTS: without that pool and with operations of stride 2 on the inputs of reduction cells,
and without a norm behind pooling, which only the supernet has. So they take no weights from the supernet, but
`Space.supernet` of a decision does.
"""

from collections.abc import Mapping, Sequence
from functools import partial

from torch import Tensor, nn

from compressnas.errors import InputError
from compressnas.slim import SlimArch
from compressnas.spaces.cell import Cell, Kept, Space, Term, operation_of, read_by, slim_of
from compressnas.spaces.cell_module import CellModule, Mix
from compressnas.spaces.genotype import KINDS, NODES, Pair, genotype_text, read_genotype
from compressnas.spaces.operations import FactorizedReduce, ReluConvBn, operation, without

NAMES = (
    "max_pool_3x3", "avg_pool_3x3", "skip_connect", "sep_conv_3x3", "sep_conv_5x5", "dil_conv_3x3", "dil_conv_5x5",
)  # fmt: skip
POOLS = ("max_pool_3x3", "avg_pool_3x3")
RANKS = ("first", "second")  # terms of a node, by the rank of what they take
FEWEST = 3  # cells, of which two are reduction cells


def darts(
    cells: int = 8,
    width: int = 16,
    exclude: Sequence[str] = (),
    affine: bool = False,
    derived_cells: int = 20,
    derived_width: int = 36,
    stem: str = "cifar",
) -> Space:
    """The space. Its text is a genotype.

    Args:
        cells: of the supernet; those at 1/3 and 2/3 are reduction cells.
        width: channels of a node in the first cell of the supernet.
        exclude: operations that are no candidates.
        affine: whether batch norms of the supernet have a scale and a bias; those of derived networks have.
        derived_cells, derived_width: the same of the derived network; DARTS has 14 and 48 for ImageNet.
        stem: of the derived network: `cifar`, one convolution; or `imagenet`, three of stride 2.

    Raises:
        InputError: an operation or a stem that is unknown, no operation that is left, or fewer than three cells.
    """
    names = without(NAMES, exclude)
    if stem not in STEMS:
        raise InputError(f"space.stem: {stem}, expected one of {', '.join(STEMS)}")
    for name, count in (("cells", cells), ("derived_cells", derived_cells)):
        if count < FEWEST:
            raise InputError(f"space.{name}: {count}, expected at least {FEWEST}, of which two are reduction cells")
    kinds = {kind: _cell(kind, names) for kind in KINDS}
    network = partial(Darts, kinds, cells=derived_cells, width=derived_width, stem=stem)
    supernet = partial(Darts, kinds, cells=cells, width=width, affine=affine, searched=True)
    return Space("darts", kinds, network, supernet, partial(_text, kinds), partial(_parsed, kinds, names))


def _cell(kind: str, names: tuple[str, ...]) -> Cell:
    output = (Term(f"{kind}.output", tuple(NODES), reads=len(NODES), join="concat"),)
    drawn = {f"{kind}.node{number}": tuple(range(number)) for number in NODES}
    mixed = tuple((Term(name, inputs, names),) for name, inputs in drawn.items())
    nodes = tuple(
        tuple(Term(f"{name}.{word}", inputs, names, drawn=name, rank=rank) for rank, word in enumerate(RANKS))
        for name, inputs in drawn.items()
    )
    return Cell(inputs=2, nodes=(*nodes, output), mixed=(*mixed, output))


# ---------------------------------------------------------------- networks


class Darts(nn.Module):
    """A stack of cells: the derived network; or with `searched` the supernet, of all cells or of one.

    Args:
        shape: (C, H, W) of one image.

    Raises:
        InputError: no decision, where it is not the supernet.
    """

    def __init__(
        self, kinds: Mapping[str, Cell], kept: Kept | None, shape: tuple[int, int, int], classes: int, *, cells: int,
        width: int, stem: str = "cifar", affine: bool = True, searched: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        if kept is None and not searched:
            raise InputError("the derived network of the space darts needs a decision, got none")
        self.stems = STEMS[stem](shape[0], width)
        before = (width, width) if stem == "imagenet" else (3 * width, 3 * width)
        self.pooled = tuple(n for n in range(cells) if searched and _reduces(n, cells))
        self.cells, channels, halves = nn.ModuleList(), width, stem == "imagenet"
        for number in range(cells):
            reduces = _reduces(number, cells)
            channels *= 2 if reduces else 1
            make = partial(_searched if searched else operation, channels=channels, affine=affine)
            cell = CellModule(
                kinds["reduce" if reduces else "normal"], make, kept, 2 if reduces and not searched else 1
            )
            self.cells.append(DartsCell(cell, before, channels, halves, affine))
            before, halves = (before[1], len(NODES) * channels), reduces and not searched
        self.pool_before = nn.MaxPool2d(2, ceil_mode=True)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(before[1], classes)

    def forward(self, images: Tensor, way: Mix | Kept | None = None) -> Tensor:
        """(B, C, H, W) -> (B, classes)."""
        first: Tensor = self.stems[0](images)
        second: Tensor = self.stems[1](first) if len(self.stems) > 1 else first
        for number, cell in enumerate(self.cells):
            if number in self.pooled:
                first, second = self.pool_before(first), self.pool_before(second)
            first, second = second, cell(first, second, way)
        logits: Tensor = self.classifier(self.pool(second).flatten(1))
        return logits


class DartsCell(nn.Module):
    """A cell, and 1 x 1 convolutions that give its two inputs the width of its nodes.

    Args:
        inputs: channels of the two inputs.
        halves: whether the first is twice as high and wide as the second.
    """

    def __init__(self, cell: CellModule, inputs: tuple[int, int], channels: int, halves: bool, affine: bool) -> None:
        super().__init__()
        self.first = (
            FactorizedReduce(inputs[0], channels, affine)
            if halves
            else ReluConvBn(inputs[0], channels, 1, affine=affine)
        )
        self.second = ReluConvBn(inputs[1], channels, 1, affine=affine)
        self.cell = cell

    def forward(self, first: Tensor, second: Tensor, way: Mix | Kept | None = None) -> Tensor:
        result: Tensor = self.cell(self.first(first), self.second(second), way=way)
        return result


def _reduces(number: int, cells: int) -> bool:
    return number in (cells // 3, 2 * cells // 3)


def _searched(name: str, channels: int, affine: bool, stride: int) -> nn.Module:
    """An operation of the supernet: pooling has a norm behind it, so that no operation gives more than the others."""
    made = operation(name, channels, affine, stride)
    return nn.Sequential(made, nn.BatchNorm2d(channels, affine=False)) if name in POOLS else made


def _cifar_stem(inputs: int, width: int) -> nn.ModuleList:
    return nn.ModuleList(
        [nn.Sequential(nn.Conv2d(inputs, 3 * width, 3, padding=1, bias=False), nn.BatchNorm2d(3 * width))]
    )


def _imagenet_stem(inputs: int, width: int) -> nn.ModuleList:
    """To 1/4 of the height and width, and to 1/8: the two inputs of the first cell."""
    half = width // 2
    quarter = nn.Sequential(
        nn.Conv2d(inputs, half, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(half),
        *ReluConvBn(half, width, 3, 2),
    )
    return nn.ModuleList([quarter, ReluConvBn(width, width, 3, 2)])


STEMS = {"cifar": _cifar_stem, "imagenet": _imagenet_stem}

# ---------------------------------------------------------------- genotypes


def _text(kinds: Mapping[str, Cell], kept: Kept) -> str:
    return genotype_text({kind: [_pair(term, kept) for term in _paired(cell)] for kind, cell in kinds.items()})


def _pair(term: Term, kept: Kept) -> Pair:
    (source,) = read_by(term, kept)
    return operation_of(term, kept), source


def _paired(cell: Cell) -> tuple[Term, ...]:
    """The terms that a genotype names."""
    return tuple(term for term in cell.terms if term.operations)


def _parsed(kinds: Mapping[str, Cell], names: Sequence[str], text: str) -> SlimArch:
    """The cells of a genotype. Raises InputError."""
    kept = {}
    for kind, pairs in read_genotype(text, names).items():
        for term, (name, source) in zip(_paired(kinds[kind]), pairs, strict=True):
            kept[f"{term.name}.op"] = (names.index(name),)
            kept[f"{term.name}.input"] = (term.inputs.index(source),)
    return slim_of(kinds, kept)
