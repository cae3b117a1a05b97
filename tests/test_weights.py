"""Weights in and out of files: what fits is loaded, what does not is refused, and nothing runs code."""

import io
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from compressnas.errors import InputError
from compressnas.layers import SelectLinear
from compressnas.weights import load_weights, save_weights

State = dict[str, Tensor]


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), SelectLinear(nn.Linear(9, 3), _read()))


def _read() -> Tensor:
    return torch.tensor([0, 4, 7])


def same(one: nn.Module, other: nn.Module) -> bool:
    first, second = one.state_dict(), other.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_saved_weights_come_back(tmp_path: Path) -> None:
    path, model, other = tmp_path / "weights.safetensors", network(0), network(1)
    model.to(memory_format=torch.channels_last)  # strided: safetensors stores contiguous tensors only
    save_weights(model, path)
    assert not same(model, other)
    load_weights(other, path)
    assert same(model, other)
    first = path.read_bytes()
    save_weights(other, path)
    assert path.read_bytes() == first and [p.name for p in tmp_path.iterdir()] == ["weights.safetensors"]
    assert set(load_file(path)) == set(model.state_dict())  # plain safetensors, for anyone to read


WRAPPINGS: dict[str, Callable[[State], Any]] = {
    "state dict": lambda state: state,
    "under state_dict": lambda state: {"state_dict": state, "epoch": 3},
    "under model": lambda state: {"model": state, "optimizer": {"state": {}}},
    "under net": lambda state: {"net": state, "acc": 95.1},
    "without counts of batches": lambda state: {n: t for n, t in state.items() if "num_batches" not in n},
    "under model under state_dict": lambda state: {"state_dict": {"model": state}},
    "data parallel": lambda state: {f"module.{name}": tensor for name, tensor in state.items()},
    "data parallel under state_dict": lambda state: {"state_dict": {f"module.{n}": t for n, t in state.items()}},
    "parameters": lambda state: {name: nn.Parameter(t) if t.is_floating_point() else t for name, t in state.items()},
    "double": lambda state: {name: t.double() if t.is_floating_point() else t for name, t in state.items()},
}


@pytest.mark.parametrize("name", WRAPPINGS)
def test_a_torch_checkpoint_is_loaded(name: str, tmp_path: Path) -> None:
    path, model, other = tmp_path / "checkpoint.pt", network(0), network(1)
    torch.save(WRAPPINGS[name](model.state_dict()), path)
    load_weights(other, path)
    assert same(model, other)
    assert all(p.dtype == torch.float32 for p in other.parameters())


def test_a_layer_that_is_called_module_keeps_its_name(tmp_path: Path) -> None:
    model, other = (nn.ModuleDict({"module": network(seed)}) for seed in (0, 1))
    torch.save(model.state_dict(), tmp_path / "checkpoint.pt")
    load_weights(other, tmp_path / "checkpoint.pt")
    assert same(model, other)


def test_fresh_modules_keep_what_they_have(tmp_path: Path) -> None:
    """Whatever the file holds for them: other shapes, nothing, or modules that the network does not have."""
    state = network(0).state_dict()
    state |= {"3.weight": torch.zeros(99, 3), "AuxLogits.conv.weight": torch.zeros(1)}
    del state["3.bias"]
    torch.save({f"module.{name}": tensor for name, tensor in state.items()}, tmp_path / "checkpoint.pt")
    model, before = network(1), network(1).state_dict()
    load_weights(model, tmp_path / "checkpoint.pt", ("3", "AuxLogits"))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name] if name.startswith("3.") else state[name]), name
    with pytest.raises(InputError, match=r"AuxLogits.conv.weight is unknown"):
        load_weights(model, tmp_path / "checkpoint.pt", ["3"])
    with pytest.raises(InputError, match=r"model.fresh: neither the network nor .*checkpoint.pt has a module '4'"):
        load_weights(model, tmp_path / "checkpoint.pt", ["3", "4"])


