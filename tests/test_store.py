"""Saved in one process, loaded in another: the same network."""

import json
import os
import subprocess
import sys
from inspect import getmembers, isclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import compressnas as cn
from compressnas import layers, surgery
from compressnas.errors import InputError
from compressnas.models import BUILDERS
from compressnas.store import REPLACED, load, save


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.body(x))


def residual() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), Block(8), Block(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(8, 4),
    )  # fmt: skip


def grouped() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.GroupNorm(4, 8), nn.Conv2d(8, 16, 3, groups=4), nn.PReLU(16),
        nn.Conv2d(16, 16, 3, groups=16), nn.ConvTranspose2d(16, 6, 2), nn.Flatten(), nn.LayerNorm(6 * 49),
        nn.Linear(6 * 49, 4),
    )  # fmt: skip


def lenet5() -> nn.Module:
    return BUILDERS["lenet5"]((1, 20, 20), 10)


class Tied(nn.Module):
    """One matrix under two names, and a buffer that a state dict leaves out."""

    counts: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 6), nn.Linear(6, 7)
        self.head.weight = self.embed.weight
        self.register_buffer("counts", torch.ones(3), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embed(ids) * self.counts.sum())
        return logits


BUILD = {"residual": residual, "grouped": grouped, "lenet5": lenet5}
EXAMPLES = {"residual": (2, 3, 10, 10), "grouped": (2, 3, 12, 12), "lenet5": (2, 1, 20, 20)}


def slimmed(name: str) -> tuple[nn.Module, cn.SlimArch, Tensor]:
    """A removed network: every second unit; of LeNet-5 also columns that are not read, and a cropped kernel."""
    torch.manual_seed(0)
    model, example = BUILD[name](), torch.randn(EXAMPLES[name])
    for module in model.modules():  # a norm that does nothing would hide what is lost
        if isinstance(module, nn.BatchNorm2d) and isinstance(module.running_mean, Tensor):
            module.running_mean.normal_()
    kinds = ("coupled", "column", "shape") if name == "lenet5" else ("coupled",)
    sets = surgery.find_groups(model, example, kinds).sets
    kept = {s.name: tuple(range(0, s.size, 2)) for s in sets if s.kind == "coupled"}
    for s in sets:
        if s.kind == "column":
            kept[s.name] = tuple(i for i in range(s.size) if i % 3)
        if s.kind == "shape":  # the first row of every 5 x 5 kernel goes
            kept[s.name] = tuple(i for i in range(s.size) if i % 25 >= 5)
    slim = cn.SlimArch(kept, {s.name: s.size for s in sets})
    small, proof = cn.remove(model, example, slim)
    assert proof.verdict == "equal"
    return small.eval(), slim, example


@pytest.mark.parametrize("name", BUILD)
def test_saved_here_loaded_in_another_process(name: str, tmp_path: Path) -> None:
    small, slim, example = slimmed(name)
    if name == "lenet5":
        assert {layers.SelectLinear, layers.CroppedConv2d} <= {type(m) for m in small.modules()}
    if name == "grouped":
        convs = [m for m in small.modules() if isinstance(m, nn.Conv2d)]
        assert [m.groups for m in convs] != [1, 4, 16]
    folder = tmp_path / "new" / "folder"
    cn.save(small, slim, folder)
    assert sorted(os.listdir(folder)) == ["slim.json", "weights.safetensors"]
    assert cn.SlimArch.load(folder / "slim.json") == slim
    with torch.no_grad():
        torch.save((example, small(example)), tmp_path / "expected.pt")
    program = (
        f"import sys, torch, compressnas as cn, test_store\nbuild = test_store.BUILD[{name!r}]\n"
        "example, expected = torch.load('expected.pt', weights_only=True)\n"
        "small = cn.load(build(), 'new/folder').eval()\n"
        "assert torch.equal(small(example), expected), (small(example) - expected).abs().max()\n"
        "print(cn.measure(small, example).flops)"
    )
    here = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(here), str(here.parent)])}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert int(done.stdout) == cn.measure(small, example).flops


