"""A cell as a module: with all candidates, or with those that stay."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from compressnas.errors import InputError
from compressnas.spaces.cell import Cell, Choice, Kept, Term, operation_of, read_by, terms_of


class Mix(Protocol):
    """How a supernet puts the candidates of a choice together; each is computed when it is called."""

    def __call__(self, choice: Choice, candidates: Sequence[Callable[[], Tensor]]) -> Tensor: ...


class Make(Protocol):
    """Name of an operation -> module."""

    def __call__(self, name: str, /, *, stride: int) -> nn.Module: ...


Reading = Callable[[Term, int], nn.Module | None]  # what a term applies to a node before all else; None: nothing


class CellModule(nn.Module):
    """A cell: with all candidates (`kept` None), or with those that stay.

    Args:
        kept: the decision; then only operations that are used are there.
        stride: of the operations of terms that may read inputs of the cell only, and in a derived cell of those that
            do read one.
        reading: what terms apply to the nodes that they read.
    """

    def __init__(
        self, cell: Cell, make: Make, kept: Kept | None = None, stride: int = 1, reading: Reading | None = None
    ) -> None:
        super().__init__()
        self.cell, self.kept = cell, None if kept is None else dict(kept)
        self.terms, self.readings = nn.ModuleDict(), nn.ModuleDict()
        used = frozenset[str]() if kept is None else cell.used(kept)
        for term in terms_of(cell.mixed_nodes) if kept is None else cell.terms:
            if kept is None:
                names, sources = term.operations, term.inputs
            elif term.name not in used:
                names, sources = (), ()
            else:
                names, sources = (operation_of(term, kept),) if term.operations else (), read_by(term, kept)
            strided = stride if all(source < cell.inputs for source in sources) else 1
            self.terms[_key(term.name)] = nn.ModuleDict({name: make(name, stride=strided) for name in names})
            read = {} if reading is None else {str(source): reading(term, source) for source in sources}
            self.readings[_key(term.name)] = nn.ModuleDict({n: module for n, module in read.items() if module})

    def forward(self, *inputs: Tensor, way: "Mix | Kept | None" = None) -> Tensor:
        """(B, C, H, W) each -> the last node.

        Args:
            way: how a supernet goes: with a mixture of each choice, or as the decision says.
        """
        way = self.kept if way is None else way
        if way is None:
            raise InputError("a supernet is called with a decision or a mixture, got neither")
        nodes = list(inputs)
        if isinstance(way, Mapping):
            used = self.cell.used(way)
            for node in self.cell.nodes:
                parts = [self._decided(term, nodes, way) for term in node if term.name in used]
                nodes.append(total_of(parts) if parts else torch.zeros_like(nodes[0]))
        else:
            for node in self.cell.mixed_nodes:
                nodes.append(total_of([self._mixed(term, nodes, way) for term in node]))
        return nodes[-1]

    def origins(self) -> dict[str, str]:
        """Name of each tensor -> its name in the supernet's cell."""
        origin = {_key(term.name): _key(term.origin) for term in self.cell.terms}
        split = {name: name.split(".", 2) for name in self.state_dict()}  # terms or readings, the term, what is in it
        return {name: f"{group}.{origin[term]}.{rest}" for name, (group, term, rest) in split.items()}

    def _mixed(self, term: Term, nodes: Sequence[Tensor], mix: Mix) -> Tensor:
        read, operations = term.input_choice, term.op_choice
        if read is None:
            joined = _joined(term, [self._read(term, nodes, i) for i in term.inputs])
        else:
            candidate = self._block if term.join == "concat" else self._read
            joined = mix(read, [partial(candidate, term, nodes, i) for i in term.inputs])
        if operations is None:
            return joined
        return mix(operations, [partial(self._of(self.terms, term)[name], joined) for name in term.operations])

    def _decided(self, term: Term, nodes: Sequence[Tensor], kept: Kept) -> Tensor:
        sources = read_by(term, kept)
        values = {i: self._read(term, nodes, i) for i in sources}
        if term.join == "concat" and self.kept is None:
            nothing = torch.zeros_like(values[sources[0]])
            joined = _joined(term, [values.get(i, nothing) for i in term.inputs])
        else:
            joined = _joined(term, list(values.values()))
        if not term.operations:
            return joined
        result: Tensor = self._of(self.terms, term)[operation_of(term, kept)](joined)
        return result

    def _read(self, term: Term, nodes: Sequence[Tensor], source: int) -> Tensor:
        readings = self._of(self.readings, term)
        value: Tensor = readings[str(source)](nodes[source]) if str(source) in readings else nodes[source]
        return value

    def _block(self, term: Term, nodes: Sequence[Tensor], source: int) -> Tensor:
        """The concatenation of what may be read, zero but for one part."""
        value = self._read(term, nodes, source)
        nothing = torch.zeros_like(value)
        return _joined(term, [value if i == source else nothing for i in term.inputs])

    def _of(self, modules: nn.ModuleDict, term: Term) -> nn.ModuleDict:
        found = modules[_key(term.origin if self.kept is None else term.name)]
        assert isinstance(found, nn.ModuleDict)
        return found


def _key(name: str) -> str:
    return name.replace(".", "_")  # names of modules have no dots


def _joined(term: Term, parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts), dim=1) if term.join == "concat" else total_of(parts)


def total_of(parts: Sequence[Tensor]) -> Tensor:
    """The sum of one tensor or several, of the same shape."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
