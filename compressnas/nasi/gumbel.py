"""Architectures drawn with Gumbel noise, and the gradient through them (straight-through Gumbel-Softmax)."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Drawn:
    """One choice, drawn.

    Attributes:
        hot: (O,) ones for the candidates that are drawn, zeros for the others.
        soft: (O,) the softmax that stands for it in the gradient.
        tau: its temperature.
    """

    hot: Tensor
    soft: Tensor
    tau: float

    def gradient(self, by_weight: Tensor) -> Tensor:
        """(O,) derivative in alpha, from that in the weights of the candidates: through `soft` instead of `hot`."""
        return self.soft * (by_weight - (self.soft * by_weight).sum()) / self.tau


def draw(alpha: Tensor, keep: int, tau: float, generator: torch.Generator, device: torch.device | str = "cpu") -> Drawn:
    """The candidates with the `keep` largest alpha + g, g ~ Gumbel(0, 1) (NASI, equation 41).

    Args:
        alpha: (O,) logits, on the CPU.
        device: where the result goes.
    """
    exponential = torch.empty(alpha.shape, dtype=torch.float64).exponential_(generator=generator)
    noisy = alpha - exponential.log().to(alpha)
    hot = torch.zeros_like(alpha)
    hot[noisy.topk(keep).indices] = 1
    return Drawn(hot.to(device), (noisy / tau).softmax(0).to(device), tau)
