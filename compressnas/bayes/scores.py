"""Scores: the gradients of a loss, or of drawn targets, with respect to the outputs of a network, sample by sample.

Without a loss the targets say what it is. Whole numbers: mean cross-entropy over the samples (and over the positions
of a sample, where each has its class). Floating-point numbers: 1/2 ||y - f||^2 summed over the outputs of a sample.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

from compressnas.inputs import Inputs, tensors_of

Loss = Callable[[Any, Any], Tensor]  # output, targets -> scalar, the mean over the batch
Score = list[Tensor]  # one for each output of the network, shaped like it


def samples_of(inputs: Inputs) -> int:
    """B, the first axis of the first tensor."""
    tensors = tensors_of(inputs)
    if not tensors or tensors[0].dim() == 0:
        raise ValueError("expected inputs whose first tensor has the samples on its first axis")
    return tensors[0].shape[0]


def drawn_score(outputs: list[Tensor], targets: Any, generator: torch.Generator) -> Score:
    """Gradient of -log p(y | f) at a drawn y: p - e_y for classes, (f - y) ~ N(0, I) for a regression.

    With P positions per sample the loss of a sample is their mean, whose GGN is 1/P of the sum of theirs: the scores of
    positions are independent, too, so they are divided by sqrt(P). Drawn on the CPU, so that every device draws the
    same.
    """
    output = _single(outputs)
    if targets.is_floating_point():
        noise = torch.randn(output.shape, generator=generator, dtype=output.dtype)
        return [noise.to(output.device)]
    axis = _class_axis(output, targets)
    p = output.detach().movedim(axis, -1).softmax(-1)  # (B, ..., C)
    if not bool(p.isfinite().all()):
        raise ValueError("the outputs of the network are not finite")
    drawn = torch.multinomial(p.reshape(-1, p.shape[-1]).cpu(), 1, generator=generator)  # (B * P, 1)
    one_hot = F.one_hot(drawn[:, 0].to(p.device), p.shape[-1]).reshape(p.shape)
    positions = p[0].numel() // p.shape[-1]
    return [((p - one_hot) / math.sqrt(positions)).movedim(-1, axis)]


def hessian_columns(outputs: list[Tensor], targets: Any) -> Iterator[Score]:
    """The columns of S, where SS' is the Hessian of a sample's loss with respect to its outputs."""
    output = _single(outputs)
    if targets.is_floating_point():
        for place in range(output[0].numel()):
            column = torch.zeros_like(output, requires_grad=False).flatten(1)
            column[:, place] = 1
            yield [column.reshape(output.shape)]
        return
    if _class_axis(output, targets) != 1 or output.dim() != 2:
        raise ValueError(f"ggn takes logits (samples, classes), got {tuple(output.shape)}; use mc")
    p = output.detach().softmax(1)  # (B, C)
    for c in range(p.shape[1]):
        column = -p * p[:, c : c + 1].sqrt()
        column[:, c] += p[:, c].sqrt()
        yield [column]


def true_score(output: Any, outputs: list[Tensor], targets: Any, loss: Loss) -> Score:
    """Gradient of each sample's own loss, from the mean over the batch.

    The loss sees the outputs cut off from the network: where one is computed from another, each has its own share.
    """
    leaves = {id(o): o.detach().requires_grad_() for o in outputs}
    value = loss(tree_map_only(Tensor, lambda o: leaves.get(id(o), o), output), targets)
    if value.dim() or not value.requires_grad:
        raise ValueError(f"expected a loss that is a differentiable scalar, got shape {tuple(value.shape)}")
    gradients = torch.autograd.grad(value, [leaves[id(o)] for o in outputs], allow_unused=True)
    if all(g is None for g in gradients):
        raise ValueError("the loss does not depend on what the network returns: tensors, in tuples, lists or mappings")
    return [torch.zeros_like(o) if g is None else g * len(o) for o, g in zip(outputs, gradients, strict=True)]


def signed(score: Score, generator: torch.Generator) -> Score:
    """Each sample's score times a random sign: then (sum_i g_i)^2 has the mean sum_i g_i^2, whatever the scores are."""
    signs = torch.randint(2, (len(score[0]),), generator=generator).to(score[0]) * 2 - 1  # (B,)
    return [part * signs.to(part).reshape(-1, *[1] * (part.dim() - 1)) for part in score]


def differentiable(output: Any, samples: int) -> list[Tensor]:
    """The tensors (B, ...) that the network returns and that depend on its weights, each once."""
    found = {id(t): t for t in tensors_of(output) if t.requires_grad and t.dim() and len(t) == samples}
    if not found:
        raise ValueError(f"nothing that the network returns is (samples = {samples}, ...) and depends on its weights")
    return list(found.values())


def _single(outputs: list[Tensor]) -> Tensor:
    if len(outputs) > 1:
        raise ValueError(f"the network returns {len(outputs)} tensors, so that a loss must say what they mean")
    return outputs[0]


def _class_axis(logits: Tensor, targets: Tensor) -> int:
    """Where the classes are: 1 as cross-entropy has them, or last as language models do.

    Raises:
        ValueError: the shapes do not go together, or there is a single class.
    """
    axes = (1, logits.dim() - 1) if logits.dim() > 1 else ()
    places = [a for a in axes if targets.shape == logits.shape[:a] + logits.shape[a + 1 :]]
    if not places or logits.shape[places[0]] < 2:
        raise ValueError(
            f"outputs {tuple(logits.shape)} are no logits of classes for targets {tuple(targets.shape)}; give the loss"
        )
    return places[0]
