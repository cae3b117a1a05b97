"""What a user sees of a run: bad input, resumed runs, other methods. Runs are tiny and on synthetic images."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from filelock import FileLock
from safetensors.torch import load_file

from compressnas.errors import InputError

RECIPE: dict[str, Any] = {
    "seed": 3,
    "threads": 1,
    "data": {"name": "synthetic", "shape": [1, 20, 20], "classes": 4, "train": 128, "validation": 48, "test": 48},
    "model": {"name": "lenet5"},
    "train": {"epochs": 2, "lr": 0.02, "batch_size": 32},
    "method": {
        "kind": "bayes",
        "groups": "coupled",
        "lam": 1e-3,
        "lam_growth": 1.5,
        "epochs": 4,
        "batch_size": 32,
        "updates_per_epoch": 2,
        "curvature": {"samples": 64, "batch_size": 32},
        "target": {"flops": 0.4},
    },
    "finetune": {"epochs": 2, "lr": 0.01, "batch_size": 32},
}


def changed(**sections: Any) -> dict[str, Any]:
    """RECIPE with keys of sections replaced; None takes a section out."""
    recipe: dict[str, Any] = json.loads(json.dumps(RECIPE))
    for name, value in sections.items():
        if value is None:
            del recipe[name]
        elif isinstance(value, dict) and name in recipe and "kind" not in value and "name" not in value:
            recipe[name].update(value)
        else:
            recipe[name] = value
    return recipe


def command(folder: Path, recipe: dict[str, Any], *options: str) -> list[str]:
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return [sys.executable, "-m", "compressnas", "run", str(path), "--out", str(folder / "out"), *options]


def compressnas(folder: Path, recipe: dict[str, Any], *options: str, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command(folder, recipe, *options), capture_output=True, text=True, env=environment, timeout=300, **kwargs
    )


def refused(done: subprocess.CompletedProcess[str], *words: str) -> None:
    """One line on stderr that says why, exit code 2, no traceback."""
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("error: ")
    for word in words:
        assert word in lines[0]


def metrics(out: Path) -> list[dict[str, Any]]:
    points = [json.loads(line) for line in (out / "points.jsonl").read_text().splitlines()]
    return [{key: value for key, value in p.items() if not key.startswith("latency")} for p in points]


def epochs(out: Path) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in (out / "history.jsonl").read_text().splitlines()]
    return [{key: value for key, value in r.items() if key != "seconds"} for r in records]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """An uninterrupted run, and how long it took."""
    folder = tmp_path_factory.mktemp("finished")
    started = time.perf_counter()
    done = compressnas(folder, RECIPE)
    assert done.returncode == 0, done.stderr
    return folder / "out", time.perf_counter() - started


def test_run_says_what_it_did(finished: tuple[Path, float]) -> None:
    out, _ = finished
    log = (out / "log.txt").read_text()
    assert "removed: 20-50-" in log
    assert "verified: ONNX Runtime = torch" in log
    dense, slim = metrics(out)
    assert slim["flops"] <= 0.4 * dense["flops"]
    assert slim["params"] < dense["params"]


def test_killed_at_random_moments_and_resumed_ends_the_same(finished: tuple[Path, float], tmp_path: Path) -> None:
    whole, seconds = finished
    moments = random.Random(5)
    for number in range(5):
        options = ["--resume"] if (tmp_path / "out").exists() else []
        process = subprocess.Popen(
            command(tmp_path, RECIPE, *options),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        time.sleep(seconds * moments.uniform(0.2, 0.9) if number else seconds * 0.6)
        process.send_signal(signal.SIGKILL)
        _, stderr = process.communicate()
        assert process.returncode in (-signal.SIGKILL, 0), stderr.decode()
        for path in (tmp_path / "out").rglob("*.json*"):  # whole files or none
            if not path.name.startswith(".part-"):
                text = path.read_text()
                [json.loads(part) for part in ([text] if path.suffix == ".json" else text.splitlines())]
    done = compressnas(tmp_path, RECIPE, "--resume")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "slim.json").read_bytes() == (whole / "slim.json").read_bytes()
    assert metrics(tmp_path / "out") == metrics(whole)
    assert epochs(tmp_path / "out") == epochs(whole)
    assert not list((tmp_path / "out").rglob(".part-*"))


def test_interrupt_leaves_whole_files_and_can_be_resumed(finished: tuple[Path, float], tmp_path: Path) -> None:
    process = subprocess.Popen(
        command(tmp_path, RECIPE),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background shell has it ignored
    )
    deadline = time.monotonic() + 120
    while not (tmp_path / "out" / "checkpoint" / "train.pt").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"--resume" in stderr
    assert b"Traceback" not in stderr
    assert not list((tmp_path / "out").rglob(".part-*"))
    assert compressnas(tmp_path, RECIPE, "--resume").returncode == 0
    assert metrics(tmp_path / "out") == metrics(finished[0])


def test_finished_folder_is_refused_and_other_recipes_are_not_resumed(finished: tuple[Path, float]) -> None:
    out, _ = finished
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}
    refused(compressnas(out.parent, RECIPE), "--resume", "--overwrite")
    refused(compressnas(out.parent, changed(seed=4), "--resume"), "another recipe")
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()} == before


def test_a_folder_in_which_another_run_works_is_refused(tmp_path: Path) -> None:
    """Two of them would take up each other's checkpoints."""
    out = tmp_path / "out"
    out.mkdir()
    with FileLock(out / ".lock"):
        for options in ("--resume", "--overwrite"):
            refused(compressnas(tmp_path, RECIPE, options), "another run works in this folder")
        assert [path.name for path in out.iterdir()] == [".lock"]


