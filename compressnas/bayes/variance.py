"""Sparse Bayesian updates, element by element and group by group: pure functions of tensors.

The objective is E(w)/lam + 1/2 [w' Gamma^-1 w + log|Gamma| + log|Gamma^-1 + H/lam|], E the mean loss per sample and
H >= 0 the diagonal of its curvature. Linearising the concave part at the current point turns one round into a
re-weighted group Lasso (BayesNAS, arXiv 1905.04919, sections 5.2 and 5.3 and algorithm 1).

`precision` stands for H/lam (`consistent`) or H (`paper`) throughout; see `scaled_curvature`.
"""

import torch
from torch import Tensor

SCALES = ("summed", "consistent", "paper")


def scaled_curvature(curvature: Tensor, lam: float, scale: str | float, samples: int) -> Tensor:
    """Curvature as the updates want it, any shape.

    `consistent`: H/lam, the derivation with E the mean loss. `paper`: H, as algorithm 1 prints it. `summed`: N H, the
    curvature of the log-likelihood of all N training samples; the penalty's lam then tempers the prior alone. The more
    curvature, the closer gamma comes to the mean square of a group's weights and the penalty to lam |g| log ||w_g||,
    which leaves large groups in peace and empties small ones; with little curvature omega hardly depends on gamma, and
    all groups shrink alike. A number takes the place of N.

    Negative curvature (possible for networks that are not piecewise linear) is clamped at 0. At lam = 0, where nothing
    is shrunk, `consistent` gives 0.

    Raises:
        ValueError: `scale` is not in SCALES.
    """
    if isinstance(scale, float):
        return curvature.clamp(min=0) * scale
    if scale not in SCALES:
        raise ValueError(f"curvature scale must be one of {', '.join(SCALES)}, got {scale!r}")
    factor = {"summed": float(samples), "consistent": 1 / lam if lam > 0 else 0.0, "paper": 1.0}[scale]
    return curvature.clamp(min=0) * factor


def posterior_variance(gamma: Tensor, precision: Tensor) -> Tensor:
    """C = 1 / (1/gamma + H/lam), both of one shape. gamma = 0 gives 0, gamma = infinity gives lam/H."""
    return 1 / (1 / gamma + precision)


def slope(gamma: Tensor, precision: Tensor) -> Tensor:
    """a = 1/gamma - C/gamma^2 = (H/lam) / (1 + gamma H/lam) >= 0, both of one shape.

    Written as 1 / (lam/H + gamma): finite at gamma = 0 where algorithm 1 has 0/0, and right at every limit: 0 for no
    curvature or gamma = infinity (a group that nothing holds), 1/gamma for infinite curvature.
    """
    return 1 / (1 / precision + gamma)


def overlapping_gamma(gammas: Tensor) -> Tensor:
    """(J, ...) prior variances of J groups that share a weight -> (...): 1/gamma = sum_j 1/gamma_j.

    The precision of the unnormalised product of the priors. One gamma of 0 makes the whole 0.
    """
    return 1 / (1 / gammas).sum(0)


def overlapping_slope(gamma: Tensor, others: Tensor, precision: Tensor) -> Tensor:
    """a_j = 1/gamma_j - C/gamma_j^2 for group j of several that share a weight.

    With s = sum_{k != j} 1/gamma_k (`others`) this is (s + H/lam) / (1 + gamma_j (s + H/lam)): to group j the other
    priors are more curvature. Finite where gamma_j or 1/s is above 0. All arguments have one shape.
    """
    return slope(gamma, others + precision)


def omega_from_slopes(slope_sums: Tensor) -> Tensor:
    """Re-weighting coefficient (G,): omega_g = sqrt(sum_{i in g} a_i), from the sums (G,)."""
    return slope_sums.clamp(min=0).sqrt()


def group_gamma(norms: Tensor, omega: Tensor) -> Tensor:
    """Prior variance (G,): gamma_g = ||w_g||_2 / omega_g, the minimum of ||w||^2/gamma + gamma sum a.

    A group with norm 0 has gamma 0, whatever its omega. A group with a norm and omega = 0 (no curvature holds it, none
    of its weights matters to the loss) has gamma = infinity; whoever prunes treats it as dead.
    """
    return torch.where(norms == 0, torch.zeros_like(norms), norms / omega)


def switch_gamma(precision: Tensor) -> Tensor:
    """Prior variance of a switch that stands at 1 and that the data hold with `precision` h: max(0, 1 - 1/h).

    The maximum over gamma of the evidence N(1; 0, gamma + 1/h); it collapses to 0 at h <= 1 (Tipping and Faul, Fast
    marginal likelihood maximisation for sparse Bayesian models, eq. 20, with q = h and s = h).
    """
    return (1 - 1 / precision).clamp(min=0)


def switch_evidence(precision: Tensor) -> Tensor:
    """What the log evidence loses when the switch goes: (h - 1 - log h) / 2 at h > 1, else 0; any shape."""
    h = precision.clamp(min=1)
    return (h - 1 - h.log()) / 2


def gated_gamma(own: Tensor, predecessors: Tensor) -> Tensor:
    """Eq. 6 of BayesNAS: gamma = 1 / (1/own + 1/sum of predecessors' switches), of one shape; 0 where either is 0."""
    return 1 / (1 / own + 1 / predecessors)
