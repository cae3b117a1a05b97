"""The main path: data, model, decision, removal, fine-tuning, measuring, export, report; top to bottom."""

import json
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from torch import Tensor, nn

from compressnas import __version__
from compressnas.baselines import CRITERIA
from compressnas.bayes.prune import Decision, bayes_prune, penalty_strengths
from compressnas.data import DataSet, load_data
from compressnas.errors import InputError
from compressnas.export import BATCH_SIZES, Check, export_onnx, onnx_metadata
from compressnas.files import write_whole
from compressnas.gradual import criterion_prune
from compressnas.groups import modules_with_weights, structure
from compressnas.latency import interleaved, random_images
from compressnas.measure import cost, theoretical_flops
from compressnas.models import build_network
from compressnas.progress import Progress
from compressnas.proof import Proof
from compressnas.reachable import Reachable, reachable
from compressnas.recipe import Baseline, Recipe, Target, recipe_hash, to_yaml
from compressnas.report import write_report
from compressnas.slim import SlimArch
from compressnas.surgery import Found, Removal, find_groups, masked, remove, without_selection
from compressnas.train import Work, evaluate, fit, make_work, task_loss
from compressnas.weights import load_weights, save_weights

PROOF_IMAGES = 64
NOISE = 0.05  # part of a latency by which two measurements of it may differ
LOCK = ".lock"  # of the run that works in a folder
GUESSING = 0.9  # an error above this part of what guessing gives is called so
# What --overwrite removes; recipe.yaml and facts.json are replaced. Whatever else lies in the folder is its user's.
WRITTEN = (
    "checkpoint", "log.txt", "history.jsonl", "points.jsonl", "points.csv", "result.json", "slim.json",
    "dense.safetensors", "weights.safetensors", "model.onnx", "report.html", "report.md", "plots",
)  # fmt: skip


def run(recipe: Recipe, out: Path, *, resume: bool, overwrite: bool, progress: Progress, command: str) -> Path:
    """Carry out a recipe in the folder `out`, and return it.

    Raises:
        InputError: the recipe, its data, its weights or the folder cannot be used.
        RunFailed: the proof or the verification of the ONNX file failed.
    """
    _refuse_folder(recipe, out, resume, overwrite)
    work = make_work(recipe.device, recipe.seed, recipe.threads, progress, out / "checkpoint")
    data = load_data(recipe.data, recipe.seed)
    if len(data.validation) < max(BATCH_SIZES):
        held = f"the validation split has {len(data.validation)} images"
        raise InputError(f"data: {held}; expected at least {max(BATCH_SIZES)}, to check the ONNX file with")
    example = data.train[0][0][None].to(work.device)
    dense = _untrained(recipe, data).to(work.device)
    found = CHECKS[recipe.method.kind](dense, example, recipe)  # nothing is written before all is known to be good
    with _alone_in(out) if work.accelerator.is_main_process else nullcontext():  # processes of one run share it
        _make_folder(recipe, out, overwrite)
        progress.log_to(out / "log.txt")
        _write_facts(recipe, out, command, work)
        _carry_out(recipe, out, data, dense, found, work)
    return out


