"""What a finished run folder holds, read back typed and checked. Knows pydantic, never torch."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from compressnas.errors import InputError
from compressnas.slim import SlimArch

EXPECTED = ("recipe.yaml", "facts.json", "points.jsonl", "history.jsonl", "slim.json", "result.json")


def _finite(value: object) -> object:
    """NaN and infinity are no results: they read as `not there`."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _regular(positions: "list[list[list[Number]]]") -> "list[list[list[Number]]]":
    if len({len(rows) for rows in positions}) > 1 or len({len(row) for rows in positions for row in rows}) > 1:
        raise ValueError("expected C_in x kh x kw, got lists of different lengths")
    return positions


Number = Annotated[float | None, BeforeValidator(_finite)]
Index = Annotated[int, Field(ge=0)]
Shape = Annotated[list[Index], Field(min_length=2)]
Positions = Annotated[list[list[list[Number]]], AfterValidator(_regular)]


class Part(BaseModel):
    """A part of a file. Every value may be missing or null; unknown keys are carried, not refused."""

    model_config = ConfigDict(frozen=True, extra="allow")


class Facts(Part):
    command: str | None = None
    recipe: str | None = None
    recipe_hash: str | None = None
    seed: int | None = None
    started: str | None = None
    versions: dict[str, Any] | None = None
    machine: dict[str, Any] | None = None


class Point(Part):
    """One measured network: `dense`, `slim`, ... Errors are fractions, bytes are those of the ONNX file."""

    point: str
    error: Number = None
    validation_error: Number = None
    flops: Number = None
    flops_theoretical: Number = None
    flops_bias_convention: Number = None
    params: Number = None
    bytes: Number = None
    latency_p50_ms: Number = None
    latency_p90_ms: Number = None
    structure: str | None = None
    uncounted: dict[str, int] | None = None


class Epoch(Part):
    stage: str
    epoch: int
    train_error: Number = None
    error: Number = None
    groups_alive: dict[str, int | None] | None = None


class Layer(Part):
    """`before` and `after` are weight shapes. `kept_positions` is C_in x kh x kw, the share of filters that read it."""

    name: str
    kind: str
    before: Shape
    after: Shape
    kept_out: list[int] | None = None
    kept_in: list[int] | None = None
    kept_positions: Positions | None = None
    weights_nonzero: int | None = None


class Groups(Part):
    """A group set at the end of the method. `gamma` holds null where it is infinite."""

    kind: str | None = None
    gamma: list[Number] | None = None
    kept: list[int] | None = None
    size: int | None = None


class Rule(Part):
    name: str | None = None
    threshold: Number = None


class LeftAlone(Part):
    set: str
    reason: str


class Proof(Part):
    verdict: str | None = None
    max_relative_difference: Number = None
    tolerance: Number = None
    change: Number = None
    approximate: list[str] | None = None
    images: int | None = None
    left_alone: list[LeftAlone] | None = None
    realised: dict[str, int] | None = None
    theoretical_only: dict[str, int] | None = None


class Check(Part):
    max_abs_diff: Number = None
    max_abs_output: Number = None
    tolerance: Number = None
    opset: int | None = None
    by_batch: dict[str, Number] | None = None


class Options(Part):
    """One choice of a search. `alpha` is Delta, a value for each candidate; `kept` are indices of candidates."""

    candidates: list[str] | None = None
    alpha: list[Number] | None = None
    kept: list[Index] | None = None

    @model_validator(mode="after")
    def _fits(self) -> "Options":
        names = self.candidates or []
        if self.alpha is not None and len(self.alpha) != len(names):
            raise ValueError(f"alpha has {len(self.alpha)} values for {len(names)} candidates")
        outside = [index for index in self.kept or [] if index >= len(names)]
        if outside:
            raise ValueError(f"kept names candidate {outside[0]}, expected at most {len(names) - 1}")
        return self


class Graph(Part):
    """A cell: names of its nodes in order, and (source, target, operation) of each edge that carries something."""

    nodes: list[str] | None = None
    edges: list[tuple[Index, Index, str]] | None = None

    @model_validator(mode="after")
    def _leads_forward(self) -> "Graph":
        nodes = len(self.nodes or [])
        for source, target, _ in self.edges or []:
            if not source < target < nodes:
                raise ValueError(f"edge {source} -> {target}, expected one that leads forward among {nodes} nodes")
        return self


