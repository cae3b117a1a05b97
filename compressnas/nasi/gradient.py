"""The gradient of the trace norm in the weights of the candidates, at the price of the drawn path.

T = ||v||^2 with v = grad_theta L. A mixture z = sum_k w_k u_k with one-hot w has dL/dw_k = <delta, u_k>, where
delta = dL/dz, and as d^2 L / (dw_k dtheta) may be taken in either order,

    dT/dw_k = 2 d/de <delta, u_k> = 2 (<d delta/de, u_k> + <delta, d u_k/de>)    along theta + e v.

A candidate that is not drawn has no part in v, so that it takes one forward pass with its derivative in e; only the
drawn path is differentiated backwards, once for v, and once, with derivatives in e along, for delta.
"""

import warnings
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import torch
import torch.autograd.forward_ad as forward_mode
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from compressnas.nasi.ntk import Scales, gradients, no_tracking, squares
from compressnas.spaces.cell import Choice

Candidates = Sequence[Callable[[], Tensor]]


@dataclass
class _DrawnPath:
    """A way through a supernet along the candidates that are drawn.

    Attributes:
        calls: each mixture that was met: its choice, what it gave, the candidates, the values of those drawn.
    """

    hot: Mapping[str, Tensor]
    calls: list[tuple[Choice, Tensor, Candidates, dict[int, Tensor]]] = field(default_factory=list)
    remembers: bool = False

    def __call__(self, choice: Choice, candidates: Candidates) -> Tensor:
        values = {int(k): candidates[int(k)]() for k in self.hot[choice.name].nonzero()[:, 0]}
        first, *others = values.values()
        mixed = first
        for other in others:
            mixed = mixed + other
        if self.remembers:
            mixed = mixed + torch.zeros((), dtype=mixed.dtype, device=mixed.device, requires_grad=True)
            self.calls.append((choice, mixed, candidates, values))
        return mixed


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
    found = _drawn_gradients(network, images, labels, hot)
    trace = squares(found, scales)
    tangents = {name: (scales or {}).get(name, 1.0) * one for name, one in found.items()}
    _load_forward_mode()
    with no_tracking(network), forward_mode.dual_level():
        along = {n: _dual(p.detach(), tangents[n]) if n in tangents else p.detach() for n, p in named.items()}
        path = _DrawnPath(hot, remembers=True)
        loss = F.cross_entropy(functional_call(network, along, (images,), {"way": path}), labels)
        deltas = torch.autograd.grad(loss, [mixed for _, mixed, _, _ in path.calls], allow_unused=True)
        by_weight = {name: torch.zeros(len(one), dtype=torch.float64) for name, one in hot.items()}
        with torch.no_grad():
            for (choice, _, candidates, values), delta in zip(path.calls, deltas, strict=True):
                if delta is not None:
                    for k in range(len(candidates)):
                        by_weight[choice.name][k] += 2 * _moved(delta, values[k] if k in values else candidates[k]())
    return trace, {name: value.to(hot[name]) for name, value in by_weight.items()}


def drawn_trace(
    network: nn.Module, images: Tensor, labels: Tensor, hot: Mapping[str, Tensor], scales: Scales | None = None
) -> float:
    """T of the drawn architecture alone; arguments as for `trace_gradient`."""
    return squares(_drawn_gradients(network, images, labels, hot), scales)


def _drawn_gradients(
    network: nn.Module, images: Tensor, labels: Tensor, hot: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    with no_tracking(network):
        loss = F.cross_entropy(network(images, way=_DrawnPath(hot)), labels)
    return gradients(loss, network)


@cache
def _load_forward_mode() -> None:
    """Torch scripts some derivatives when forward mode is first used, and itself calls that deprecated."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`torch.jit.script` is deprecated", category=FutureWarning)
        with forward_mode.dual_level():
            _dual(torch.zeros(()), torch.zeros(()))


def _dual(value: Tensor, tangent: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", FutureWarning
        )  # torch compiles them in a way that it deprecates
        dual: Tensor = forward_mode.make_dual(value, tangent)  # type: ignore[no-untyped-call]
    return dual


def _moved(delta: Tensor, value: Tensor) -> float:
    """d/de <delta, value>, both with their derivative."""
    delta, delta_moves = forward_mode.unpack_dual(delta)  # type: ignore[no-untyped-call]
    value, value_moves = forward_mode.unpack_dual(value)  # type: ignore[no-untyped-call]
    total = 0.0
    if delta_moves is not None:
        total += float(torch.linalg.vecdot(delta_moves.flatten(), value.flatten()))
    if value_moves is not None:
        total += float(torch.linalg.vecdot(delta.flatten(), value_moves.flatten()))
    return total
