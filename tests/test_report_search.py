"""The report of a search: what a reader finds in it, from complete folders, poor ones and damaged ones."""

import base64
import html
import json
import math
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compressnas.cell_plots import cells
from compressnas.errors import InputError
from compressnas.report import write_report
from compressnas.runfolder import Graph, Search

OPERATIONS = ["none", "skip_connect", "nor_conv_1x1", "nor_conv_3x3", "avg_pool_3x3"]
DARTS = ["none", "max_pool_3x3", "avg_pool_3x3", "skip_connect", "sep_conv_3x3", "sep_conv_5x5", "dil_conv_3x3"]
CELL = "|nor_conv_3x3~0|+|nor_conv_1x1~0|skip_connect~1|+|none~0|nor_conv_3x3~1|nor_conv_3x3~2|"
TABLE = {
    "c10_valid_12": 85.1234, "c10_test_200": 93.76, "c100_valid_200": 70.5, "c100_test_200": 71.11,
    "in16_test_200": 41.44, "params_M": 1.2,
}  # fmt: skip
VERSIONS = {"compressnas": "0.2.0", "torch": "2.14.1", "fvcore": "0.1.5", "onnxruntime": "1.26.0", "altair": "6.3.0"}
MACHINE = {"cpu": "A & B processor", "cores": 2, "threads": 2, "platform": "Linux", "device": "cpu", "python": "3.11"}
POINT = {
    "point": "slim", "error": 0.0724, "validation_error": 0.071, "flops": 113_950_000, "flops_theoretical": 113_900_000,
    "flops_bias_convention": 114_200_000, "params": 802_426, "bytes": 3_260_000, "latency_p50_ms": 4.21,
    "latency_p90_ms": 5.02, "structure": "16-16-32-64", "uncounted": {"aten::relu": 90, "aten::avg_pool2d": 17},
}  # fmt: skip


def _write(folder: Path, name: str, content: Any) -> None:
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))


def _lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def _choice(candidates: list[str], draw: random.Random, keep: int = 1) -> dict[str, Any]:
    alpha = [draw.gauss(0, 0.02) for _ in candidates]
    kept = sorted(sorted(range(len(alpha)), key=lambda i: -alpha[i])[:keep])
    return {"candidates": candidates, "alpha": alpha, "kept": kept}


def nasbench201(folder: Path, epochs: int = 12) -> Path:
    """A run folder as NASI on NAS-Bench-201 leaves it."""
    folder.mkdir(parents=True)
    draw = random.Random(0)
    traces = [math.exp(draw.gauss(2.5, 1.6)) if step % 31 else 0.0 for step in range(1, 101)]
    limits = [(1000 + sum(traces[:step])) / (step + 1) for step in range(len(traces))]
    choices = {f"cell.edge{i}.op": _choice(OPERATIONS, draw) for i in range(6)}
    edges = [[0, 1, "nor_conv_3x3"], [0, 2, "nor_conv_1x1"], [1, 2, "skip_connect"], [1, 3, "nor_conv_3x3"],
             [2, 3, "nor_conv_3x3"]]  # fmt: skip
    _write(folder, "recipe.yaml", "seed: 0\nspace: {name: nasbench201}\nmethod: {kind: nasi, steps: 100}\n")
    _write(folder, "facts.json", {
        "command": "compressnas run recipes/nasbench201_nasi.yaml", "recipe": "nasbench201_nasi", "seed": 0,
        "recipe_hash": "1d7e02c9", "started": "2026-12-03T14:42:07+00:00", "versions": VERSIONS, "machine": MACHINE,
    })  # fmt: skip
    _write(folder, "points.jsonl", _lines([POINT]))
    _write(folder, "history.jsonl", _lines([
        {"stage": "train", "epoch": i, "loss": 1.0, "train_error": 0.6 / i, "error": 0.5 / i + 0.04}
        for i in range(1, epochs + 1)
    ]))  # fmt: skip
    sets = {name: {"size": len(one["candidates"]), "kept": one["kept"]} for name, one in choices.items()}
    _write(folder, "slim.json", {"sets": sets, "origin": {"method": "nasi", "seed": 0}})
    _write(folder, "result.json", {
        "search": {
            "space": "nasbench201", "method": "nasi", "cell": CELL, "choices": choices, "traces": traces,
            "limits": limits, "scores": None, "score_name": None, "table": TABLE,
            "graphs": {"cell": {"nodes": ["in", "1", "2", "out"], "edges": edges}},
        },
        "proof": {"verdict": "equal", "max_relative_difference": 3.2e-14, "tolerance": 1e-10, "images": 64},
        "check": {"max_abs_diff": 2.1e-6, "max_abs_output": 14.2, "tolerance": 1.42e-3, "opset": 18,
                  "by_batch": {"1": 1e-6, "2": 2e-6, "5": 2.1e-6}},
        "notes": ["the search took 41 s"],
    })  # fmt: skip
    return folder