class Checked(Part):
    """A decision whose own trace norm was taken."""

    cell: str | None = None
    trace: Number = None


class Search(Part):
    """A cell that was found, and how. `traces` and `limits` are T and nu of each step, `table` a benchmark's row.

    `checks` are decisions by falling alpha, up to the one that keeps to nu.
    """

    space: str | None = None
    method: str | None = None
    cell: str | None = None
    choices: dict[str, Options] | None = None
    traces: list[Number] | None = None
    limits: list[Number] | None = None
    checks: list[Checked] | None = None
    scores: list[Number] | None = None
    score_name: str | None = None
    graphs: dict[str, Graph] | None = None
    table: dict[str, Number] | None = None

    @model_validator(mode="after")
    def _same_steps(self) -> "Search":
        if self.traces is not None and self.limits is not None and len(self.traces) != len(self.limits):
            raise ValueError(f"limits has {len(self.limits)} steps, traces has {len(self.traces)}")
        return self


class Result(Part):
    layers: list[Layer] | None = None
    groups: dict[str, Groups] | None = None
    rule: Rule | None = None
    proof: Proof | None = None
    check: Check | None = None
    notes: list[str] | None = None
    search: Search | None = None


@dataclass(frozen=True)
class RunFolder:
    """Everything a report is made of. `rows` are the points as they were written, at full precision."""

    recipe: str
    facts: Facts
    points: Mapping[str, Point]
    rows: list[dict[str, Any]]
    history: list[Epoch]
    slim: SlimArch
    result: Result


def read_run_folder(folder: Path) -> RunFolder:
    """Read what a run wrote into `folder`. The last line of a point's name wins.

    Raises:
        InputError: `folder` is no run folder, or one of its files is missing or damaged (the message names it).
    """
    _check_files(folder)
    rows = [row for _, row in _json_lines(folder / "points.jsonl")]
    points = {point.point: point for point in _parts(Point, folder / "points.jsonl")}
    if not points:
        raise InputError(f"{folder / 'points.jsonl'}: empty, expected one measured network a line")
    try:
        slim = SlimArch.from_json(_text(folder / "slim.json"))
    except InputError as error:
        raise InputError(f"{folder / 'slim.json'}: {error}") from error
    return RunFolder(
        recipe=_text(folder / "recipe.yaml"),
        facts=_part(Facts, _json(folder / "facts.json"), folder / "facts.json"),
        points=points,
        rows=rows,
        history=_parts(Epoch, folder / "history.jsonl"),
        slim=slim,
        result=_part(Result, _json(folder / "result.json"), folder / "result.json"),
    )


def _check_files(folder: Path) -> None:
    expected = f"expected the folder of a finished run with {', '.join(EXPECTED)}"
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder, {expected}")
    missing = [name for name in EXPECTED if not (folder / name).is_file()]
    if len(missing) == len(EXPECTED):
        raise InputError(f"{folder}: not a run folder, {expected}")
    if missing:
        raise InputError(f"{folder / missing[0]}: missing, so the run has not finished (`--resume` goes on with it)")


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise InputError(f"cannot read {path}: {reason or error}") from error


def _json(path: Path) -> Any:
    try:
        return json.loads(_text(path))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: damaged, expected JSON: {error}") from error


def _json_lines(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """Pairs of `path, line n` and the object on that line; blank lines are skipped."""
    found = []
    for number, line in enumerate(_text(path).splitlines(), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{where}: damaged, expected one JSON object: {error}") from error
        if not isinstance(row, dict):
            raise InputError(f"{where}: expected a JSON object, got {type(row).__name__}")
        found.append((where, row))
    return found


P = TypeVar("P", bound=Part)


def _parts(kind: type[P], path: Path) -> list[P]:
    return [_part(kind, row, where) for where, row in _json_lines(path)]


def _part(kind: type[P], value: object, where: str | Path) -> P:
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(step) for step in first["loc"]) or "the whole of it"
        raise InputError(f"{where}: damaged at {key}: {first['msg']}") from error
