"""Genotypes: the notation for cells in which DARTS and what came after it publish what they found.

    Genotype(normal=[('sep_conv_3x3', 1), ('sep_conv_3x3', 0), ...], normal_concat=range(2, 6), reduce=[...], ...)

A pair is an operation and the node that it reads; two pairs in turn are a node. Nodes 0 and 1 are inputs of the cell.
"""

import ast
from collections.abc import Mapping, Sequence

from compressnas.errors import InputError

KINDS = ("normal", "reduce")  # of cells
NODES = range(2, 6)  # those that are searched; all of them are concatenated
PER_NODE = 2  # pairs
EXAMPLE = "Genotype(normal=[('sep_conv_3x3', 1), ...], normal_concat=range(2, 6), reduce=[...], reduce_concat=...)"

Pair = tuple[str, int]  # operation, node that it reads


def genotype_text(pairs: Mapping[str, Sequence[Pair]]) -> str:
    """Kind of cell -> its pairs, as text."""
    concat = f"range({NODES.start}, {NODES.stop})"
    return "Genotype(" + ", ".join(f"{kind}={list(pairs[kind])}, {kind}_concat={concat}" for kind in KINDS) + ")"


def read_genotype(text: str, operations: Sequence[str]) -> dict[str, tuple[Pair, ...]]:
    """The inverse of `genotype_text`; the text is parsed and never run.

    Raises:
        InputError: a text that is no genotype, an operation that is none of `operations`, or a node that is not there
            to be read.
    """
    try:
        parts = _keywords(text)
        listed = {kind: ast.literal_eval(parts[kind]) for kind in KINDS}
        concats = {kind: _numbers(parts[f"{kind}_concat"]) for kind in KINDS}
    except (SyntaxError, ValueError, TypeError, KeyError, RecursionError, MemoryError) as error:
        raise InputError(f"genotype {_short(text)}: expected a text such as {EXAMPLE}") from error
    for kind, numbers in concats.items():
        if tuple(numbers[: len(NODES) + 1]) != tuple(NODES):
            raise InputError(f"genotype: {kind}_concat: expected the nodes {', '.join(map(str, NODES))}")
    return {kind: _pairs(kind, listed[kind], operations) for kind in KINDS}


def _keywords(text: str) -> dict[str, ast.expr]:
    """What stands behind each name in Genotype(name=...). Raises ValueError, SyntaxError."""
    call = ast.parse(text.strip(), mode="eval").body
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.func.id != "Genotype" or call.args:
        raise ValueError("no Genotype(...)")
    found = {part.arg: part.value for part in call.keywords if part.arg is not None}
    if set(found) != {*KINDS, *(f"{kind}_concat" for kind in KINDS)}:
        raise ValueError("other names")
    return found


def _numbers(value: ast.expr) -> Sequence[int]:
    """A list, or range(...), which is not written out. Raises ValueError, TypeError."""
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "range":
        return range(*(ast.literal_eval(one) for one in value.args))
    return tuple(ast.literal_eval(value))


def _pairs(kind: str, listed: object, operations: Sequence[str]) -> tuple[Pair, ...]:
    """The pairs of a kind of cell. Raises InputError."""
    expected = PER_NODE * len(NODES)
    if not isinstance(listed, list | tuple) or len(listed) != expected:
        raise InputError(f"genotype: {kind}: expected a list of {expected} pairs of an operation and a node")
    found: list[Pair] = []
    for number, pair in enumerate(listed):
        where, node = f"genotype: {kind}, pair {number + 1}", NODES[number // PER_NODE]
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise InputError(f"{where}: expected an operation and a node, got {_short(repr(pair))}")
        name, source = pair
        if not isinstance(name, str) or name not in operations:
            raise InputError(f"{where}: operation {_short(str(name))}, expected one of {', '.join(operations)}")
        if not isinstance(source, int) or isinstance(source, bool) or not 0 <= source < node:
            raise InputError(f"{where}: reads node {_short(str(source))}, expected one of 0 to {node - 1}")
        found.append((name, source))
    return tuple(found)


def _short(text: str, most: int = 60) -> str:
    line = " ".join(text.split())
    return line if len(line) <= most else line[:most] + "..."