def edit(folder: Path, **changes: Any) -> None:
    """Change keys of the search."""
    result = json.loads((folder / "result.json").read_text())
    _write(folder, "result.json", result | {"search": result["search"] | changes})


def darts(folder: Path) -> Path:
    """A run folder with two kinds of cell, two inputs each, parallel arrows, and choices of what is read."""
    draw, nodes = random.Random(3), ["in 1", "in 2", "1", "2", "3", "4", "out"]
    normal = [[0, 2, "sep_conv_3x3"], [1, 2, "sep_conv_3x3"], [0, 3, "sep_conv_3x3"], [1, 3, "skip_connect"],
              [1, 4, "dil_conv_3x3"], [2, 4, "max_pool_3x3"], [0, 5, "skip_connect"],
              [2, 5, "dil_conv_3x3"]]  # fmt: skip
    reduce = [[0, 2, "max_pool_3x3"], [1, 2, "max_pool_3x3"], [1, 3, "sep_conv_5x5"], [0, 3, "max_pool_3x3"],
              [3, 4, "skip_connect"], [3, 4, "sep_conv_3x3"], [2, 5, "skip_connect"],
              [4, 5, "max_pool_3x3"]]  # fmt: skip
    out = [[node, 6, "skip_connect"] for node in (2, 3, 4, 5)]
    choices = {f"{kind}.edge{i}.op": _choice(DARTS, draw) for kind in ("normal", "reduce") for i in range(14)}
    for kind in ("normal", "reduce"):
        for node in (2, 3, 4):
            names = [str(i) for i in range(node + 1)]
            choices[f"{kind}.node{node}.input"] = _choice(names, draw, keep=2)
    graphs = {"normal": {"nodes": nodes, "edges": normal + out}, "reduce": {"nodes": nodes, "edges": reduce + out}}
    edit(nasbench201(folder), space="darts", cell="Genotype(...)", choices=choices, graphs=graphs, table=None)
    return folder


