"""What a network costs: FLOPs in two conventions, and parameters. The only file that knows fvcore."""

import copy
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

with warnings.catch_warnings():
    # fvcore scripts a loss function when it is imported, and torch calls that deprecated. Not the user's business.
    warnings.filterwarnings("ignore", message="`torch.jit.script` is deprecated", category=FutureWarning)
    from fvcore.nn import ActivationCountAnalysis, FlopCountAnalysis

_CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_LAYERS = (*_CONVS, *_TRANSPOSED, nn.Linear)
_LAYER_OPERATIONS = ("conv", "linear", "addmm")  # fvcore's names for what convolutions and linear layers run


@dataclass(frozen=True)
class Cost:
    """What the network costs as it physically is, for one input.

    Attributes:
        flops: fvcore's count: one per multiply-add. Besides convolutions and linear layers it counts norms, matrix
            products, adaptive pooling and upsampling.
        params: trainable or not, shared ones once; buffers are not counted.
        by_layer: module path -> fvcore's count of the convolutions and linear operations the module itself runs;
            every convolution and linear layer is listed, also with 0. A module that is used twice counts twice.
        uncounted: operation -> how often the network runs it; fvcore has no count for these, so `flops` leaves
            them out.
        flops_bias_convention: (K^2 C_in / groups + 1) H_out W_out C_out summed over convolutions plus
            (n_in + 1) n_out over linear layers, bias or not: what the Bayesian pruning papers print. The dense
            LeNet-5 20-50-800-500 has 2,308,230. Norms are not counted.
    """

    flops: int
    params: int
    by_layer: Mapping[str, int]
    uncounted: Mapping[str, int]
    flops_bias_convention: int


def cost(model: nn.Module, example: Tensor) -> Cost:
    """Count the FLOPs and parameters of `model` in eval mode for the first image of `example` (B, C, H, W).

    Everything runs on a copy: statistics, gradients, training flags and hooks of `model` stay as they are.
    """
    network, image = _copy(model, example)
    flops = _analyse(FlopCountAnalysis, network, image)
    outputs = _analyse(ActivationCountAnalysis, network, image)  # output elements of the same operations
    total = flops.by_operator()
    own = _own_counts(flops.by_module_and_operator())
    layers = {name: sum(own[name][op] for op in _LAYER_OPERATIONS) for name in own}
    named = dict(network.named_modules())
    return Cost(
        flops=int(sum(total.values())),
        params=sum(parameter.numel() for parameter in model.parameters()),
        by_layer=MappingProxyType({n: int(f) for n, f in layers.items() if f or isinstance(named[n], _LAYERS)}),
        uncounted=MappingProxyType({op: int(n) for op, n in sorted(flops.unsupported_ops().items())}),
        flops_bias_convention=int(sum(total[op] + outputs.by_operator()[op] for op in _LAYER_OPERATIONS)),
    )


def theoretical_flops(model: nn.Module, example: Tensor) -> tuple[int, int]:
    """FLOPs for one input if every zero weight of a convolution or linear layer were free.

    A zero weight saves one multiply-add per output position. In the bias convention an output unit all of whose
    weights are zero saves its "+ 1" per output position as well. What `cost` counts elsewhere stays counted, so a
    network without zeros has the same theoretical and realised FLOPs.

    Args:
        model: any network; it is not changed.
        example: (B, C, H, W), of which the first image is used.

    Returns:
        (fvcore's convention, bias convention).
    """
    dense = cost(model, example)
    network, image = _copy(model, example)
    free: list[tuple[int, int]] = []

    def count(layer: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        free.append(_free(layer, inputs[0] if inputs else None, output))

    for module in network.modules():
        if isinstance(module, _LAYERS):
            module.register_forward_hook(count)
    with torch.no_grad():
        network(image)
    return dense.flops - sum(f for f, _ in free), dense.flops_bias_convention - sum(b for _, b in free)


def _free(layer: nn.Module, inputs: Tensor | None, output: Tensor) -> tuple[int, int]:
    """What the zero weights of `layer` would save in this call, in fvcore's and in the bias convention."""
    weight = layer.weight
    assert isinstance(weight, Tensor)
    zeros = weight.numel() - int(torch.count_nonzero(weight))
    if isinstance(layer, _TRANSPOSED):  # (C_in, C_out / groups, K, K): each weight works once per input position
        units = weight.reshape(layer.groups, layer.in_channels // layer.groups, weight.shape[1], -1)
        units = units.ne(0).any(3).any(1).flatten()  # (C_out,)
        positions = 0 if inputs is None else inputs.numel() // max(layer.in_channels, 1)
    else:  # (C_out, C_in / groups, K, K) or (n_out, n_in): once per output position
        units = weight.flatten(1).ne(0).any(1)  # (C_out,)
        positions = output.numel() // max(len(units), 1)
    dead_outputs = output.numel() // max(len(units), 1) * int((~units).sum())
    return zeros * positions, zeros * positions + dead_outputs


def _copy(model: nn.Module, example: Tensor) -> tuple[nn.Module, Tensor]:
    """An eval-mode copy on the CPU, and one image (1, C, H, W) in the dtype of its parameters."""
    network = copy.deepcopy(model).cpu().eval()
    dtype = next((p.dtype for p in network.parameters() if p.is_floating_point()), example.dtype)
    return network, example[:1].detach().to("cpu", dtype)


def _analyse(kind: Any, network: nn.Module, image: Tensor) -> Any:
    """An fvcore analysis that keeps quiet: what it would have logged is in `unsupported_ops`."""
    analysis = kind(network, image)
    analysis.unsupported_ops_warnings(False).uncalled_modules_warnings(False).tracer_warnings("none")
    with torch.no_grad():
        analysis.total()
    return analysis


def _own_counts(counts: Mapping[str, Counter[str]]) -> dict[str, Counter[str]]:
    """What each module runs itself; fvcore adds every operation to all modules above it as well."""
    own = {name: Counter(count) for name, count in counts.items()}
    for name, count in counts.items():
        if name:
            own[name.rpartition(".")[0]].subtract(count)
    return own
