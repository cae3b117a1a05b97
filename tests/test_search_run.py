"""A recipe that searches a space: what it writes, what it says, what it refuses."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from compressnas.errors import InputError
from compressnas.export import load_onnx
from compressnas.progress import Progress
from compressnas.recipe import load_recipe
from compressnas.run import run
from compressnas.slim import SlimArch
from compressnas.spaces import nasbench201

RECIPE = Path(__file__).parent.parent / "recipes" / "nasbench201_nasi.yaml"
TINY = [
    "data={name: synthetic, shape: [3, 8, 8], classes: 4, train: 64, validation: 16, test: 16}",
    "space.cells=1", "space.width=4", "method.steps=3", "method.batch_size=6", "threads=1",
]  # fmt: skip
SPACE = nasbench201(cells=1, width=4, exclude=["none"])


def searched(out: Path, *more: str, resume: bool = False) -> Path:
    recipe = load_recipe(RECIPE, [*TINY, *more])
    return run(recipe, out, resume=resume, overwrite=False, progress=Progress(quiet=True), command="test")


def write_table(path: Path, cells: list[str]) -> Path:
    lines = ["index,arch,c10_test_200,c10_valid_12", *(f"{i},{cell},9{i % 10}.5,80" for i, cell in enumerate(cells))]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("search")
    table = write_table(folder / "table.csv", [SPACE.text(kept) for kept in SPACE.all()])
    return searched(folder / "run", f"space.table={table}", "train.epochs=1")


def test_the_folder_is_whole(finished: Path) -> None:
    expected = ["recipe.yaml", "facts.json", "slim.json", "weights.safetensors", "model.onnx", "points.csv"]
    expected += ["history.jsonl", "report.html", "report.md", "log.txt"]
    assert [name for name in expected if not (finished / name).is_file()] == []


def test_the_result_says_what_was_found(finished: Path) -> None:
    result = json.loads((finished / "result.json").read_text())
    found, slim = result["search"], SlimArch.load(finished / "slim.json")
    assert SPACE.text(slim.kept) == found["cell"]
    assert len(found["traces"]) == len(found["limits"]) == 3
    assert set(found["choices"]) == {f"cell.edge{number}.op" for number in range(6)}
    assert found["table"]["c10_valid_12"] == 80
    assert result["proof"]["verdict"] == "equal" and result["proof"]["max_relative_difference"] <= 1e-10
    assert result["check"]["max_abs_diff"] <= 1e-4 * result["check"]["max_abs_output"]
    for _, target, operation in found["graphs"]["cell"]["edges"]:
        assert operation in SPACE.choices[0].candidates and target <= 3


def test_the_model_file_is_the_trained_network(finished: Path) -> None:
    (point,) = (json.loads(line) for line in (finished / "points.jsonl").read_text().splitlines())
    assert point["point"] == "slim" and point["flops"] > 0
    stages = [json.loads(line)["stage"] for line in (finished / "history.jsonl").read_text().splitlines()]
    assert stages == ["train"]
    session = load_onnx(finished / "model.onnx")
    assert session is not None


def test_the_same_recipe_gives_the_same_cell(finished: Path, tmp_path: Path) -> None:
    again = searched(tmp_path / "run", "train.epochs=1")
    assert json.loads((again / "slim.json").read_text()) == json.loads((finished / "slim.json").read_text())


def test_an_untrained_network_is_called_so(tmp_path: Path) -> None:
    result = json.loads((searched(tmp_path / "run") / "result.json").read_text())
    assert any("not trained" in note for note in result["notes"])


def test_random_labels_and_real_images(tmp_path: Path) -> None:
    searched(tmp_path / "run", "method.images=real", "method.labels=random", "method.nu=fixed", "method.nu_0=null",
             "method.nu_samples=2")  # fmt: skip


KNOWN = "|nor_conv_3x3~0|+|nor_conv_1x1~0|skip_connect~1|+|avg_pool_3x3~0|nor_conv_3x3~1|nor_conv_3x3~2|"
V2 = (
    "Genotype(normal=[('sep_conv_3x3', 0), ('sep_conv_3x3', 1), ('sep_conv_3x3', 0), ('sep_conv_3x3', 1),"
    " ('sep_conv_3x3', 1), ('skip_connect', 0), ('skip_connect', 0), ('dil_conv_3x3', 2)], normal_concat=[2, 3, 4, 5],"
    " reduce=[('max_pool_3x3', 0), ('max_pool_3x3', 1), ('skip_connect', 2), ('max_pool_3x3', 1), ('max_pool_3x3', 0),"
    " ('skip_connect', 2), ('skip_connect', 2), ('max_pool_3x3', 1)], reduce_concat=[2, 3, 4, 5])"
)


def test_a_known_cell_is_trained(tmp_path: Path) -> None:
    out = searched(tmp_path / "run", f"method={{kind: cell, text: '{KNOWN}'}}", "train.epochs=1")
    assert json.loads((out / "result.json").read_text())["search"]["cell"] == KNOWN
    again = searched(tmp_path / "again", f"method={{kind: cell, path: {out / 'slim.json'}}}")
    assert json.loads((again / "result.json").read_text())["search"]["cell"] == KNOWN


def test_a_genotype_and_what_it_costs(tmp_path: Path) -> None:
    space = "space={name: darts, cells: 3, width: 4, derived_cells: 3, derived_width: 4}"
    out = searched(tmp_path / "run", space, f'method={{kind: cell, text: "{V2}"}}')
    result = json.loads((out / "result.json").read_text())
    assert result["search"]["cell"].startswith("Genotype(") and result["proof"]["verdict"] == "equal"
    assert {"normal", "reduce"} == set(result["search"]["graphs"])


@pytest.mark.parametrize("name", ["flops", "synflow"])
def test_the_best_of_random_cells(name: str, tmp_path: Path) -> None:
    out = searched(tmp_path / "run", f"method={{kind: proxy, name: {name}, samples: 4, batch_size: 4}}")
    result = json.loads((out / "result.json").read_text())["search"]
    assert len(result["scores"]) == 4 and result["score_name"] == name


def test_a_cell_of_another_space_is_refused(tmp_path: Path) -> None:
    SPACE.slim(SPACE.parsed(KNOWN).kept).save(tmp_path / "slim.json")
    with pytest.raises(InputError, match="no cell of the space"):
        searched(tmp_path / "run", "space.exclude=[]", f"method={{kind: cell, path: {tmp_path / 'slim.json'}}}")
    assert not (tmp_path / "run").exists()


def test_more_cells_than_there_are(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="5,000 different cells"):
        searched(tmp_path / "run", "method={kind: proxy, name: flops, samples: 5000}")


REFUSED = {
    "a genotype": (
        ["space={name: darts}", "method={kind: cell, text: 'Genotype(normal=['}"],
        "expected a text such as Genotype(",
    ),
    "a cell": (["method={kind: cell, text: '|conv~0|'}"], "conv"),
    "a cell that computes nothing": (
        ["space.exclude=[]", "method={kind: cell, text: '|none~0|+|none~0|none~1|+|none~0|none~1|none~2|'}"],
        "nothing of the input comes to the output",
    ),
    "no cell": (["method={kind: cell}"], "exactly one of text and path"),
    "an operation": (["space.exclude=[conv]"], "space.exclude"),
    "nothing left": (["space.exclude=[skip_connect, nor_conv_1x1, nor_conv_3x3, avg_pool_3x3]"], "is left"),
    "both": (["model={name: lenet5}"], "model, space: expected exactly one"),
    "neither": (["space="], "model, space: expected exactly one"),
    "pruning": (["method={kind: magnitude, target: {flops: 0.5}}"], "magnitude needs a model"),
    "no table": (["space.table=nowhere.csv"], "cannot read nowhere.csv"),
    "finetune": (["finetune.epochs=1"], "trained by `train`"),
    "steps": (["method.steps=0"], "method.steps"),
    "nu_0": (["method.nu_0=-1"], "method.nu_0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_one_line_and_leaves_nothing(name: str, tmp_path: Path) -> None:
    settings, message = REFUSED[name]
    command = [sys.executable, "-m", "compressnas", "run", str(RECIPE), "--out", str(tmp_path / "run")]
    for setting in [*TINY, *settings]:
        command += ["--set", setting]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "NO_COLOR": "1"})
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


def test_pruning_recipes_do_not_search() -> None:
    with pytest.raises(InputError, match="nasi searches a space"):
        load_recipe("lenet5_filterwise", ["method={kind: nasi}"])


def test_a_table_without_the_cell_is_told(tmp_path: Path) -> None:
    table = write_table(tmp_path / "table.csv", ["|none~0|+|none~0|none~1|+|none~0|none~1|none~2|"])
    with pytest.raises(InputError, match="it lacks the cell"):
        searched(tmp_path / "run", f"space.table={table}")


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", "arch,x\ncell,high\n"])
def test_what_is_no_table_is_told(text: str, tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text(text)
    with pytest.raises(InputError, match=r"space\.table"):
        searched(tmp_path / "run", f"space.table={tmp_path / 'table.csv'}")
    assert not (tmp_path / "run").exists()
