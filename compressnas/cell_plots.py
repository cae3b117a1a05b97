"""Cells drawn as graphs: a column of nodes, one operation to each arrow. Plain SVG.

Arrows to the next node run straight down, the others run beside the column. At every node each arrow has a line of its
own for its name, so no two names meet; where arrows cross, the later one has a white rim.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from markupsafe import escape

from compressnas.plots import COLOURS, EDGE, INK, Chart, stem
from compressnas.runfolder import Graph, Search

ROW, OUT, LANE, GAP, TURN, ARROW = 24, 8, 9, 16, 6, 9  # px
LETTER, MAX_LETTERS, TEXT, PADDING = 6.2, 24, 11, 8
FONT = "Helvetica, Arial, sans-serif"

Edge = tuple[int, int, str]  # source, target, operation


@dataclass(frozen=True)
class Beside:
    """An arrow beside the column: left (-1) or right (1), in a lane, the first lane being next to the names."""

    edge: Edge
    side: int
    lane: int


def cells(search: Search) -> list[Chart]:
    """One picture for each kind of cell; an operation has the same colour in all of them."""
    graphs = {kind: graph for kind, graph in (search.graphs or {}).items() if graph.nodes}
    known = [name for options in (search.choices or {}).values() for name in options.candidates or []]
    drawn = {operation for graph in graphs.values() for *_, operation in graph.edges or []}
    names = [name for name in dict.fromkeys([*known, *sorted(drawn)]) if name in drawn]
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}
    return [_cell(kind, graph, colours) for kind, graph in graphs.items()]


def _cell(kind: str, graph: Graph, colours: Mapping[str, str]) -> Chart:
    nodes, edges = graph.nodes or [], sorted(graph.edges or [], key=lambda edge: (edge[1], -edge[0], edge[2]))
    arrows = [f"{operation} from {nodes[source]} to {nodes[target]}" for source, target, operation in edges]
    text = "; ".join(arrows) or "nothing leads from its input to its output"
    title = f"The cell, {kind}" if kind != "cell" else "The cell"
    return Chart(f"cell-{stem(kind)}", title, f"Arrows of the cell: {text}.", _picture(nodes, edges, colours))


# ---------------------------------------------------------------- where things are


def _straight(edges: Sequence[Edge]) -> list[Edge]:
    """The first of the arrows from each node to the next."""
    near = [edge for edge in edges if edge[1] == edge[0] + 1]
    return [next(same) for _, same in groupby(near, key=lambda edge: edge[1])]


def _beside(edges: Sequence[Edge]) -> list[Beside]:
    """The other arrows, short ones inside; each on the side where fewer arrive at its target."""
    rest = list(edges)
    for edge in _straight(edges):
        rest.remove(edge)
    placed: list[Beside] = []
    for edge in sorted(rest, key=lambda edge: (edge[1] - edge[0], edge[1])):
        options = [Beside(edge, side, _free_lane(edge, [p for p in placed if p.side == side])) for side in (1, -1)]
        placed.append(min(options, key=lambda o: (sum(p.edge[1] == edge[1] and p.side == o.side for p in placed),
                                                  sum(p.side == o.side for p in placed))))  # fmt: skip
    return placed


def _free_lane(edge: Edge, placed: Sequence[Beside]) -> int:
    taken = {p.lane for p in placed if p.edge[0] < edge[1] and edge[0] < p.edge[1]}
    return next(lane for lane in range(len(placed) + 1) if lane not in taken)


def _rows(beside: Sequence[Beside], node: int, side: int, end: int) -> list[Beside]:
    """Arrows at a node on one side from top to bottom: those that leave (end 0) or arrive (end 1), uncrossed."""
    here = [p for p in beside if p.side == side and p.edge[end] == node]
    return sorted(here, key=lambda p: p.lane, reverse=end == 0)


# ---------------------------------------------------------------- the picture


@dataclass(frozen=True)
class Places:
    """x of the column and of the ends of names beside it, top and bottom of each node, height of all."""

    middle: float
    half: float
    name: float
    tops: list[float]
    bottoms: list[float]

    def lane(self, arrow: Beside) -> float:
        return self.middle + arrow.side * (self.half + GAP + self.name + LANE * (arrow.lane + 1))

    def leaving(self, arrow: Beside, beside: Sequence[Beside]) -> float:
        rows = _rows(beside, arrow.edge[0], arrow.side, 0)
        return self.bottoms[arrow.edge[0]] - 5 - OUT * (len(rows) - 1 - rows.index(arrow))

    def arriving(self, arrow: Beside, beside: Sequence[Beside]) -> float:
        rows = _rows(beside, arrow.edge[1], arrow.side, 1)
        return self.tops[arrow.edge[1]] + ROW * (rows.index(arrow) + 0.5)


def _picture(nodes: Sequence[str], edges: Sequence[Edge], colours: Mapping[str, str]) -> str:
    straight, beside = _straight(edges), _beside(edges)
    places = _places(nodes, straight, beside)
    lines, names = [], []
    for arrow in sorted(beside, key=lambda arrow: -arrow.lane):
        colour = colours[arrow.edge[2]]
        leaves, arrives, lane = places.leaving(arrow, beside), places.arriving(arrow, beside), places.lane(arrow)
        edge_of_node = places.middle + arrow.side * places.half
        lines.append(_line(_bracket(edge_of_node, lane, leaves, arrives, arrow.side), colour))
        lines.append(_head(edge_of_node, arrives, arrow.side, 0, colour))
        at = edge_of_node + arrow.side * (GAP + places.name / 2)
        names.append(_name(arrow.edge[2], at, arrives, colour))
    for source, target, operation in straight:
        top, bottom, colour = places.bottoms[source], places.tops[target], colours[operation]
        lines.append(_line(f"M{places.middle:g} {top:g}V{bottom - 4:g}", colour))
        lines.append(_head(places.middle, bottom, 0, -1, colour))
        names.append(_name(operation, places.middle, (top + bottom - ARROW) / 2, colour))
    used = {end for source, target, _ in edges for end in (source, target)}
    boxes = [_node(name, places, i, i in used) for i, name in enumerate(nodes)]
    lanes = [max((arrow.lane + 1 for arrow in beside if arrow.side == side), default=-1) for side in (-1, 1)]
    return _svg(places, lanes, lines + names + boxes)


def _places(nodes: Sequence[str], straight: Sequence[Edge], beside: Sequence[Beside]) -> Places:
    followed = {target for _, target, _ in straight}
    tops, bottoms, y = [], [], 4.0
    for node in range(len(nodes)):
        y += 0 if node == 0 else 52 if node in followed else 22
        tops.append(y)
        leaving, arriving = ([len(_rows(beside, node, side, end)) for side in (-1, 1)] for end in (0, 1))
        y += max(28, ROW * max(arriving) + (OUT * max(leaving) + 4 if any(leaving) else 0))
        bottoms.append(y)
    half = max(18.0, *(_wide(name) / 2 for name in nodes))
    name = max((_wide(arrow.edge[2]) for arrow in beside), default=0.0)
    sides = [max((LANE * (a.lane + 2) for a in beside if a.side == side), default=0) for side in (-1, 1)]
    widest = max((_wide(operation) / 2 for *_, operation in straight), default=0.0)
    left = max(half + (GAP + name + sides[0] if sides[0] else 0), widest)
    return Places(left + 4, half, name, tops, bottoms)


def _svg(places: Places, lanes: Sequence[int], parts: Sequence[str]) -> str:
    reach = places.half + GAP + places.name
    right = reach + LANE * (lanes[1] + 1) if lanes[1] > 0 else max(places.half, places.middle)
    width, height = round(places.middle + right + 4), round(places.bottoms[-1] + 4)
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    look = f'font-family="{FONT}" font-size="{TEXT}" text-anchor="middle"'
    whole = f'<rect width="{width}" height="{height}" fill="white"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {look}>{whole}{"".join(parts)}</svg>'


def _bracket(edge: float, lane: float, top: float, bottom: float, side: int) -> str:
    """From a node out to the lane, down, and back towards the column, with round corners."""
    corner = lane - side * TURN
    return (f"M{edge:g} {top:g}H{corner:g}Q{lane:g} {top:g} {lane:g} {top + TURN:g}V{bottom - TURN:g}"
            f"Q{lane:g} {bottom:g} {corner:g} {bottom:g}H{edge + side * 4:g}")  # fmt: skip


def _line(path: str, colour: str) -> str:
    rim = f'<path d="{path}" fill="none" stroke="white" stroke-width="6"/>'
    return rim + f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'


def _head(x: float, y: float, across: int, down: int, colour: str) -> str:
    """An arrow head with its tip at (x, y); (across, down) points back along the arrow."""
    back, wide = (x + across * ARROW, y + down * ARROW), (4.5 * down, 4.5 * across)
    ends = [(x, y), (back[0] + wide[0], back[1] + wide[1]), (back[0] - wide[0], back[1] - wide[1])]
    return f'<polygon points="{" ".join(f"{a:g},{b:g}" for a, b in ends)}" fill="{colour}"/>'


def _name(operation: str, x: float, y: float, colour: str) -> str:
    wide = _wide(operation)
    box = f'<rect x="{x - wide / 2:g}" y="{y - 9:g}" width="{wide:g}" height="18" rx="9" fill="white"'
    return f'{box} stroke="{colour}" stroke-width="1.6"/>{_text(operation, x, y)}'


def _node(name: str, places: Places, node: int, used: bool) -> str:
    x, y, wide = places.middle - places.half, places.tops[node], 2 * places.half
    look = f'stroke="{INK}" fill="#eef1f5"' if used else f'stroke="{EDGE}" stroke-dasharray="3 3" fill="white"'
    box = f'<rect x="{x:g}" y="{y:g}" width="{wide:g}" height="{places.bottoms[node] - y:g}" rx="6" {look}/>'
    return box + _text(name, places.middle, (y + places.bottoms[node]) / 2)


def _text(words: str, x: float, y: float) -> str:
    return f'<text x="{x:g}" y="{y + 4:g}" fill="{INK}">{escape(_short(words))}</text>'


def _short(words: str) -> str:
    """What fits, without what SVG cannot hold."""
    clean = "".join(letter if letter.isprintable() else " " for letter in words)
    return clean if len(clean) <= MAX_LETTERS else clean[: MAX_LETTERS - 3] + "..."


def _wide(words: str) -> float:
    return round(LETTER * len(_short(words)) + 2 * PADDING, 1)
