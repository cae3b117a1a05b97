"""The report of a run: what a reader finds in it, from complete folders, poor ones and damaged ones."""

import csv
import json
import math
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from compressnas.errors import InputError
from compressnas.report import points_csv, write_report

RECIPE = "# <script>alert('recipe')</script>\nseed: 0\nmodel: {name: lenet5}\n# a fence: ```\n"
VERSIONS = {"compressnas": "0.1.0", "torch": "2.14.1", "fvcore": "0.1.5", "onnxruntime": "1.26.0", "altair": "6.3.0"}
MACHINE = {"cpu": "A & B processor", "cores": 2, "threads": 2, "platform": "Linux", "device": "cpu", "python": "3.11"}


def _write(folder: Path, name: str, content: Any) -> None:
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))


def _lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def _write_run(folder: Path, recipe: str, points: list[dict[str, Any]], layers: list[dict[str, Any]],
               groups: dict[str, Any], rule: dict[str, Any]) -> Path:  # fmt: skip
    folder.mkdir(parents=True)
    draw = random.Random(0)
    _write(folder, "recipe.yaml", RECIPE)
    _write(folder, "facts.json", {
        "command": f"compressnas run recipes/{recipe}.yaml --set data.limit=3000", "recipe": recipe, "seed": 0,
        "recipe_hash": "9f3c2a77d1e0", "started": "2026-11-30T14:42:07+00:00", "versions": VERSIONS, "machine": MACHINE,
    })  # fmt: skip
    _write(folder, "points.jsonl", _lines(points))
    history: list[dict[str, Any]] = []
    for stage, epochs, start in (("train", 10, 0.30), ("shrink", 12, 0.05), ("finetune", 8, 0.04)):
        for epoch in range(1, epochs + 1):
            error = 0.02 + start * math.exp(-epoch / 2) + 0.002 * draw.random()
            share = (1 - epoch / 13) ** 2 if stage == "shrink" else 0.0
            alive = {name: len(g["kept"]) + round(share * (g["size"] - len(g["kept"]))) for name, g in groups.items()}
            history.append({
                "stage": stage, "epoch": epoch, "loss": error, "train_error": max(0.0, error - 0.02), "error": error,
                "groups_alive": alive if stage == "shrink" else None, "flops": None, "seconds": 2.0,
            })  # fmt: skip
    _write(folder, "history.jsonl", _lines(history))
    sets = {name: {"size": group["size"], "kept": group["kept"]} for name, group in groups.items()}
    _write(folder, "slim.json", {"sets": sets, "origin": {"method": "bayes"}})
    _write(folder, "result.json", {
        "layers": layers, "groups": groups, "rule": rule,
        "proof": {"verdict": "partly", "max_relative_difference": 3.2e-14, "tolerance": 1e-9, "images": 64,
                  "left_alone": [{"set": "stem.out", "reason": "`stem` feeds `F.pad` across channels & <b>more</b>"}],
                  "realised": {"conv1.out": 15}, "theoretical_only": {"conv2.shape": 31}},
        "check": {"max_abs_diff": 2.1e-6, "max_abs_output": 14.2, "tolerance": 1.42e-3, "opset": 18, "bytes": 101000,
                  "by_batch": {"1": 1e-6, "2": 2e-6, "5": 2.1e-6}},
        "notes": ["the exported model keeps all its pixels: selecting them is slower here"],
    })  # fmt: skip
    return folder


def _point(
    name: str, error: float, flops: int, params: int, size: int, latency: float, structure: str
) -> dict[str, Any]:
    return {
        "point": name, "error": error, "validation_error": error + 0.001, "flops": flops,
        "flops_theoretical": round(0.9 * flops), "flops_bias_convention": flops + 9000, "params": params, "bytes": size,
        "latency_p50_ms": latency, "latency_p90_ms": 1.3 * latency, "structure": structure,
        "uncounted": {"aten::max_pool2d": 2, "aten::relu": 3},
    }  # fmt: skip


def _group(kind: str, size: int, kept: list[int], draw: random.Random) -> dict[str, Any]:
    alive = set(kept)
    gamma = [10 ** draw.uniform(-1.2, 1.5) if i in alive else 0.0 if i % 3 else 10 ** draw.uniform(-6, -2)
             for i in range(size)]  # fmt: skip
    return {"kind": kind, "gamma": gamma, "omega": [1.0] * size, "norm": [0.1] * size, "kept": kept, "size": size}


