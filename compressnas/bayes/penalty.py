"""The re-weighted group Lasso: its value, and the proximal step that takes groups to exact zero."""

import torch
from torch import Tensor


def group_lasso(norms: Tensor, omega: Tensor, lam: float) -> Tensor:
    """lam * sum_g omega_g ||w_g||_2 -> scalar, from norms (G,) and omega (G,). BayesNAS section 5.3."""
    return lam * (omega * norms).sum()


def proximal_factors(norms: Tensor, omega: Tensor, lam: float, step: float) -> Tensor:
    """What the proximal step multiplies each group by -> (G,), in 0..1.

    prox of step * lam * omega_g ||w_g||_2 is w_g * max(0, 1 - step lam omega_g / ||w_g||): block soft-thresholding
    (Parikh and Boyd, Proximal Algorithms, section 6.5.1). A group that is zero stays zero. omega = infinity gives 0.
    """
    thresholds = step * lam * omega
    safe = torch.where(norms > 0, norms, torch.ones_like(norms))
    factors = (1 - thresholds / safe).clamp(min=0)
    return torch.where(norms > 0, factors, torch.zeros_like(norms))
