"""A switch on every group, 1 when it is there: how sharply the loss holds it, from one backward pass a batch.

All weights by which others read a group are multiplied by its switch z. The curvature of the mean loss in z is that of
removing the group along w_g: w_g' H_gg w_g, with all interactions inside the group, which diagonals leave out.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from compressnas.bayes.calls import Call, Calls, eval_mode, forward
from compressnas.bayes.scores import Loss, Score, drawn_score, hessian_columns, samples_of, signed, true_score
from compressnas.groups import GroupSet, Member
from compressnas.inputs import Inputs

Read = tuple[Call, Tensor]  # a call, and the gradient of the score at its output


def switch_curvature(
    model: nn.Module,
    sets: Sequence[GroupSet],
    batches: Iterable[tuple[Inputs, Any]],
    generator: torch.Generator,
    loss: Loss | None = None,
    exact: bool = False,
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
        exact: without a loss, the GGN itself: a backward pass for each class instead of one for a drawn target, which
            hardly ever is another one than the network is sure of.

    Raises:
        ValueError: no batch was given, or outputs of which nothing is known without a loss; with `exact`, also others
            than (samples, classes) with targets that are whole numbers.
    """
    total = {s.name: torch.zeros(s.size, dtype=torch.float64) for s in sets}
    names = sorted({m.parameter for s in sets for m in s.readers})
    weights = {name: dict(model.named_parameters())[name] for name in names}
    seen = 0
    with eval_mode(model), _trained(weights.values()), torch.enable_grad():
        for inputs, targets in batches:
            output, outputs, calls = forward(model, inputs)
            for score in _scores(output, outputs, targets, generator, loss, exact):
                reads = _reads(outputs, calls, names, score)
                clear = [s for s in sets if all(_fits(m, reads.get(m.parameter, ())) for m in s.readers)]
                others = [s for s in sets if s not in clear]
                for name, value in _sample_by_sample(clear, reads).items():
                    total[name] += value.cpu()
                for name, value in _by_signs(others, weights, outputs, signed(score, generator)).items():
                    total[name] += value.cpu()
            seen += samples_of(inputs)
    if seen == 0:
        raise ValueError("curvature needs at least one batch")
    return {name: value / seen for name, value in total.items()}


def _scores(
    output: Any, outputs: list[Tensor], targets: Any, generator: torch.Generator, loss: Loss | None, exact: bool
) -> Iterable[Score]:
    if loss is not None:
        return [true_score(output, outputs, targets, loss)]
    return hessian_columns(outputs, targets) if exact else [drawn_score(outputs, targets, generator)]


@contextmanager
def _trained(weights: Collection[nn.Parameter]) -> Iterator[None]:
    """Frozen weights hold their groups, too: they take gradients for now."""
    frozen = [weight for weight in weights if not weight.requires_grad]
    for weight in frozen:
        weight.requires_grad_(True)
    try:
        yield
    finally:
        for weight in frozen:
            weight.requires_grad_(False)


def _reads(outputs: list[Tensor], calls: Calls, names: Sequence[str], score: Score) -> dict[str, list[Read]]:
    """Weight -> its calls, each with the gradient of the score at its output; only weights of which all is known."""
    uses = {name: own for name in names if name not in calls.unclear and (own := calls.of.get(name))}
    edges = [edge for own in uses.values() for _, edge in own]
    found = iter(torch.autograd.grad(outputs, edges, score, retain_graph=True, allow_unused=True) if edges else ())
    each = {
        name: [(one, gradient) for (one, _), gradient in zip(own, found, strict=False)] for name, own in uses.items()
    }
    return {name: [(one, g) for one, g in own if g is not None] for name, own in each.items()}


def _sample_by_sample(sets: Sequence[GroupSet], reads: Mapping[str, Sequence[Read]]) -> dict[str, Tensor]:
    """Sum over samples of the squared derivative of the score by each switch."""
    needed = {m.parameter for s in sets for m in s.readers}
    of_channels = {name: torch.stack([_of_channels(*one) for one in reads[name]]).sum(0) for name in needed}  # (B, C)
    result = {}
    for group_set in sets:
        each: Tensor | None = None  # (B, G)
        for member in group_set.readers:
            own, group_of = of_channels[member.parameter], member.group_of.to(of_channels[member.parameter].device)
            each = own.new_zeros(len(own), group_set.size) if each is None else each
            inside = group_of >= 0
            each.index_add_(1, group_of[inside], own[:, inside])
        if each is not None:
            result[group_set.name] = each.square().sum(0)
    return result


def _by_signs(
    sets: Sequence[GroupSet], weights: Mapping[str, nn.Parameter], outputs: list[Tensor], score: Score
) -> dict[str, Tensor]:
    """The square of the derivative of the whole batch, whose samples' scores have random signs."""
    names = sorted({m.parameter for s in sets for m in s.readers})
    if not names:
        return {}
    gradients = torch.autograd.grad(outputs, [weights[n] for n in names], score, retain_graph=True, allow_unused=True)
    products = {
        n: torch.zeros_like(weights[n]) if g is None else weights[n].detach() * g
        for n, g in zip(names, gradients, strict=True)
    }
    sums = {s.name: [m.sums(products[m.parameter], s.size) for m in s.readers] for s in sets}
    return {name: torch.stack(values).sum(0).square() for name, values in sums.items()}


def _fits(member: Member, reads: Sequence[Read]) -> bool:
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
