"""Whether a removed network is the masked one: what is compared, and what is said of it."""

import copy
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from compressnas.coupling import Coupling, left_of_riders
from compressnas.folding import Folded
from compressnas.inputs import Inputs, call, double, tensors_of
from compressnas.partial_norms import Left, norms_over

TOLERANCE = 1e-9  # relative difference in float64 up to which two networks are the same


@dataclass(frozen=True)
class Proof:
    """That the removed network is the masked one.

    Attributes:
        verdict: `equal` (the whole decision), `partly` (some group sets were left alone), or `approximate`: equal, or
            in part, but for norms that now average over less.
        max_relative_difference: max |masked - removed| / max |masked| in float64 on `images` real inputs; with the
            verdict `approximate` the norms of the masked network average over what is left, too.
        left_alone: (group set, reason).
        folded: constant channels whose value moved into biases first: the masked network is then the one that has it
            there, and equals the network before but for the rounding of these biases.
        constant: the removed network gives the same output for all images, up to `tolerance`: nothing comes through
            the units that are left. That would be so whatever was removed, so random weights were compared as well.
        approximate: the group sets that a norm averages over and of which something is gone, if that changes anything.
        change: what it changes: max |masked - removed| / max |masked| with the masked network's norms as they were.
    """

    verdict: str
    max_relative_difference: float
    images: int
    left_alone: tuple[tuple[str, str], ...]
    tolerance: float = TOLERANCE
    folded: Folded = field(default_factory=Folded)
    constant: bool = False
    approximate: tuple[str, ...] = ()
    change: float = 0.0


@torch.no_grad()
def relative_difference(one: nn.Module, other: nn.Module, inputs: Inputs, left: Left | None = None) -> float:
    """max |one - other| / max |one| over all outputs, both in float64 and eval mode.

    Infinity where an output is not finite or the shapes differ. With `left` the norms of `one` average over these
    places of their parameters only.
    """
    first, second = _float64_outputs(one, inputs, left), _float64_outputs(other, inputs)
    if [t.shape for t in first] != [t.shape for t in second] or not first:
        return math.inf
    pairs = list(zip(first, second, strict=True))
    scale = max(float(a.abs().max()) if a.numel() else 0.0 for a, _ in pairs)
    difference = max(float((a - b).abs().max()) if a.numel() else 0.0 for a, b in pairs) / max(scale, 1e-300)
    return difference if math.isfinite(difference) else math.inf


def compared(
    whole: nn.Module,
    small: nn.Module,
    inputs: Inputs,
    coupled: Coupling,
    names: Collection[str],
    gone: Mapping[str, tuple[int, ...]],
) -> tuple[float, float, Left]:
    """How far the masked network is from the removed one, what norms over what is left change, and what that is.

    Norms are those of the masked network wherever that is exact; else, where they average over units of the sets in
    `names`, they average over what is left (without the units `gone` of each set), and what they change is told apart
    from the difference.
    """
    difference = relative_difference(whole, small, inputs)
    if difference <= TOLERANCE or coupled.inexact.isdisjoint(names):
        return difference, 0.0, {}
    left = left_of_riders(coupled, gone)
    return relative_difference(whole, small, inputs, left), difference, left


def is_constant(network: nn.Module, inputs: Inputs) -> bool:
    """Whether all samples of a batch of several give the same outputs, up to the tolerance."""
    outputs = [t for t in _float64_outputs(network, inputs) if t.numel()]
    scale = max((float(t.abs().max()) for t in outputs), default=0.0)
    moved = max((float((t - t[:1]).abs().max()) for t in outputs if t.dim()), default=0.0)
    return count_of(inputs) > 1 and moved <= TOLERANCE * scale


@torch.no_grad()
def _float64_outputs(network: nn.Module, inputs: Inputs, left: Left | None = None) -> list[Tensor]:
    """What the network returns for these inputs in float64 and eval mode, tensors that it makes itself included."""
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        twin = copy.deepcopy(network).double().eval()
        with norms_over(twin, left or {}):
            return [t.double() for t in tensors_of(call(twin, double(inputs)))]
    finally:
        torch.set_default_dtype(before)


def count_of(images: Inputs) -> int:
    """How many samples a batch holds."""
    return next((len(tensor) for tensor in tensors_of(images) if tensor.dim()), 1)


@torch.no_grad()
def redrawn(model: nn.Module) -> nn.Module:
    """A float64 copy in eval mode with random weights and norm statistics: zeros and ones hide faults."""
    generator = torch.Generator().manual_seed(0)
    network = copy.deepcopy(model).double().eval()
    for parameter in network.parameters():
        scale = 1 / math.sqrt(max(1, parameter[0].numel())) if parameter.dim() > 1 else 1.0
        parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * scale)
    for name, tensor in network.named_buffers():
        if name.endswith("running_mean"):
            tensor.copy_(torch.randn(tensor.shape, generator=generator, dtype=torch.float64))
        if name.endswith("running_var"):
            tensor.copy_(torch.rand(tensor.shape, generator=generator, dtype=torch.float64) + 0.5)
    return network
