"""A switch on every group, 1 when it is there: how sharply the loss holds it, from one backward pass a batch.

All weights by which others read a group are multiplied by its switch z. The curvature of the mean loss in z is that of
removing the group along w_g: w_g' H_gg w_g, with all interactions inside the group, which diagonals leave out.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from compressnas.bayes import curvature as scores
from compressnas.bayes.curvature import Call, Loss, samples_of
from compressnas.groups import GroupSet, Member
from compressnas.inputs import Inputs


def switch_curvature(
    model: nn.Module,
    sets: Sequence[GroupSet],
    batches: Iterable[tuple[Inputs, Any]],
    generator: torch.Generator,
    loss: Loss | None = None,
) -> dict[str, Tensor]:
    """Mean over samples of (sum over the weights w_i that read group g of w_i dL/dw_i)^2 -> set name -> (G,).

    L is the loss of a sample at a target drawn from what the network predicts: unbiased for the GGN of the switches
    (Martens, New insights on the natural gradient, section 9.2). With a loss, at the true targets: the empirical
    Fisher. Where per-sample gradients are out of reach (attention, grouped readers), the sum over a batch at random
    signs stands for them: as unbiased, with more variance.

    Args:
        batches: (inputs, targets), on the model's device; targets tell classification from regression.
        generator: draws targets and signs; on the CPU.
        loss: (output, targets) -> scalar, the mean over the batch.

    Raises:
        ValueError: no batch was given, or outputs of which nothing is known without a loss.
    """
    total = {s.name: torch.zeros(s.size, dtype=torch.float64) for s in sets}
    seen = 0
    parameters = dict(model.named_parameters())
    with scores._eval_mode(model), torch.enable_grad():
        for inputs, targets in batches:
            output, outputs, calls = scores._forward(model, inputs)
            score = (
                scores._true_score(output, outputs, targets, loss)
                if loss
                else scores._drawn_score(outputs, targets, generator)
            )
            wanted = {m.parameter for s in sets for m in s.readers}
            uses = {name: own for name, own in calls.of.items() if name in wanted and name not in calls.unclear}
            edges = [edge for own in uses.values() for _, edge in own]
            found = iter(torch.autograd.grad(outputs, edges, score, retain_graph=True, allow_unused=True))
            reads = {
                name: [(one, g) for (one, _), g in zip(own, found, strict=False) if g is not None]
                for name, own in uses.items()
            }
            clear = [s for s in sets if all(m.parameter in reads and _fits(m, reads[m.parameter]) for m in s.readers)]
            by_channel: dict[str, Tensor] = {}  # reader -> (B, C): w dL/dw, summed over all weights of a channel
            for group_set in clear:
                each = outputs[0].new_zeros(calls.samples, group_set.size)
                for member in group_set.readers:
                    name = member.parameter
                    if name not in by_channel:
                        by_channel[name] = sum((_of_channels(*one) for one in reads[name]), torch.zeros(()))
                    inside = member.group_of >= 0
                    each.index_add_(1, member.group_of[inside], by_channel[name][:, inside].to(each))
                total[group_set.name] += each.square().sum(0).cpu()
            if others := [s for s in sets if s not in clear]:
                signed = scores._signed(score, generator)
                names = sorted({m.parameter for s in others for m in s.readers})
                gradients = torch.autograd.grad(outputs, [parameters[n] for n in names], signed, allow_unused=True)
                products = {n: parameters[n] * (0 if g is None else g) for n, g in zip(names, gradients, strict=True)}
                for s in others:
                    once = sum((m.sums(products[m.parameter], s.size) for m in s.readers), torch.zeros(()))
                    total[s.name] += once.detach().square().cpu()
            seen += samples_of(inputs)
    if seen == 0:
        raise ValueError("curvature needs at least one batch")
    return {name: value / seen for name, value in total.items()}


def _fits(member: Member, reads: Sequence[tuple[Call, Tensor]]) -> bool:
    """Whether the places of a member are the input channels of the calls that read it, padded alike on both sides."""
    for call, _ in reads:
        axis = 0 if call.transposed else 1
        even = all(before == after for before, after in call.padding)
        if member.axes != (axis,) or call.groups > 1 or not even or call.inputs.dim() < 2:
            return False
    return bool(reads)


@torch.no_grad()
def _of_channels(call: Call, gradients: Tensor) -> Tensor:
    """Input times dL/d input of one call, summed over positions -> (B, C)."""
    if call.weight.dim() == 2:
        return (call.inputs * (gradients @ call.weight)).reshape(len(gradients), -1, call.weight.shape[1]).sum(1)
    spatial = len(call.stride)
    size = [
        (n - 1) * s - p[0] - p[1] + d * (k - 1) + 1
        for n, s, p, d, k in zip(
            call.inputs.shape[2:], call.stride, call.padding, call.dilation, call.weight.shape[2:], strict=True
        )
    ]
    extra = [a - b for a, b in zip(gradients.shape[2:], size, strict=True)] if call.transposed else [0] * spatial
    back = torch.ops.aten.convolution_backward(
        gradients, call.inputs, call.weight, None, call.stride, [p for p, _ in call.padding], call.dilation,
        call.transposed, extra, call.groups, [True, False, False],
    )[0]  # fmt: skip
    product: Tensor = call.inputs * back
    return product.flatten(2).sum(2)
