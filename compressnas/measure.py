"""What a network costs: FLOPs in two conventions, and parameters. The only file that knows fvcore."""

import copy
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from compressnas.errors import InputError
from compressnas.inputs import Inputs, map_tensors
from compressnas.interface import TensorsOnly, input_tensors, take

with warnings.catch_warnings():
    # fvcore scripts a loss function when it is imported, and torch calls that deprecated. Not the user's business.
    warnings.filterwarnings("ignore", message="`torch.jit.script` is deprecated", category=FutureWarning)
    from fvcore.nn import ActivationCountAnalysis, FlopCountAnalysis

_CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_LAYERS = (*_CONVS, *_TRANSPOSED, nn.Linear)
_LAYER_OPERATIONS = ("conv", "linear", "addmm")  # fvcore's names for what convolutions and linear layers run

Evaluate = Callable[[nn.Module], float]  # a network, in eval mode -> any metric of it: accuracy, mIoU, an error


@dataclass(frozen=True)
class Cost:
    """What the network costs as it physically is, for one input.

    Attributes:
        flops: fvcore's count: one per multiply-add. Besides convolutions and linear layers it counts norms, matrix
            products, adaptive pooling and upsampling; attention, which fvcore leaves out, has its two matrix products.
        params: trainable or not, shared ones once; buffers are not counted.
        by_layer: module path -> fvcore's count of the convolutions and linear operations the module itself runs;
            every convolution and linear layer is listed, also with 0. A module that is used twice counts twice.
        uncounted: operation -> how often the network runs it; fvcore has no count for these, so `flops` leaves
            them out.
        flops_bias_convention: (K^2 C_in / groups + 1) H_out W_out C_out summed over convolutions plus
            (n_in + 1) n_out over linear layers, bias or not: what the Bayesian pruning papers print. The dense
            LeNet-5 20-50-800-500 has 2,308,230. Norms are not counted.
        metric: what `evaluate` gave, None without one.
    """

    flops: int
    params: int
    by_layer: Mapping[str, int]
    uncounted: Mapping[str, int]
    flops_bias_convention: int
    metric: float | None = None


def cost(model: nn.Module, example: Inputs, evaluate: Evaluate | None = None) -> Cost:
    """Count the FLOPs and parameters of `model` in eval mode for the first sample of `example`.

    Everything runs on a copy: statistics, gradients, training flags and hooks of `model` stay as they are.

    Args:
        model: any network.
        example: a tensor (B, ...), a tuple of arguments or a mapping of named ones.
        evaluate: takes a copy of the network, in eval mode and on its device, gradients off; gives any metric of it.

    Raises:
        InputError: the example holds no sample, or `evaluate` gives something else than a number.
    """
    metric = None if evaluate is None else metric_of(model, evaluate)
    network, sample = _copy(model, example)
    with _attention_in_steps():
        flops = _analyse(FlopCountAnalysis, network, sample)
        outputs = _analyse(ActivationCountAnalysis, network, sample)  # output elements of the same operations
        total = flops.by_operator()
    own = _own_counts(flops.by_module_and_operator())
    layers = {
        name.removeprefix("network").removeprefix("."): sum(own[name][op] for op in _LAYER_OPERATIONS)
        for name in own
        if name  # the wrapper
    }
    named = dict(model.named_modules())
    return Cost(
        flops=int(sum(total.values())),
        params=sum(parameter.numel() for parameter in model.parameters()),
        by_layer=MappingProxyType({n: int(f) for n, f in layers.items() if f or isinstance(named[n], _LAYERS)}),
        uncounted=MappingProxyType({op: int(n) for op, n in sorted(flops.unsupported_ops().items())}),
        flops_bias_convention=int(sum(total[op] + outputs.by_operator()[op] for op in _LAYER_OPERATIONS)),
        metric=metric,
    )


@torch.no_grad()
def metric_of(model: nn.Module, evaluate: Evaluate) -> float:
    """What `evaluate` gives for a copy of the network, in eval mode.

    Raises:
        InputError: `evaluate` is no function, or gives no number; NaN and infinity are numbers, and so is an array or a
            tensor of one.
    """
    if not callable(evaluate):
        raise InputError(f"evaluate: {type(evaluate).__name__}; expected a function of a network")
    given: Any = evaluate(copy.deepcopy(model).eval())
    try:
        if isinstance(given, str | bytes | bytearray):  # float reads these, too
            raise TypeError
        return float(given.item() if hasattr(given, "item") else given)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:  # RuntimeError: a tensor of several elements
        raise InputError(f"evaluate: gave {type(given).__name__}; expected a number") from error


def theoretical_flops(model: nn.Module, example: Inputs) -> tuple[int, int]:
    """FLOPs for one input if every zero weight of a convolution or linear layer were free.

    A zero weight saves one multiply-add per output position. In the bias convention an output unit all of whose
    weights are zero saves its "+ 1" per output position as well. What `cost` counts elsewhere stays counted, so a
    network without zeros has the same theoretical and realised FLOPs.

    Args:
        model: any network; it is not changed.
        example: as for `cost`.

    Returns:
        (fvcore's convention, bias convention).
    """
    dense = cost(model, example)
    network, sample = _copy(model, example)
    free: list[tuple[int, int]] = []

    def count(layer: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        free.append(_free(layer, inputs[0] if inputs else None, output))

    for module in network.modules():
        if isinstance(module, _LAYERS):
            module.register_forward_hook(count)
    with torch.no_grad(), _attention_in_steps():
        network(*sample)
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


def _copy(model: nn.Module, example: Inputs) -> tuple[TensorsOnly, tuple[Tensor, ...]]:
    """An eval-mode copy on the CPU, and one sample for it, floating-point tensors in the dtype of its parameters."""
    network = copy.deepcopy(model).cpu().eval()
    dtype = next((p.dtype for p in network.parameters() if p.is_floating_point()), None)
    sample = map_tensors(
        take(example, torch.zeros(1, dtype=torch.int64)),
        lambda t: t.detach().to("cpu", dtype if t.is_floating_point() else None),
    )
    return TensorsOnly(network, sample), tuple(input_tensors(sample))


@contextmanager
def _attention_in_steps() -> Iterator[None]:
    """Torch's attention layers have a fast path in eval mode: one operation, inside which nothing can be counted."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def _attention(inputs: Sequence[Any], outputs: Sequence[Any]) -> Counter[str]:
    """Multiply-adds of q k' and attn v: q (..., L, E), k (..., S, E), v (..., S, E_v). Masks save nothing."""
    query, _, value = (value.type().sizes() for value in inputs[:3])
    per_pair = query[-1] + value[-1]
    return Counter({"attention": math.prod(query[:-2]) * query[-2] * value[-2] * per_pair})


def _added_products(inputs: Sequence[Any], outputs: Sequence[Any]) -> Counter[str]:
    """Multiply-adds of a sum and batched products: added to, (B, L, E), (B, E, S); attention with a mask runs it."""
    one, other = (value.type().sizes() for value in inputs[1:3])
    return Counter({"bmm": math.prod(one) * other[-1]})


def _analyse(kind: Any, network: nn.Module, sample: tuple[Tensor, ...]) -> Any:
    """An fvcore analysis that keeps quiet: what it would have logged is in `unsupported_ops`."""
    analysis = kind(network, sample)
    analysis.unsupported_ops_warnings(False).uncalled_modules_warnings(False).tracer_warnings("none")
    if kind is FlopCountAnalysis:
        analysis.set_op_handle("aten::scaled_dot_product_attention", _attention, "aten::baddbmm", _added_products)
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
