"""The charts of the report. Knows altair and vl-convert: no browser, no network, no pandas."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import altair as alt
import vl_convert

from compressnas.runfolder import Epoch, Groups, Layer, Rule

STAYS, GONE, EDGE, INK, THRESHOLD = "#1f5f99", "#e4e7eb", "#8a919c", "#2b2f36", "#c2410c"
# Okabe and Ito's palette without its yellow: told apart by colour-blind readers, and each visible on white.
COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000", "#7f7f7f"]
DASHES = [[1, 0], [6, 3], [2, 2], [8, 2, 2, 2], [1, 0], [6, 3], [2, 2], [8, 2, 2, 2]]
STAGES = {"train": "train dense", "shrink": "shrink", "finetune": "fine-tune"}
LABELS = {"labelColor": INK, "titleColor": INK, "labelFontSize": 11, "titleFontSize": 12, "titleFontWeight": "normal"}
CONFIG = {
    "font": "Helvetica, Arial, sans-serif",
    "background": "white",
    "padding": 4,
    "view": {"stroke": None},
    "axis": LABELS | {"gridColor": "#e6e8eb", "domainColor": EDGE, "tickColor": EDGE},
    "legend": LABELS | {"orient": "bottom", "labelLimit": 0, "symbolSize": 120, "columns": 3, "symbolStrokeWidth": 2},
}
WIDTH = 330  # of a plotting area; with its axis a chart stays near 400 px, so it fits a phone at full size
MAX_KERNEL_LAYERS, MAX_CHANNELS, MAX_HISTOGRAMS, MAX_LINES = 8, 64, 12, 8
DECADES = 14  # gammas this many decades below the largest are drawn as zero


Layered = alt.LayerChart | alt.FacetChart  # what altair says that layering charts gives


@dataclass(frozen=True)
class Chart:
    """A rendered chart: `name` is a file stem, `text` says in words what it shows, width and height are in px."""

    name: str
    title: str
    text: str
    svg: str

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in CSS px."""
        found = re.search(r'width="([\d.]+)" height="([\d.]+)"', self.svg)
        return (round(float(found[1])), round(float(found[2]))) if found else (WIDTH, WIDTH)

    def png(self) -> bytes:
        """The same picture as PNG, two pixels to each CSS px."""
        return vl_convert.svg_to_png(self.svg, scale=2)


def render(name: str, title: str, text: str, chart: Layered) -> Chart:
    # Checking the spec against the schema takes longer than drawing it, and vl-convert refuses what it cannot draw.
    svg = vl_convert.vegalite_to_svg(chart.to_dict(validate=False) | {"config": CONFIG})
    return Chart(name, title, text, _same_ids(svg))


def _same_ids(svg: str) -> str:
    """Vega numbers clips and gradients over the life of the process; the same chart shall be the same bytes."""
    ids = {old: f"part{i}" for i, old in enumerate(re.findall(r' id="((?:clip|gradient_)\d+)"', svg))}
    for old, new in ids.items():
        svg = svg.replace(f' id="{old}"', f' id="{new}"').replace(f"url(#{old})", f"url(#{new})")
    return svg


def data(rows: list[dict[str, Any]]) -> alt.Chart:
    # As text: altair copies its data many times on the way through a layered chart.
    return alt.Chart(alt.InlineData(values=json.dumps(rows), format=alt.JsonDataFormat(type="json")))


def corners(x: alt.X, y: alt.Y) -> dict[str, Any]:
    """Rectangles from x, y to x2, y2."""
    return {"x": x, "y": y, "x2": alt.X2("x2"), "y2": alt.Y2("y2")}


# ---------------------------------------------------------------- over epochs


def _stages(history: Sequence[Epoch], names_of: Mapping[str, str] = STAGES) -> Layered:
    """Names above, every second stage shaded, so that the marks survive a print in grey."""
    spans, start = [], 0
    for stage, epochs in groupby(history, key=lambda epoch: epoch.stage):
        end = start + len(list(epochs))
        name = names_of.get(stage, stage)
        spans.append({"from": start + 0.5, "to": end + 0.5, "middle": (start + end + 1) / 2, "stage": name})
        start = end
    x = alt.X("from:Q", scale=_epochs(history), title="epoch of the run", axis=alt.Axis(grid=False, tickMinStep=1))
    shade = data(spans[1::2]).mark_rect(color="#f1f3f6").encode(x=x, x2=alt.X2("to"))
    borders = data(spans[1:]).mark_rule(color=EDGE, strokeDash=[3, 3]).encode(x=alt.X("from:Q"))
    names = data(spans).mark_text(baseline="bottom", fontSize=11, color=INK).encode(
        x=alt.X("middle:Q"), y=alt.value(-4), text=alt.Text("stage:N"))  # fmt: skip
    return alt.layer(shade, borders, names)


