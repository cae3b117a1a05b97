"""Weights on disk: safetensors out; safetensors or weights-only checkpoints in. Never a pickle that runs code."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from compressnas.errors import InputError
from compressnas.files import write_whole
from compressnas.train import read_checkpoint


def save_weights(model: nn.Module, path: Path) -> None:
    """Write the state dict as safetensors, whole or not at all."""
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    write_whole(path, save(state))


def load_weights(model: nn.Module, path: Path, fresh: Sequence[str] = ()) -> None:
    """Load a `.safetensors` file or a `torch.save`d checkpoint into `model`, wherever it was saved.

    A checkpoint may hold the state dict itself or under `state_dict`, `model` or `net`, and its names may start with
    `module.`. It may lack the batch norms' count of batches, which files of before 2018 do not have.

    Args:
        model: what is loaded into; unchanged when the file is refused.
        path: the file.
        fresh: modules that keep the weights they have; what the file holds for them is not read, if anything.

    Raises:
        InputError: the file is missing, damaged, no state dict, does not fit the model, or holds NaN or infinity; or
            neither the model nor the file has a module that `fresh` names.
    """
    if not path.is_file():
        raise InputError(f"model.weights: no file {path.absolute()}")
    if path.suffix == ".safetensors":
        try:
            state: Any = load_file(str(path), device="cpu")
        except (SafetensorError, OSError, ValueError) as error:
            raise InputError(f"cannot read weights {path}: {error}") from error
    else:
        state = read_checkpoint(path)
    for key in ("state_dict", "model", "net"):
        if isinstance(state, Mapping) and isinstance(state.get(key), Mapping):
            state = state[key]
    if not isinstance(state, Mapping) or not all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in state.items()
    ):
        raise InputError(f"weights {path}: expected a state dict (names -> tensors)")
    own = model.state_dict()
    given = {name if name in own else name.removeprefix("module."): tensor for name, tensor in state.items()}
    for module in fresh:
        if not any(_is_within(name, [module]) for name in (*own, *given)):
            raise InputError(f"model.fresh: neither the network nor {path} has a module {module!r}")
    given = {name: tensor for name, tensor in given.items() if not _is_within(name, fresh)}
    given |= {name: tensor for name, tensor in own.items() if _is_within(name, fresh)}
    counts = {name: tensor for name, tensor in own.items() if name.endswith(".num_batches_tracked")}
    given = {**counts, **given}
    faults = [f"{name} is missing" for name in own if name not in given]
    faults += [f"{name} is unknown" for name in given if name not in own]
    faults += [
        f"{name} has shape {tuple(given[name].shape)}, expected {tuple(tensor.shape)}"
        for name, tensor in own.items()
        if name in given and given[name].shape != tensor.shape
    ]
    faults += [f"{name} has values that are not finite" for name in own if not _is_finite(given.get(name))]
    if faults:
        more = f" and {len(faults) - 4} more" if len(faults) > 4 else ""
        raise InputError(f"weights {path} do not fit the model: {'; '.join(faults[:4])}{more}")
    model.load_state_dict(given)


def _is_within(name: str, modules: Sequence[str]) -> bool:
    return any(name.startswith(f"{module}.") for module in modules)


def _is_finite(tensor: Tensor | None) -> bool:
    return tensor is None or bool(tensor.isfinite().all())
