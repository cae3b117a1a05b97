"""What a cell may be: nodes, what they read, candidate operations; and a module that is such a cell.

A node is the sum of its terms. A term reads some of the nodes before it and applies an operation to their sum; which
nodes and which operation is a choice each. A space is written down with `Term`, `Cell` and
a function that stacks cells to a network; the supernet and the derived network are the same code, with all candidates
and with those that stay.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from compressnas.errors import InputError
from compressnas.slim import SlimArch
from compressnas.spaces.operations import NOTHING

Kept = Mapping[str, Sequence[int]]  # choice -> indices of the candidates that stay


@dataclass(frozen=True)
class Choice:
    """`keep` of the candidates stay.

    Attributes:
        name: of the group set in a SlimArch: `cell.edge3.op`.
    """

    name: str
    candidates: tuple[str, ...]
    keep: int = 1


@dataclass(frozen=True)
class Term:
    """What is added to a node: an operation, applied to nodes that are read.

    Attributes:
        inputs: numbers of the nodes that may be read; inputs of the cell come first.
        operations: candidates, of which one stays.
        reads: how many of the inputs are read; their sum goes into the operation.
    """

    name: str
    inputs: tuple[int, ...]
    operations: tuple[str, ...]
    reads: int = 1

    @property
    def input_choice(self) -> Choice | None:
        """None where all that may be read is read."""
        if len(self.inputs) == self.reads:
            return None
        return Choice(f"{self.name}.input", tuple(str(node) for node in self.inputs), self.reads)

    @property
    def op_choice(self) -> Choice:
        return Choice(f"{self.name}.op", self.operations)


@dataclass(frozen=True)
class Cell:
    """A kind of cell: node `inputs` + i is the sum of the terms `nodes[i]`; its output is the last node."""

    inputs: int
    nodes: tuple[tuple[Term, ...], ...]

    @property
    def terms(self) -> tuple[Term, ...]:
        return tuple(term for node in self.nodes for term in node)

    @property
    def choices(self) -> tuple[Choice, ...]:
        return tuple(choice for term in self.terms for choice in (term.input_choice, term.op_choice) if choice)

    def used(self, kept: Kept) -> frozenset[str]:
        """Names of the terms that carry something from an input of the cell to its output."""
        reached = set(range(self.inputs))  # nodes that something comes to
        for number, node in enumerate(self.nodes, start=self.inputs):
            if any(reached.intersection(read_by(term, kept)) for term in node if operation_of(term, kept) != NOTHING):
                reached.add(number)
        wanted, used = {self.inputs + len(self.nodes) - 1}, set()
        for number, node in reversed(list(enumerate(self.nodes, start=self.inputs))):
            for term in node if number in wanted else ():
                sources = reached.intersection(read_by(term, kept))
                if operation_of(term, kept) != NOTHING and sources:
                    used.add(term.name)
                    wanted |= sources
        return frozenset(used)


def read_by(term: Term, kept: Kept) -> tuple[int, ...]:
    """Numbers of the nodes that a term reads."""
    choice = term.input_choice
    return term.inputs if choice is None else tuple(term.inputs[i] for i in kept[choice.name])


def operation_of(term: Term, kept: Kept) -> str:
    (chosen,) = kept[term.op_choice.name]
    return term.operations[chosen]


class Mix(Protocol):
    """How a supernet puts the candidates of a choice together; each is computed when it is called."""

    def __call__(self, choice: Choice, candidates: Sequence[Callable[[], Tensor]]) -> Tensor: ...


class CellModule(nn.Module):
    """A cell: with all candidates (`kept` None), or with those that stay.

    Args:
        make: name of an operation -> module.
        kept: the decision; then only operations that are used are there.
    """

    def __init__(self, cell: Cell, make: Callable[[str], nn.Module], kept: Kept | None = None) -> None:
        super().__init__()
        self.cell, self.kept = cell, None if kept is None else dict(kept)
        used = None if kept is None else cell.used(kept)
        self.terms = nn.ModuleDict()
        for term in cell.terms:
            if kept is None or used is None:
                names = term.operations
            else:
                names = (operation_of(term, kept),) if term.name in used else ()
            self.terms[term.name.replace(".", "_")] = nn.ModuleDict({name: make(name) for name in names})

    def forward(self, *inputs: Tensor, way: "Mix | Kept | None" = None) -> Tensor:
        """(B, C, H, W) each -> the last node, of the same shape.

        Args:
            way: how a supernet goes: with a mixture of each choice, or as the decision says.
        """
        way = self.kept if way is None else way
        if way is None:
            raise InputError("a supernet is called with a decision or a mixture, got neither")
        used = self.cell.used(way) if isinstance(way, Mapping) else None
        nodes = list(inputs)
        for node in self.cell.nodes:
            if used is None:
                assert not isinstance(way, Mapping)
                parts = [self._mixed(term, nodes, way) for term in node]
            else:
                assert isinstance(way, Mapping)
                parts = [self._decided(term, nodes, way) for term in node if term.name in used]
            nodes.append(_sum(parts) if parts else torch.zeros_like(nodes[0]))
        return nodes[-1]

    def _mixed(self, term: Term, nodes: Sequence[Tensor], mix: Mix) -> Tensor:
        operations, choice = self._operations(term), term.input_choice
        if choice is None:
            read = _sum([nodes[i] for i in term.inputs])
        else:
            read = mix(choice, [partial(_same, nodes[i]) for i in term.inputs])
        return mix(term.op_choice, [partial(operations[name], read) for name in term.operations])

    def _decided(self, term: Term, nodes: Sequence[Tensor], kept: Kept) -> Tensor:
        result: Tensor = self._operations(term)[operation_of(term, kept)](_sum([nodes[i] for i in read_by(term, kept)]))
        return result

    def _operations(self, term: Term) -> nn.ModuleDict:
        found = self.terms[term.name.replace(".", "_")]
        assert isinstance(found, nn.ModuleDict)
        return found


def _same(node: Tensor) -> Tensor:
    return node


def _sum(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


Build = Callable[[Kept | None, tuple[int, int, int], int], nn.Module]  # kept, (C, H, W) of an image, classes


@dataclass(frozen=True)
class Space:
    """A search space.

    Attributes:
        cells: kind of cell -> what it may be; names of choices are unique over all of them.
        network: builds the network that is trained and exported, of a decision.
        supernet: builds the network that is searched: with kept None all candidates, called with `way=`; with a
            decision the same network without the others. Often it is `network`.
        text: the decision in the notation of the space's benchmark.
        parsed: the inverse. Raises InputError.
    """

    name: str
    cells: Mapping[str, Cell]
    network: Build
    supernet: Build
    text: Callable[[Kept], str]
    parsed: Callable[[str], SlimArch]

    @property
    def choices(self) -> tuple[Choice, ...]:
        return tuple(choice for cell in self.cells.values() for choice in cell.choices)

    def connected(self, kept: Kept) -> bool:
        """Whether something of the input comes to the output in every kind of cell."""
        return all(cell.used(kept) for cell in self.cells.values())

    def best(self, alpha: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
        """The decision with the largest logits, of those that compute something.

        Args:
            alpha: choice -> (O,).

        Raises:
            InputError: no decision computes anything.
        """
        first = {c.name: tuple(sorted(alpha[c.name].topk(c.keep).indices.tolist())) for c in self.choices}
        if self.connected(first):
            return first
        connected = [kept for kept in self.all() if self.connected(kept)]
        if not connected:
            raise InputError(f"space {self.name}: no cell has a path from its input to its output")
        return max(connected, key=lambda kept: sum(float(alpha[name][list(one)].sum()) for name, one in kept.items()))

    def slim(self, kept: Kept, **origin: str | int | float | bool | None) -> SlimArch:
        """The decision, to write down."""
        sizes = {choice.name: len(choice.candidates) for choice in self.choices}
        return SlimArch({name: tuple(kept[name]) for name in sizes}, sizes, origin)

    def all(self) -> Iterator[dict[str, tuple[int, ...]]]:
        """Every decision, connected or not, in order."""
        ways = [tuple(itertools.combinations(range(len(c.candidates)), c.keep)) for c in self.choices]
        names = [choice.name for choice in self.choices]
        for chosen in itertools.product(*ways):
            yield dict(zip(names, chosen, strict=True))
