"""NASI on NAS-Bench-201: settings chosen on some seeds, then searches with others, looked up in the benchmark's table.

    python tools/studies/nasbench201_nasi.py settings --table T.csv.gz --data c10.npz --seeds 100 104 --out runs/nasi
    python tools/studies/nasbench201_nasi.py search --table T.csv.gz --data c10.npz --seeds 0 10 --out runs/nasi
    python tools/studies/nasbench201_nasi.py search --table T.csv.gz --data c10.npz --seeds 0 4 --steps 400

A step depends neither on the constraint nor on the budget: the steps of a seed are taken once, saved in OUT, and put
together as often as one likes; a killed study goes on where it was. `settings` compares ways to put them together by
the validation accuracy after 12 epochs, and reads no other column. `search` decides as the recipe does (`--set` changes
it) and prints the test accuracy of what was found, beside what the paper's settings find with the same steps, what was
published, random cells, and the cell with most FLOPs.
"""

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from compressnas.data import load_data
from compressnas.nasi.search import Found, decided, nasi_search
from compressnas.progress import Progress
from compressnas.recipe import Nasi, Recipe, load_recipe
from compressnas.search_run import search_batch
from compressnas.spaces import SPACES
from compressnas.spaces.cell import Space
from compressnas.spaces.nasbench201 import looked_up, read_table
from compressnas.train import make_work

RECIPE = "nasbench201_nasi"
TEST = ("c10_test_200", "c100_test_200", "in16_test_200")
CHOSEN_BY = "c10_valid_12"
PUBLISHED = {
    "NASI (T), published": (93.08, 69.51, 40.87),
    "NASI (4T), published": (93.55, 71.20, 44.84),
    "TE-NAS, published": (93.90, 71.24, 42.38),
}
PAPERS = {"mu": 2.0, "nu": "adaptive", "nu_0": 1000.0, "checks": 0}
CHECKS = 100  # decisions, of each setting that is compared
Table = Mapping[str, Mapping[str, float]]


def recipe_of(seed: int, arguments: argparse.Namespace, **changed: Any) -> Recipe:
    """The recipe of a seed, with what the command line says, and then with other settings of the method."""
    said = [f"seed={seed}", f"method.steps={arguments.steps}", *arguments.set]
    if arguments.data:
        said += [f"data={{name: npz, path: {arguments.data}}}", "method.images=real"]
    return load_recipe(RECIPE, said + [f"method.{key}={json.dumps(value)}" for key, value in changed.items()])


def space_of(recipe: Recipe) -> Space:
    assert recipe.space is not None
    settings = recipe.space.model_dump()
    settings.pop("table", None)
    return SPACES[settings.pop("name")](**settings)


def searched(seed: int, arguments: argparse.Namespace, ways: list[dict[str, Any]]) -> list[Found]:
    """What the steps of a seed lead to in each way; on one thread."""
    torch.set_num_threads(1)
    folder: Path = arguments.out / f"seed{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    work = make_work("cpu", seed, None, Progress(quiet=True, log=folder / "log.txt"), folder)
    found = []
    for changed in ways:
        recipe = recipe_of(seed, arguments, **changed)
        assert isinstance(recipe.method, Nasi)
        data = load_data(recipe.data, seed)
        batch = partial(search_batch, data, recipe.method, seed)
        found.append(nasi_search(space_of(recipe), data.shape, len(data.classes), batch, recipe.method, work))
    return found


def all_searched(arguments: argparse.Namespace, ways: list[dict[str, Any]]) -> list[list[Found]]:
    """The same for every seed, some at a time: seed -> way -> what was found."""
    seeds = range(*arguments.seeds)
    one = partial(searched, arguments=arguments, ways=ways)
    with ProcessPoolExecutor(arguments.workers, mp_context=get_context("spawn")) as pool:
        return list(pool.map(one, seeds))


# ---------------------------------------------------------------- searches