def test_a_checkpoint_of_a_gpu_is_loaded_without_one(tmp_path: Path) -> None:
    """A file as a GPU machine writes it: the storages are tagged `cuda:0` in the pickle."""
    path, model, other = tmp_path / "gpu.pt", network(0), network(1)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    with zipfile.ZipFile(buffer) as ordinary, zipfile.ZipFile(path, "w") as tagged:
        for entry in ordinary.infolist():
            content = ordinary.read(entry)
            if entry.filename.endswith("data.pkl"):
                assert content.count(b"X\x03\x00\x00\x00cpu") == 1  # once, then from the pickle's memo
                content = content.replace(b"X\x03\x00\x00\x00cpu", b"X\x06\x00\x00\x00cuda:0")
            tagged.writestr(entry.filename, content)
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="CUDA"):
            torch.load(path, weights_only=True)
    load_weights(other, path)
    assert same(model, other) and all(t.device.type == "cpu" for t in other.state_dict().values())


class Harmful:
    """Unpickled, it would write a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.write_text, (self.path, "it ran")


def test_a_pickle_with_code_in_it_is_refused(tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    for name, save in (("new.pt", torch.save), ("old.pkl", lambda o, p: p.write_bytes(pickle.dumps(o)))):
        path = tmp_path / name
        save({"state_dict": {"0.weight": Harmful(trap)}}, path)
        with pytest.raises(InputError, match=f"cannot read checkpoint .*{name}: ") as caught:
            load_weights(network(0), path)
        assert "\n" not in str(caught.value)
        assert not trap.exists()


def broken(path: Path, how: str) -> None:
    if path.suffix == ".safetensors":
        save_weights(network(0), path)
    else:
        torch.save(network(0).state_dict(), path)
    content = path.read_bytes()
    path.write_bytes({"cut": content[: len(content) // 2], "noise": b"\x80noise" * 20, "empty": b""}[how])


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
@pytest.mark.parametrize("how", ["cut", "noise", "empty"])
def test_a_damaged_file_is_refused(suffix: str, how: str, tmp_path: Path) -> None:
    path, model = tmp_path / f"weights{suffix}", network(1)
    broken(path, how)
    with pytest.raises(InputError, match=r"cannot read .*weights") as caught:
        load_weights(model, path)
    assert "\n" not in str(caught.value) and caught.value.exit_code == 2
    assert same(model, network(1))


def test_a_missing_file_says_where_it_was_looked_for(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.pt", tmp_path / "absent.safetensors", tmp_path):
        with pytest.raises(InputError, match=f"no file {path}"):
            load_weights(network(0), path)


def renamed(state: State) -> State:
    return {("1.weights" if name == "1.weight" else name): tensor for name, tensor in state.items()}


MISFITS: dict[str, tuple[Callable[[State], Any], str]] = {
    "missing": (lambda s: {n: t for n, t in s.items() if n != "0.bias"}, "0.bias is missing"),
    "unknown": (lambda s: {**s, "5.bias": torch.zeros(1)}, "5.bias is unknown"),
    "renamed": (renamed, "1.weight is missing; 1.weights is unknown"),
    "shape": (
        lambda s: {**s, "0.weight": torch.zeros(2, 1, 5, 5)},
        r"0.weight has shape \(2, 1, 5, 5\), expected \(2, ",
    ),
    "other network": (lambda s: {f"x{i}": torch.zeros(1) for i in range(9)}, "and [0-9]+ more"),
    "no state dict": (lambda s: {"epoch": 3}, "expected a state dict"),
    "a tensor": (lambda s: torch.zeros(3), "expected a state dict"),
    "a list": (lambda s: list(s.values()), "expected a state dict"),
    "numbers for names": (lambda s: dict(enumerate(s.values())), "expected a state dict"),
    "empty": (lambda s: {}, "0.weight is missing"),
    "not finite": (lambda s: {**s, "0.bias": torch.tensor([0, float("nan")])}, "0.bias has values that are not finite"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_weights_of_another_network_are_refused(name: str, tmp_path: Path) -> None:
    change, message = MISFITS[name]
    path, model = tmp_path / "other.pt", network(1)
    torch.save(change(network(0).state_dict()), path)
    with pytest.raises(InputError, match=message) as caught:
        load_weights(model, path)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)
    assert same(model, network(1))  # not half of it


def test_weights_of_another_network_in_safetensors(tmp_path: Path) -> None:
    path = tmp_path / "other.safetensors"
    save_file({"0.weight": torch.zeros(2, 1, 3, 3)}, path)
    with pytest.raises(InputError, match=r"do not fit the model: 0.bias is missing"):
        load_weights(network(0), path)