def _epochs(history: Sequence[Epoch]) -> alt.Scale:
    return alt.Scale(domain=[0.5, len(history) + 0.5], nice=False, zero=False)


def error_over_epochs(history: Sequence[Epoch], names_of: Mapping[str, str] = STAGES) -> list[Chart]:
    """Validation and training error in %, all stages in a row. Empty where nothing was recorded."""
    rows: list[dict[str, Any]] = [
        {"epoch": i, "error": 100 * value, "which": which}
        for i, epoch in enumerate(history, start=1)
        for which, value in (("validation", epoch.error), ("training", epoch.train_error))
        if value is not None
    ]
    if not rows:
        return []
    # Linear near zero and logarithmic above: a start at 60 % and an end at 0.8 % are both readable, and 0 % exists.
    marks = [0, 0.5, 1, 2, 5, 10, 20, 50, 100]
    top = next(mark for mark in marks if mark >= min(100, max(row["error"] for row in rows)))
    y = alt.Y(
        "error:Q",
        title="error (%)",
        scale=alt.Scale(type="symlog", constant=1, domain=[0, max(top, 1)], nice=False),
        axis=alt.Axis(values=[mark for mark in marks if mark <= max(top, 1)], format="~g"),
    )
    shown = [which for which in ("validation", "training") if any(row["which"] == which for row in rows)]
    lines = data(rows).mark_line(strokeWidth=2, point=alt.OverlayMarkDef(size=18)).encode(
        x=alt.X("epoch:Q", scale=_epochs(history)), y=y, **_looks("which", shown))  # fmt: skip
    chart = alt.layer(_stages(history, names_of), lines).properties(width=WIDTH, height=210)
    text = "Error on the validation split, and on the training split where it was measured, after each epoch."
    return [render("error", "Error over epochs", text, chart)]


def groups_over_epochs(history: Sequence[Epoch], sizes: Mapping[str, int]) -> list[Chart]:
    """Share of the groups of each set that are alive, in %. More than 8 sets are drawn as one line."""
    alive = [(i, epoch.groups_alive) for i, epoch in enumerate(history, start=1) if epoch.groups_alive]
    names = list(dict.fromkeys(name for _, counts in alive for name in counts))
    most = {name: max(counts.get(name) or 0 for _, counts in alive) for name in names}
    whole = {name: sizes.get(name) or most[name] or 1 for name in names}
    together = len(names) > MAX_LINES
    rows: list[dict[str, Any]] = []
    for i, counts in alive:
        known = {name: count for name, count in counts.items() if count is not None}
        if together and known:
            share = sum(known.values()) / sum(whole[name] for name in known)
            rows.append({"epoch": i, "share": 100 * share, "set": f"all {len(names)} group sets"})
        elif not together:
            rows += [{"epoch": i, "share": 100 * n / whole[name], "set": name} for name, n in known.items()]
    if not rows:
        return []
    shown = list(dict.fromkeys(row["set"] for row in rows))
    lines = data(rows).mark_line(strokeWidth=2, point=alt.OverlayMarkDef(size=18)).encode(
        x=alt.X("epoch:Q", scale=_epochs(history)),
        y=alt.Y("share:Q", title="groups alive (%)", scale=alt.Scale(domain=[0, 100])),
        **_looks("set", shown))  # fmt: skip
    chart = alt.layer(_stages(history), lines).properties(width=WIDTH, height=210)
    text = "Share of the groups of each set that still have a nonzero weight after each epoch."
    return [render("groups", "Groups alive over epochs", text, chart)]


