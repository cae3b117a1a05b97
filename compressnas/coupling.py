"""Which units live and die together: torch-pruning's dependency graph, as group sets. With baselines.py the only file
that knows torch_pruning.
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch_pruning as tp
from torch import Tensor, nn

from compressnas.errors import InputError
from compressnas.groups import GroupSet, Member, modules_with_weights
from compressnas.layers import SelectLinear


def output_sets(model: nn.Module, example: Tensor) -> list[GroupSet]:
    """One coupled group set per layer whose output units can be removed, in order of registration.

    Members are the incoming weights of a unit (of its own layer first), then the outgoing ones; readers the outgoing
    ones, writers the biases and batch norms. A layer that no layer reads is left out: its units are the classes.

    Raises:
        InputError: the network cannot be traced.
    """
    return proposed_sets(model, example)[0]


def proposed_sets(model: nn.Module, example: Tensor) -> tuple[list[GroupSet], dict[str, str]]:
    """`output_sets`, and those that no group set can describe, with the reason."""
    graph = _graph(model, example)
    names = {module: name for name, module in model.named_modules()}
    sets: list[GroupSet] = []
    refused: dict[str, str] = {}
    covered: dict[str, int] = {}  # layer -> how many of its units are in a set
    for name, layer in modules_with_weights(model):
        if name in covered:
            continue
        try:
            group_set = _coupled_set(graph, layer, names)
        except _Refused as error:
            refused[f"{name}.out"] = str(error)
            continue
        except Exception as error:  # torch-pruning may raise anything where it does not understand a network
            refused[f"{name}.out"] = f"torch-pruning cannot follow its units: {one_line(error)}"
            continue
        for member in incoming(group_set):
            owner = member.parameter.removesuffix(".weight")
            covered[owner] = covered.get(owner, 0) + int((member.group_of >= 0).sum())
        if group_set.readers:
            sets.append(group_set)
    for name, layer in modules_with_weights(model):
        if covered.get(name, layer.weight.shape[0]) < layer.weight.shape[0]:
            refused.setdefault(f"{name}.out", "only some of its units live or die with those of another layer")
    return sets, refused


class _Refused(Exception):
    """Units that no group set can describe; the message is the reason."""


def _coupled_set(graph: tp.DependencyGraph, layer: nn.Conv2d | nn.Linear, names: Mapping[nn.Module, str]) -> GroupSet:
    units = layer.weight.shape[0]
    incoming: list[Member] = []
    outgoing: list[Member] = []
    writers: list[Member] = []
    reaches_output = False
    for item in _group(graph, layer, range(units)).items:
        target, fn = item.dep.target.module, item.dep.handler
        reaches_output |= isinstance(target, graph.ops._OutputOp)
        reads = graph.is_in_channel_pruning_fn(fn) and not graph.is_out_channel_pruning_fn(fn)  # both: depthwise, norm
        if isinstance(target, nn.modules.batchnorm._BatchNorm) and target.affine:
            group_of = _group_of(item, target.num_features, target.weight.device)
            writers += [Member(f"{names[target]}.{which}", (0,), group_of) for which in ("weight", "bias")]
        if not isinstance(target, nn.Conv2d | nn.Linear):
            continue
        if isinstance(target, nn.Conv2d) and target.groups > 1 and not _is_depthwise(target):
            raise _Refused(f"{names[target]} is a grouped convolution: its groups must stay equally wide")
        if reads and isinstance(target, SelectLinear):
            raise _Refused(f"{names[target]} selects its inputs already")
        group_of = _group_of(item, target.weight.shape[int(reads)], target.weight.device)
        (outgoing if reads else incoming).append(Member(f"{names[target]}.weight", (int(reads),), group_of))
        if not reads and target.bias is not None:
            writers.append(Member(f"{names[target]}.bias", (0,), group_of))
    if outgoing and reaches_output:
        raise _Refused("its units reach the output of the network")
    if outgoing and _live_together(graph, layer, units):
        raise _Refused("several of its units can only be removed together")
    members = (*incoming, *outgoing)
    return GroupSet(f"{names[layer]}.out", "coupled", units, members, tuple(outgoing), tuple(writers))


def _group_of(item: Any, places: int, device: torch.device) -> Tensor:
    group_of = torch.full((places,), -1, device=device)
    group_of[torch.tensor(item.idxs, device=device)] = torch.tensor(item.root_idxs, device=device)
    return group_of


def _is_depthwise(layer: nn.Conv2d) -> bool:
    return layer.groups == layer.in_channels == layer.out_channels


def _live_together(graph: tp.DependencyGraph, layer: nn.Module, units: int) -> bool:
    """Whether removing one unit of the layer takes another one along. Two units differ in some bit of their number."""
    for bit in range((units - 1).bit_length()):
        some = {unit for unit in range(units) if unit >> bit & 1}
        if set(_group(graph, layer, sorted(some)).items[0].idxs) != some:
            return True
    return False


def _graph(model: nn.Module, example: Tensor) -> tp.DependencyGraph:
    """torch-pruning's graph. It traces by autograd and leaves the network in eval mode, both of which are undone."""
    modes = [(module, module.training) for module in model.modules()]
    frozen = [p for p in model.parameters() if not p.requires_grad and p.is_floating_point()]
    try:
        with torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # advice about what it does not know; the trial judges that
            for parameter in frozen:
                parameter.requires_grad_(True)
            graph = tp.DependencyGraph()
            return graph.build_dependency(model, example, forward_fn=_one_tensor, verbose=False)
    except InputError:
        raise
    except Exception as error:  # whatever the network itself raises
        shape = tuple(example.shape)
        raise InputError(f"the network cannot be traced at an input of shape {shape}: {one_line(error)}") from error
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)
        for module, training in modes:
            module.training = training


