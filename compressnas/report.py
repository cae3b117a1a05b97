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

from compressnas import cell_plots, plots, readable, search_plots, search_words
from compressnas.errors import InputError
from compressnas.files import write_whole
from compressnas.runfolder import Check, Layer, Point, Proof, Result, Rule, RunFolder, Search, read_run_folder

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
        "searched": _search_charts(run.result.search) if run.result.search else [],
        "epochs": plots.error_over_epochs(run.history, search_words.STAGES if run.result.search else plots.STAGES)
        + plots.groups_over_epochs(run.history, sizes),
    }


def _search_charts(search: Search) -> list[plots.Chart]:
    cells = cell_plots.cells(search)
    return cells + search_plots.traces(search) + search_plots.alphas(search) + search_plots.scores(search)


# ---------------------------------------------------------------- rows of the table

# key, what it is called, how it is written, how dense and slim are compared, words for less and more
ROWS: tuple[tuple[str, str, Callable[[float], str], Callable[..., str], str, str], ...] = (
    ("error", "Test error", readable.percent, readable.in_points, "", ""),
    ("validation_error", "Validation error", readable.percent, readable.in_points, "", ""),
    ("flops", "FLOPs, realised", readable.count, readable.times, "fewer", "more"),
    ("flops_theoretical", "FLOPs, theoretical", readable.count, readable.times, "fewer", "more"),
    ("flops_bias_convention", "FLOPs, bias-counting convention", readable.count, readable.times, "fewer", "more"),
    ("params", "Parameters", readable.count, readable.times, "fewer", "more"),
    ("bytes", "ONNX file", readable.in_bytes, readable.times, "smaller", "larger"),
    ("latency_p50_ms", "Latency p50", readable.milliseconds, readable.times, "faster", "slower"),
    ("latency_p90_ms", "Latency p90", readable.milliseconds, readable.times, "faster", "slower"),
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
        "headline": _headline(run.points) + _evidence(result),
        "structure": " -> ".join(s for s in (dense.structure, slim.structure) if s),
        "columns": [name for name in ("dense", "slim") if name in run.points],
        "others": [name for name in run.points if name not in ("dense", "slim")],
        "heads": {name: name for name in run.points},
        "rows": [_row(run.points, *row) for row in ROWS if row[0] in measured],
        "uncounted": _uncounted(run.points),
        "search": None,
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
    } | (_words_of_search(run, result.search, slim, measured) if result.search else {})


def _words_of_search(run: RunFolder, search: Search, slim: Point, measured: set[str]) -> Words:
    """What a search says in place of, and beside, the words of a pruning."""
    heads = {name: "derived network" if name == "slim" else name for name in run.points}
    uncounted = _uncounted({heads[name]: point for name, point in run.points.items()})
    return {
        "headline": search_words.headline(run, search, slim) + _evidence(run.result),
        "structure": "",
        "heads": heads,
        "uncounted": [],
        "proof": search_words.proof(run.result.proof, run.result.proof is not None and _proved(run.result.proof)),
        "search": {
            "cell": search.cell or "",
            "story": search_words.story(search),
            "table": search_words.table(search),
            "footnotes": search_words.footnotes(search, len(run.points), measured, uncounted),
        },
    }


def _row(points: Mapping[str, Point], key: str, label: str, write: Callable[[float], str],
         compare: Callable[..., str], less: str, more: str) -> Words:  # fmt: skip
    cells = {name: "-" if (value := getattr(p, key)) is None else write(value) for name, p in points.items()}
    before, after = (getattr(points.get(name, NOTHING), key) for name in ("dense", "slim"))
    return {"key": key, "label": label, "cells": cells, "ratio": compare(before, after, less, more)}


def _headline(points: Mapping[str, Point]) -> list[str]:
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
    return clauses


def _evidence(result: Result) -> list[str]:
    """The clauses that end the sentence on top: that the network, and then its file, compute the same."""
    proof, check, clauses = result.proof, result.check, []
    if proof is not None and proof.max_relative_difference is not None:
        masked, removed = ("masked supernet", "derived network") if result.search else ("masked", "removed")
        sign, to = ("=", "to") if _proved(proof) else ("differs from", "by")
        clauses.append(f"proof: {masked} {sign} {removed} {to} {readable.power(_apart(proof))}")
    if check is not None and check.max_abs_diff is not None:
        clauses.append(f"ONNX = torch to {readable.power(_relative(check))}")
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
    difference = readable.scientific(proof.max_relative_difference)
    allowed = f"{readable.power(proof.tolerance)} is allowed"
    if proof.change is not None and proof.approximate:
        text += f"They differ by {readable.scientific(proof.change)} of the largest output: the removal is "
        text += f"approximate, as norms average over {', '.join(proof.approximate)}. "
        text += "With the masked network's norms over what is left "
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
    text += f". The largest difference is {readable.scientific(check.max_abs_diff)}"
    text += f" ({readable.scientific(check.tolerance)} is allowed)" if check.tolerance is not None else ""
    if check.max_abs_output:
        text += f", which is {readable.scientific(check.max_abs_diff / check.max_abs_output)} of the largest output"
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
    environment.filters |= {"words": _html_words, "breaks": _html_breaks, "uri": _data_uri}
    environment.filters |= {"md": _markdown_words, "code": _markdown_code, "fence": _fence}
    return environment


def _html_words(text: str) -> Markup:
    """Escaped text with arrows, and with `backticks` as code."""
    safe = str(escape(text)).replace(" -&gt; ", " \N{RIGHTWARDS ARROW} ")
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", safe))


def _html_breaks(text: str) -> Markup:
    """Escaped text whose line may break after a plus sign."""
    return Markup("+<wbr>").join(text.split("+"))


def _markdown_words(text: object) -> str:
    """Text that cannot end a table cell, a line, or begin a tag."""
    return re.sub(r"([|<])", r"\\\1", " ".join(str(text).split()))


def _markdown_code(text: str) -> str:
    """A code span on one line of Markdown, whatever is in it."""
    ticks = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    space = " " if len(ticks) > 1 else ""
    return f"{ticks}{space}{' '.join(text.split())}{space}{ticks}"


def _fence(text: str) -> str:
    """A code fence longer than any in `text`."""
    return "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))


def _data_uri(svg: str) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()
