"""Every recipe that ships is valid, opens with what it is, and runs at a shrunken size to a verified model."""

import json
from pathlib import Path

import pytest

from compressnas.progress import Progress
from compressnas.recipe import Recipe, load_recipe
from compressnas.run import run
from compressnas.slim import SlimArch

RECIPES = sorted(Path(__file__).parent.parent.joinpath("recipes").rglob("*.yaml"))


SHAPES = {"cifar10": (3, 16, 16), "image_folder": (3, 32, 32)}  # data set -> a small image; of MNIST, a whole one


def shrunken(path: Path, *more: str) -> Recipe:
    """The recipe on a few synthetic images, for an epoch or two, with weights drawn at random."""
    recipe = load_recipe(path)
    if recipe.space is not None:
        cells = 3 if recipe.space.name == "darts" else 1
        small = [f"space.cells={cells}", "space.width=4", "method.batch_size=6", "threads=1", "train.epochs=1"]
        small += ["space.derived_cells=3", "space.derived_width=4"] if recipe.space.name == "darts" else []
        small += ["method.steps=3"] if recipe.method.kind == "nasi" else ["method.samples=3"]
        small += ["data={name: synthetic, shape: [3, 16, 16], train: 32, validation: 16, test: 16}"]
        return load_recipe(path, [*small, *more])
    deep = recipe.data.name in SHAPES
    counts = "train: 32, validation: 16, test: 16" if deep else "train: 160, validation: 64, test: 64"
    shape = list(SHAPES.get(recipe.data.name, (1, 28, 28)))
    settings = [f"data={{name: synthetic, shape: {shape}, {counts}}}", "threads=1"]
    settings += ["model.weights=", "model.fresh=[]", "train.epochs=1", "finetune.epochs=1"]
    if recipe.method.kind == "bayes":
        epochs = min(recipe.method.epochs, 1 if deep else 2)
        settings += ["method.curvature.samples=64", f"method.epochs={epochs}"]
        settings += ["method.updates_per_epoch=1"] if deep else []  # each round removes what died, which takes a while
    return load_recipe(path, [*settings, *more])


def test_recipes_were_found() -> None:
    assert len(RECIPES) >= 3


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_header_says_what_and_how(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert lines[0].startswith("# ")
    assert any(line.startswith("# compressnas run ") for line in lines[:6]), "the header gives the command"
    load_recipe(path)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_runs_shrunken(path: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    run(shrunken(path), out, resume=False, overwrite=False, progress=Progress(quiet=True), command="test")
    result = json.loads((out / "result.json").read_text())
    assert result["proof"]["verdict"] == "equal"
    assert result["proof"]["max_relative_difference"] <= 1e-9
    assert result["check"]["max_abs_diff"] <= 1e-4 * result["check"]["max_abs_output"]
    assert {"1", "2", "5"} == set(result["check"]["by_batch"])
    points = {p["point"]: p for p in map(json.loads, (out / "points.jsonl").read_text().splitlines())}
    assert points["slim"]["flops"] <= points.get("dense", points["slim"])["flops"]
    SlimArch.load(out / "slim.json")
    expected = ["recipe.yaml", "facts.json", "slim.json", "weights.safetensors", "model.onnx"]
    expected += ["dense.safetensors"] if "dense" in points else []
    expected += ["points.csv", "history.jsonl", "report.html", "report.md", "log.txt"]
    assert [name for name in expected if not (out / name).is_file()] == []
    assert list((out / "plots").glob("*.png"))
    assert not list(out.rglob(".part-*"))
