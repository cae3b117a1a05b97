"""The report of a run: one HTML file that needs no network, Markdown, CSV and PNG, from the run folder alone."""

import base64
import csv
import io
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape
from markupsafe import Markup, escape

from compressnas import plots
from compressnas.errors import InputError
from compressnas.files import write_whole
from compressnas.runfolder import Check, Layer, Point, Proof, Result, Rule, RunFolder, read_run_folder

Words = dict[str, Any]


def write_report(folder: Path) -> None:
    """Write `report.html`, `report.md`, `points.csv` and `plots/*.png` into the run folder, each whole or not at all.

    The same folder gives the same bytes.

    Raises:
        InputError: `folder` is no run folder, a file in it is missing or damaged, or it cannot be written.
    """
    run = read_run_folder(Path(folder))
    charts = _charts(run)
    words = _words(run) | {"charts": charts}
    environment = _environment()
    pictures = Path(folder) / "plots"
    try:
        pictures.mkdir(exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot write {pictures}: {error.strerror or error}") from error
    for chart in (chart for group in charts.values() for chart in group):
        write_whole(pictures / f"{chart.name}.png", chart.png())
    write_whole(Path(folder) / "points.csv", points_csv(run.rows))
    write_whole(Path(folder) / "report.md", environment.get_template("report.md.j2").render(words))
    write_whole(Path(folder) / "report.html", environment.get_template("report.html.j2").render(words))


def points_csv(rows: list[dict[str, Any]]) -> str:
    """The points as CSV at full precision: known columns first, then the others by name; null is an empty cell."""
    known = list(Point.model_fields)
    columns = known + sorted({key for row in rows for key in row} - set(known))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        cells = [row.get(column) for column in columns]
        writer.writerow([json.dumps(c, sort_keys=True) if isinstance(c, dict | list) else c for c in cells])
    return text.getvalue()


def _charts(run: RunFolder) -> dict[str, list[plots.Chart]]:
    layers, groups = run.result.layers or [], run.result.groups or {}
    sizes = dict(run.slim.sizes) | {name: group.size for name, group in groups.items() if group.size}
    return {
        "stayed": plots.kept_per_layer(layers) + plots.input_map(layers) + plots.kernels(layers),
        "gamma": plots.gammas(groups, run.result.rule),
        "epochs": plots.error_over_epochs(run.history) + plots.groups_over_epochs(run.history, sizes),
    }


# ---------------------------------------------------------------- numbers for humans


def _count(value: float) -> str:
    """Three digits: 2.29 M, 151 K, 64."""
    return _scaled(value, ((1e9, " G"), (1e6, " M"), (1e3, " K"), (1, "")))


def _bytes(value: float) -> str:
    return _scaled(value, ((1e9, " GB"), (1e6, " MB"), (1e3, " kB"), (1, " bytes")))


def _scaled(value: float, units: tuple[tuple[float, str], ...]) -> str:
    # 999,600 reads 1.00 M, not 1000 K: the unit is chosen for the rounded number.
    scale, unit = next((u for u in units if abs(value) >= 0.9995 * u[0]), units[-1])
    return _digits(value / scale, whole=scale == 1) + unit


def _digits(value: float, whole: bool = False) -> str:
    """Three significant digits without an exponent; counts below 1,000 have no decimals."""
    if whole and value == round(value):
        return f"{value:.0f}"
    size = abs(value)
    decimals = 0 if size >= 99.95 else 1 if size >= 9.995 else 2 if size >= 0.9995 else 3
    return f"{value:.{decimals}f}"


def _percent(value: float) -> str:
    return f"{100 * value:.2f} %"


def _milliseconds(value: float) -> str:
    return f"{_digits(value)} ms"


def _power(value: float | None) -> str:
    """3e-14; an exact 0 is said as such."""
    return "?" if value is None else "0" if value == 0 else _scientific(value, 0)


def _scientific(value: float, decimals: int = 1) -> str:
    """2.1e-6, without Python's zero in the exponent."""
    return re.sub(r"e([+-])0", r"e\1", f"{value:.{decimals}e}")


def _times(before: float | None, after: float | None, less: str, more: str) -> str:
    """`15.2x fewer`, or nothing where a side is missing or zero."""
    if not before or not after or before < 0 or after < 0:
        return ""
    ratio = before / after
    if f"{ratio:.2f}" == "1.00":
        return "the same"
    return f"{_digits(ratio)}x {less}" if ratio > 1 else f"{_digits(1 / ratio)}x {more}"


def _points(before: float | None, after: float | None, *_: str) -> str:
    """Difference of two fractions in percentage points; no minus sign on a zero."""
    return "" if before is None or after is None else f"{round(100 * (after - before), 2) + 0.0:+.2f} points"


# key, what it is called, how it is written, how dense and slim are compared, words for less and more
ROWS: tuple[tuple[str, str, Callable[[float], str], Callable[..., str], str, str], ...] = (
    ("error", "Test error", _percent, _points, "", ""),
    ("validation_error", "Validation error", _percent, _points, "", ""),
    ("flops", "FLOPs, realised", _count, _times, "fewer", "more"),
    ("flops_theoretical", "FLOPs, theoretical", _count, _times, "fewer", "more"),
    ("flops_bias_convention", "FLOPs, bias-counting convention", _count, _times, "fewer", "more"),
    ("params", "Parameters", _count, _times, "fewer", "more"),
    ("bytes", "ONNX file", _bytes, _times, "smaller", "larger"),
    ("latency_p50_ms", "Latency p50", _milliseconds, _times, "faster", "slower"),
    ("latency_p90_ms", "Latency p90", _milliseconds, _times, "faster", "slower"),
)
NOTHING = Point(point="")


# ---------------------------------------------------------------- words


def _words(run: RunFolder) -> Words:
    """Everything that both templates say, in the order in which they say it."""
    result, facts = run.result, run.facts
    dense, slim = run.points.get("dense", NOTHING), run.points.get("slim", NOTHING)
    measured = {key for key, *_ in ROWS if any(getattr(p, key) is not None for p in run.points.values())}
    return {
        "title": facts.recipe or "run",
        "headline": _headline(run.points, result),
        "structure": " -> ".join(s for s in (dense.structure, slim.structure) if s),
        "columns": [name for name in ("dense", "slim") if name in run.points],
        "others": [name for name in run.points if name not in ("dense", "slim")],
        "rows": [_row(run.points, *row) for row in ROWS if row[0] in measured],
        "uncounted": _uncounted(run.points),
        "proof": _proof(result.proof),
        "left_alone": (result.proof and result.proof.left_alone) or [],
        "theoretical": _theoretical(result.proof),
        "check": _check(result.check),
        "rule": _rule(result.rule),
        "layers": [_layer(layer) for layer in result.layers or []],
        "more_gammas": max(0, sum(bool(g.gamma) for g in (result.groups or {}).values()) - plots.MAX_HISTOGRAMS),
        "more_kernels": max(0, sum(bool(x.kept_positions) for x in result.layers or []) - plots.MAX_KERNEL_LAYERS),
        "notes": result.notes or [],
        "facts": _facts(run),
        "command": facts.command,
        "versions": sorted((facts.versions or {}).items()),
        "recipe": run.recipe.rstrip() + "\n",
    }


def _row(points: Mapping[str, Point], key: str, label: str, write: Callable[[float], str],
         compare: Callable[..., str], less: str, more: str) -> Words:  # fmt: skip
    cells = {name: "-" if (value := getattr(p, key)) is None else write(value) for name, p in points.items()}
    before, after = (getattr(points.get(name, NOTHING), key) for name in ("dense", "slim"))
    return {"key": key, "label": label, "cells": cells, "ratio": compare(before, after, less, more)}


def _headline(points: Mapping[str, Point], result: Result) -> list[str]:
    """The clauses of the one sentence on top; what was not measured is not said."""
    patterns = {"flops": "{} FLOPs", "error": "test error {}", "bytes": "ONNX file {}",
                "latency_p50_ms": "latency p50 {}"}  # fmt: skip
    rows = {row[0]: _row(points, *row) for row in ROWS}
    clauses = []
    for key, words in patterns.items():
        cells = [cell for name in ("dense", "slim") if (cell := rows[key]["cells"].get(name, "-")) != "-"]
        ratio = rows[key]["ratio"]
        if cells:
            clauses.append(words.format(" -> ".join(cells)) + (f" ({ratio})" if ratio else ""))
    proof, check = result.proof, result.check
    if proof is not None and proof.max_relative_difference is not None:
        sign = "=" if _proved(proof) else "differs from"
        clauses.append(f"proof: masked {sign} removed {'to' if _proved(proof) else 'by'} {_power(_apart(proof))}")
    if check is not None and check.max_abs_diff is not None:
        clauses.append(f"ONNX = torch to {_power(_relative(check))}")
    return clauses


def _proved(proof: Proof) -> bool:
    difference, tolerance = proof.max_relative_difference, proof.tolerance
    within = difference is not None and (tolerance is None or difference <= tolerance)
    return within and proof.verdict != "approximate"


def _apart(proof: Proof) -> float | None:
    """How far the removed network is from the masked one, whose norms average over everything."""
    return proof.max_relative_difference if proof.change is None else proof.change


def _relative(check: Check) -> float | None:
    if check.max_abs_diff is None:
        return None
    return check.max_abs_diff / check.max_abs_output if check.max_abs_output else check.max_abs_diff


def _proof(proof: Proof | None) -> str:
    if proof is None or proof.max_relative_difference is None:
        return "This run carries no proof of the removal."
    images = f"on {proof.images} real images " if proof.images else ""
    text = f"The masked network and the removed network were compared {images}in float64. "
    difference, allowed = _scientific(proof.max_relative_difference), f"{_power(proof.tolerance)} is allowed"
    if proof.change is not None and proof.approximate:
        text += f"They differ by {_scientific(proof.change)} of the largest output: the removal is approximate, as "
        text += f"norms average over {', '.join(proof.approximate)}. With the masked network's norms over what is left "
        return text + f"the largest difference is {difference} ({allowed})."
    if not _proved(proof):
        return text + f"They differ by {difference} of the largest output ({allowed}): the removal is approximate."
    text += f"The largest difference is {difference} of the largest output ({allowed}): what was removed did nothing."
    if proof.verdict == "partly":
        text += " Not everything that was proposed could be removed."
    return text


def _theoretical(proof: Proof | None) -> list[str]:
    if proof is None:
        return []
    realised, only = proof.realised or {}, proof.theoretical_only or {}
    return [f"{name}: {count} groups are zero but still there"
            + (f", {realised[name]} were removed" if realised.get(name) else "")
            for name, count in sorted(only.items()) if count]  # fmt: skip


def _check(check: Check | None) -> str:
    if check is None or check.max_abs_diff is None:
        return "This run carries no check of the ONNX file."
    batches = [str(size) for size in sorted(check.by_batch or {}, key=lambda size: (len(size), size))]
    text = "ONNX Runtime and torch were compared on real images"
    text += f" at batch {', '.join(batches)}" if batches else ""
    text += f". The largest difference is {_scientific(check.max_abs_diff)}"
    text += f" ({_scientific(check.tolerance)} is allowed)" if check.tolerance is not None else ""
    if check.max_abs_output:
        text += f", which is {_scientific(check.max_abs_diff / check.max_abs_output)} of the largest output"
    return text + "." + (f" ONNX opset {check.opset}." if check.opset else "")


def _rule(rule: Rule | None) -> str:
    if rule is None or rule.name is None:
        return ""
    if rule.name == "keep_at_zero":
        return "Rule: what the proximal step has emptied goes, the rest stays."
    if rule.name == "threshold" and rule.threshold is not None:
        return f"Rule: a group goes when its gamma is at or below {rule.threshold:.3g}."
    return f"Rule: {rule.name}."


def _uncounted(points: Mapping[str, Point]) -> list[str]:
    """One line for each different list of operations that fvcore does not count."""
    lists: dict[str, list[str]] = {}
    for name, point in points.items():
        ops = ", ".join(f"{op} ({count}x)" for op, count in sorted((point.uncounted or {}).items()))
        if ops:
            lists.setdefault(ops, []).append(name)
    return [f"{' and '.join(names)}: {ops}" for ops, names in lists.items()]


def _layer(layer: Layer) -> Words:
    shape = [" x ".join(str(size) for size in sizes) for sizes in (layer.before, layer.after)]
    nonzero = "-" if layer.weights_nonzero is None else f"{layer.weights_nonzero:,}"
    return {"name": layer.name, "kind": layer.kind, "before": shape[0], "after": shape[1], "nonzero": nonzero}


def _facts(run: RunFolder) -> list[tuple[str, str]]:
    facts = run.facts
    named = {"Recipe": facts.recipe, "Recipe hash": facts.recipe_hash, "Seed": facts.seed, "Started": facts.started}
    machine = {key.capitalize() if key != "cpu" else "CPU": value for key, value in (facts.machine or {}).items()}
    return [(key, str(value)) for key, value in (named | machine).items() if value is not None]


# ---------------------------------------------------------------- templates


def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=select_autoescape(enabled_extensions=("html.j2",), default=False),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"words": _html_words, "md": _markdown_words, "fence": _fence, "uri": _data_uri}
    return environment


def _html_words(text: str) -> Markup:
    """Escaped text with arrows, and with `backticks` as code."""
    safe = str(escape(text)).replace(" -&gt; ", " \N{RIGHTWARDS ARROW} ")
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", safe))


def _markdown_words(text: object) -> str:
    """Text that cannot end a table cell, a line, or begin a tag."""
    return re.sub(r"([|<])", r"\\\1", " ".join(str(text).split()))


def _fence(text: str) -> str:
    """A code fence longer than any in `text`."""
    return "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))


def _data_uri(svg: str) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()