@pytest.mark.parametrize("name", BUILD)
def test_what_is_loaded_is_an_ordinary_module(name: str, tmp_path: Path) -> None:
    small, slim, example = slimmed(name)
    save(small, slim, tmp_path)
    given = BUILD[name]()
    next(given.parameters()).requires_grad_(False)
    before = {key: tensor.clone() for key, tensor in given.state_dict().items()}
    loaded = load(given, tmp_path)
    assert all(torch.equal(tensor, before[key]) for key, tensor in given.state_dict().items())
    assert str(loaded) == str(small) and loaded.training  # the widths that layers tell are right
    assert [p.requires_grad for p in loaded.parameters()] == [i > 0 for i, _ in enumerate(loaded.parameters())]
    assert {k: v.shape for k, v in loaded.state_dict().items()} == {k: v.shape for k, v in small.state_dict().items()}
    again = every_second_again(loaded, example)
    assert cn.measure(again, example).params < cn.measure(loaded, example).params
    save(loaded, slim, tmp_path)
    assert str(load(BUILD[name](), tmp_path)) == str(small)


def every_second_again(model: nn.Module, example: Tensor) -> nn.Module:
    sets = cn.find_groups(model, example).sets
    slim = cn.SlimArch({s.name: tuple(range(0, s.size, 2)) for s in sets}, {s.name: s.size for s in sets})
    return cn.remove(model, example, slim)[0]


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    model = Tied()
    model.counts = torch.tensor([1.0, 2.0])
    save(model, cn.SlimArch({}, {}), tmp_path)
    assert len(load_file(tmp_path / "weights.safetensors")) == 3
    loaded = load(Tied(), tmp_path)
    assert isinstance(loaded, Tied) and loaded.head.weight is loaded.embed.weight
    assert torch.equal(loaded(torch.tensor([3])), model(torch.tensor([3])))


def test_every_layer_that_a_removal_puts_in_can_be_loaded() -> None:
    own = {kind for _, kind in getmembers(layers, isclass) if kind.__module__ == layers.__name__}
    assert own == set(REPLACED)


def test_another_network_is_refused(tmp_path: Path) -> None:
    small, slim, _ = slimmed("residual")
    save(small, slim, tmp_path)
    with pytest.raises(InputError, match=r"weights\.safetensors does not fit Sequential"):
        load(nn.Sequential(nn.Linear(3, 4)), tmp_path)
    narrow = residual()
    narrow.set_submodule("0", nn.Conv2d(3, 2, 3))
    with pytest.raises(InputError, match=r"0\.weight has shape \(4, 3, 3, 3\) in the file, expected at most \(2, 3,"):
        load(narrow, tmp_path)
    with pytest.raises(InputError, match=r"0\.bias is missing in the file|the network has no 0\.bias"):
        narrow.set_submodule("0", nn.Conv2d(3, 8, 3, bias=False))
        load(narrow, tmp_path)
    lenet, slim, _ = slimmed("lenet5")
    save(lenet, slim, tmp_path)
    with pytest.raises(InputError, match="does not fit Sequential"):
        load(residual(), tmp_path)


def test_damaged_files_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"expected a folder that compressnas\.save wrote"):
        load(residual(), tmp_path)
    (tmp_path / "weights.safetensors").write_bytes(b"no weights")
    with pytest.raises(InputError, match="cannot read weights"):
        load(residual(), tmp_path)
    for header in ({}, {"compressnas": "[]"}, {"compressnas": json.dumps({"numbers": 3})}):
        save_file({"a": torch.ones(1)}, tmp_path / "weights.safetensors", metadata=header)
        with pytest.raises(InputError, match="no structure in its header"):
            load(residual(), tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot make the folder"):
        save(residual(), cn.SlimArch({}, {}), tmp_path / "file" / "below")