def _looks(field: str, names: Sequence[str]) -> dict[str, Any]:
    """Colour and dash together, so that no line is told by its colour alone."""
    legend = alt.Legend(symbolType="stroke", symbolSize=400)
    colours = alt.Scale(domain=list(names), range=COLOURS[: len(names)])
    dashes = alt.Scale(domain=list(names), range=DASHES[: len(names)])
    return {
        "color": alt.Color(f"{field}:N", sort=None, title=None, scale=colours, legend=legend),
        "strokeDash": alt.StrokeDash(f"{field}:N", sort=None, title=None, scale=dashes, legend=legend),
    }


# ---------------------------------------------------------------- what stayed


def kept_per_layer(layers: Sequence[Layer]) -> list[Chart]:
    """A bar for each axis of each layer: the share that stays, and the counts."""
    rows = [
        {"row": f"{layer.name} {axis}", "stays": 100 * stays / size, "whole": 100, "label": f"{stays} of {size}"}
        for layer in layers
        for axis, stays, size in _axes(layer)
        if size > 1
    ]
    if not rows:
        return []
    y = alt.Y("row:N", sort=None, title=None, axis=alt.Axis(labelLimit=0, ticks=False, domain=False, labelPadding=6))
    x = alt.Scale(domain=[0, 100])
    gone = (
        data(rows)
        .mark_bar(color=GONE, stroke=EDGE, strokeWidth=0.5, height=11)
        .encode(
            y=y, x=alt.X("whole:Q", scale=x, title="stays (%)", axis=alt.Axis(values=[0, 25, 50, 75, 100], grid=False))
        )
    )
    kept = data(rows).mark_bar(color=STAYS, height=11).encode(y=y, x=alt.X("stays:Q", scale=x))
    label = data(rows).mark_text(align="left", dx=6, fontSize=11, color=INK).encode(
        y=y, x=alt.datum(100, scale=x), text=alt.Text("label:N"))  # fmt: skip
    chart = alt.layer(gone, kept, label).properties(width=190, height=alt.Step(19))
    text = "Dark: stays. Light: gone. The counts are what stays of what the dense network has."
    return [render("layers", "What stayed, layer by layer", text, chart)]


def _axes(layer: Layer) -> list[tuple[str, int, int]]:
    """(what, how many stay, how many there were) for each axis of the weight."""
    conv = len(layer.before) > 2
    out = layer.after[0] if layer.kept_out is None else len(layer.kept_out)
    into = layer.after[1] if layer.kept_in is None else len(layer.kept_in)
    axes = [("filters" if conv else "neurons", out, layer.before[0]),
            ("input channels" if conv else "inputs", into, layer.before[1])]  # fmt: skip
    if conv and layer.kept_positions is not None:
        used = sum(bool(value) for channel in layer.kept_positions for row in channel for value in row)
        axes.append(("kernel positions", used, math.prod(layer.before[1:])))
    return axes


def kernels(layers: Sequence[Layer]) -> list[Chart]:
    """One picture for each of the first 8 conv layers: the positions of its kernels that are still read."""
    conv = [layer for layer in layers if layer.kept_positions]
    return [_kernel(layer) for layer in conv[:MAX_KERNEL_LAYERS] if layer.kept_positions]