def search(arguments: argparse.Namespace, table: Table) -> Iterator[str]:
    space, seeds = space_of(recipe_of(0, arguments)), range(*arguments.seeds)
    found = all_searched(arguments, [{}, PAPERS])
    cells = [[space.text(one.kept) for one in way] for way in zip(*found, strict=True)]
    yield f"| {arguments.steps} steps, {len(seeds)} seeds | " + " | ".join(TEST) + " |"
    yield "|---|---|---|---|"
    yield _row("NASI, the recipe", [looked_up(table, cell) for cell in cells[0]])
    yield _row("NASI, the paper's settings, same steps", [looked_up(table, cell) for cell in cells[1]])
    for name, figures in PUBLISHED.items():
        yield f"| {name} | " + " | ".join(f"{figure:.2f}" for figure in figures) + " |"
    yield _row("random cells, all of them", list(table.values()))
    free = [row for cell, row in table.items() if "none" not in cell]
    yield _row("random cells without `none`, all of them", free)
    yield _row("the cell with most FLOPs", [max(table.values(), key=lambda row: row["flops_c10_M"])])
    yield ""
    for seed, (one, _), cell, paper in zip(seeds, found, *cells, strict=True):
        figures, papers = (", ".join(f"{looked_up(table, c)[column]:.2f}" for column in TEST) for c in (cell, paper))
        trace = f"T {one.checked[-1][1]:.2f}, nu {one.limits[-1]:.2f}, check {len(one.checked)}" if one.checked else ""
        yield f"- seed {seed}: `{cell}` {figures} ({trace}); the paper's settings: `{paper}` {papers}"


def _row(name: str, rows: list[Mapping[str, float]]) -> str:
    cells = []
    for column in TEST:
        values = [row[column] for row in rows]
        spread = f" +- {statistics.stdev(values):.2f}" if len(values) > 1 else ""
        cells.append(f"{statistics.mean(values):.2f}{spread}")
    return f"| {name} | " + " | ".join(cells) + " |"


# ---------------------------------------------------------------- settings


def settings(arguments: argparse.Namespace, table: Table) -> Iterator[str]:
    space = space_of(recipe_of(0, arguments))
    ways: list[dict[str, Any]] = [{"nu": "geometric"}]
    ways += [{"nu": "adaptive", "nu_0": value} for value in (300.0, 1000.0, 3000.0)]
    ways += [{"nu": "fixed", "nu_0": value} for value in (100.0, 30.0, 20.0, 10.0, 7.0, 5.0)]
    penalties = [{**way, "mu": mu, "checks": 0} for way, mu in itertools.product(ways, (1.0, 1.5, 2.0, 3.0))]
    strictest = {**ways[-1], "mu": 0.0, "checks": CHECKS}  # those it checks serve every larger nu
    plain = {"mu": 0.0, "checks": 0}
    found = all_searched(arguments, [plain, *penalties, *({**way, **plain} for way in ways), strictest])
    rows = []
    for index, way in enumerate([plain, *penalties, *({**way, "mu": 0.0, "checks": CHECKS} for way in ways)]):
        cells = []
        for by_way in found:
            one, checked = by_way[index], by_way[-1].checked if way["checks"] else ()
            cells.append(space.text(decided(space, one.alpha, one.limits[-1], checked)))
        values = [looked_up(table, cell)[CHOSEN_BY] for cell in cells]
        each = ", ".join(f"{value:.1f}" for value in values)
        nu = f"{way.get('nu', 'none')} {way.get('nu_0', '')}"
        rows.append((statistics.mean(values), f"| {nu} | {way['mu']:g} | {way['checks']} |", each))
    yield f"| nu | mu | checks | {CHOSEN_BY}, mean | each seed |"
    yield "|---|---|---|---|---|"
    yield from (f"{row} {mean:.2f} | {each} |" for mean, row, each in sorted(rows, key=lambda row: -row[0]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["search", "settings"])
    parser.add_argument("--table", required=True, type=Path, help="the benchmark's results, CSV")
    parser.add_argument("--data", type=Path, help="npz of images; Gaussian ones without")
    parser.add_argument("--seeds", nargs=2, type=int, default=(0, 10), metavar=("FIRST", "END"))
    parser.add_argument("--steps", type=int, default=100, help="T")
    parser.add_argument("--out", type=Path, default=Path("runs/nasbench201_nasi"))
    parser.add_argument("--workers", type=int, default=1, help="searches at a time, one thread each")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="for every search")
    arguments = parser.parse_args()
    began = time.monotonic()
    print("\n".join((search if arguments.what == "search" else settings)(arguments, read_table(arguments.table))))
    print(f"{time.monotonic() - began:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