def proxies(folder: Path) -> Path:
    """A run folder as a proxy leaves it: scores, and neither alpha nor traces; not trained, nothing proved."""
    nasbench201(folder, epochs=0)
    draw = random.Random(5)
    scores = [None if i % 40 == 7 else math.exp(draw.gauss(30, 12)) for i in range(200)]
    choices = {f"cell.edge{i}.op": {"candidates": OPERATIONS, "alpha": None, "kept": [i % 5]} for i in range(6)}
    edit(folder, method="proxy", choices=choices, traces=None, limits=None, scores=scores, score_name="synflow")
    result = json.loads((folder / "result.json").read_text())
    _write(folder, "result.json", result | {"proof": None})
    return folder


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A NAS-Bench-201 folder with its report: read only."""
    folder = nasbench201(tmp_path_factory.mktemp("runs") / "nasi")
    write_report(folder)
    return folder


def shown(folder: Path) -> str:
    """The HTML as a reader sees it, without tags."""
    write_report(folder)
    body = (folder / "report.html").read_text().partition("<body>")[2]
    return " ".join(html.unescape(re.sub(r"<[^>]*>", "", body)).split())


def drawn(folder: Path, name: str) -> list[str]:
    """The words in a chart."""
    page = (folder / "report.html").read_text()
    titles = re.findall(r"<figcaption><b>([^<]*)</b>", page)
    sources = re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', page)
    svg = dict(zip(titles, (base64.b64decode(source).decode() for source in sources), strict=True))[name]
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)


def test_headline_says_what_was_found(reported: Path) -> None:
    page, markdown = shown(reported), (reported / "report.md").read_text()
    for text in (page, markdown):
        for said in ("114 M FLOPs, ", "802 K parameters, ", "test error 7.24 %, ", "ONNX = torch to 1e-7.",
                     "CIFAR-10 test, 200 epochs: 93.76 % in the table, ", "masked supernet = derived network to 3e-14",
                     "ImageNet16-120 test, 200 epochs: 41.44 % in the table, "):  # fmt: skip
            assert said in text, said
    assert f"cell {CELL}" in page
    assert f"Cell: `{CELL}`" in markdown  # as code, so that a tilde strikes nothing out


def test_words_of_pruning_are_not_said_of_a_search(reported: Path) -> None:
    page, markdown = shown(reported), (reported / "report.md").read_text()
    for text in (page, markdown):
        for said in (
            "dense",
            "slim against",
            "interleaved",
            "was saved",
            "removed",
            "16-16-32-64",
            "validation split:",
        ):
            assert said not in text, said
        assert "they are the same network" in text and "Is it the network that was searched?" in text
        assert "No choice looks at the test split or the benchmark's table." in text
        assert "Operations fvcore does not count, derived network: aten::avg_pool2d (17x), aten::relu (90x)." in text


def test_a_search_that_is_pruned_later_keeps_its_columns(tmp_path: Path) -> None:
    folder = nasbench201(tmp_path / "run")
    _write(folder, "points.jsonl", _lines([POINT, POINT | {"point": "int8"}]))
    shown(folder)
    markdown = (folder / "report.md").read_text()
    assert "| | derived network | int8 |" in markdown and "the networks timed interleaved" in markdown


def test_section_shows_how_it_was_found(reported: Path) -> None:
    page, markdown = shown(reported), (reported / "report.md").read_text()
    for text in (page, markdown):
        assert "What was searched" in text and "NASI searched the space" in text
        assert "nor_conv_3x3 from in to 1; skip_connect from 1 to 2; nor_conv_1x1 from in to 2;" in text
        assert "Not drawn: 3 steps with T = 0" in text and "in each step (100 steps)" in text
    pictures = {path.name for path in (reported / "plots").iterdir()}
    assert pictures == {"cell-cell.png", "traces.png", "alpha-op.png", "error.png"}
    assert set(re.findall(r"\]\(plots/([^)]+)\)", markdown)) == pictures


def test_charts_hold_what_the_folder_holds(reported: Path) -> None:
    write_report(reported)
    search = json.loads((reported / "result.json").read_text())["search"]
    assert sorted(drawn(reported, "The cell")) == sorted(
        ["in", "1", "2", "out", *(operation for *_, operation in search["graphs"]["cell"]["edges"])]
    )
    alpha = drawn(reported, "Alpha of each choice: the operation of an edge")
    for name, choice in search["choices"].items():
        assert name.removesuffix(".op") in alpha
        assert {f"{round(value, 3) + 0.0:.3f}" for value in choice["alpha"]} <= set(alpha)
    assert set(OPERATIONS) <= set(alpha)
    assert "train" in drawn(reported, "Error over epochs")
    assert {"nu", "1000", "0.1"} <= set(drawn(reported, "Trace norm over steps"))


def test_table_of_the_benchmark_has_readable_names(reported: Path) -> None:
    page, markdown = shown(reported), (reported / "report.md").read_text()
    rows = {"CIFAR-10 validation, 12 epochs, %": "85.12", "CIFAR-100 test, 200 epochs, %": "71.11",
            "ImageNet16-120 test, 200 epochs, %": "41.44", "params_M": "1.2"}  # fmt: skip
    for name, figure in rows.items():
        assert f"| {name} | {figure} |" in markdown
        assert f"{name}{figure}" in page


def test_two_kinds_of_cell_stand_side_by_side(tmp_path: Path) -> None:
    folder = darts(tmp_path / "run")
    text = shown(folder)
    assert "The cell, normal" in text and "The cell, reduce" in text
    assert "sep_conv_3x3 from 2 to 3; skip_connect from 2 to 3" in text  # parallel arrows
    assert drawn(folder, "The cell, reduce").count("skip_connect") == 6
    assert (folder / "plots" / "alpha-input.png").is_file() and "what a node reads" in text
    assert "4" in drawn(folder, "Alpha of each choice: what a node reads")
    assert "No choice looks at the test split." in text


def test_a_proxy_shows_its_scores(tmp_path: Path) -> None:
    text = shown(proxies(tmp_path / "run"))
    assert "200 cells of the space nasbench201 were scored (synflow)" in text
    assert "Scores (synflow) of 195 cells tried." in text and "Not drawn: 5 whose score is not finite." in text
    assert "test error 7.24 % (not trained)" in text and "carries no proof" in text
    assert "Alpha" not in text and "Trace norm" not in text and "Over epochs" not in text


def test_a_network_that_differs_is_never_called_the_same(tmp_path: Path) -> None:
    folder = nasbench201(tmp_path / "run")
    result = json.loads((folder / "result.json").read_text())
    proof = {"verdict": "equal", "max_relative_difference": 0.0031, "tolerance": 1e-10}
    _write(folder, "result.json", result | {"proof": proof})
    text = shown(folder)
    assert "masked supernet differs from derived network by 3e-3" in text
    assert "they are not the same network" in text and "they are the same" not in text


@pytest.mark.parametrize("search", [{}, {"space": "tree"}, {"traces": [], "choices": {}, "graphs": {}, "scores": []}])
def test_every_part_may_be_missing(tmp_path: Path, search: dict[str, Any]) -> None:
    folder = nasbench201(tmp_path / "run", epochs=0)
    _write(folder, "result.json", {"search": search})
    text = shown(folder)
    assert "What was searched" in text and "<img" not in (folder / "report.html").read_text()
    assert not re.search(r"\b(None|null|nan)\b", text)


NAN = float("nan")
ODD: dict[str, tuple[dict[str, Any], str]] = {
    "zeros": ({"traces": [0.0, 0.0, NAN], "limits": [1.0, 1.0, 1.0]}, "No step has a trace norm above zero"),
    "nan": ({"traces": [NAN, 0.0, 2.0, 3.0], "limits": None}, "Not drawn: 1 step with T = 0, where nothing"),
    "far apart": ({"traces": [1e-308, 1e308], "limits": [float("inf"), 1.0]}, "in each step (2 steps)"),
    "one": ({"traces": [1.0], "limits": [1.0]}, "in each step (1 step)"),
    "checked": ({"traces": [1.0], "limits": [3.0], "checks": [{"cell": "a", "trace": 9}, {"cell": "b", "trace": 2.5}]},
                "the last is the first with T up to nu (2.5, and nu is 3): it is kept"),
    "none keeps to nu": ({"traces": [1.0], "limits": [3.0], "checks": [{"cell": "a", "trace": 7}, {"trace": 9.5}]},
                         "each T is above nu (3), and the cell with the smallest is kept (7)"),
    "checks of nothing": ({"traces": [1.0], "limits": [NAN], "checks": [{"trace": NAN}]}, "in each step (1 step)"),
    "no score": ({"scores": [NAN, None]}, "No score is finite"),
    "one score": ({"scores": [-2.5, -2.5]}, "of 2 cells tried"),
    "wide scores": ({"scores": [-1e308, 1e308, 0.0]}, "of 3 cells tried"),
    "alpha": ({"choices": {"c.op": {"candidates": ["a", "b"], "alpha": [NAN, 0.0], "kept": [1]}}}, "(1 choice)"),
    "large alpha": ({"choices": {"c.op": {"candidates": ["a", "b"], "alpha": [-1e308, 1e9]}}}, "(1 choice)"),
    "no alpha": ({"choices": {"c.op": {"candidates": ["a"], "alpha": [NAN]}}}, "Trace norm"),
    "nothing leads": ({"graphs": {"cell": {"nodes": ["in", "out"], "edges": []}}}, "nothing leads from"),
    "names": ({"graphs": {"<b>": {"nodes": ["<i>", "a\x00b"], "edges": [[0, 1, "x" * 80], [0, 1, "&"]]}}}, "x" * 80),
    "table": ({"table": {"c10_test_200": NAN, "other": 1}}, "other1"),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_odd_figures_are_drawn_or_left_out(tmp_path: Path, name: str) -> None:
    changes, said = ODD[name]
    folder = nasbench201(tmp_path / "run")
    edit(folder, **changes)
    text = shown(folder)
    assert said in text
    assert not re.search(r"\b(nan|none|null|inf)\b", text.replace("|none~0|", ""), re.IGNORECASE)
    assert "<i>" not in (folder / "report.html").read_text()
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in (folder / "plots").iterdir())


def test_many_choices_are_cut(tmp_path: Path) -> None:
    folder = nasbench201(tmp_path / "run")
    edit(folder, choices={f"edge{i}.op": {"candidates": ["a", "b"], "alpha": [0.1, i]} for i in range(64)})
    assert "The alphas of 4 more choices are in result.json." in shown(folder)


DAMAGED: dict[str, tuple[Any, str]] = {
    "no object": ({"search": []}, "damaged at search"),
    "a cell that is no text": ({"search": {"cell": 3}}, "damaged at search.cell"),
    "a word for a number": ({"search": {"traces": [1, "high"]}}, "damaged at search.traces.1"),
    "steps": ({"search": {"traces": [1, 2], "limits": [1]}}, "limits has 1 steps, traces has 2"),
    "alpha is short": ({"search": {"choices": {"a.op": {"candidates": ["x", "y"], "alpha": [1]}}}},
                       "damaged at search.choices.a.op: Value error, alpha has 1 values for 2 candidates"),
    "alpha of nothing": ({"search": {"choices": {"a.op": {"alpha": [1]}}}}, "search.choices.a.op"),
    "kept": ({"search": {"choices": {"a.op": {"candidates": ["x"], "kept": [1]}}}}, "kept names candidate 1"),
    "kept below": ({"search": {"choices": {"a.op": {"candidates": ["x"], "kept": [-1]}}}}, "a.op.kept.0"),
    "candidates": ({"search": {"choices": {"a.op": {"candidates": "none"}}}}, "search.choices.a.op.candidates"),
    "outside": ({"search": {"graphs": {"cell": {"nodes": ["in", "out"], "edges": [[0, 2, "x"]]}}}},
                "damaged at search.graphs.cell: Value error, edge 0 -> 2"),
    "backwards": ({"search": {"graphs": {"cell": {"nodes": ["in", "out"], "edges": [[1, 0, "x"]]}}}}, "edge 1 -> 0"),
    "below": ({"search": {"graphs": {"cell": {"nodes": ["in", "out"], "edges": [[-1, 1, "x"]]}}}}, "cell.edges.0.0"),
    "no operation": ({"search": {"graphs": {"cell": {"nodes": ["in", "out"], "edges": [[0, 1]]}}}}, "cell.edges.0"),
    "table": ({"search": {"table": {"c10_test_200": "high"}}}, "search.table.c10_test_200"),
    "huge": ({"search": {"traces": [10**400]}}, "search.traces.0"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_input_is_named_in_one_line(tmp_path: Path, name: str) -> None:
    content, said = DAMAGED[name]
    folder = nasbench201(tmp_path / "run")
    _write(folder, "result.json", content)
    with pytest.raises(InputError) as caught:
        write_report(folder)
    assert str(folder / "result.json") in str(caught.value) and said in str(caught.value)
    assert "\n" not in str(caught.value) and not (folder / "report.html").exists()


@pytest.mark.parametrize("make", [nasbench201, darts, proxies])
def test_same_folder_gives_the_same_bytes(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    folder = make(tmp_path / "run")
    write_report(folder)
    again = tmp_path / "elsewhere"
    shutil.copytree(folder, again)
    (again / "report.html").unlink()
    write_report(again)
    for path in (path for path in folder.rglob("*") if path.is_file()):
        assert path.read_bytes() == (again / path.relative_to(folder)).read_bytes(), path.name


def boxes(svg: str) -> list[tuple[float, float, float, float]]:
    """Left, top, right and bottom of the names and nodes of a drawn cell."""
    found = re.findall(r'<rect x="([-\d.]+)" y="([-\d.]+)" width="([\d.]+)" height="([\d.]+)" rx', svg)
    return [(float(x), float(y), float(x) + float(w), float(y) + float(h)) for x, y, w, h in found]


def test_no_two_names_of_a_cell_meet() -> None:
    draw = random.Random(0)
    for _ in range(100):
        nodes = [str(i) for i in range(draw.randint(2, 8))]
        pairs = [(a, b) for b in range(len(nodes)) for a in range(b)]
        edges = [(*draw.choice(pairs), draw.choice(DARTS)) for _ in range(draw.randint(1, 16))]
        (chart,) = cells(Search(graphs={"cell": Graph(nodes=nodes, edges=edges)}))
        places, (width, height) = boxes(chart.svg), chart.size
        assert len(places) == len(nodes) + len(edges)
        for i, (left, top, right, bottom) in enumerate(places):
            assert left >= 0 and top >= 0 and right <= width and bottom <= height
            for other in places[:i]:
                apart = left >= other[2] or right <= other[0] or top >= other[3] or bottom <= other[1]
                assert apart, (edges, chart.text)