def _kernel(layer: Layer) -> Chart:
    positions = [[[value or 0.0 for value in row] for row in channel] for channel in layer.kept_positions or []]
    channels = list(range(len(positions)))
    if layer.kept_in is not None and len(positions) == len(layer.kept_in):
        channels = list(layer.kept_in)
    names, what = [str(channel) for channel in channels], "a square of cells for each input channel (its number above)"
    if len(positions) > MAX_CHANNELS:
        mean = [[sum(cells) / len(cells) for cells in zip(*rows, strict=True)] for rows in zip(*positions, strict=True)]
        what, names, positions = f"the mean over {len(positions)} input channels", [""], [mean]
    kh, kw = max(len(tile) for tile in positions), max((len(row) for tile in positions for row in tile), default=0)
    across = min(len(positions), max(1, 48 // (kw + 1)))
    cells, tiles = [], []
    for i, tile in enumerate(positions):
        left, top = (i % across) * (kw + 1), (i // across) * (kh + 2) + 1
        tiles.append({"x": left, "y": top, "x2": left + kw, "y2": top + kh, "middle": left + kw / 2, "name": names[i]})
        cells += [{"x": left + c, "x2": left + c + 1, "y": top + r, "y2": top + r + 1, "share": 100 * share}
                  for r, row in enumerate(tile) for c, share in enumerate(row) if share > 0]  # fmt: skip
    wide, high = across * (kw + 1), math.ceil(len(positions) / across) * (kh + 2)
    size = min(16.0, 390 / wide)
    x = alt.X("x:Q", axis=None, scale=alt.Scale(domain=[0, wide], nice=False))
    y = alt.Y("y:Q", axis=None, scale=alt.Scale(domain=[0, high], nice=False, reverse=True))
    ramp = alt.Scale(domain=[0, 100], range=["#cfe0f0", "#0b3c6b"])
    colour = alt.Color("share:Q", scale=ramp, legend=alt.Legend(
        title="filters that read it (%)", gradientLength=150, gradientThickness=10, values=[0, 50, 100]))  # fmt: skip
    chart = alt.layer(
        data(tiles).mark_rect(color="#f6f7f9", stroke=EDGE, strokeWidth=0.8).encode(**corners(x, y)),
        data(cells).mark_rect(stroke="white", strokeWidth=0.5).encode(**corners(x, y), color=colour),
        data(tiles)
        .mark_text(baseline="bottom", dy=-1, fontSize=10, color=INK)
        .encode(x=alt.X("middle:Q"), y=alt.Y("y:Q"), text=alt.Text("name:N")),
    ).properties(width=round(wide * size), height=round(high * size))
    text = f"{layer.name}: {what}. A filled cell is a kernel position that is still read, an empty one is gone."
    return render(f"kernels-{stem(layer.name)}", f"Kernel positions of {layer.name}", text, chart)


def input_map(layers: Sequence[Layer]) -> list[Chart]:
    """The pixels a fully connected first layer still reads, where its inputs form a square image."""
    first = layers[0] if layers else None
    if first is None or len(first.before) != 2 or first.kept_in is None:
        return []
    side = math.isqrt(first.before[1])
    if side * side != first.before[1] or side < 4:
        return []
    rows = [{"x": i % side, "x2": i % side + 1, "y": i // side, "y2": i // side + 1} for i in first.kept_in]
    domain = alt.Scale(domain=[0, side], nice=False)
    ticks = alt.Axis(grid=False, tickCount=5)
    x = alt.X("x:Q", scale=domain, title="pixel column", axis=ticks)
    y = alt.Y("y:Q", scale=alt.Scale(domain=[0, side], nice=False, reverse=True), title="pixel row", axis=ticks)
    chart = alt.layer(
        data([{"x": 0, "x2": side, "y": 0, "y2": side}]).mark_rect(color=GONE, stroke=EDGE).encode(
            **corners(x, y)),
        data(rows).mark_rect(color=STAYS, stroke="white", strokeWidth=0.4).encode(**corners(x, y)),
    ).properties(width=280, height=280)  # fmt: skip
    text = f"Dark: the {len(rows)} of {side * side} pixels that {first.name} reads. Light: pixels nobody reads."
    return [render("pixels", "Input pixels that are read", text, chart)]


# ---------------------------------------------------------------- gamma


def gammas(groups: Mapping[str, Groups], rule: Rule | None) -> list[Chart]:
    """A histogram of gamma for each of the first 12 group sets, all on the same logarithmic axis."""
    known = {name: group for name, group in groups.items() if group.gamma}
    logs = [math.log10(g) for group in known.values() for g in group.gamma or [] if g is not None and g > 0]
    cut = rule.threshold if rule is not None and rule.name == "threshold" else None
    cut = cut if cut is not None and cut > 0 else None
    if cut is not None:
        logs.append(math.log10(cut))
    high = math.ceil(max(logs, default=0) + 1e-9)
    low = max(math.floor(min(logs, default=-1)), high - DECADES)
    return [_histogram(name, group, low, high, cut) for name, group in list(known.items())[:MAX_HISTOGRAMS]]


def _histogram(name: str, group: Groups, low: int, high: int, cut: float | None) -> Chart:
    gamma, kept = group.gamma or [], set(group.kept or ())
    side = (high - low) / 16  # half the room that the bars for zero and infinity take at either end
    zero, infinite = (low - 2 * side, low - side), (high + side, high + 2 * side)
    counts: dict[tuple[float, float], dict[str, int]] = {}
    for index, value in enumerate(gamma):
        if value is None:
            place = infinite
        elif value <= 0 or math.log10(value) < low:
            place = zero
        else:
            place = _bin(math.log10(value), low, high, cut)
        bar = counts.setdefault(place, {"stays": 0, "gone": 0})
        bar["stays" if index in kept or group.kept is None else "gone"] += 1
    rows: list[dict[str, Any]] = []
    for (left, right), bar in sorted(counts.items()):
        rows.append({"x": left, "x2": right, "y": 0, "y2": bar["stays"], "state": "stays"})
        rows.append({"x": left, "x2": right, "y": bar["stays"], "y2": bar["stays"] + bar["gone"], "state": "gone"})
    at_zero = sum(counts.get(zero, {}).values())
    text = f"{name}: gamma of its {len(gamma)} groups, {at_zero} at zero (or below 1e{low})"
    text += f", {gamma.count(None)} infinite." if None in gamma else "."
    if cut is not None:
        text += f" The line is the threshold {cut:.3g}: what is at or below it goes."
    chart = _bars([row for row in rows if row["y2"] > row["y"]], low, high, side, cut)
    return render(f"gamma-{stem(name)}", f"Gamma of {name}", text, chart)


def _bin(value: float, low: int, high: int, cut: float | None) -> tuple[float, float]:
    """The bin (left, right] of a log10 gamma; the threshold is an edge, so that no bar stands on both its sides."""
    step = 0.25 if high - low <= 6 else 0.5
    origin = low if cut is None else math.log10(cut)
    number = max(math.ceil((value - origin) / step) - 1, math.floor((low - origin) / step))
    left = origin + step * number
    return max(left, low), min(left + step, high)


def _bars(rows: list[dict[str, Any]], low: int, high: int, side: float, cut: float | None) -> Layered:
    every = math.ceil((high - low) / 6)
    values = [low - 1.5 * side, *range(low, high + 1, every), high + 1.5 * side]
    words = f"datum.value < {low - side} ? '0' : datum.value > {high + side} ? 'inf' : '1e' + datum.value"
    x = alt.X("x:Q", title="gamma (log scale)", scale=alt.Scale(domain=[low - 2 * side, high + 2 * side], nice=False),
              axis=alt.Axis(values=values, labelExpr=words, grid=False))  # fmt: skip
    # Hundreds of groups at zero stand beside bins of one or two: the square root keeps both visible.
    top = max(row["y2"] for row in rows)
    y = alt.Y("y:Q", title="groups (sqrt scale)", scale=alt.Scale(type="sqrt", domain=[0, top], nice=False),
              axis=alt.Axis(values=_ticks(top), format="d"))  # fmt: skip
    legend = alt.Legend(symbolType="square", symbolStrokeColor=EDGE, symbolStrokeWidth=0.6)
    looks = alt.Scale(domain=["stays", "gone"], range=[STAYS, GONE])
    colour = alt.Color("state:N", title=None, scale=looks, legend=legend)
    bars = data(rows).mark_rect(stroke=EDGE, strokeWidth=0.6).encode(**corners(x, y), color=colour)
    layers: list[alt.Chart] = [bars]
    if cut is not None:
        line = [{"x": math.log10(cut), "label": f"threshold {cut:.3g}"}]
        layers.append(data(line).mark_rule(color=THRESHOLD, strokeWidth=2, strokeDash=[5, 3]).encode(x=x))
        layers.append(data(line).mark_text(color=THRESHOLD, baseline="bottom", dy=-3, fontSize=11).encode(
            x=x, y=alt.value(0), text=alt.Text("label:N")))  # fmt: skip
    return alt.layer(*layers).properties(width=WIDTH, height=120)


def _ticks(top: int) -> list[int]:
    """Round counts up to `top`, far enough apart on a square-root scale."""
    ticks = [0]
    for tick in (tick for power in range(10) for tick in (10**power, 2 * 10**power, 5 * 10**power)):
        if tick <= top and math.sqrt(tick / top) - math.sqrt(ticks[-1] / top) >= 0.15:
            ticks.append(tick)
    return ticks


def stem(name: str) -> str:
    """A set or layer name as part of a file name."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip(".-") or "layer"
