"""The charts of a search at initialisation: trace norms, alpha, scores. Knows altair."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt

from compressnas.plots import COLOURS, EDGE, INK, STAYS, THRESHOLD, WIDTH, Chart, corners, data, render, stem
from compressnas.readable import counted, scientific
from compressnas.runfolder import Options, Search

FALLS, MIDDLE = "#b35806", "#f7f7f7"  # alpha below zero, and zero
MAX_CHOICES, BINS = 60, 20
NARROW = 42  # px: numbers fit into wider columns
TINY, HUGE, LARGEST = -300, 300, 1e150  # powers of ten, and scores, that are drawn where they are


# ---------------------------------------------------------------- trace norms


def traces(search: Search) -> list[Chart]:
    """T of the cell of each step as dots, nu as a line. Empty where no T is above zero."""
    steps = search.traces or []
    dots, limits = _above_zero(steps), _above_zero(search.limits or [])
    if not dots:
        return []
    axis = _powers([row["value"] for row in dots + limits])
    x = alt.X("step:Q", title="step", scale=alt.Scale(domain=[0.5, len(steps) + 0.5], nice=False),
              axis=alt.Axis(grid=False, tickMinStep=1, tickCount=6))  # fmt: skip
    y = alt.Y("value:Q", title="trace norm T (log scale)", **axis)
    layers: list[alt.Chart] = [data(dots).mark_circle(size=26, color=STAYS, opacity=0.85).encode(x=x, y=y)]
    if limits:
        layers.append(data(limits).mark_line(color=THRESHOLD, strokeWidth=2, strokeDash=[5, 3]).encode(x=x, y=y))
        layers.append(data(limits[-1:]).mark_text(color=THRESHOLD, align="left", fontSize=12).encode(
            x=alt.value(WIDTH + 5), y=y, text=alt.value("nu")))  # fmt: skip
    text = f"Dots: the trace norm T of the cell that was drawn in each step ({counted(len(steps), 'step')})."
    text += " Line: nu, above which T is held back." if limits else ""
    chart = alt.layer(*layers).properties(width=WIDTH, height=210)
    return [render("traces", "Trace norm over steps", text + _undrawn(steps), chart)]


def _above_zero(values: Sequence[float | None]) -> list[dict[str, float]]:
    """What a logarithmic axis can show."""
    return [{"step": i, "value": value} for i, value in enumerate(values, start=1) if value is not None and value > 0]


def _undrawn(steps: Sequence[float | None]) -> str:
    """What it cannot."""
    zero, missing = sum(value is not None and value <= 0 for value in steps), sum(value is None for value in steps)
    said = f" Not drawn: {counted(zero, 'step')} with T = 0, where nothing comes through the cell." if zero else ""
    return said + (f" {counted(missing, 'step')} without a finite T." if missing else "")


def _powers(values: Sequence[float]) -> dict[str, Any]:
    """A logarithmic scale over whole decades, and its axis."""
    logs = [min(max(math.log10(value), TINY), HUGE) for value in values]
    low, high = math.floor(min(logs)), math.ceil(max(logs))
    high += low == high
    every = math.ceil((high - low) / 6)
    steps = (1, 2, 5) if high - low <= 2 else (1,)
    ticks = [float(f"{step}e{power}") for power in range(low, high + 1, every) for step in steps]
    return {
        "scale": alt.Scale(type="log", domain=[float(f"1e{low}"), float(f"1e{high}")], nice=False, clamp=True),
        "axis": alt.Axis(values=[tick for tick in ticks if tick <= float(f"1e{high}")], format="~g"),
    }


# ---------------------------------------------------------------- alpha


def alphas(search: Search) -> list[Chart]:
    """A heat map of alpha for each kind of choice (`op`, `input`): a row a choice, a column a candidate."""
    kinds: dict[str, dict[str, Options]] = {}
    for name, options in list(known(search).items())[:MAX_CHOICES]:
        row, _, kind = name.rpartition(".")
        kinds.setdefault(kind, {})[row or name] = options
    return [_heat(kind, rows) for kind, rows in kinds.items()]


def known(search: Search) -> dict[str, Options]:
    """The choices whose alpha is there."""
    choices = (search.choices or {}).items()
    return {name: options for name, options in choices if any(a is not None for a in options.alpha or [])}


def _heat(kind: str, choices: Mapping[str, Options]) -> Chart:
    cells: list[dict[str, Any]] = [
        {"row": row, "column": name, "alpha": alpha, "kept": i in (options.kept or [])}
        for row, options in choices.items()
        for i, (name, alpha) in enumerate(zip(options.candidates or [], options.alpha or [], strict=True))
    ]
    columns = list(dict.fromkeys(cell["column"] for cell in cells))
    longest = max(len(row) for row in choices)
    across = min(62, max(16, (WIDTH + 30 - 6 * longest) // len(columns)))  # px
    most = max(abs(cell["alpha"]) for cell in cells if cell["alpha"] is not None) or 1.0
    for cell in cells:
        cell["words"] = _written(cell["alpha"], most) if across >= NARROW else ""
        cell["light"] = cell["alpha"] is not None and abs(cell["alpha"]) > 0.6 * most
    plain: dict[str, Any] = {"labelLimit": 0, "ticks": False, "domain": False}
    turned: dict[str, Any] = {} if all(7 * len(name) <= across for name in columns) else {"labelAlign": "left"}
    x = alt.X("column:N", sort=None, title=None, scale=alt.Scale(domain=columns, padding=0.08),
              axis=alt.Axis(orient="top", labelAngle=-35 if turned else 0, **turned, **plain))  # fmt: skip
    y = alt.Y("row:N", sort=None, title=None, scale=alt.Scale(domain=list(choices), padding=0.08),
              axis=alt.Axis(labelPadding=6, **plain))  # fmt: skip
    ramp = alt.Scale(domain=[-most, 0, most], range=[FALLS, MIDDLE, STAYS])
    legend = alt.Legend(title="alpha", gradientLength=150, gradientThickness=10, tickCount=4, format=".2~g")
    filled = [cell for cell in cells if cell["alpha"] is not None]
    layers = [
        data(filled).mark_rect(stroke=EDGE, strokeWidth=0.6).encode(x=x, y=y, color=alt.Color(
            "alpha:Q", scale=ramp, legend=legend)),
        data([cell for cell in cells if cell["kept"]]).mark_rect(filled=False, stroke="black", strokeWidth=2.5).encode(
            x=x, y=y),
    ]  # fmt: skip
    layers += [
        data([cell for cell in cells if cell["light"] == light]).mark_text(fontSize=10, color=colour).encode(
            x=x, y=y, text=alt.Text("words:N"))
        for light, colour in ((False, INK), (True, "white"))
    ]  # fmt: skip
    # Names take more room in a browser that lacks the font they were measured in.
    room = {"left": 4 + longest, "top": 8, "right": 12, "bottom": 4}
    chart = alt.layer(*layers).properties(width=across * len(columns), height=alt.Step(24), padding=room)
    what = {"op": "the operation of an edge", "input": "what a node reads"}.get(kind, kind)
    text = f"Delta, the alpha that each candidate ended with ({counted(len(choices), 'choice')}). Framed: what is kept."
    return render(f"alpha-{stem(kind)}", f"Alpha of each choice: {what}", text, chart)


def _written(value: float | None, most: float) -> str:
    """With the decimals that the largest value needs for two digits: 0.012, -0.003."""
    if value is None:
        return "?"
    decimals = 1 - math.floor(math.log10(most))
    if not 0 <= decimals <= 4:
        return scientific(value, 0) if value else "0"
    return f"{round(value, decimals) + 0.0:.{decimals}f}"


# ---------------------------------------------------------------- scores


def scores(search: Search) -> list[Chart]:
    """A histogram of the scores of the cells that were tried; a logarithmic axis where they span 1,000 and more."""
    tried = search.scores or []
    finite = [min(max(score, -LARGEST), LARGEST) for score in tried if score is not None]
    if not finite:
        return []
    log = min(finite) > 0 and max(finite) / min(finite) >= 1000
    values = [math.log10(score) for score in finite] if log else finite
    low, high = min(values), max(values)
    room = (high - low) or max(abs(low), 1.0)
    if high == low:
        low -= room / 2
    counts: dict[int, int] = {}
    for value in values:
        place = min(BINS - 1, math.floor(BINS * ((value - low) / room)))
        counts[place] = counts.get(place, 0) + 1
    rows = [{"x": low + room * i / BINS, "x2": low + room * (i + 1) / BINS, "y": 0, "y2": counts[i]}
            for i in sorted(counts)]  # fmt: skip
    name = search.score_name or "score"
    powers = list(range(math.ceil(low), math.floor(high) + 1, math.ceil((high - low) / 6))) if log else []
    axis = alt.Axis(grid=False, values=powers, labelExpr="'1e' + datum.value") if log else alt.Axis(
        grid=False, tickCount=5, format="~g")  # fmt: skip
    x = alt.X("x:Q", title=f"{name} (log scale)" if log else name, axis=axis,
              scale=alt.Scale(domain=[low, low + room], nice=False, zero=False))  # fmt: skip
    y = alt.Y("y:Q", title="cells", axis=alt.Axis(tickMinStep=1, tickCount=5, format="d"))
    bars = data(rows).mark_rect(color=COLOURS[0], stroke="white", strokeWidth=0.6).encode(**corners(x, y))
    text = f"Scores ({name}) of {counted(len(finite), 'cell')} tried."
    missing = len(tried) - len(finite)
    text += f" Not drawn: {missing} whose score is not finite." if missing else ""
    return [render("scores", "Scores of the cells that were tried", text, alt.layer(bars).properties(
        width=WIDTH, height=180))]  # fmt: skip