def _carry_out(recipe: Recipe, out: Path, data: DataSet, dense: nn.Module, found: Found | None, work: Work) -> None:
    """Train, decide, remove, fine-tune, export, report: `run` in a folder that is there."""
    progress, example = work.progress, data.train[0][0][None].to(work.device)
    if recipe.train is not None:
        dense = fit(dense, data, recipe.train, work, stage="train")
    save_weights(dense, out / "dense.safetensors")
    decision = METHODS[recipe.method.kind](dense, data, recipe, work, found)
    images = _images(data).to(work.device)
    small, slim, removal, proof = remove(
        decision.model, example, decision.slim, images, recipe.export.select_inputs != "never"
    )
    slim.save(out / "slim.json")
    progress.say(
        f"removed: {structure(dense)} -> {structure(small)}, masked = removed to {proof.max_relative_difference:.0e}"
        + (f", but for norms over what is left, which change it by {proof.change:.0e}" if proof.approximate else "")
    )
    if recipe.method.kind == "given" and recipe.method.fresh:
        _start_afresh(small, recipe.seed)
    keep, loss_fn = _keeper(small, removal), task_loss(recipe.finetune, dense)
    if keep is not None:
        keep()  # new weights are zero where the decision says so
    small = fit(small, data, recipe.finetune, work, stage="finetune", loss_fn=loss_fn, after_step=keep)
    save_weights(small, out / "weights.safetensors")
    _write_lines(out / "history.jsonl", [record for stage in work.history.values() for record in stage])

    small, selection_notes = _with_faster_inputs(small.cpu(), recipe, removal, images.cpu(), out)
    networks = {"dense": dense.cpu(), "slim": small}
    checks = _export(recipe, out, data, networks, images.cpu(), proof)
    points = _write_points(out, data, networks, checks)
    doubts = _doubts(recipe, points, len(data.classes))
    latency_note = "latency: ONNX Runtime, batch 1, one thread, the two files in turns"
    notes = [*doubts, *decision.notes, *_constants(proof), *selection_notes, latency_note]
    result = _result(recipe, decision, slim, removal, proof, networks, checks["slim"], notes)
    write_whole(out / "result.json", json.dumps(result, indent=1, sort_keys=True))
    write_report(out)
    progress.say(f"verified: ONNX Runtime = torch to {checks['slim'].max_abs_diff:.0e} at batch 1, 2 and 5")
    for doubt in doubts:
        progress.say(f"note: {doubt}")


def reachable_by(recipe: Recipe, steps: int = 10) -> tuple[Reachable, ...]:
    """What the network of a recipe can cost when whole channels go; nothing is trained or written."""
    data = load_data(recipe.data, recipe.seed)
    dense = _untrained(recipe, data).eval()
    round_to, approximate = getattr(recipe.method, "round_to", 1), getattr(recipe.method, "approximate", False)
    return reachable(dense, data.train[0][0][None], round_to, steps=steps, approximate=approximate)


# ---------------------------------------------------------------- the steps


def _refuse_folder(recipe: Recipe, out: Path, resume: bool, overwrite: bool) -> None:
    """Refuse a run folder that is there, unless it may be resumed or overwritten. Changes nothing."""
    try:
        str(out).encode()
    except UnicodeEncodeError as error:  # ONNX Runtime and the report could not name it
        raise InputError(f"output {str(out)!r}: expected a path that is UTF-8 text") from error
    if out.exists() and not out.is_dir():
        raise InputError(f"output {out}: a file is there; name a folder")
    if not out.is_dir() or not any(out.iterdir()):
        return
    if not (resume or overwrite):
        raise InputError(f"output {out}: the folder exists; use --resume, --overwrite, or another --out")
    known = (out / "recipe.yaml").is_file() and ((out / "checkpoint").is_dir() or (out / "facts.json").is_file())
    leftovers = all(path.name in ("checkpoint", LOCK) or path.name.startswith(".part-") for path in out.iterdir())
    if not known and not leftovers:
        raise InputError(f"output {out}: not a run folder (no recipe.yaml and checkpoint in it), so it is left alone")
    if resume and known and (out / "recipe.yaml").read_text(encoding="utf-8") != to_yaml(recipe):
        raise InputError(f"output {out}: it holds a run of another recipe; use --overwrite, or another --out")


