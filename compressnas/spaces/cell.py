"""What a cell may be: nodes, what they read, candidate operations; and what a space of such cells is.

A node is the sum of its terms; the last node is the cell's output. A term reads some of the nodes before it and applies
an operation to their sum, or to their concatenation; which nodes and which operation is a choice each. A space is
written down with `Term`, `Cell` and a function that stacks cells (see cell_module.py) to a network; the supernet and
the derived network are the same code, with all candidates and with those that stay.

A search may draw less than a decision says: in DARTS's space a node of the supernet has one term, and two of the
derived cell, which take their candidates, ranks and weights from that one. See `Cell.mixed` and `Term.drawn`.
"""

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from compressnas.errors import InputError
from compressnas.slim import Origin, SlimArch
from compressnas.spaces.operations import NOTHING, SAME

Kept = Mapping[str, Sequence[int]]  # choice -> indices of the candidates that stay


@dataclass(frozen=True)
class Choice:
    """`keep` of the candidates stay.

    Attributes:
        name: of the group set in a SlimArch: `cell.edge3.op`.
        logits: name of the choice that a search draws for it; its own, where that is the same one.
        rank: how many candidates with larger logits are passed over.
    """

    name: str
    candidates: tuple[str, ...]
    keep: int
    logits: str
    rank: int = 0

    def best(self, alpha: Tensor) -> tuple[int, ...]:
        """The candidates with the largest logits (O,) from the rank on; of equal ones the first."""
        order = alpha.argsort(descending=True, stable=True).tolist()
        start = min(self.rank, len(order) - self.keep)
        return tuple(sorted(order[start : start + self.keep]))


@dataclass(frozen=True)
class Term:
    """What is added to a node: an operation, applied to nodes that are read.

    Attributes:
        inputs: numbers of the nodes that may be read; inputs of the cell come first.
        operations: candidates, of which one stays; without any, what is read is added as it is.
        reads: how many of the inputs are read.
        join: how what is read goes into the operation: as a sum; or concatenated, in a supernet with zeros for what is
            not read.
        drawn: the term of the supernet that this one takes its ranks and weights from, where it is another.
        rank: which of the best candidates of that term it takes; 0 is the best.
    """

    name: str
    inputs: tuple[int, ...]
    operations: tuple[str, ...] = ()
    reads: int = 1
    join: Literal["sum", "concat"] = "sum"
    drawn: str = ""
    rank: int = 0

    @property
    def origin(self) -> str:
        """Name of the term of the supernet."""
        return self.drawn or self.name

    @property
    def input_choice(self) -> Choice | None:
        """None where all that may be read is read."""
        if len(self.inputs) == self.reads:
            return None
        candidates = tuple(str(node) for node in self.inputs)
        return Choice(f"{self.name}.input", candidates, self.reads, f"{self.origin}.input", self.rank)

    @property
    def op_choice(self) -> Choice | None:
        """None where there are no operations."""
        if not self.operations:
            return None
        return Choice(f"{self.name}.op", self.operations, 1, f"{self.origin}.op", self.rank)


Nodes = tuple[tuple[Term, ...], ...]


@dataclass(frozen=True)
class Cell:
    """A kind of cell: node `inputs` + i is the sum of the terms `nodes[i]`; its output is the last node.

    Attributes:
        nodes: what a decision says.
        mixed: what a supernet mixes and a search draws, where it is not the same.
    """

    inputs: int
    nodes: Nodes
    mixed: Nodes = ()

    @property
    def terms(self) -> tuple[Term, ...]:
        return terms_of(self.nodes)

    @property
    def mixed_nodes(self) -> Nodes:
        return self.mixed or self.nodes

    @property
    def choices(self) -> tuple[Choice, ...]:
        """What is drawn."""
        return _choices(self.mixed_nodes)

    @property
    def decisions(self) -> tuple[Choice, ...]:
        """What a SlimArch names."""
        return _choices(self.nodes)

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


def terms_of(nodes: Nodes) -> tuple[Term, ...]:
    """All terms of some nodes."""
    return tuple(term for node in nodes for term in node)


def _choices(nodes: Nodes) -> tuple[Choice, ...]:
    return tuple(choice for term in terms_of(nodes) for choice in (term.input_choice, term.op_choice) if choice)


def read_by(term: Term, kept: Kept) -> tuple[int, ...]:
    """Numbers of the nodes that a term reads."""
    choice = term.input_choice
    return term.inputs if choice is None else tuple(term.inputs[i] for i in kept[choice.name])


def operation_of(term: Term, kept: Kept) -> str:
    """Name of the operation that a term applies."""
    choice = term.op_choice
    if choice is None:
        return SAME
    (chosen,) = kept[choice.name]
    return term.operations[chosen]


