"""The main path of a search: space, search, the derived network, training, measuring, export, report."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compressnas.data import DataSet
from compressnas.errors import InputError, RunFailed
from compressnas.files import write_whole
from compressnas.nasi.proxies import PROXIES, best_of
from compressnas.nasi.search import nasi_search
from compressnas.outcome import check_facts, export_networks, guesses, some_images, write_lines, write_points
from compressnas.proof import relative_difference
from compressnas.recipe import KnownCell, Nasi, Proxy, Recipe, SearchData
from compressnas.report import write_report
from compressnas.slim import SlimArch
from compressnas.spaces import SPACES
from compressnas.spaces.cell import Cell, Kept, Space, operation_of, read_by, take_weights
from compressnas.spaces.nasbench201 import looked_up, read_table
from compressnas.train import Work, fit, stage_seed
from compressnas.weights import save_weights

TOLERANCE = 1e-10  # relative difference in float64 of the masked supernet and the derived network
Table = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class Prepared:
    """A space, and what a benchmark knows of its cells."""

    space: Space
    table: Table | None


@dataclass(frozen=True)
class Chosen:
    """What a search method returns: the cell, and what the report tells of how it was found."""

    kept: Kept
    facts: Mapping[str, Any]


def prepare_search(recipe: Recipe) -> Prepared:
    """The space of a recipe and its table. Raises InputError where one of them cannot be used."""
    assert recipe.space is not None
    settings = recipe.space.model_dump()
    table, name = settings.pop("table", None), settings.pop("name")
    space = SPACES[name](**settings)
    space.best({choice.name: torch.zeros(len(choice.candidates)) for choice in space.choices})
    if isinstance(recipe.method, KnownCell):
        known_cell(space, recipe.method)
    return Prepared(space, None if table is None else read_table(table))


def carry_out_search(recipe: Recipe, data: DataSet, prepared: Prepared, work: Work, out: Path) -> None:
    """Search, derive, train, measure, export, report, in a folder that is there."""
    space, progress = prepared.space, work.progress
    chosen = SEARCHES[recipe.method.kind](space, data, recipe, work)
    slim = space.slim(chosen.kept, method=recipe.method.kind, seed=recipe.seed)
    slim.save(out / "slim.json")
    text = space.text(chosen.kept)
    known = None if prepared.table is None else looked_up(prepared.table, text)
    progress.say(f"found: {text}" + (f" ({_told(known)})" if known else ""))

    images = some_images(data)
    proof = _proved(space, chosen.kept, data, images, recipe.seed)
    torch.manual_seed(recipe.seed)
    derived = space.network(chosen.kept, data.shape, len(data.classes))
    if recipe.train is not None:
        derived = fit(derived, data, recipe.train, work, stage="train")
    save_weights(derived, out / "weights.safetensors")
    write_lines(out / "history.jsonl", [record for stage in work.history.values() for record in stage])

    networks = {"slim": derived.cpu()}
    checks = export_networks(recipe, out, data, networks, images, proof["verdict"])
    points = write_points(out, data, networks, checks)
    notes = _notes(recipe, points, len(data.classes))
    facts = {"space": space.name, "method": recipe.method.kind, "cell": text, "table": known and dict(known)}
    facts |= {k: v for k, v in chosen.facts.items() if k != "alpha"}
    facts |= {"choices": _choices(space, chosen), "graphs": _graphs(space, chosen.kept)}
    result = {"search": facts, "proof": proof, "check": check_facts(checks["slim"]), "notes": notes}
    write_whole(out / "result.json", json.dumps(result, indent=1, sort_keys=True))
    write_report(out)
    progress.say(f"verified: ONNX Runtime = torch to {checks['slim'].max_abs_diff:.0e} at batch 1, 2 and 5")
    for note in notes:
        progress.say(f"note: {note}")


class _Masked(nn.Module):
    """A supernet on which a decision is laid."""

    def __init__(self, supernet: nn.Module, kept: Kept) -> None:
        super().__init__()
        self.supernet, self.kept = supernet, dict(kept)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.supernet(images, way=self.kept)
        return logits


def _proved(space: Space, kept: Kept, data: DataSet, images: Tensor, seed: int) -> dict[str, Any]:
    """That the cell on its own computes what the supernet does with all other candidates masked.

    Raises:
        RunFailed: it does not.
    """
    torch.manual_seed(seed)
    supernet = space.supernet(None, data.shape, len(data.classes))
    derived = space.supernet(kept, data.shape, len(data.classes))
    take_weights(derived, supernet)
    difference = relative_difference(_Masked(supernet, kept), derived, images)
    if not difference <= TOLERANCE:
        raise RunFailed(f"the derived network differs from the masked supernet by {difference:.1e} (relative)")
    return {
        "verdict": "equal",
        "max_relative_difference": difference,
        "tolerance": TOLERANCE,
        "images": len(images),
    }


# ---------------------------------------------------------------- methods

Search = Callable[[Space, DataSet, Recipe, Work], Chosen]


def _nasi(space: Space, data: DataSet, recipe: Recipe, work: Work) -> Chosen:
    settings = recipe.method
    assert isinstance(settings, Nasi)
    batch = partial(search_batch, data, settings, work.seed)
    found = nasi_search(space, data.shape, len(data.classes), batch, settings, work)
    alpha = {name: one.tolist() for name, one in found.alpha.items()}
    checks = [{"cell": space.text(kept), "trace": trace} for kept, trace in found.checked]
    facts = {"alpha": alpha, "traces": list(found.traces), "limits": list(found.limits), "checks": checks}
    return Chosen(found.kept, facts)


def _proxy(space: Space, data: DataSet, recipe: Recipe, work: Work) -> Chosen:
    settings = recipe.method
    assert isinstance(settings, Proxy)
    images, labels = (one.to(work.device) for one in search_batch(data, settings, work.seed, 0))

    def build(kept: Kept) -> nn.Module:
        torch.manual_seed(stage_seed(work.seed, "proxy"))
        return space.supernet(kept, data.shape, len(data.classes)).to(work.device)

    def score(network: nn.Module) -> float:
        return PROXIES[settings.name](network, images, labels)

    generator = torch.Generator().manual_seed(stage_seed(work.seed, "cells"))
    with work.progress.stage(f"search by {settings.name}", settings.samples) as step:
        ranking = best_of(space, score, settings.samples, generator, build, step)
    scores = [one if math.isfinite(one) else None for one in ranking.scores]
    return Chosen(ranking.best, {"scores": scores, "score_name": settings.name})


def _cell(space: Space, data: DataSet, recipe: Recipe, work: Work) -> Chosen:
    assert isinstance(recipe.method, KnownCell)
    return Chosen(known_cell(space, recipe.method), {})


SEARCHES: dict[str, Search] = {"nasi": _nasi, "proxy": _proxy, "cell": _cell}


def known_cell(space: Space, settings: KnownCell) -> Kept:
    """The cell that a recipe gives. Raises InputError where the space has none like it, or nothing comes through it."""
    slim = space.parsed(settings.text) if settings.text is not None else SlimArch.load(str(settings.path))
    sizes = {choice.name: len(choice.candidates) for choice in space.decisions}
    counts = {choice.name: choice.keep for choice in space.decisions}
    if dict(slim.sizes) != sizes or any(len(slim.kept[name]) != count for name, count in counts.items()):
        raise InputError(f"method.path: {settings.path} is no cell of the space {space.name}")
    if not space.connected(slim.kept):
        raise InputError(f"method: nothing of the input comes to the output of the cell {space.text(slim.kept)}")
    return slim.kept


def search_batch(data: DataSet, settings: SearchData, seed: int, step: int) -> tuple[Tensor, Tensor]:
    """Images (B, C, H, W) and labels (B,) of a step, real or random; by (seed, step) alone."""
    generator = torch.Generator().manual_seed(stage_seed(seed, f"batch {step}"))
    size = min(settings.batch_size, len(data.train)) if settings.images == "real" else settings.batch_size
    chosen = torch.randperm(len(data.train), generator=generator)[:size].tolist()
    images, labels = data.train.__getitems__(chosen)
    if settings.images == "gaussian":
        images = torch.randn(size, *data.shape, generator=generator)
    if settings.labels == "random" or len(labels) != len(images):
        labels = torch.randint(len(data.classes), (len(images),), generator=generator)
    return images, labels


# ---------------------------------------------------------------- what the report reads


def _choices(space: Space, chosen: Chosen) -> dict[str, Any]:
    alpha = chosen.facts.get("alpha") or {}
    return {
        choice.name: {
            "candidates": list(choice.candidates),
            "alpha": alpha.get(choice.logits),
            "kept": list(chosen.kept[choice.name]),
        }
        for choice in space.decisions
    }


def _graphs(space: Space, kept: Kept) -> dict[str, Any]:
    """Kind of cell -> its nodes, and (source, target, operation) of what leads from its input to its output."""
    return {kind: _graph(cell, kept) for kind, cell in space.cells.items()}


def _graph(cell: Cell, kept: Kept) -> dict[str, Any]:
    inputs = ["in"] if cell.inputs == 1 else [f"in {number}" for number in range(1, cell.inputs + 1)]
    names = [*inputs, *(str(number) for number in range(1, len(cell.nodes))), "out"]
    used = cell.used(kept)
    edges = [
        [source, node, operation_of(term, kept)]
        for node, terms in enumerate(cell.nodes, start=cell.inputs)
        for term in terms
        if term.name in used
        for source in read_by(term, kept)
    ]
    return {"nodes": names, "edges": edges}


def _told(known: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.2f}" for name, value in known.items() if "_test_200" in name)


def _notes(recipe: Recipe, points: list[dict[str, Any]], classes: int) -> list[str]:
    if recipe.train is None or recipe.train.epochs == 0:
        return ["the network is not trained (no `train` section): its error says nothing of the cell"]
    return guesses(points, classes)
