"""Scores of a network at initialisation, the peers of the trace norm: one batch each, nothing is trained.

Every proxy takes a network, images (B, C, H, W) and labels (B,) int64, and gives a score: the higher, the better; and
-inf where there is none (a singular kernel, a figure that is not a number). It works on a copy, so that the network
stays as it was. Unless it is said otherwise batch norms take the statistics of the batch, whatever mode the network is
in, and dropout is off.

As in Abdelfattah et al. (arXiv 2101.08134) scores that are sums over weights take those of convolutions and linear
layers, without biases and norms.
"""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compressnas.errors import InputError
from compressnas.measure import cost
from compressnas.nasi.ntk import batch_gradient
from compressnas.progress import Step
from compressnas.spaces.cell import Kept, Space

Proxy = Callable[[nn.Module, Tensor, Tensor], float]

JACOBIAN_SHIFT = 1e-5  # k of jacob_cov: what is added to each eigenvalue
MOST_DRAWS = 1_000_000  # in a row that give no new cell
_NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm)

# ---------------------------------------------------------------- proxies


def grad_norm(network: nn.Module, images: Tensor, labels: Tensor) -> float:
    """sum over layers of || dL/dW ||_2 with cross-entropy L (Abdelfattah et al., arXiv 2101.08134, section 3.1)."""
    copied = _copied(network)
    slopes = _slopes(F.cross_entropy(copied(images), labels), _weights(copied))
    return _score(sum(float(one.double().norm()) for one in slopes))


def snip(network: nn.Module, images: Tensor, labels: Tensor) -> float:
    """sum |W * dL/dW| with cross-entropy L (Lee et al., arXiv 1810.02340, equation 5, not normalised)."""
    copied = _copied(network)
    weights = _weights(copied)
    return _score(_products(weights, _slopes(F.cross_entropy(copied(images), labels), weights)))


def grasp(network: nn.Module, images: Tensor, labels: Tensor) -> float:
    """-sum W * (H g) with g = dL/dW, H the Hessian of L, cross-entropy (Wang et al., arXiv 2002.07376, equation 8)."""
    copied = _copied(network)
    weights = _weights(copied)
    first = _slopes(F.cross_entropy(copied(images), labels), weights, create_graph=True)
    along = sum(((one.detach() * one).sum() for one in first), torch.zeros((), device=images.device))
    second = _slopes(along, weights)
    return _score(-sum(float((w.detach() * one).double().sum()) for w, one in zip(weights, second, strict=True)))


def synflow(network: nn.Module, images: Tensor, labels: Tensor) -> float:
    """sum |W * dR/dW|, R the sum of the outputs for ones, all parameters |.| (Tanaka et al., 2006.05467, equation 1).

    Norms are off (Abdelfattah et al.), everything is float64. Of `images` only the shape (C, H, W) counts.
    """
    copied = _copied(network).double().eval()
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.abs_()
    for module in copied.modules():
        if isinstance(module, _NORMS):
            module.register_forward_hook(_left_out)
    weights = _weights(copied)
    flow = copied(torch.ones_like(images[:1], dtype=torch.float64)).sum()
    return _score(_products(weights, _slopes(flow, weights)))