# ---------------------------------------------------------------- the space

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
        """What a search draws, and has logits for."""
        return tuple(choice for cell in self.cells.values() for choice in cell.choices)

    @property
    def decisions(self) -> tuple[Choice, ...]:
        """What a decision names; the same as `choices`, but where a search draws less than a decision says."""
        return decisions_of(self.cells)

    def connected(self, kept: Kept) -> bool:
        """Whether something of the input comes to the output in every kind of cell."""
        return all(cell.used(kept) for cell in self.cells.values())

    def best(self, alpha: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
        """The decision with the largest logits, of those that compute something: the first one of `ranked`.

        Raises:
            InputError: no decision computes anything.
        """
        for kept in self.ranked(alpha):
            return kept
        raise InputError(f"space {self.name}: no cell has a path from its input to its output")

    def ranked(self, alpha: Mapping[str, Tensor]) -> Iterator[dict[str, tuple[int, ...]]]:
        """The decisions that compute something, by falling sum of the logits of what stays.

        Those are found one after the other, so that the first ones of a large space cost little. Of equal sums the one
        with the first candidates comes first.

        Args:
            alpha: choice that is drawn -> (O,).
        """
        options = [self._options(choice, alpha[choice.name]) for choice in self.choices]
        first = (0,) * len(options)
        heap, met = [(0.0, first)], {first}
        while heap:
            _, at = heapq.heappop(heap)
            kept = {name: some for ways, i in zip(options, at, strict=True) for name, some in ways[i][1].items()}
            if self.connected(kept):
                yield {choice.name: kept[choice.name] for choice in self.decisions}
            for which, ways in enumerate(options):
                after = (*at[:which], at[which] + 1, *at[which + 1 :])
                if after[which] < len(ways) and after not in met:
                    met.add(after)
                    heapq.heappush(heap, (sum(ways[i][0] for ways, i in zip(options, after, strict=True)), after))

    def _options(self, drawn: Choice, alpha: Tensor) -> list[tuple[float, dict[str, tuple[int, ...]]]]:
        """What the decisions that share some logits may say: how far its sum is from the largest, and it; best first.

        Args:
            alpha: (O,).
        """
        sharing = [choice for choice in self.decisions if choice.logits == drawn.name]
        count = min(len(alpha), max((choice.rank + choice.keep for choice in sharing), default=0))
        values = alpha.double()
        ways = []
        for some in itertools.combinations(range(len(alpha)), count):
            only = torch.full_like(values, -math.inf)
            only[list(some)] = values[list(some)]
            ways.append((float(values[list(some)].sum()), {choice.name: choice.best(only) for choice in sharing}))
        ways.sort(key=lambda way: -way[0])  # stable
        return [(ways[0][0] - total, kept) for total, kept in ways]

    def slim(self, kept: Kept, **origin: str | int | float | bool | None) -> SlimArch:
        """The decision, to write down."""
        return slim_of(self.cells, kept, origin)

    def all(self) -> Iterator[dict[str, tuple[int, ...]]]:
        """Every decision, connected or not, in order."""
        ways = [tuple(itertools.combinations(range(len(c.candidates)), c.keep)) for c in self.decisions]
        names = [choice.name for choice in self.decisions]
        for chosen in itertools.product(*ways):
            yield dict(zip(names, chosen, strict=True))


def decisions_of(cells: Mapping[str, Cell]) -> tuple[Choice, ...]:
    """What a decision on these cells names."""
    return tuple(choice for cell in cells.values() for choice in cell.decisions)


def slim_of(cells: Mapping[str, Cell], kept: Kept, origin: Origin | None = None) -> SlimArch:
    """A decision on these cells, to write down."""
    sizes = {choice.name: len(choice.candidates) for choice in decisions_of(cells)}
    return SlimArch({name: tuple(kept[name]) for name in sizes}, sizes, origin or {})


# ---------------------------------------------------------------- weights


@runtime_checkable
class Renamed(Protocol):
    """A module whose tensors may have other names in the supernet."""

    def origins(self) -> Mapping[str, str]:
        """Name of each tensor, within the module -> its name in the supernet, within the same module."""


@runtime_checkable
class Narrowed(Protocol):
    """A network some of whose parameters are columns of the supernet's.

    Attributes:
        columns: parameter -> indices along dimension 1 of the supernet's.
    """

    columns: Mapping[str, Sequence[int]]


@torch.no_grad()
def take_weights(derived: nn.Module, supernet: nn.Module) -> None:
    """Give a network with a decision the weights and statistics of the supernet, in place.

    Args:
        derived: `Space.supernet` of a decision.
        supernet: `Space.supernet` of None, with the same settings, shape and classes.

    Raises:
        InputError: the supernet lacks a tensor, or has it in another shape.
    """
    origin = {
        f"{path}.{own}": f"{path}.{theirs}"
        for path, module in derived.named_modules()
        if isinstance(module, Renamed)
        for own, theirs in module.origins().items()
    }
    source, columns = supernet.state_dict(), derived.columns if isinstance(derived, Narrowed) else {}
    for name, value in derived.state_dict().items():
        found = source.get(origin.get(name, name))
        if found is not None and name in columns:
            found = found[:, list(columns[name])]
        if found is None or found.shape != value.shape:
            got = "nothing" if found is None else f"shape {tuple(found.shape)}"
            raise InputError(f"{name}: expected shape {tuple(value.shape)} in the supernet, got {got}")
        value.copy_(found)
