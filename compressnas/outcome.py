"""What a run leaves behind: ONNX files, the figures of its networks, what the report reads."""

import json
import os
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compressnas import __version__
from compressnas.bayes.prune import Decision
from compressnas.data import DataSet
from compressnas.export import Check, export_onnx, onnx_metadata
from compressnas.files import write_whole
from compressnas.groups import modules_with_weights, structure
from compressnas.latency import interleaved, random_images
from compressnas.measure import cost, theoretical_flops
from compressnas.proof import Proof
from compressnas.recipe import Recipe, Target, recipe_hash
from compressnas.slim import SlimArch
from compressnas.surgery import Removal
from compressnas.train import Work, evaluate

PROOF_IMAGES = 64
NOISE = 0.05  # part of a latency by which two measurements of it may differ
GUESSING = 0.9  # an error above this part of what guessing gives is called so


def some_images(data: DataSet) -> Tensor:
    """Real images for the proof and the checks: of the validation split, so that the test split is read once."""
    return data.validation.__getitems__(range(min(PROOF_IMAGES, len(data.validation))))[0]


def export_networks(
    recipe: Recipe, out: Path, data: DataSet, networks: Mapping[str, nn.Module], images: Tensor, verdict: str
) -> dict[str, Check]:
    """Write and verify the ONNX file of `slim`, and that of `dense`, where there is one, for comparison."""
    flops = {name: cost(network, images[:1]).flops for name, network in networks.items()}
    extra = {
        "recipe_hash": recipe_hash(recipe),
        "flops_before": flops.get("dense", flops["slim"]),
        "flops_after": flops["slim"],
        "flops_convention": "fvcore: one per multiply-add",
        "proof": verdict,
        "compressnas": __version__,
    }
    metadata = onnx_metadata(data.classes, data.shape, data.mean, data.std, extra)
    files = _onnx_files(out, networks)
    return {name: export_onnx(networks[name], images, path, metadata) for name, path in files.items()}


def _onnx_files(out: Path, names: Iterable[str]) -> dict[str, Path]:
    places = {"dense": out / "checkpoint" / "dense.onnx", "slim": out / "model.onnx"}
    return {name: places[name] for name in names}


def write_points(
    out: Path, data: DataSet, networks: Mapping[str, nn.Module], checks: Mapping[str, Check]
) -> list[dict[str, Any]]:
    """Measure the networks -> what was written; the only place that reads the test split."""
    times = interleaved(_onnx_files(out, networks), random_images(data.shape))
    example = some_images(data)[:1]
    points = []
    for name, network in networks.items():
        whole, free = cost(network, example), theoretical_flops(network, example)
        points.append(
            {
                "point": name,
                "error": evaluate(network, data.test, "cpu"),
                "validation_error": evaluate(network, data.validation, "cpu"),
                "flops": whole.flops,
                "flops_theoretical": free[0],
                "flops_bias_convention": whole.flops_bias_convention,
                "params": whole.params,
                "bytes": checks[name].bytes,
                "latency_p50_ms": times[name].p50_ms,
                "latency_p90_ms": times[name].p90_ms,
                "structure": structure(network),
                "uncounted": dict(whole.uncounted),
            }
        )
    write_lines(out / "points.jsonl", points)
    return points


def doubts(recipe: Recipe, points: Sequence[Mapping[str, Any]], classes: int) -> list[str]:
    """What a user must know before using the result, from the dense and the slim point."""
    dense, slim = points
    notes = []
    target: Target | None = getattr(recipe.method, "target", None)
    if target is not None:
        before, reached = (p[target.kind] if target.kind in p else 1000 * p["latency_p50_ms"] for p in points)
        kind, limit = target.limit({target.kind: before})
        if reached > limit * (1 + (NOISE if kind == "latency" else 0)):
            most = f"{limit:,.0f}" if limit >= 1 else f"{limit:.1g}"
            what = "us of latency" if kind == "latency" else kind
            notes.append(f"the target is missed: {reached:,.0f} {what}, and at most {most} were asked for")
    notes += guesses(points, classes)
    if slim["flops"] >= dense["flops"]:
        notes.append(f"no FLOPs were saved: {dense['flops']:,} before, {slim['flops']:,} after")
    return notes