def _one_tensor(model: nn.Module, example: Tensor) -> Tensor:
    """The output. Without this function torch-pruning would first try the images of the batch as separate inputs."""
    output = model(example)
    if not isinstance(output, Tensor):
        raise InputError(f"the network returns a {type(output).__name__}, expected one tensor (B, classes)")
    return output


def one_line(error: BaseException) -> str:
    """The first line an exception has to say."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _group(graph: tp.DependencyGraph, layer: nn.Module, units: Sequence[int]) -> tp.dependency.Group:
    prune = tp.prune_conv_out_channels if isinstance(layer, nn.Conv2d) else tp.prune_linear_out_channels
    return graph.get_pruning_group(layer, prune, idxs=list(units))


def pruning_group(model: nn.Module, example: Tensor, name: str) -> tp.dependency.Group:
    """torch-pruning's own group of all units of the output set `name`, as its importances take it."""
    layer = dict(modules_with_weights(model))[name.removesuffix(".out")]
    return _group(_graph(model, example), layer, range(layer.weight.shape[0]))


def incoming(group_set: GroupSet) -> tuple[Member, ...]:
    """The weights that make a unit: one layer's, or several where their outputs are added."""
    return tuple(m for m in group_set.members if m not in group_set.readers)


def remove_units(network: nn.Module, example: Tensor, units: Mapping[str, tuple[int, ...]]) -> None:
    """Remove the units of all sets at once, so that every index counts in the network as it was."""
    graph, gone = _graph(network, example), tp.dependency.Group()
    gone._DG = graph
    parts: dict[tuple[Any, Any], tuple[Any, set[int]]] = {}
    for name, indices in units.items():
        for dep, places in _group(graph, network.get_submodule(name.removesuffix(".out")), indices).items:
            parts.setdefault((dep.target, dep.handler), (dep, set()))[1].update(places)
    for dep, places in parts.values():
        gone.add_dep(dep, sorted(places))
    gone.prune(record_history=False)
