"""The main path: data, model, decision, removal, fine-tuning, measuring, export, report; top to bottom."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

import torch
from filelock import FileLock, Timeout
from torch import Tensor, nn

from compressnas.baselines import CRITERIA
from compressnas.bayes.prune import Decision, bayes_prune, penalty_strengths
from compressnas.data import DataSet, load_data
from compressnas.errors import InputError
from compressnas.export import BATCH_SIZES, export_onnx
from compressnas.files import write_whole
from compressnas.gradual import criterion_prune
from compressnas.groups import structure
from compressnas.latency import interleaved, random_images
from compressnas.models import build_network
from compressnas.outcome import (
    constants,
    doubts,
    export_networks,
    result_of,
    some_images,
    write_facts,
    write_lines,
    write_points,
)
from compressnas.progress import Progress
from compressnas.reachable import Reachable, reachable
from compressnas.recipe import Baseline, Recipe, to_yaml
from compressnas.report import write_report
from compressnas.search_run import carry_out_search, prepare_search
from compressnas.slim import SlimArch
from compressnas.surgery import Found, Removal, find_groups, masked, remove, without_selection
from compressnas.train import Work, fit, make_work, task_loss
from compressnas.weights import load_weights, save_weights

LOCK = ".lock"  # of the run that works in a folder
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
    carry_out = _prepared(recipe, data, work)  # nothing is written before all is known to be good
    with _alone_in(out) if work.accelerator.is_main_process else nullcontext():  # processes of one run share it
        _make_folder(recipe, out, overwrite)
        progress.log_to(out / "log.txt")
        write_facts(recipe, out, command, work)
        carry_out(out)
    return out


def _prepared(recipe: Recipe, data: DataSet, work: Work) -> Callable[[Path], None]:
    """What carries the recipe out in a folder that is there. Raises InputError for what can be known before."""
    if recipe.space is not None:
        return partial(carry_out_search, recipe, data, prepare_search(recipe), work)
    example = data.train[0][0][None].to(work.device)
    dense = _untrained(recipe, data).to(work.device)
    found = CHECKS[recipe.method.kind](dense, example, recipe)
    return partial(_carry_out, recipe, data, dense, found, work)


def _carry_out(recipe: Recipe, data: DataSet, dense: nn.Module, found: Found | None, work: Work, out: Path) -> None:
    """Train, decide, remove, fine-tune, export, report: `run` in a folder that is there."""
    progress, example = work.progress, data.train[0][0][None].to(work.device)
    if recipe.train is not None:
        dense = fit(dense, data, recipe.train, work, stage="train")
    save_weights(dense, out / "dense.safetensors")
    decision = METHODS[recipe.method.kind](dense, data, recipe, work, found)
    images = some_images(data).to(work.device)
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
    write_lines(out / "history.jsonl", [record for stage in work.history.values() for record in stage])

    small, selection_notes = _with_faster_inputs(small.cpu(), recipe, removal, images.cpu(), out)
    networks = {"dense": dense.cpu(), "slim": small}
    checks = export_networks(recipe, out, data, networks, images.cpu(), proof.verdict)
    points = write_points(out, data, networks, checks)
    warned = doubts(recipe, points, len(data.classes))
    latency_note = "latency: ONNX Runtime, batch 1, one thread, the two files in turns"
    notes = [*warned, *decision.notes, *constants(proof), *selection_notes, latency_note]
    result = result_of(recipe, decision, slim, removal, proof, networks, checks["slim"], notes)
    write_whole(out / "result.json", json.dumps(result, indent=1, sort_keys=True))
    write_report(out)
    progress.say(f"verified: ONNX Runtime = torch to {checks['slim'].max_abs_diff:.0e} at batch 1, 2 and 5")
    for doubt in warned:
        progress.say(f"note: {doubt}")


def reachable_by(recipe: Recipe, steps: int = 10) -> tuple[Reachable, ...]:
    """What the network of a recipe can cost when whole channels go; nothing is trained or written.

    Raises:
        InputError: the recipe searches a space.
    """
    if recipe.model is None:
        raise InputError("reachable: this recipe searches a space; expected one with a model")
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
    assert recipe.model is not None
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