def guesses(points: Sequence[Mapping[str, Any]], classes: int) -> list[str]:
    """The points that hardly do better than guessing."""
    return [
        f"the {point['point']} network hardly does better than guessing: validation error"
        f" {point['validation_error']:.2%} with {classes} classes"
        for point in points
        if point["validation_error"] > GUESSING * (1 - 1 / classes)
    ]


def constants(proof: Proof) -> list[str]:
    """What became of channels that were the same for every input."""
    moved = [f"{name}: {len(gone)} constant channels moved into biases" for name, gone in proof.folded.folded.items()]
    lost = [f"{name}: constants of removed channels are lost: {why}" for name, why in proof.folded.lost.items()]
    dead = ["before fine-tuning, the slim network gives the same output for every image"] if proof.constant else []
    return moved + lost + dead


def write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    write_whole(path, "".join(json.dumps(record, sort_keys=True) + "\n" for record in records))


# ---------------------------------------------------------------- what the report reads


def result_of(
    recipe: Recipe,
    decision: Decision,
    slim: SlimArch,
    removal: Removal,
    proof: Proof,
    networks: Mapping[str, nn.Module],
    check: Check,
    notes: list[str],
) -> dict[str, Any]:
    """result.json of a run that prunes."""
    groups = {name: {**facts, "kept": list(slim.kept[name])} for name, facts in decision.groups.items()}
    theoretical = {n: int((mask == 0).sum()) for n, mask in removal.masks.items()}
    rule = getattr(recipe.method, "rule", recipe.method.kind)
    return {
        "layers": _layers(slim, removal, networks),
        "groups": groups,
        "rule": {"name": rule, "threshold": getattr(recipe.method, "threshold", None) if rule == "threshold" else None},
        "proof": {
            "verdict": proof.verdict,
            "max_relative_difference": proof.max_relative_difference,
            "tolerance": proof.tolerance,
            "change": proof.change if proof.approximate else None,
            "approximate": list(proof.approximate),
            "images": proof.images,
            "left_alone": [{"set": name, "reason": reason} for name, reason in proof.left_alone],
            "realised": {name: len(gone) for name, gone in removal.units.items()},
            "theoretical_only": theoretical,
        },
        "check": check_facts(check),
        "notes": notes,
    }


def check_facts(check: Check) -> dict[str, Any]:
    return {**vars(check), "by_batch": {str(size): value for size, value in check.by_batch.items()}}


def _layers(slim: SlimArch, removal: Removal, networks: Mapping[str, nn.Module]) -> list[dict[str, Any]]:
    """What stayed of each layer: shapes, units, inputs, kernel positions."""
    small = dict(modules_with_weights(networks["slim"]))
    layers = []
    for name, layer in modules_with_weights(networks["dense"]):
        after, weight = small[name], layer.weight
        gone = set(removal.units.get(f"{name}.out", ()))
        facts: dict[str, Any] = {
            "name": name,
            "kind": "linear" if isinstance(layer, nn.Linear) else "conv",
            "before": list(weight.shape),
            "after": list(after.weight.shape),
            "kept_out": [i for i in range(weight.shape[0]) if i not in gone],
            "kept_in": None,
            "weights_nonzero": int((after.weight != 0).sum()),
        }
        if f"{name}.in" in slim.kept:
            facts["kept_in"] = list(slim.kept[f"{name}.in"])
        if f"{name}.shape" in slim.kept:
            positions = torch.zeros(weight[0].numel())
            positions[list(slim.kept[f"{name}.shape"])] = 1
            facts["kept_positions"] = positions.reshape(weight.shape[1:]).int().tolist()
        layers.append(facts)
    return layers


_PACKAGES = (
    "torch", "torchvision", "torch-pruning", "fvcore", "onnx", "onnxruntime", "onnxscript", "accelerate", "numpy",
)  # fmt: skip


def write_facts(recipe: Recipe, out: Path, command: str, work: Work) -> None:
    """facts.json: what ran, where, with which versions."""
    versions = {"compressnas": __version__}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "unknown"
    machine = {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "platform": platform.platform(),
        "device": str(work.device),
        "python": sys.version.split()[0],
    }
    facts = {
        "command": command,
        "recipe": f"{recipe.subject}, {recipe.method.kind}",
        "recipe_hash": recipe_hash(recipe),
        "seed": recipe.seed,
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "versions": versions,
        "machine": machine,
    }
    write_whole(out / "facts.json", json.dumps(facts, indent=1, sort_keys=True))


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
