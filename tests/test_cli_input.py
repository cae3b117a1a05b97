"""The command line as a user meets it: output, messages and exit codes of what is asked and of what goes wrong."""

import errno
import os
import signal
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from compressnas import __version__
from compressnas.cli import main
from compressnas.errors import RunFailed
from compressnas.recipe import MODELS, NETWORKS, shipped_recipes

ROOT = Path(__file__).resolve().parents[1]

GOOD = """# Purpose of this recipe.
data: {name: synthetic}
model: {name: lenet5}
train: {epochs: 1}
method: {kind: bayes}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "my.yaml"
    path.write_text(GOOD)
    return path


def compressnas(*arguments: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "compressnas", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=cwd, timeout=60, check=False)


# ---------------------------------------------------------------- in a process of its own


def test_check_of_a_good_recipe(recipe: Path) -> None:
    done = compressnas("check", recipe, "--set", "method.lam=1e-2")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{recipe}: valid (data synthetic, model lenet5, method bayes, hash ")


def test_check_of_a_bad_recipe_lists_every_fault_and_leaves_nothing(recipe: Path) -> None:
    recipe.write_text(GOOD.replace("lenet5", "lenet6"))
    done = compressnas("check", recipe, "--set", "method.lam=-1", "--set", "sed=1", cwd=recipe.parent)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [
        f"error: recipe {recipe}: 3 faults",
        f"  model.name: expected one of {', '.join(MODELS)}, got 'lenet6'; did you mean 'lenet5'?",
        "  method.lam: expected a number >= 0, got -1",
        "  sed: unknown key; did you mean 'seed'?",
    ]
    assert os.listdir(recipe.parent) == ["my.yaml"]


def test_check_and_list_import_neither_torch_nor_numpy(recipe: Path) -> None:
    code = (
        "import sys; from compressnas.cli import main\n"
        f"codes = main(['check', {str(recipe)!r}]), main(['list']), main(['check', 'no_such_recipe'])\n"
        "heavy = {'torch', 'numpy', 'onnx', 'onnxruntime', 'torchvision', 'rich', 'PIL'} & set(sys.modules)\n"
        "sys.exit(f'{codes} {heavy}' if heavy or codes != (0, 0, 2) else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "nope"], "error: recipe 'nope': neither a file nor a recipe that ships with compressnas"),
        (
            ["run", "my.yaml", "--resume", "--overwrite"],
            "error: --resume and --overwrite: expected at most one of them",
        ),
        (
            ["run", "my.yaml", "--set", "method.lam=x"],
            "error: recipe my.yaml: 1 fault\n  method.lam: expected a number",
        ),
        (["report", "nope"], "error: report nope: expected a run folder"),
        (["predict", "nope", "my.yaml"], "error: predict: no file nope"),
        (["predict", ".", "my.yaml"], "error: predict: no file model.onnx"),
        (["predict", "my.yaml", "nope.png"], "error: predict: no file nope.png"),
        (["check"], "Missing argument"),
        (["check", "my.yaml", "--frob"], "No such option"),
        (["frob"], "No such command"),
    ],
)
def test_bad_input_is_exit_code_2_without_a_traceback(recipe: Path, arguments: list[str], message: str) -> None:
    done = compressnas(*arguments, cwd=recipe.parent)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert os.listdir(recipe.parent) == ["my.yaml"]


def test_debug_shows_the_traceback_too(recipe: Path) -> None:
    done = compressnas("run", recipe, "--resume", "--overwrite", "--debug")
    assert done.returncode == 2
    assert "Traceback" in done.stderr
    assert done.stderr.endswith("error: --resume and --overwrite: expected at most one of them\n")


def test_version() -> None:
    done = compressnas("--version")
    assert (done.returncode, done.stdout) == (0, f"compressnas {__version__}\n")


def test_a_full_disk_behind_stdout_is_no_success() -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("this system has no /dev/full")
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "compressnas", "list"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)


def test_closed_streams_are_no_failure(recipe: Path) -> None:
    """And the next file that is opened does not take the number of a closed one: what is printed would end up in it."""
    script = f"import os, sys; from compressnas.cli import main; code = main(['check', {str(recipe)!r}]); " + (
        f"file = open({str(recipe.parent / 'new')!r}, 'w'); sys.exit(code or file.fileno() < 3)"
    )
    command = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", script]
    assert subprocess.run(command, cwd=ROOT, timeout=60, check=False).returncode == 0


def test_what_an_encoding_lacks_is_shown_as_an_escape(recipe: Path) -> None:
    path = recipe.rename(recipe.with_name("\u2603.yaml"))
    command = [sys.executable, "-m", "compressnas", "check", str(path)]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\\u2603.yaml: valid" in done.stdout


# ---------------------------------------------------------------- in this process


@pytest.mark.parametrize("command", ["run", "check", "report", "list", "predict"])
def test_every_help_has_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    assert f"\n    compressnas {command}" in capsys.readouterr().out


def test_list_has_a_line_for_every_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    listed = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if line.startswith("  "))
    assert {
        "mnist5k",
        "cifar10",
        "synthetic",
        "bayes",
        "magnitude",
        "given",
        *MODELS,
        *NETWORKS[1:],
        *shipped_recipes(),
    } <= set(listed)
    assert all(listed.values())


@pytest.fixture
def fake_run(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Path]], None]:
    """Put a function in the place of `compressnas.run.run`."""

    def install(function: Callable[..., Path]) -> None:
        module = types.ModuleType("compressnas.run")
        module.run = function  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "compressnas.run", module)

    return install


def test_run_gets_what_was_asked_and_ends_with_a_summary(
    recipe: Path, fake_run: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: dict[str, Any] = {}

    def run(loaded: Any, out: Path, **settings: Any) -> Path:
        asked.update(settings, seed=loaded.seed, out=out)
        folder = recipe.parent / "result"
        folder.mkdir()
        (folder / "points.jsonl").write_text(
            '{"point": "dense", "error": 0.0123, "flops": 2293000, "bytes": 1700000}\n'
            '{"point": "slim", "error": 0.015, "flops": 150000, "latency_p50_ms": 0.0417}\n'
        )
        (folder / "report.html").touch()
        return folder

    fake_run(run)
    assert main(["run", str(recipe), "--set", "seed=3", "--resume", "--set", "data.labels=random"]) == 0
    del asked["progress"]
    command = f"compressnas run {recipe} --set seed=3 --resume --set data.labels=random"
    out = Path("runs") / "my-seed3"
    assert asked == {"seed": 3, "out": out, "resume": True, "overwrite": False, "command": command}
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[:5]] == [
        ["dense", "slim"],
        ["test", "error", "1.23%", "1.50%"],
        ["FLOPs", "2,293,000", "150,000"],
        ["ONNX", "bytes", "1,700,000", "-"],
        ["latency", "p50,", "ms", "-", "0.042"],
    ]
    assert len({len(line) for line in lines[:5]}) == 1
    assert lines[5:] == [
        f"report: {recipe.parent}/result/report.html",
        f"next: compressnas predict {recipe.parent}/result IMAGE.png",
    ]


def test_quiet_says_nothing(recipe: Path, fake_run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    fake_run(lambda loaded, out, progress, **settings: progress.say("hello") or recipe.parent)
    assert main(["run", str(recipe), "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")


def raising(error: BaseException) -> Callable[..., Path]:
    def run(*_arguments: Any, **_settings: Any) -> Path:
        raise error

    return run


def killed(*_arguments: Any, **_settings: Any) -> Path:
    os.kill(os.getpid(), signal.SIGTERM)
    raise AssertionError("SIGTERM did nothing")


INTERRUPTED = "interrupted; continue with --resume\n"


@pytest.mark.parametrize(
    ("run", "code", "message"),
    [
        (raising(RunFailed("the proof differs by 1e-3")), 1, "error: the proof differs by 1e-3\n"),
        (raising(KeyboardInterrupt()), 130, INTERRUPTED),
        (killed, 130, INTERRUPTED),
        (
            raising(ValueError("two\nlines")),
            1,
            "error: ValueError: two lines (this is a fault of compressnas; --debug shows the traceback)\n",
        ),
        (
            raising(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 16 bytes")),
            2,
            "error: not enough memory for what was asked: "
            "DefaultCPUAllocator: can't allocate memory: you tried to allocate 16 bytes\n",
        ),
        (raising(MemoryError()), 2, "error: not enough memory for what was asked: MemoryError\n"),
        (
            raising(OSError(errno.ENOSPC, "No space left on device", "log.txt")),
            2,
            "error: the disk is full while writing log.txt: No space left on device\n",
        ),
    ],
)
def test_how_a_run_ends_badly(
    recipe: Path, fake_run: Any, capsys: pytest.CaptureFixture[str], run: Any, code: int, message: str
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    fake_run(run)
    assert main(["run", str(recipe)]) == code
    assert capsys.readouterr().err == message
    assert signal.getsignal(signal.SIGTERM) == before


# ---------------------------------------------------------------- predict


class Brightness:
    """Stands for an exported model of 2 x 3 images: the brighter the first pixel, the surer it is of `light`."""

    classes = ("dark", "light")

    def __init__(self, channels: int) -> None:
        self.shape = (channels, 2, 3)

    def probabilities(self, images: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        assert images.dtype == np.uint8
        assert images.shape[1:] == self.shape
        light = images[:, -1, 0, 0] / 255  # the last channel: blue
        return np.stack([1 - light, light], axis=1)


@pytest.fixture
def classify(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """`compressnas predict . FILES` with that model: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    Path("model.onnx").touch()

    def predict(*files: str, channels: int = 1) -> tuple[int, str, str]:
        module = types.ModuleType("compressnas.export")
        module.load_onnx = lambda path: Brightness(channels)  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "compressnas.export", module)
        code = main(["predict", ".", *files])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return predict


