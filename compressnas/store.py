"""A removed network on disk: its weights with its structure, and the decision. No pickle, and no code is run."""

import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor, nn

from compressnas.errors import InputError
from compressnas.files import write_whole
from compressnas.layers import CroppedConv2d, PrunedAttention, SelectLinear
from compressnas.slim import SlimArch

WEIGHTS, DECISION = "weights.safetensors", "slim.json"


def save(small: nn.Module, slim: SlimArch, folder: str | Path) -> None:
    """Write `weights.safetensors` and `slim.json`, each whole or not at all, into `folder`, which is made if missing.

    The weights file holds every parameter and buffer, and in its header what `load` needs to give a fresh network
    the same structure: the whole numbers that its modules hold (channels, groups, kernel sizes) and which layers were
    replaced.

    Raises:
        InputError: the folder cannot be written.
    """
    folder = Path(folder)
    tensors, tied = _tensors(small)
    modules = list(small.named_modules(remove_duplicate=False))
    structure = {
        "numbers": {name: numbers for name, module in modules if (numbers := _numbers(module))},
        "replaced": {name: type(module).__name__ for name, module in modules if type(module) in REPLACED},
        "tied": tied,
    }
    stored = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    content = to_bytes(stored, metadata={"compressnas": json.dumps(structure, sort_keys=True)})
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make the folder {folder}: {error.strerror or error}") from error
    write_whole(folder / WEIGHTS, content)
    slim.save(folder / DECISION)


def load(model: nn.Module, folder: str | Path) -> nn.Module:
    """The network that `save` wrote, from a fresh original one.

    Args:
        model: the network as it was before removal, with any weights; not changed. The result is a copy that has its
            code, device, mode and `requires_grad`.
        folder: what `save` was given.

    Raises:
        InputError: a file is missing or damaged, or was saved from another network.
    """
    path = Path(folder) / WEIGHTS
    stored, structure = _read(path)
    small = copy.deepcopy(model)
    try:
        for name, kind in structure["replaced"].items():
            small.set_submodule(name, REPLACED_NAMES[kind](small.get_submodule(name), stored, name))
        modules = dict(small.named_modules(remove_duplicate=False))
        for name, numbers in structure["numbers"].items():
            for attribute, value in numbers.items():
                setattr(modules[name], attribute, tuple(map(int, value)) if isinstance(value, list) else int(value))
    except (KeyError, AttributeError, TypeError, ValueError, IndexError) as error:
        raise InputError(f"{path} does not fit {type(model).__name__}: {error}") from error
    own = dict(_named(small))
    names = set(stored) | set(structure["tied"])
    faults = [f"{n} is missing in the file" for n in own if n not in names]
    faults += [f"the network has no {n}" for n in sorted(names) if n not in own]
    faults += [
        f"{n} has shape {tuple(stored[n].shape)} in the file, expected at most {tuple(t.shape)}"
        for n, t in own.items()
        if n in stored and not _within(stored[n].shape, t.shape)
    ]
    if faults:
        more = f" and {len(faults) - 4} more" if len(faults) > 4 else ""
        raise InputError(f"{path} does not fit {type(model).__name__}: {'; '.join(faults[:4])}{more}")
    _put(small, own, stored, structure["tied"])
    trained = dict(model.named_parameters(remove_duplicate=False))
    for name, parameter in small.named_parameters():
        parameter.requires_grad_(trained[name].requires_grad)
    return small


# ---------------------------------------------------------------- layers that a removal puts in place of others


def _select_linear(dense: nn.Module, stored: Mapping[str, Tensor], name: str) -> nn.Module:
    if not isinstance(dense, nn.Linear):
        raise TypeError(f"{name} is a {type(dense).__name__}, expected a Linear")
    return SelectLinear(dense, stored[f"{name}.indices"].to(dense.weight.device))


def _cropped_conv(dense: nn.Module, stored: Mapping[str, Tensor], name: str) -> nn.Module:
    if not isinstance(dense, nn.Conv2d):
        raise TypeError(f"{name} is a {type(dense).__name__}, expected a Conv2d")
    height, width = stored[f"{name}.weight"].shape[2:]
    return CroppedConv2d(dense, (0, height), (0, width))  # how it pads is among its numbers


def _pruned_attention(dense: nn.Module, stored: Mapping[str, Tensor], name: str) -> nn.Module:
    if not isinstance(dense, nn.MultiheadAttention):
        raise TypeError(f"{name} is a {type(dense).__name__}, expected a MultiheadAttention")
    return PrunedAttention(dense)


REPLACED: dict[type[nn.Module], Callable[[nn.Module, Mapping[str, Tensor], str], nn.Module]] = {
    SelectLinear: _select_linear,
    CroppedConv2d: _cropped_conv,
    PrunedAttention: _pruned_attention,
}
REPLACED_NAMES = {kind.__name__: build for kind, build in REPLACED.items()}


# ---------------------------------------------------------------- tensors and numbers


def _named(network: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers under all their names; also buffers that a state dict leaves out."""
    yield from network.named_parameters(remove_duplicate=False)
    yield from network.named_buffers(remove_duplicate=False)


def _tensors(network: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Each tensor under its first name, and other name -> first name for those that have several."""
    first: dict[int, str] = {}
    tensors: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    for name, tensor in _named(network):
        if id(tensor) in first:
            tied[name] = first[id(tensor)]
        else:
            first[id(tensor)] = name
            tensors[name] = tensor
    return tensors, tied


def _numbers(module: nn.Module) -> dict[str, int | list[int]]:
    """The whole numbers, and tuples of them, that a module holds: those that follow the shapes are among them."""
    found: dict[str, int | list[int]] = {}
    for name, value in vars(module).items():
        if name.startswith("_") or isinstance(value, bool):
            continue
        if isinstance(value, int):
            found[name] = int(value)
        elif isinstance(value, tuple) and value and all(type(n) is int for n in value):
            found[name] = list(value)
    return found


def _within(small: Sequence[int], whole: Sequence[int]) -> bool:
    return len(small) == len(whole) and all(a <= b for a, b in zip(small, whole, strict=True))


def _put(network: nn.Module, own: Mapping[str, Tensor], stored: Mapping[str, Tensor], tied: Mapping[str, str]) -> None:
    """Put the stored tensors in place of the network's own. In place."""
    new: dict[str, Tensor] = {}
    for name, before in own.items():
        first = tied.get(name, name)
        if first not in new:
            device = "cpu" if before.is_meta else before.device
            value = stored[first].to(device, copy=True)  # not the file's memory, which may change and is not aligned
            new[first] = nn.Parameter(value, requires_grad=False) if isinstance(before, nn.Parameter) else value
        module, _, attribute = name.rpartition(".")
        setattr(network.get_submodule(module), attribute, new[first])


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
    """The tensors and the structure in a file of `save`."""
    if not path.is_file():
        raise InputError(f"no file {path.absolute()}, expected a folder that compressnas.save wrote")
    try:
        with safe_open(str(path), framework="pt", device="cpu") as file:
            stored: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            text = (file.metadata() or {}).get("compressnas")
    except (SafetensorError, OSError, ValueError) as error:
        raise InputError(f"cannot read weights {path}: {error}") from error
    try:
        structure = json.loads(text or "")
        kept = {key: dict(structure[key]) for key in ("numbers", "replaced", "tied")}
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: no structure in its header, expected a file of compressnas.save") from error
    return stored, kept