def lenet5(folder: Path) -> Path:
    """A run folder as LeNet-5 leaves it: 20-50-800-500 to 5-10-76-16, threshold rule."""
    draw = random.Random(1)
    one, two = sorted(draw.sample(range(20), 5)), sorted(draw.sample(range(50), 10))
    flat, units = sorted(draw.sample(range(800), 76)), sorted(draw.sample(range(500), 16))
    first = [[[0.0 if r in (0, 4) and c in (0, 4) else draw.randint(1, 5) / 5 for c in range(5)] for r in range(5)]]
    second = [[[(c in one) * draw.randint(0, 3) / 3 for _ in range(5)] for _ in range(5)] for c in range(20)]
    layers = [
        {"name": "conv1", "kind": "conv", "before": [20, 1, 5, 5], "after": [5, 1, 5, 5], "kept_out": one,
         "kept_in": [0], "kept_positions": first, "weights_nonzero": 105},
        {"name": "conv2", "kind": "conv", "before": [50, 20, 5, 5], "after": [10, 5, 5, 5], "kept_out": two,
         "kept_in": one, "kept_positions": second, "weights_nonzero": 1022},
        {"name": "fc1", "kind": "linear", "before": [500, 800], "after": [16, 76], "kept_out": units, "kept_in": flat,
         "weights_nonzero": 1216},
        {"name": "fc2", "kind": "linear", "before": [10, 500], "after": [10, 16], "kept_out": list(range(10)),
         "kept_in": units, "weights_nonzero": 160},
    ]  # fmt: skip
    groups = {name: _group(kind, size, kept, draw) for name, kind, size, kept in (
        ("conv1.out", "filter", 20, one), ("conv2.out", "filter", 50, two), ("fc1.in", "column", 800, flat),
        ("fc1.out", "row", 500, units))}  # fmt: skip
    groups["conv2.out"]["gamma"][two[0]] = None
    points = [_point("dense", 0.021, 2_293_000, 431_080, 1_731_204, 0.2134, "20-50-800-500"),
              _point("slim", 0.023, 151_321, 3_012, 101_000, 0.0712, "5-10-76-16")]  # fmt: skip
    rule = {"name": "threshold", "threshold": 0.0585498}
    return _write_run(folder, "lenet5_filterwise", points, layers, groups, rule)