def naswot(network: nn.Module, images: Tensor, labels: Tensor) -> float:
    """log |K|, K_ij the number of ReLUs that are on for both images or off for both (Mellor et al., 2006.04647, v3).

    `nn.ReLU` modules count, at each call.
    """
    copied = _copied(network)
    kernel = torch.zeros(len(images), len(images), dtype=torch.float64, device=images.device)

    def add(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        on = (output > 0).flatten(1).double()  # (B, ReLUs)
        kernel.add_(on @ on.T + (1 - on) @ (1 - on).T)

    for module in copied.modules():
        if isinstance(module, nn.ReLU):
            module.register_forward_hook(add)
    with torch.no_grad():
        copied(images)
    values = torch.linalg.eigvalsh(kernel)  # ascending, none negative but for rounding
    if float(values[0]) <= len(values) * torch.finfo(values.dtype).eps * float(values[-1]):
        return -math.inf
    return _score(float(values.log().sum()))


def jacob_cov(network: nn.Module, images: Tensor, labels: Tensor) -> float:
    """-sum_i (log(v_i + k) + 1/(v_i + k)), v the eigenvalues of the (B, B) correlation of d(sum of outputs)/d(image).

    Mellor et al., arXiv 2006.04647 (v1), with k = 1e-5.
    """
    copied, images = _copied(network), images.detach().clone().requires_grad_()
    (slopes,) = _slopes(copied(images).sum(), [images])
    correlation = torch.corrcoef(slopes.double().flatten(1)).reshape(len(images), len(images))
    if not bool(correlation.isfinite().all()):
        return -math.inf  # an image that the outputs do not depend on correlates with nothing
    values = torch.linalg.eigvalsh(correlation).clamp(min=0) + JACOBIAN_SHIFT
    return _score(-float((values.log() + 1 / values).sum()))


def params(network: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Number of parameters, norms and biases among them."""
    return float(sum(parameter.numel() for parameter in network.parameters()))


def flops(network: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Multiply-adds for one image, in eval mode (`compressnas.measure.cost`)."""
    return float(cost(network, images).flops)


def trace(network: nn.Module, images: Tensor, labels: Tensor) -> float:
    """|| (1/B) sum_x grad_theta L_x ||^2 over all parameters (NASI, arXiv 2109.00817, equation 11)."""
    return _score(batch_gradient(_copied(network), images, labels))


PROXIES: dict[str, Proxy] = {
    "grad_norm": grad_norm,
    "snip": snip,
    "grasp": grasp,
    "synflow": synflow,
    "naswot": naswot,
    "jacob_cov": jacob_cov,
    "params": params,
    "flops": flops,
    "trace": trace,
}


def _copied(network: nn.Module) -> nn.Module:
    """A copy in eval mode but for batch norms, all its parameters with gradients."""
    copied = copy.deepcopy(network).eval().requires_grad_(True)
    for module in copied.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.train()
    return copied


def _weights(network: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in network.parameters() if parameter.dim() > 1]


def _slopes(value: Tensor, of: Sequence[Tensor], create_graph: bool = False) -> Sequence[Tensor]:
    """d value / d each; zeros where it does not depend on one."""
    if not of or not value.requires_grad:
        return [torch.zeros_like(one) for one in of]
    return torch.autograd.grad(value, of, create_graph=create_graph, materialize_grads=True)


def _products(weights: Sequence[Tensor], slopes: Sequence[Tensor]) -> float:
    """sum |w * g|."""
    return sum(float((w.detach() * one).abs().double().sum()) for w, one in zip(weights, slopes, strict=True))


def _left_out(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Any:
    """As a forward hook: the module gives what it was given."""
    return inputs[0]


def _score(value: float) -> float:
    return -math.inf if math.isnan(value) else float(value)


# ---------------------------------------------------------------- cells by their scores


@dataclass(frozen=True)
class Ranking:
    """Cells of a space and their scores.

    Attributes:
        best: the cell with the highest score, of equal ones the first.
        cells: in the order in which they were drawn.
        scores: of each cell.
    """

    best: Kept
    cells: tuple[Kept, ...]
    scores: tuple[float, ...]


def random_cell(space: Space, generator: torch.Generator) -> dict[str, tuple[int, ...]]:
    """A decision, each of those that compute something as likely as another.

    Raises:
        InputError: no decision that computes something was met.
    """
    return random_cells(space, 1, generator)[0]


def random_cells(space: Space, samples: int, generator: torch.Generator) -> list[dict[str, tuple[int, ...]]]:
    """Different decisions that compute something, drawn without replacement.

    Every order of the candidates of a choice is as likely as another; decisions that share one take it by rank.

    Raises:
        InputError: the space has not as many.
    """
    size = math.prod(math.comb(len(choice.candidates), choice.keep) for choice in space.decisions)
    cells: dict[tuple[tuple[int, ...], ...], dict[str, tuple[int, ...]]] = {}
    missed = 0
    while len(cells) < samples:
        ranks = {c.name: torch.rand(len(c.candidates), generator=generator) for c in space.choices}
        kept = {c.name: c.best(ranks[c.logits]) for c in space.decisions}
        key = tuple(kept.values())
        if key not in cells and space.connected(kept):
            cells[key] = kept
            missed = 0
        elif (missed := missed + 1) > min(20 * size, MOST_DRAWS):  # misses what is left with chance exp(-20)
            raise InputError(
                f"space {space.name}: {samples:,} different cells with a path from input to output were asked for,"
                f" {len(cells):,} were found"
            )
    return list(cells.values())


def best_of(
    space: Space,
    score: Callable[[nn.Module], float],
    samples: int,
    generator: torch.Generator,
    build: Callable[[Kept], nn.Module],
    step: Step | None = None,
) -> Ranking:
    """Score different random cells of a space.

    Args:
        score: network -> the higher, the better; a proxy with its batch.
        samples: number of cells, 1 or more.
        build: cell -> the network that is scored, initialised; called for one cell after the other.
        step: called after each cell with the best score so far.

    Raises:
        InputError: no samples, a space with fewer cells, or no cell that has a score.
    """
    if samples < 1:
        raise InputError(f"samples: {samples}, expected 1 or more")
    cells, scores = random_cells(space, samples, generator), []
    for kept in cells:
        scores.append(_score(score(build(kept))))
        if step is not None:
            step(1, best=f"{max(scores):.4g}")
    if max(scores) == -math.inf:
        raise InputError(f"space {space.name}: none of {samples:,} cells has a score")
    return Ranking(cells[scores.index(max(scores))], tuple(cells), tuple(scores))