def test_predict_image_files(classify: Any) -> None:
    grey = np.full((2, 3), 204, np.uint8)
    Image.fromarray(grey).save("grey.png")
    Image.fromarray(np.full((4, 6), 51, np.uint8)).save("large.png")
    Image.fromarray(grey.astype(np.uint16) * 257).save("deep.png")
    code, out, err = classify("grey.png", "large.png", "deep.png")
    assert (code, out) == (0, "grey.png: light 0.8000\nlarge.png: dark 0.8000\ndeep.png: light 0.8000\n")
    assert err == "note: large.png: resized from 4 x 6 to 2 x 3\n"


def test_predict_keeps_the_channels_apart(classify: Any) -> None:
    blue = np.zeros((2, 3, 3), np.uint8)
    blue[..., 2] = 255
    Image.fromarray(blue).save("blue.png")
    np.save("blue.npy", blue[None])
    assert classify("blue.png", "blue.npy", channels=3) == (
        0,
        "blue.png: light 1.0000\nblue.npy[0]: light 1.0000\n",
        "",
    )


def test_predict_arrays(classify: Any) -> None:
    images = np.zeros((300, 2, 3), np.uint8)
    images[299] = 255
    np.save("many.npy", images)
    np.savez("some.npz", first=images[298:, :, :, None], second=np.zeros(3))
    code, out, _ = classify("many.npy", "some.npz")
    lines = out.splitlines()
    assert (code, len(lines)) == (0, 302)
    assert lines[298:] == [
        "many.npy[298]: dark 1.0000",
        "many.npy[299]: light 1.0000",
        "some.npz[0]: dark 1.0000",
        "some.npz[1]: light 1.0000",
    ]


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((4, 2, 2), np.uint8), "x.npy: expected uint8 (N, 2, 3), got uint8 (4, 2, 2)"),
        (np.zeros((4, 2, 3)), "x.npy: expected uint8 (N, 2, 3), got float64 (4, 2, 3)"),
        (np.zeros((2, 3), np.uint8), "x.npy: expected uint8 (N, 2, 3), got uint8 (2, 3)"),
        (np.array([{}]), "x.npy: not a numpy file that can be read: "),
    ],
)
def test_predict_refuses_other_arrays(classify: Any, array: np.ndarray[Any, Any], message: str) -> None:
    np.save("x.npy", array, allow_pickle=True)
    code, out, err = classify("x.npy")
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {message}")


@pytest.mark.parametrize("name", ["x.png", "x.jpg", "x.npy", "x.npz"])
@pytest.mark.parametrize("content", [b"", b"no image", b"\x89PNG\r\n\x1a\n\x00\x00", b"PK\x03\x04", b"\x93NUMPY\x01"])
def test_predict_names_a_damaged_file(classify: Any, name: str, content: bytes) -> None:
    Path(name).write_bytes(content)
    code, out, err = classify(name)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {name}: not ")
    assert err.count("\n") == 1


def test_predict_refuses_a_truncated_image(classify: Any) -> None:
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (2, 3), np.uint8)).save("x.png")
    Path("x.png").write_bytes(Path("x.png").read_bytes()[:45])
    code, _, err = classify("x.png")
    assert code == 2
    assert err.startswith("error: x.png: not an image that can be read: ")
