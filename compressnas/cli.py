"""The commands. What needs torch or ONNX Runtime is imported by the command that uses it."""

import errno
import io
import json
import os
import re
import shlex
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from compressnas import __version__
from compressnas.errors import CompressnasError, InputError, RunFailed

if TYPE_CHECKING:
    from compressnas.progress import Progress

INTERRUPTED = 130  # 128 + SIGINT, as shells count

_FIGURES = {  # title -> key in points.jsonl, how it is shown
    "test error": ("error", "{:.2%}"),
    "FLOPs": ("flops", "{:,}"),
    "parameters": ("params", "{:,}"),
    "ONNX bytes": ("bytes", "{:,}"),
    "latency p50, ms": ("latency_p50_ms", "{:.3f}"),
}

app = typer.Typer(add_completion=False, rich_markup_mode=None, no_args_is_help=True, pretty_exceptions_enable=False)

RecipeName = Annotated[str, typer.Argument(metavar="RECIPE", help="A YAML file, or the name of a shipped recipe.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY.PATH=VALUE", help="Override one setting; the value is YAML. Repeatable."),
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of a failure.")]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code: 0 done, 1 the run failed, 2 bad input, 130 interrupted."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    _make_streams_safe()
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        typer.main.get_command(app)(args=arguments, prog_name="compressnas", obj=arguments)
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except KeyboardInterrupt:
        code = INTERRUPTED
    except Exception as error:
        if "--debug" in arguments:
            traceback.print_exc()
        message, code = _told(error)
        _complain(f"error: {message}")
    finally:
        signal.signal(signal.SIGTERM, before)
    if code == INTERRUPTED:
        _complain("interrupted; continue with --resume" if arguments[:1] == ["run"] else "interrupted")
    return _flushed(code)


def _told(error: Exception) -> tuple[str, int]:
    """The message for the user and the exit code."""
    if isinstance(error, CompressnasError):
        return str(error), error.exit_code
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        where = f" while writing {error.filename}" if error.filename else ""
        return f"the disk is full{where}: {error.strerror}", InputError.exit_code
    text = " ".join(str(error).split())
    if isinstance(error, MemoryError) or re.search("OutOfMemory|allocate memory|not enough memory", repr(error)):
        return f"not enough memory for what was asked: {text or type(error).__name__}", InputError.exit_code
    fault = "this is a fault of compressnas; --debug shows the traceback"
    return f"{type(error).__name__}: {text} ({fault})", RunFailed.exit_code


def _make_streams_safe() -> None:
    """Let a closed stdout or stderr swallow what is said, and a narrow encoding show what it cannot write as escapes.

    Python has no stream for a closed descriptor, and the next file that is opened would take its number: what a
    library prints would end up in it.
    """
    for name, number in (("stdin", 0), ("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
            substitute = os.fdopen(number, "r" if number == 0 else "w", encoding="utf-8", closefd=False)
            setattr(sys, name, substitute)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _complain(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _flushed(code: int) -> int:
    """`code`, or another one when what was printed cannot be written (full disk, closed pipe)."""
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains once more at exit
        return code or (InputError.exit_code if error.errno == errno.ENOSPC else RunFailed.exit_code)
    return code


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"compressnas {__version__}")
        raise typer.Exit


@app.callback()
def compressnas(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Show the version and exit.")
    ] = False,
) -> None:
    """A trained network goes in, the slimmest verified ONNX model comes out.

    \b
    Examples:
      compressnas list
      compressnas run lenet5_filterwise
      compressnas COMMAND --help
    """


@app.command()
def run(
    context: typer.Context,
    recipe: RecipeName,
    overrides: Overrides = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The run folder.  [default: runs/RECIPE-seedSEED]")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted run in its folder.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is in the folder.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Write nothing to stdout; log.txt has it all.")] = False,
    debug: Debug = False,
) -> None:
    """Run a recipe: train, decide, remove, prove, fine-tune, measure, export, report.

    \b
    Examples:
      compressnas run lenet5_filterwise
      compressnas run my.yaml --set seed=1 --set method.lam=1e-3
      compressnas run my.yaml --out runs/first --resume
    """
    from compressnas.recipe import load_recipe, resolve

    if resume and overwrite:
        raise InputError("--resume and --overwrite: expected at most one of them")
    loaded = load_recipe(recipe, overrides or ())
    from compressnas.progress import Progress  # late: a bad recipe is told before torch is imported
    from compressnas.run import run as run_recipe

    folder = out or Path("runs") / f"{resolve(recipe).stem}-seed{loaded.seed}"
    progress = Progress(quiet)
    command = shlex.join(["compressnas", *context.obj])
    folder = run_recipe(loaded, folder, resume=resume, overwrite=overwrite, progress=progress, command=command)
    _summarise(folder, progress)


@app.command()
def check(recipe: RecipeName, overrides: Overrides = None) -> None:
    """Validate a recipe and list all its faults. Reads nothing but the recipe.

    \b
    Examples:
      compressnas check my.yaml
      compressnas check lenet5_filterwise --set method.lam=1e-2
    """
    from compressnas.recipe import load_recipe, recipe_hash, resolve

    loaded = load_recipe(recipe, overrides or ())
    what = "space" if loaded.model is None else "model"
    parts = f"data {loaded.data.name}, {what} {loaded.subject}, method {loaded.method.kind}"
    print(f"{resolve(recipe)}: valid ({parts}, hash {recipe_hash(loaded)})")


