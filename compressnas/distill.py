"""Knowledge distillation: a network learns from the outputs of a larger one besides the labels."""

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def distillation_loss(student: Tensor, teacher: Tensor, labels: Tensor, weight: float, temperature: float) -> Tensor:
    """(1 - weight) * cross-entropy + weight * T^2 * KL(softmax(teacher / T) || softmax(student / T)) -> scalar.

    T^2 keeps the size of the gradient whatever the temperature (Hinton, Vinyals, Dean, arXiv 1503.02531, section 2).

    Args:
        student, teacher: (B, C) logits.
        labels: (B,) int64.
        weight: 0 for the labels alone, 1 for the teacher alone.
        temperature: T > 0.
    """
    outputs, targets = (F.log_softmax(logits / temperature, 1) for logits in (student, teacher))  # (B, C)
    divergence = F.kl_div(outputs, targets, reduction="batchmean", log_target=True)
    return (1 - weight) * F.cross_entropy(student, labels) + weight * temperature**2 * divergence


def distillation(teacher: nn.Module, weight: float, temperature: float) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The loss (images, logits, labels) -> scalar of a network that learns from `teacher`, as it is now."""
    teacher = copy.deepcopy(teacher).eval()

    def loss(images: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad():
            targets = teacher(images)
        return distillation_loss(logits, targets, labels, weight, temperature)

    return loss
