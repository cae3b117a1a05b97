"""The Python in the README runs as it is printed."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

README = Path(__file__).parents[1] / "README.md"
SECTION = "Prune your own model in ten lines"


def blocks(heading: str) -> list[str]:
    """The fenced Python blocks below a heading, up to the next one of its rank."""
    text = README.read_text(encoding="utf-8")
    section = re.split(rf"^## {re.escape(heading)}$", text, flags=re.M)[1]
    return re.findall(r"^```python\n(.*?)^```$", re.split(r"^## ", section, flags=re.M)[0], flags=re.M | re.S)


def test_ten_lines() -> None:
    lines = [line for line in blocks(SECTION)[0].splitlines() if line and not line.startswith("#")]
    assert len(lines) <= 10


def test_the_library_does_what_the_readme_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    own, awkward = blocks(SECTION)
    names: dict[str, Any] = {}
    exec(compile(own, "README.md", "exec"), names)
    said = capsys.readouterr().out
    dense, small = (int(n.replace(",", "")) for n in re.findall(r"[\d,]+(?= -> | FLOPs)", said))
    assert 0.45 * dense < small <= 0.5 * dense and said.count("equal") == 1
    assert sorted(path.name for path in tmp_path.rglob("*.*")) == ["model.onnx", "slim.json", "weights.safetensors"]
    widths = {m.out_channels for m in names["small"].modules() if isinstance(m, torch.nn.Conv2d)}
    assert all(width % 8 == 0 for width in widths) and min(widths) < 64
    exec(compile(awkward, "README.md", "exec"), names)
    said = capsys.readouterr().out
    assert "may go: ['body.out']" in said and re.search(r"^stem\.out is left alone: \w+", said, flags=re.M)