def test_a_folder_that_is_no_run_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("years of work")
    refused(compressnas(tmp_path, RECIPE, "--overwrite"), "not a run folder")
    refused(compressnas(tmp_path, RECIPE, "--resume"), "not a run folder")
    assert (tmp_path / "out" / "thesis.txt").read_text() == "years of work"


def quick(folder: Path, recipe: dict[str, Any], out: Path, **options: bool) -> None:
    """A run in this process; it is meant to be refused."""
    from compressnas.progress import Progress
    from compressnas.recipe import load_recipe
    from compressnas.run import run

    path = folder / "quick.yaml"
    path.write_text(yaml.safe_dump(recipe))
    settings = {"resume": False, "overwrite": False} | options
    run(load_recipe(path), out, **settings, progress=Progress(quiet=True), command="test")


def test_a_folder_with_a_recipe_of_the_user_is_no_run_folder(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(InputError, match="not a run folder"):
        quick(tmp_path, RECIPE, tmp_path, overwrite=True)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_overwrite_leaves_what_no_run_has_written_and_goes_through_links(tmp_path: Path) -> None:
    out, link = tmp_path / "out", tmp_path / "link"
    (out / "checkpoint").mkdir(parents=True)
    link.symlink_to(out)
    for name in ("recipe.yaml", "facts.json", "model.onnx", "slim.json", "checkpoint/train.pt", "notes.txt"):
        (out / name).write_text("old")
    with pytest.raises(InputError, match="learning rate"):
        quick(tmp_path, changed(train={"lr": 1e30}), link, overwrite=True)
    assert link.is_symlink() and (out / "notes.txt").read_text() == "old"
    assert (out / "recipe.yaml").read_text() != "old"
    assert not (out / "model.onnx").exists() and not (out / "checkpoint" / "train.pt").exists()


def test_too_few_images_to_verify_with_are_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="validation split has 4 images; expected at least 5"):
        quick(tmp_path, changed(data={"validation": 4}), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_name_that_is_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"caf\\udce9'.*UTF-8"):
        quick(tmp_path, RECIPE, tmp_path / "caf\udce9")


def test_a_useless_result_is_never_without_a_note(tmp_path: Path) -> None:
    from compressnas.outcome import doubts
    from compressnas.recipe import load_recipe

    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    recipe = load_recipe(tmp_path / "recipe.yaml")  # target: 0.4 of the FLOPs; 4 classes
    dense = {"point": "dense", "validation_error": 0.01, "flops": 1000, "params": 100}
    good, missed = {"point": "slim", "validation_error": 0.02, "flops": 400, "params": 40}, {"flops": 401}
    assert doubts(recipe, [dense, good], 4) == []
    assert doubts(recipe, [dense, good | missed], 4) == [
        "the target is missed: 401 flops, and at most 400 were asked for"
    ]
    (died,) = doubts(recipe, [dense, good | {"validation_error": 0.75}], 4)
    assert died == "the slim network hardly does better than guessing: validation error 75.00% with 4 classes"
    free = load_recipe(tmp_path / "recipe.yaml", ["method.target="])
    assert doubts(free, [dense, good | {"flops": 1000}], 4) == ["no FLOPs were saved: 1,000 before, 1,000 after"]


BAD_INPUT = {
    "missing data root": (changed(data={"name": "mnist", "root": "/no/such/folder"}), ["/no/such/folder"]),
    "groups without a layer": (changed(model={"name": "lenet300_100"}, method={"groups": "filter"}), ["filter"]),
    "missing weights": (changed(model={"name": "lenet5", "weights": "/no/such/file.pt"}), ["/no/such/file.pt"]),
    "missing decision": (changed(method={"kind": "given", "path": "/no/such/slim.json"}), ["/no/such/slim.json"]),
    "images too small": (changed(data={"shape": [1, 8, 8]}), ["16 x 16"]),
}