@app.command()
def reachable(
    recipe: RecipeName,
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(min=1, help="Lines below the dense network's.")] = 10,
    debug: Debug = False,
) -> None:
    """What the network of a recipe can cost, by the part of the channels that stays; trains nothing.

    \b
    Examples:
      compressnas reachable lenet5_filterwise
      compressnas reachable my.yaml --set method.round_to=8
    """
    from compressnas.recipe import load_recipe

    loaded = load_recipe(recipe, overrides or ())
    from compressnas.run import reachable_by  # late: a bad recipe is told before torch is imported

    lines = [("channels", "FLOPs", "of dense", "parameters", "of dense")]
    for one in reachable_by(loaded, steps):
        lines.append(
            (
                f"{one.channels:.0%}",
                f"{one.flops:,}",
                f"{one.flops_kept:.1%}",
                f"{one.params:,}",
                f"{one.params_kept:.1%}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(f"{cell:>{width}}" for cell, width in zip(line, widths, strict=True)))
    print("layers keep the same part of their channels; a target below the last line cannot be met")


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A run folder.")],
    debug: Debug = False,
) -> None:
    """Rebuild the report of a run from its folder.

    \b
    Example:
      compressnas report runs/lenet5_filterwise-seed0
    """
    if not folder.is_dir():
        raise InputError(f"report {folder}: expected a run folder")
    from compressnas.report import write_report

    write_report(folder)
    print(f"report: {folder / 'report.html'}")


@app.command("list")
def list_names() -> None:
    """List recipes, models, spaces, data sets and methods, each with one line.

    \b
    Example:
      compressnas list
    """
    from compressnas.recipe import MODELS, NETWORKS, Model, shipped_recipes

    sections: dict[str, Mapping[Any, str]] = {
        "recipes": {name: _first_comment(path) for name, path in shipped_recipes().items()},
        "models (model.name)": MODELS,
        "other models (model.KEY)": {key: Model.model_fields[key].description or "" for key in NETWORKS[1:]},
        "spaces (space.name)": _union_lines("space"),
        "data sets (data.name)": _union_lines("data"),
        "methods (method.kind)": _union_lines("method"),
    }
    for title, lines in sections.items():
        width = max(map(len, lines), default=0)
        print(f"{title}:", *(f"  {name:<{width}}  {line}".rstrip() for name, line in lines.items()), sep="\n")


@app.command()
def predict(
    model: Annotated[Path, typer.Argument(metavar="RUN_OR_ONNX", help="A run folder, or a model.onnx of a run.")],
    images: Annotated[
        list[Path], typer.Argument(metavar="IMAGES...", help="Image files, or uint8 .npy / .npz arrays.")
    ],
    debug: Debug = False,
) -> None:
    """Classify images with ONNX Runtime; the preprocessing is the file's own.

    \b
    Examples:
      compressnas predict runs/lenet5_filterwise-seed0 digit.png
      compressnas predict model.onnx digits.npy
    """
    file = model / "model.onnx" if model.is_dir() else model
    for path in (file, *images):
        if not path.is_file():
            raise InputError(f"predict: no file {path}")
    from compressnas.export import load_onnx
    from compressnas.predict import predictions

    for name, label, probability in predictions(load_onnx(file), images, note=_complain):
        print(f"{name}: {label} {probability:.4f}")


def _summarise(folder: Path, progress: "Progress") -> None:
    """Say what the run has paid and gained, where its files lie, and what to do with them."""
    points = _points(folder / "points.jsonl")
    rows = [["", *points]]
    for title, (key, form) in _FIGURES.items():
        values = [point.get(key) for point in points.values()]
        if any(value is not None for value in values):
            rows.append([title, *("-" if value is None else form.format(value) for value in values)])
    first, *rest = (max(map(len, column)) for column in zip(*rows, strict=True))
    for title, *cells in rows if len(rows) > 1 else []:
        progress.say("  ".join([f"{title:<{first}}", *(f"{c:>{w}}" for c, w in zip(cells, rest, strict=True))]))
    for title, name in (("model", "model.onnx"), ("report", "report.html")):
        if (folder / name).is_file():
            progress.say(f"{title}: {folder / name}")
    progress.say(f"next: compressnas predict {shlex.quote(str(folder))} IMAGE.png")


def _points(file: Path) -> dict[str, dict[str, Any]]:
    """Name (`dense`, `slim`) -> figures, in the order of the file; empty when there is none."""
    if not file.is_file():
        return {}
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    return {str(point.get("point")): point for point in lines}


def _first_comment(file: Path) -> str:
    """The first comment line of a YAML file; empty when it has none."""
    lines = file.read_text(encoding="utf-8").splitlines()
    return next((line.lstrip("# ").rstrip() for line in lines if line.startswith("#")), "")


def _union_lines(section: str) -> dict[str, str]:
    """Name -> the first docstring line of the class that `data` or `method` has for it."""
    from compressnas.faults import members
    from compressnas.recipe import Recipe

    by_name = members(Recipe.model_fields[section])
    return {name: (model.__doc__ or "").strip().partition("\n")[0] for name, model in by_name.items()}
