"""NASI on NAS-Bench-201: settings chosen on some seeds, then searches with others, looked up in the benchmark's table.

    python tools/studies/nasbench201_nasi.py search --table T.csv.gz --data c10.npz --seeds 0 10 --out runs/nasi
    python tools/studies/nasbench201_nasi.py settings --table T.csv.gz --data c10.npz --seeds 100 104 --out runs/nasi

`search` runs the recipe once for each seed (finished runs are not repeated, killed ones are resumed) and prints the
mean test accuracy of what was found, beside the paper's, random cells, and the cell with most FLOPs. `settings` takes
the same recorded steps and puts them together in different ways, since a step depends neither on the constraint nor on
the penalty nor on the budget; they are compared by the validation accuracy after 12 epochs; no other column is read.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from compressnas.nasi.search import ascent, limits_of
from compressnas.recipe import load_recipe
from compressnas.spaces import SPACES
from compressnas.spaces.nasbench201 import looked_up, read_table

RECIPE = "nasbench201_nasi"
TEST = ("c10_test_200", "c100_test_200", "in16_test_200")
CHOSEN_BY = "c10_valid_12"
PUBLISHED = {"NASI (T), published": (93.08, 69.51, 40.87), "NASI (4T), published": (93.55, 71.20, 44.84)}
NU_0, MU = (0.0, 100.0, 300.0, 1000.0, 3000.0), (1.0, 1.5, 2.0, 3.0)
Table = Mapping[str, Mapping[str, float]]


def run(seed: int, arguments: argparse.Namespace) -> Path:
    """One search, in a process of its own with one thread -> its folder."""
    out: Path = arguments.out / f"{arguments.name}-seed{seed}"
    if (out / "report.html").exists():
        return out
    command = [sys.executable, "-m", "compressnas", "run", RECIPE, "--out", str(out), "--quiet"]
    command += ["--resume"] if out.exists() else []
    settings = [f"seed={seed}", f"method.steps={arguments.steps}", f"space.table={arguments.table}", *arguments.set]
    if arguments.data:
        settings += [f"data={{name: npz, path: {arguments.data}}}", "method.images=real"]
    for setting in settings:
        command += ["--set", setting]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr}")
    return out


def recorded(folder: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    """T of each step, and choice -> (T, O) dT/dalpha, as the search has left them."""
    state = torch.load(folder / "checkpoint" / "search.pt", weights_only=True)
    return state["traces"], {name: torch.stack(one) for name, one in state["gradients"].items()}


# ---------------------------------------------------------------- searches


def searches(arguments: argparse.Namespace, folders: list[Path], table: Table) -> Iterator[str]:
    found = [json.loads((folder / "result.json").read_text())["search"]["cell"] for folder in folders]
    yield "| | " + " | ".join(TEST) + " |"
    yield "|---|---|---|---|"
    yield _row(f"NASI, {arguments.steps} steps, {len(found)} seeds", [looked_up(table, cell) for cell in found])
    for name, figures in PUBLISHED.items():
        yield f"| {name} | " + " | ".join(f"{figure:.2f}" for figure in figures) + " |"
    yield _row("random cells, all of them", list(table.values()))
    most = max(table.values(), key=lambda row: row["flops_c10_M"])
    yield _row("the cell with most FLOPs", [most])
    yield ""
    for folder, cell in zip(folders, found, strict=True):
        figures = ", ".join(f"{looked_up(table, cell)[column]:.2f}" for column in TEST)
        yield f"- {folder.name}: `{cell}` {figures}"


def _row(name: str, rows: list[Mapping[str, float]]) -> str:
    cells = []
    for column in TEST:
        values = [row[column] for row in rows]
        spread = f" +- {statistics.stdev(values):.2f}" if len(values) > 1 else ""
        cells.append(f"{statistics.mean(values):.2f}{spread}")
    return f"| {name} | " + " | ".join(cells) + " |"


# ---------------------------------------------------------------- settings


def settings(arguments: argparse.Namespace, folders: list[Path], table: Table) -> Iterator[str]:
    recipe = load_recipe(RECIPE, arguments.set)
    assert recipe.space is not None
    space = SPACES[recipe.space.name](exclude=recipe.space.exclude)
    runs = [recorded(folder) for folder in folders]
    yield f"| nu | nu_0 | mu | {CHOSEN_BY}, mean | each seed |"
    yield "|---|---|---|---|---|"
    for nu, nu_0, mu in itertools.product(
        ("adaptive", "fixed"), (0.0, 100.0, 300.0, 1000.0, 3000.0), (1.0, 1.5, 2.0, 3.0)
    ):
        values = []
        for traces, gradients in runs:
            limit = nu_0 if nu_0 or nu == "adaptive" else statistics.mean(traces)
            alpha = ascent(traces, gradients, limits_of(traces, nu, limit), mu)
            values.append(looked_up(table, space.text(space.best(alpha)))[CHOSEN_BY])
        each = ", ".join(f"{value:.1f}" for value in values)
        yield f"| {nu} | {nu_0 or 'mean T'} | {mu:g} | {statistics.mean(values):.2f} | {each} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["search", "settings"])
    parser.add_argument("--table", required=True, type=Path, help="the benchmark's results, CSV")
    parser.add_argument("--data", type=Path, help="npz of images; Gaussian ones without")
    parser.add_argument("--seeds", nargs=2, type=int, default=(0, 10), metavar=("FIRST", "END"))
    parser.add_argument("--steps", type=int, default=100, help="T")
    parser.add_argument("--name", default="T", help="of the folders: NAME-seed0")
    parser.add_argument("--out", type=Path, default=Path("runs/nasbench201_nasi"))
    parser.add_argument("--workers", type=int, default=1, help="searches at a time, one thread each")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="for every search")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(arguments.workers) as pool:
        folders = list(pool.map(lambda seed: run(seed, arguments), range(*arguments.seeds)))
    table = read_table(arguments.table)
    print("\n".join((searches if arguments.what == "search" else settings)(arguments, folders, table)))


if __name__ == "__main__":
    main()