@contextmanager
def _alone_in(out: Path) -> Iterator[None]:
    """Keep other runs out of the folder, which is made where it is not there."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = FileLock(out / LOCK, timeout=0)
        lock.acquire()
    except Timeout:
        raise InputError(f"output {out}: another run works in this folder; wait for it, or use another --out") from None
    except OSError as error:
        raise InputError(f"cannot make the run folder {out}: {error.strerror}") from error
    try:
        yield
    finally:
        (out / LOCK).unlink(missing_ok=True)
        lock.release()


def _make_folder(recipe: Recipe, out: Path, overwrite: bool) -> None:
    try:
        for path in [out / name for name in WRITTEN] if overwrite else []:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        (out / "checkpoint").mkdir(parents=True, exist_ok=True)
        for left_over in (*out.glob(".part-*"), *out.glob("*/.part-*")):  # of a killed run
            left_over.unlink()
    except OSError as error:
        raise InputError(f"cannot make the run folder {out}: {error.strerror}") from error
    write_whole(out / "recipe.yaml", to_yaml(recipe))


def _untrained(recipe: Recipe, data: DataSet) -> nn.Module:
    """The dense network, with the weights of a checkpoint where the recipe names one."""
    torch.manual_seed(recipe.seed)
    model = build_network(recipe.model, data.shape, len(data.classes))
    if recipe.model.weights is not None:
        load_weights(model, Path(recipe.model.weights), recipe.model.fresh)
    return model


def _check_bayes(dense: nn.Module, example: Tensor, recipe: Recipe) -> Found:
    assert recipe.method.kind == "bayes"
    found = find_groups(dense, example, recipe.method.groups, recipe.method.approximate)
    penalty_strengths(dense, found.sets, example, recipe.method)
    return found


def _check_given(dense: nn.Module, example: Tensor, recipe: Recipe) -> Found | None:
    assert recipe.method.kind == "given"
    masked(dense, example, SlimArch.load(recipe.method.path))
    return None


CHECKS: dict[str, Callable[[nn.Module, Tensor, Recipe], Found | None]] = {
    "bayes": _check_bayes,
    **dict.fromkeys(CRITERIA, lambda dense, example, recipe: None),
    "given": _check_given,
}

Method = Callable[[nn.Module, DataSet, Recipe, Work, Found | None], Decision]


def _bayes(dense: nn.Module, data: DataSet, recipe: Recipe, work: Work, found: Found | None) -> Decision:
    assert recipe.method.kind == "bayes"
    return bayes_prune(dense, data, recipe.method, work, found)


def _baseline(dense: nn.Module, data: DataSet, recipe: Recipe, work: Work, _: Found | None) -> Decision:
    assert isinstance(recipe.method, Baseline)
    return criterion_prune(dense, data, recipe.method, work)


def _given(dense: nn.Module, data: DataSet, recipe: Recipe, work: Work, _: Found | None) -> Decision:
    assert recipe.method.kind == "given"
    return Decision(dense, SlimArch.load(recipe.method.path), {})


METHODS: dict[str, Method] = {"bayes": _bayes, **dict.fromkeys(CRITERIA, _baseline), "given": _given}


def _start_afresh(model: nn.Module, seed: int) -> None:
    """New weights for every layer, as the layers themselves draw them."""
    torch.manual_seed(seed)
    for module in model.modules():
        reset = getattr(module, "reset_parameters", None)
        if callable(reset):
            reset()


def _keeper(model: nn.Module, removal: Removal) -> Callable[[], bool] | None:
    """What keeps weights at zero that are gone in theory only."""
    if not removal.masks:
        return None
    parameters = dict(model.named_parameters())

    @torch.no_grad()
    def keep() -> bool:
        for name, mask in removal.masks.items():
            parameters[name].mul_(mask)
        return False

    return keep


def _images(data: DataSet) -> Tensor:
    """Real images for the proof and the checks: of the validation split, so that the test split is read once."""
    return data.validation.__getitems__(range(min(PROOF_IMAGES, len(data.validation))))[0]


def _with_faster_inputs(
    small: nn.Module, recipe: Recipe, removal: Removal, images: Tensor, out: Path
) -> tuple[nn.Module, list[str]]:
    """Let `export.select_inputs: auto` decide by latency whether unread inputs are selected away or read in vain."""
    if not removal.selected or recipe.export.select_inputs == "always":
        return small, []
    candidates = {"selecting": small, "whole": without_selection(small)}
    files = {name: out / "checkpoint" / f"{name}.onnx" for name in candidates}
    for name, path in files.items():
        export_onnx(candidates[name], images, path, {})
    data_shape = (images.shape[1], images.shape[2], images.shape[3])
    times = {n: t.p50_ms for n, t in interleaved(files, random_images(data_shape), seconds=3.0).items()}
    which = "selecting" if times["selecting"] <= 1.05 * times["whole"] else "whole"
    read = ", ".join(f"{layer} reads {count}" for layer, count in removal.selected.items())
    figures = (
        f"p50 {1000 * times['selecting']:.1f} us when it selects, {1000 * times['whole']:.1f} us when it reads all"
    )
    done = "the model selects its inputs" if which == "selecting" else "selecting is slower, so all inputs are read"
    return candidates[which], [f"{read} of its inputs; {done} ({figures})"]


def _export(
    recipe: Recipe, out: Path, data: DataSet, networks: Mapping[str, nn.Module], images: Tensor, proof: Proof
) -> dict[str, Check]:
    """Write and verify the ONNX files, the dense one for comparison."""
    facts = {name: cost(network, images[:1]) for name, network in networks.items()}
    extra = {
        "recipe_hash": recipe_hash(recipe),
        "flops_before": facts["dense"].flops,
        "flops_after": facts["slim"].flops,
        "flops_convention": "fvcore: one per multiply-add",
        "proof": proof.verdict,
        "compressnas": __version__,
    }
    metadata = onnx_metadata(data.classes, data.shape, data.mean, data.std, extra)
    return {name: export_onnx(networks[name], images, path, metadata) for name, path in _onnx_files(out).items()}


def _onnx_files(out: Path) -> dict[str, Path]:
    return {"dense": out / "checkpoint" / "dense.onnx", "slim": out / "model.onnx"}


def _write_points(
    out: Path, data: DataSet, networks: Mapping[str, nn.Module], checks: Mapping[str, Check]
) -> list[dict[str, Any]]:
    """Measure dense and slim -> what was written; the only place that reads the test split."""
    times = interleaved(_onnx_files(out), random_images(data.shape))
    example = _images(data)[:1]
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
    _write_lines(out / "points.jsonl", points)
    return points


def _doubts(recipe: Recipe, points: Sequence[Mapping[str, Any]], classes: int) -> list[str]:
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
    guesses = GUESSING * (1 - 1 / classes)
    for point in points:
        if point["validation_error"] > guesses:
            notes.append(f"the {point['point']} network hardly does better than guessing: validation error"
                         f" {point['validation_error']:.2%} with {classes} classes")  # fmt: skip
    if slim["flops"] >= dense["flops"]:
        notes.append(f"no FLOPs were saved: {dense['flops']:,} before, {slim['flops']:,} after")
    return notes


def _constants(proof: Proof) -> list[str]:
    """What became of channels that were the same for every input."""
    moved = [f"{name}: {len(gone)} constant channels moved into biases" for name, gone in proof.folded.folded.items()]
    lost = [f"{name}: constants of removed channels are lost: {why}" for name, why in proof.folded.lost.items()]
    dead = ["before fine-tuning, the slim network gives the same output for every image"] if proof.constant else []
    return moved + lost + dead


def _write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    write_whole(path, "".join(json.dumps(record, sort_keys=True) + "\n" for record in records))


# ---------------------------------------------------------------- what the report reads


def _result(
    recipe: Recipe,
    decision: Decision,
    slim: SlimArch,
    removal: Removal,
    proof: Proof,
    networks: Mapping[str, nn.Module],
    check: Check,
    notes: list[str],
) -> dict[str, Any]:
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
        "check": {**vars(check), "by_batch": {str(size): value for size, value in check.by_batch.items()}},
        "notes": notes,
    }


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


def _write_facts(recipe: Recipe, out: Path, command: str, work: Work) -> None:
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
        "recipe": f"{recipe.model.network}, {recipe.method.kind}",
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