@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input_is_refused_before_anything_is_written(name: str, tmp_path: Path) -> None:
    recipe, words = BAD_INPUT[name]
    refused(compressnas(tmp_path, recipe), *words)
    assert not (tmp_path / "out").exists()


def test_bad_npz_is_refused(tmp_path: Path) -> None:
    images, labels = np.zeros((40, 20, 20), np.uint8), np.arange(40) % 4
    recipe = changed(data={"name": "npz", "path": str(tmp_path / "data.npz")})
    np.savez(tmp_path / "data.npz", train_x=images[:, :, 0], train_y=labels, test_x=images, test_y=labels)
    refused(compressnas(tmp_path, recipe), "data.npz", "train_x")
    np.savez(tmp_path / "data.npz", train_x=images, train_y=labels, test_x=images, test_y=labels + 7)
    refused(compressnas(tmp_path, recipe), "data.npz", "test_y")
    assert not (tmp_path / "out").exists()


def test_corrupt_weights_are_refused(tmp_path: Path) -> None:
    for name in ("weights.pt", "weights.safetensors"):
        (tmp_path / name).write_bytes(b"\x00\x01 not a checkpoint")
        refused(compressnas(tmp_path, changed(model={"name": "lenet5", "weights": str(tmp_path / name)})), name)
    assert not (tmp_path / "out").exists()


def test_corrupt_checkpoint_of_a_run_is_told(tmp_path: Path) -> None:
    recipe = changed(train={"lr": 1e30, "epochs": 30})  # ends at once, with a checkpoint folder
    compressnas(tmp_path, recipe)
    (tmp_path / "out" / "checkpoint" / "train.pt").write_bytes(b"\x80garbage")
    refused(compressnas(tmp_path, recipe, "--resume"), "train.pt")


def test_a_loss_that_is_not_finite_stops_the_run_and_says_where(tmp_path: Path) -> None:
    refused(compressnas(tmp_path, changed(train={"lr": 1e30})), "train, epoch 1, step ", "learning rate")
    assert not (tmp_path / "out" / "model.onnx").exists()


def test_unwritable_output_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = compressnas(tmp_path, RECIPE, "--out", str(tmp_path / "file" / "out"))
    refused(done, str(tmp_path / "file" / "out"))


def test_a_full_disk_is_told_and_leaves_no_half_file(tmp_path: Path) -> None:
    """A limit on the size of a file stands for the full disk: the write of a checkpoint fails half-way."""
    import resource

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))

    refused(compressnas(tmp_path, RECIPE, preexec_fn=limit), "cannot write", "train.pt")
    assert not (tmp_path / "out" / "checkpoint" / "train.pt").exists()
    assert not list((tmp_path / "out").rglob(".part-*"))


def test_magnitude_and_a_given_decision_use_the_dense_weights_of_another_run(
    finished: tuple[Path, float], tmp_path: Path
) -> None:
    out, _ = finished
    model = {"name": "lenet5", "weights": str(out / "dense.safetensors")}
    magnitude = tmp_path / "magnitude"
    magnitude.mkdir()
    method = {"kind": "magnitude", "target": {"flops": 0.3}}
    done = compressnas(magnitude, changed(model=model, train=None, method=method))
    assert done.returncode == 0, done.stderr
    dense, slim = metrics(magnitude / "out")
    assert slim["flops"] <= 0.3 * dense["flops"]
    assert dense["error"] == metrics(out)[0]["error"]

    fresh = tmp_path / "fresh"
    fresh.mkdir()
    given = {"kind": "given", "path": str(out / "slim.json"), "fresh": True}
    done = compressnas(fresh, changed(train=None, method=given))
    assert done.returncode == 0, done.stderr
    assert metrics(fresh / "out")[1]["structure"] == metrics(out)[1]["structure"]


def test_predict_reads_the_preprocessing_from_the_file(finished: tuple[Path, float], tmp_path: Path) -> None:
    out, _ = finished
    np.save(tmp_path / "images.npy", np.random.default_rng(0).integers(0, 256, (3, 20, 20), dtype=np.uint8))
    done = subprocess.run(
        [sys.executable, "-m", "compressnas", "predict", str(out), str(tmp_path / "images.npy")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 3
    assert all(0 <= float(line.split()[-1]) <= 1 for line in done.stdout.splitlines())


def test_weights_saved_by_the_run_are_those_of_the_onnx_file(finished: tuple[Path, float]) -> None:
    from compressnas.export import verify
    from compressnas.models import BUILDERS
    from compressnas.slim import SlimArch
    from compressnas.surgery import remove

    out, _ = finished
    images = torch.randn(8, 1, 20, 20)
    model = BUILDERS["lenet5"]((1, 20, 20), 4)
    small, *_ = remove(model, images[:1], SlimArch.load(out / "slim.json"), images)
    small.load_state_dict(load_file(out / "weights.safetensors"))
    verify(out / "model.onnx", small, images)