def lenet300(folder: Path) -> Path:
    """A run folder as LeNet-300-100 leaves it, with pixels nobody reads."""
    draw = random.Random(2)
    pixels = [i for i in range(784) if math.hypot(i // 28 - 13.5, i % 28 - 13.5) < 9 + draw.random()]
    one, two = sorted(draw.sample(range(300), 40)), sorted(draw.sample(range(100), 25))
    layers = [
        {"name": "fc1", "kind": "linear", "before": [300, 784], "after": [40, len(pixels)], "kept_out": one,
         "kept_in": pixels, "weights_nonzero": 9000},
        {"name": "fc2", "kind": "linear", "before": [100, 300], "after": [25, 40], "kept_out": two, "kept_in": one,
         "weights_nonzero": 1000},
        {"name": "fc3", "kind": "linear", "before": [10, 100], "after": [10, 25], "kept_out": list(range(10)),
         "kept_in": two, "weights_nonzero": 250},
    ]  # fmt: skip
    groups = {
        name: _group(kind, size, kept, draw)
        for name, kind, size, kept in (
            ("fc1.in", "column", 784, pixels),
            ("fc1.out", "coupled", 300, one),
            ("fc2.out", "coupled", 100, two),
        )
    }
    points = [_point("dense", 0.0412, 266_200, 266_610, 1_070_000, 0.0301, "784-300-100"),
              _point("slim", 0.0402, 11_900, 12_003, 51_000, 0.0350, f"{len(pixels)}-40-25")]  # fmt: skip
    return _write_run(folder, "lenet300_100", points, layers, groups, {"name": "keep_at_zero", "threshold": None})


def _edit(folder: Path, name: str, **changes: Any) -> None:
    document = json.loads((folder / name).read_text())
    _write(folder, name, document | changes)


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LeNet-5 folder with its report: read only."""
    folder = lenet5(tmp_path_factory.mktemp("runs") / "lenet5")
    write_report(folder)
    return folder


def test_headline_and_table_say_what_was_paid_and_saved(reported: Path) -> None:
    for name, arrow in (("report.html", "\N{RIGHTWARDS ARROW}"), ("report.md", "->")):
        text = (reported / name).read_text()
        assert f"2.29 M {arrow} 151 K FLOPs (15.2x fewer)" in text
        assert f"test error 2.10 % {arrow} 2.30 % (+0.20 points)" in text
        assert f"ONNX file 1.73 MB {arrow} 101 kB (17.1x smaller)" in text
        assert f"latency p50 0.213 ms {arrow} 0.071 ms (3.00x faster)" in text
        assert "proof: masked = removed to 3e-14" in text and "ONNX = torch to 1e-7" in text
        assert f"20-50-800-500 {arrow} 5-10-76-16" in text
        for said in ("one per multiply-add", "aten::max_pool2d (2x)", "bias-counting", "conv2.shape: 31 groups",
                     "9f3c2a77d1e0", "fvcore 0.1.5", "--set data.limit=3000", "selecting them is slower here",
                     "at batch 1, 2, 5", "2.1e-6 (1.4e-3 is allowed)", "gamma is at or below 0.0585"):  # fmt: skip
            assert said in text, said


def test_html_needs_no_network_and_runs_nothing(reported: Path) -> None:
    html = (reported / "report.html").read_text()
    loads = re.findall(r"""(?:src|href|srcset|action|data)\s*=\s*["']?([^"'\s>]{0,40})""", html)
    assert loads and all(load.startswith("data:image/svg+xml;base64,") for load in loads)
    assert not re.search(r"<(script|link|iframe|object|embed)\b|@import|url\(", html, re.IGNORECASE)


def test_text_from_the_run_is_escaped(reported: Path) -> None:
    html, markdown = (reported / "report.html").read_text(), (reported / "report.md").read_text()
    assert "&lt;script&gt;alert(" in html and "<b>more</b>" not in html
    assert "<code>F.pad</code>" in html and "A &amp; B processor" in html
    assert "````yaml\n" + RECIPE + "````\n" in markdown  # the fence is longer than the one inside the recipe
    assert r"\<b>more\</b>" in markdown


def test_csv_has_every_digit(reported: Path) -> None:
    rows = list(csv.DictReader((reported / "points.csv").read_text().splitlines()))
    assert [row["point"] for row in rows] == ["dense", "slim"]
    assert rows[0]["flops"] == "2293000" and float(rows[1]["latency_p90_ms"]) == 1.3 * 0.0712
    assert json.loads(rows[0]["uncounted"]) == {"aten::max_pool2d": 2, "aten::relu": 3}


def test_csv_carries_unknown_columns_and_leaves_null_empty() -> None:
    text = points_csv([{"point": "dense", "error": None, "seed": 3}, {"point": "int8", "error": 0.1}])
    dense, int8 = csv.DictReader(text.splitlines())
    assert (dense["error"], dense["seed"], int8["error"], int8["seed"]) == ("", "3", "0.1", "")


def test_every_picture_is_written_and_shown(reported: Path) -> None:
    names = {path.name for path in (reported / "plots").iterdir()}
    assert names == {"error.png", "groups.png", "layers.png", "kernels-conv1.png", "kernels-conv2.png",
                     "gamma-conv1.out.png", "gamma-conv2.out.png", "gamma-fc1.in.png", "gamma-fc1.out.png"}  # fmt: skip
    assert all((reported / "plots" / name).read_bytes().startswith(b"\x89PNG") for name in names)
    markdown = (reported / "report.md").read_text()
    assert set(re.findall(r"\]\(plots/([^)]+)\)", markdown)) == names
    assert (reported / "report.html").read_text().count("<img ") == len(names)


def test_markdown_tables_keep_their_columns(reported: Path) -> None:
    lines = (reported / "report.md").read_text().splitlines()
    tables = [line for line in lines if line.startswith("|")]
    start = lines.index(tables[0])
    table = lines[start : lines.index("", start)]
    assert len(table) == 2 + 9 and {line.count("|") for line in table} == {5}


def test_pixel_map_shows_what_the_first_layer_reads(tmp_path: Path) -> None:
    folder = lenet300(tmp_path / "run")
    write_report(folder)
    html = (folder / "report.html").read_text()
    pixels = len(json.loads((folder / "result.json").read_text())["layers"][0]["kept_in"])
    assert f"{pixels} of 784 pixels that fc1 reads" in html
    assert (folder / "plots" / "pixels.png").is_file()
    assert "1.16x slower" in html and "-0.10 points" in html and "the proximal step has emptied" in html


def test_same_folder_gives_the_same_bytes(reported: Path, tmp_path: Path) -> None:
    again = tmp_path / "elsewhere"
    shutil.copytree(reported, again)
    for name in ("report.html", "report.md", "points.csv"):
        (again / name).unlink()
    write_report(again)
    for path in (path for path in reported.rglob("*") if path.is_file()):
        assert path.read_bytes() == (again / path.relative_to(reported)).read_bytes(), path.name


def test_nan_and_null_are_not_shown_as_results(tmp_path: Path) -> None:
    folder = lenet5(tmp_path / "run")
    rows = [json.loads(line) for line in (folder / "points.jsonl").read_text().splitlines()]
    rows[0] |= {"latency_p50_ms": None, "latency_p90_ms": float("nan")}
    rows[1] |= {"error": float("nan"), "flops_theoretical": None, "uncounted": None}
    _write(folder, "points.jsonl", _lines(rows))
    history = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    history[3] |= {"error": float("nan"), "train_error": None, "loss": float("inf")}
    _write(folder, "history.jsonl", _lines(history))
    write_report(folder)
    html = (folder / "report.html").read_text()
    assert not re.search(r">[^<]*\b(nan|none|null|inf)\b[^<]*<", html.partition("<body>")[2], re.IGNORECASE)
    assert "test error 2.10 %," in html and "latency p50 0.071 ms," in html


def test_a_run_with_nothing_but_points_still_reports(tmp_path: Path) -> None:
    folder = lenet5(tmp_path / "run")
    _write(folder, "result.json", {})
    _write(folder, "facts.json", {})
    _write(folder, "history.jsonl", "")
    _write(folder, "points.jsonl", _lines([{"point": "slim", "error": 0.02}]))
    write_report(folder)
    html = (folder / "report.html").read_text()
    assert "test error 2.00 %" in html and "carries no proof" in html and "<img" not in html
    assert "Gamma" not in html and "Over epochs" not in html


def test_a_method_without_gamma_leaves_that_section_out(tmp_path: Path) -> None:
    folder = lenet5(tmp_path / "run")
    _edit(folder, "result.json", groups={"conv1.out": {"kind": "filter", "kept": [0, 1], "size": 20}}, rule=None)
    write_report(folder)
    html = (folder / "report.html").read_text()
    assert "Gamma" not in html and "What stayed" in html


def test_an_approximate_removal_is_never_called_equal(tmp_path: Path) -> None:
    folder = lenet5(tmp_path / "run")
    _edit(folder, "result.json", proof={"verdict": "approximate", "max_relative_difference": 0.0031, "tolerance": 1e-9})
    write_report(folder)
    markdown = (folder / "report.md").read_text()
    assert "masked differs from removed by 3e-3" in markdown and "masked = removed" not in markdown
    assert "the removal is approximate" in markdown


def test_further_points_get_their_own_column(tmp_path: Path) -> None:
    folder = lenet5(tmp_path / "run")
    with (folder / "points.jsonl").open("a") as file:
        file.write(_lines([_point("int8", 0.0242, 151_321, 3_012, 33_000, 0.05, "5-10-76-16")]))
    write_report(folder)
    markdown = (folder / "report.md").read_text()
    assert "| dense | slim | slim against dense | int8 |" in markdown
    assert "| Test error | 2.10 % | 2.30 % | +0.20 points | 2.42 % |" in markdown


@pytest.mark.parametrize("gamma", [[0.0] * 4, [None] * 4, [1e-300, 1e300, 0.0, None], [0.0585498, 2.0, 2.0, -1.0]])
def test_odd_gammas_are_drawn(tmp_path: Path, gamma: list[float | None]) -> None:
    folder = lenet5(tmp_path / "run")
    groups = {"conv1.out": {"gamma": gamma, "kept": [1, 2], "size": 4}}
    _edit(folder, "result.json", groups=groups, layers=None)
    write_report(folder)
    zero = sum(g is not None and g < 1e-200 for g in gamma)
    assert f"{zero} at zero" in (folder / "report.md").read_text()
    assert (folder / "plots" / "gamma-conv1.out.png").is_file()


def test_wide_networks_are_summed_up(tmp_path: Path) -> None:
    folder = lenet5(tmp_path / "run")
    names = [f"layer{i}.out" for i in range(14)]
    groups = {name: {"gamma": [0.0, 1.0], "kept": [1], "size": 2} for name in names}
    rows = [{"stage": "shrink", "epoch": 1, "loss": 1.0, "error": 0.5, "groups_alive": dict.fromkeys(names, 1)}]
    layer = {"name": "c", "kind": "conv", "before": [4, 80, 3, 3], "after": [4, 80, 3, 3], "kept_out": [0, 1, 2, 3],
             "kept_in": list(range(80)), "kept_positions": [[[1] * 3] * 3] * 80}  # fmt: skip
    _edit(folder, "result.json", groups=groups, layers=[layer])
    _write(folder, "history.jsonl", _lines(rows))
    write_report(folder)
    html = (folder / "report.html").read_text()
    assert "2 more group sets are in result.json" in html and "mean over 80 input channels" in html


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("points.jsonl", "", "empty"),
        ("points.jsonl", '{"point": "dense"}\n{"point": "sl', "line 2: damaged"),
        ("points.jsonl", '{"error": 0.1}\n', "line 1: damaged at point"),
        ("points.jsonl", '{"point": "dense", "error": "low"}\n', "damaged at error"),
        ("points.jsonl", "[1]\n", "expected a JSON object, got list"),
        ("history.jsonl", '{"stage": "train"}\n', "line 1: damaged at epoch"),
        ("facts.json", "{", "damaged, expected JSON"),
        ("facts.json", "[]", "damaged at the whole of it"),
        ("result.json", '{"layers": [{"name": "conv1"}]}', "damaged at layers.0.kind"),
        ("result.json", '{"layers": [{"name": "c", "kind": "conv", "before": [3], "after": [3]}]}', "layers.0.before"),
        ("slim.json", "{}", "not a SlimArch"),
        ("recipe.yaml", b"\xff\xfe\x00", "not UTF-8"),
        ("recipe.yaml", None, "missing"),
        ("history.jsonl", None, "missing"),
    ],
)
def test_damaged_input_is_named_in_one_line(tmp_path: Path, name: str, content: str | bytes | None, said: str) -> None:
    folder = lenet5(tmp_path / "run")
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(InputError) as caught:
        write_report(folder)
    assert str(folder / name) in str(caught.value) and said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (folder / "report.html").exists() and not (folder / "plots").exists()


@pytest.mark.parametrize("there", [True, False])
def test_a_folder_that_is_no_run_is_refused(tmp_path: Path, there: bool) -> None:
    folder = tmp_path / "holiday"
    if there:
        folder.mkdir()
    with pytest.raises(InputError, match=r"holiday: (no such folder|not a run folder), expected .*points\.jsonl"):
        write_report(folder)


def test_report_imports_no_torch_and_no_pandas() -> None:
    code = "import sys, compressnas.report; print([m for m in ('torch', 'pandas', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]", done.stdout


def test_a_browser_shows_it(reported: Path, tmp_path: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium on this machine")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
             "--disable-background-networking", "--disable-component-update", "--disable-sync",
             f"--user-data-dir={tmp_path / 'profile'}"]  # fmt: skip
    page = (reported / "report.html").as_uri()
    done = subprocess.run([browser, *flags, "--dump-dom", page], capture_output=True, text=True, timeout=60)
    assert "2.29 M \N{RIGHTWARDS ARROW} 151 K FLOPs (15.2x fewer)" in done.stdout, done.stderr[-500:]
