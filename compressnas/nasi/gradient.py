"""The gradient of the trace norm in the weights of the candidates, at the price of the drawn path.

T = ||v||^2 with v = grad_theta L. A mixture z = sum_k w_k u_k with one-hot w has dL/dw_k = <delta, u_k>, where
delta = dL/dz, and as d^2 L / (dw_k dtheta) may be taken in either order,

    dT/dw_k = 2 d/de <delta, u_k> = 2 (<d delta/de, u_k> + <delta, d u_k/de>)    along theta + e v.

A candidate that is not drawn has no part in v, so that it takes one forward pass with its derivative in e; only the
drawn path is differentiated backwards, once for v, and once, with derivatives in e along, for delta.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial

import torch
import torch.autograd.forward_ad as forward_mode
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from compressnas.nasi.ntk import Scales, gradients, no_tracking, squares
from compressnas.spaces.cell import Choice, Kept
from compressnas.spaces.cell_module import Mix, total_of

Candidates = Sequence[Callable[[], Tensor]]
Values = dict[int, Tensor]  # candidate -> what it gives, of those that are drawn


@dataclass(frozen=True)
class _DrawnPath:
    """A way through a supernet along the candidates that are drawn."""

    hot: Mapping[str, Tensor]

    def __call__(self, choice: Choice, candidates: Candidates) -> Tensor:
        return total_of(list(self.values(choice, candidates).values()))

    def values(self, choice: Choice, candidates: Candidates) -> Values:
        return {k: candidates[k]() for k in self.hot[choice.name].nonzero()[:, 0].tolist()}


@dataclass(frozen=True)
class _MovingPath(_DrawnPath):
    """The same way in forward mode: on the way back, what each candidate would change is summed up.

    It is done as soon as delta of a mixture is there, so that what the mixture was made of can go.

    Attributes:
        by_weight: choice -> (O,) float64, where the sums go.
        ends: mixtures with none before them, to differentiate in.
    """

    by_weight: Mapping[str, Tensor]
    ends: list[Tensor] = field(default_factory=list)

    def __call__(self, choice: Choice, candidates: Candidates) -> Tensor:
        values = self.values(choice, candidates)
        mixed = total_of(list(values.values()))
        mixed = mixed.view_as(mixed)  # a tensor of its own, of which delta is that of this mixture alone
        if not mixed.requires_grad:
            self.ends.append(mixed.requires_grad_())
        mixed.register_hook(partial(self._take, choice.name, candidates, values))  # type: ignore[no-untyped-call]
        return mixed

    def _take(self, name: str, candidates: Candidates, values: Values, delta: Tensor) -> None:
        with torch.no_grad():
            for k in range(len(candidates)):
                self.by_weight[name][k] += 2 * _moved(delta, values[k] if k in values else candidates[k]())


def trace_gradient(
    network: nn.Module,
    images: Tensor,
    labels: Tensor,
    hot: Mapping[str, Tensor],
    scales: Scales | None = None,
) -> tuple[float, dict[str, Tensor]]:
    """T of the drawn architecture and dT/dw of each choice.

    Args:
        network: a supernet, called as network(images, way=mix); batch norms in the mode in which T is meant.
        images: (B, C, H, W).
        labels: (B,) int64.
        hot: choice -> (O,) zeros and ones.
        scales: parameter -> factor on its squared gradient (NTK parameterisation); 1 where it is not named.

    Returns:
        T = || (1/B) sum_x grad_theta L_x ||^2 (NASI, equation 11), and choice -> (O,).
    """
    named = dict(network.named_parameters())
    found = _gradients_along(network, images, labels, _DrawnPath(hot))
    trace = squares(found, scales)
    tangents = {name: (scales or {}).get(name, 1.0) * one for name, one in found.items()}
    _load_forward_mode()
    with no_tracking(network), forward_mode.dual_level():
        along = {n: _dual(p.detach(), tangents[n]) if n in tangents else p.detach() for n, p in named.items()}
        path = _MovingPath(hot, {name: torch.zeros(len(one), dtype=torch.float64) for name, one in hot.items()})
        loss = F.cross_entropy(functional_call(network, along, (images,), {"way": path}), labels)
        torch.autograd.grad(loss, path.ends, allow_unused=True)
    return trace, {name: value.to(hot[name]) for name, value in path.by_weight.items()}


def drawn_trace(
    network: nn.Module, images: Tensor, labels: Tensor, hot: Mapping[str, Tensor], scales: Scales | None = None
) -> float:
    """T of the drawn architecture alone; arguments as for `trace_gradient`."""
    return squares(_gradients_along(network, images, labels, _DrawnPath(hot)), scales)


def decided_trace(
    network: nn.Module, images: Tensor, labels: Tensor, kept: Kept, scales: Scales | None = None
) -> float:
    """T of the supernet with all but a decision masked; other arguments as for `trace_gradient`."""
    return squares(_gradients_along(network, images, labels, kept), scales)


def _gradients_along(network: nn.Module, images: Tensor, labels: Tensor, way: Mix | Kept) -> dict[str, Tensor]:
    with no_tracking(network):
        loss = F.cross_entropy(network(images, way=way), labels)
    return gradients(loss, network)


@cache
def _load_forward_mode() -> None:
    """Torch scripts some derivatives when forward mode is first used, and itself calls that deprecated."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`torch.jit.script` is deprecated", category=FutureWarning)
        with forward_mode.dual_level():
            _dual(torch.zeros(()), torch.zeros(()))


def _dual(value: Tensor, tangent: Tensor) -> Tensor:
    dual: Tensor = forward_mode.make_dual(value, tangent)  # type: ignore[no-untyped-call]
    return dual


def _moved(delta: Tensor, value: Tensor) -> float:
    """d/de <delta, value>, both with their derivative."""
    delta, delta_moves = forward_mode.unpack_dual(delta)  # type: ignore[no-untyped-call]
    value, value_moves = forward_mode.unpack_dual(value)  # type: ignore[no-untyped-call]
    total = 0.0
    if delta_moves is not None:
        total += float((delta_moves * value).sum(dtype=torch.float64))
    if value_moves is not None:
        total += float((delta * value_moves).sum(dtype=torch.float64))
    return total
