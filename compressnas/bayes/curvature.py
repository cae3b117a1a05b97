"""Diagonal curvature of the mean loss with respect to weights: GGN, Monte-Carlo GGN, empirical Fisher, a recursion.

All estimates are means over samples, averaged over as many batches as given; nothing is kept between batches but the
sums. The network is evaluated in eval mode (batch norm uses its running statistics), so samples do not mix.

Without a loss the targets say what it is. Whole numbers: mean cross-entropy over the samples (and over the positions
of a sample, where each has its class). Floating-point numbers: 1/2 ||y - f||^2 summed over the outputs of a sample.
With a loss, the mean over a batch, it is the empirical Fisher: squared per-sample gradients at the true targets.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.grad import conv2d_weight

from compressnas.bayes.calls import Call, Calls, eval_mode, forward, per_sample_gradients
from compressnas.bayes.scores import (
    Loss,
    Score,
    differentiable,
    drawn_score,
    hessian_columns,
    samples_of,
    signed,
    true_score,
)
from compressnas.inputs import Inputs, call

Curvatures = dict[str, Tensor]
_FREED = "backward through the graph a second time"  # what torch says where a graph is gone


def mc(
    model: nn.Module, inputs: Inputs, targets: Any, generator: torch.Generator, loss: Loss | None = None
) -> Curvatures:
    """Sum over samples of the one-sample Monte-Carlo GGN diagonal, layer by layer.

    Targets are drawn from what the network predicts (its softmax, or a normal distribution around its outputs);
    per-sample gradients are squared. Unbiased for the GGN diagonal (Martens, New insights on the natural gradient,
    section 9.2). Per-sample gradients exist for one layer at a time. With a loss nothing is drawn.

    Args:
        inputs: one batch; the first axis of its tensors is the samples.
        targets: without a loss they only tell classification from regression.
        generator: draws the targets; on the CPU.
        loss: for the empirical Fisher.
    """
    output, outputs, calls = forward(model, inputs)
    score = true_score(output, outputs, targets, loss) if loss else drawn_score(outputs, targets, generator)
    return _squares(model, outputs, calls, [score], generator)


def mc_batch(
    model: nn.Module, inputs: Inputs, targets: Any, generator: torch.Generator, loss: Loss | None = None
) -> Curvatures:
    """Sum over samples, from one ordinary backward pass: (sum_i g_i)^2 with drawn targets.

    The scores of drawn targets are independent with mean 0, so the cross terms vanish in expectation: unbiased, with
    more variance than `mc`. Serves any parameter of any module. Those of true targets get random signs instead.

    Args:
        inputs, targets, generator, loss: as for `mc`.
    """
    output = call(model, inputs)
    outputs = differentiable(output, samples_of(inputs))
    score = true_score(output, outputs, targets, loss) if loss else drawn_score(outputs, targets, generator)
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    return _squared_sums(named, outputs, signed(score, generator) if loss else score, more=False)


def ggn(
    model: nn.Module, inputs: Inputs, targets: Any, generator: torch.Generator, loss: Loss | None = None
) -> Curvatures:
    """Sum over samples of the exact GGN diagonal: one backward pass per class, or per output of a regression.

    The Hessian of softmax cross-entropy is diag(p) - pp' = SS' with columns s_c = sqrt(p_c) (e_c - p), so the GGN
    diagonal is the sum over c of squared per-sample gradients of s_c' logits. That of 1/2 ||y - f||^2 is the identity.

    Args:
        inputs, targets, loss: as for `mc`.
        generator: signs for the weights whose per-sample gradients are out of reach.

    Raises:
        ValueError: several classes to predict for each sample.
    """
    output, outputs, calls = forward(model, inputs)
    scores = [true_score(output, outputs, targets, loss)] if loss else hessian_columns(outputs, targets)
    return _squares(model, outputs, calls, scores, generator)


def recursion(
    model: nn.Module, images: Inputs, labels: Any, generator: torch.Generator, loss: Loss | None = None
) -> Curvatures:
    """Sum over samples of the papers' diagonal recursion, for sequential networks.

    Keeps only the diagonal of the pre-activation Hessian: Hpre <- B^2 ((W^2)' Hpre) + D with B = sigma',
    D = sigma'' dL/da, and diag H_W = Hpre a^2 summed over positions (BayesNAS appendix S3). Starts from diag(p - p^2).
    D may make an entry of Hpre negative, where sigma'' is not 0: it is clamped at 0 before it goes on.

    Args:
        images: (B, ...) one batch.
        labels: (B,) true labels; dL/da of D starts from softmax minus one-hot.
        generator: not used; there for the common signature.
        loss: must be None.

    Raises:
        ValueError: a loss is given, labels are no classes, the network is no plain nn.Sequential, calls a layer twice,
            or holds a layer behind its first weights that the recursion has no rule for.
    """
    if loss is not None or not isinstance(images, Tensor) or labels.is_floating_point():
        raise ValueError("the recursion is for cross-entropy on one tensor of inputs; use mc")
    layers = _flat_layers(model)
    values, probabilities = _trace_layers(layers, images)
    gradient = probabilities - F.one_hot(labels, probabilities.shape[1])  # (B, C) dL/da, for D
    hessian = probabilities * (1 - probabilities)  # (B, C)
    total: Curvatures = {}
    weighted = sum(isinstance(layer, nn.Linear | nn.Conv2d) for _, layer in layers)
    for (name, layer), value in zip(reversed(layers), reversed(values), strict=True):
        if isinstance(layer, nn.Linear | nn.Conv2d):
            total[f"{name}.weight"] = _weight_diagonal(layer, value, hessian)
        if len(total) == weighted:
            break  # nothing in front of the first weights asks for more
        hessian, gradient = _back_one(layer, value, hessian, gradient)
    return total


Estimator = Callable[[nn.Module, Inputs, Any, torch.Generator, Loss | None], Curvatures]
ESTIMATORS: dict[str, Estimator] = {"mc": mc, "mc_batch": mc_batch, "ggn": ggn, "recursion": recursion}


def diagonal_curvature(
    model: nn.Module,
    batches: Iterable[tuple[Inputs, Any]],
    kind: str,
    generator: torch.Generator,
    loss: Loss | None = None,
) -> Curvatures:
    """Mean over all samples of all batches, weight name -> tensor shaped like the weight.

    Every parameter of two axes or more has its entry. Weights of linear layers and convolutions come from per-sample
    gradients; others (embeddings, attention, weights that are computed with), and those of layers that fold positions
    into the samples, get the `mc_batch` estimate with random signs, from the same scores.

    Args:
        batches: (inputs, targets), on the model's device.
        kind: a name in ESTIMATORS.
        generator: draws what the Monte-Carlo kinds draw; on the CPU.
        loss: (output, targets) -> scalar, the mean over the batch; for the empirical Fisher.

    Raises:
        ValueError: no batch was given, the kind has no rule for such outputs and targets, or the network keeps what it
            computes from its weights from one call to the next.
    """
    total: Curvatures = {}
    samples, weights = 0, dict(model.named_parameters())
    with eval_mode(model), torch.enable_grad():
        for inputs, targets in batches:
            for name, value in _of_batch(kind, model, inputs, targets, generator, loss).items():
                _add(total, name, value.detach(), weights[name])
            samples += samples_of(inputs)
    if samples == 0:
        raise ValueError("curvature needs at least one batch")
    return {name: value.div_(samples) for name, value in total.items()}


def _of_batch(
    kind: str, model: nn.Module, inputs: Inputs, targets: Any, generator: torch.Generator, loss: Loss | None
) -> Curvatures:
    try:
        return ESTIMATORS[kind](model, inputs, targets, generator, loss)
    except RuntimeError as error:
        if _FREED not in str(error):
            raise
        kept = "a tensor that is computed from weights in one call and kept for the next"
        raise ValueError(f"the network holds {kept}; expected it to be computed in each call") from error


def _squares(
    model: nn.Module, outputs: list[Tensor], calls: Calls, scores: Iterable[Score], generator: torch.Generator
) -> Curvatures:
    """Squares of per-sample gradients of all scores, summed over samples, weight by weight.

    Weights whose per-sample gradients are out of reach get the square of the sum over samples, at random signs.
    """
    uses = {name: own for name, own in calls.of.items() if name not in calls.unclear}
    weights = {n: p for n, p in model.named_parameters() if p.dim() > 1}
    others = {n: p for n, p in weights.items() if n not in uses and p.requires_grad}
    total: Curvatures = {}
    edges = [edge for own in uses.values() for _, edge in own]
    for score, more in _with_more(scores):
        if others:
            for name, square in _squared_sums(others, outputs, signed(score, generator), more or bool(edges)).items():
                _add(total, name, square, weights[name])
        if edges:
            found = iter(torch.autograd.grad(outputs, edges, score, retain_graph=more, allow_unused=True))
            for name, own in uses.items():
                reached = [(one, g) for (one, _), g in zip(own, found, strict=False) if g is not None]
                if reached:
                    _add(total, name, _squared_sum(reached), weights[name])
    nothing = {n: torch.zeros_like(p, requires_grad=False) for n, p in weights.items() if n not in total}
    return total | nothing


def _add(total: Curvatures, name: str, value: Tensor, weight: Tensor) -> None:
    """`value` is taken over as the sum where there is none yet: no zeros lie beside a backward pass.

    Sums have the precision of the weight: under autocast some values come in half of it.
    """
    total[name] = total[name].add_(value) if name in total else value.to(weight.dtype)


def _with_more(scores: Iterable[Score]) -> Iterator[tuple[Score, bool]]:
    """Each score, and whether another follows: the last backward pass frees the graph as it goes, as training does."""
    rest = iter(scores)
    for score in rest:
        for following in rest:
            yield score, True
            score = following
        yield score, False


def _squared_sums(parameters: dict[str, nn.Parameter], outputs: list[Tensor], score: Score, more: bool) -> Curvatures:
    """(sum over samples of the gradients of a score)^2, of each of these; with `more` the graph stays for others."""
    gradients = torch.autograd.grad(outputs, list(parameters.values()), score, retain_graph=more, allow_unused=True)
    pairs = zip(parameters.items(), gradients, strict=True)
    return {n: torch.zeros_like(p) if g is None else g.square() for (n, p), g in pairs}


# ---------------------------------------------------------------- per-sample gradients, one weight at a time

CHUNK = 2**18  # elements of im2col patches or per-sample gradients at a time: 1 MB in float32


def _squared_sum(uses: Sequence[tuple[Call, Tensor]]) -> Tensor:
    """sum_b (dL_b/dW)^2 of a weight over all its calls, shaped like it; positions and calls are summed, then squared.

    Args:
        uses: (call, dL/d output).
    """
    one, gradients = uses[0]
    if len(uses) == 1 and one.inputs.dim() == one.weight.dim() == 2:
        return gradients.square().T @ one.inputs.square()
    total = torch.zeros_like(one.weight, requires_grad=False)
    step = max(1, CHUNK // max(_elements(call, gradients) for call, gradients in uses))
    for start in range(0, len(gradients), step):
        part = slice(start, start + step)
        first, *more = (per_sample_gradients(call, call.inputs[part], g[part]) for call, g in uses)
        for other in more:
            first += other
        total += first.square_().sum(0)
    return total


def _elements(call: Call, gradients: Tensor) -> int:
    """Elements that one sample takes: its weight gradient, or its patches where they are more."""
    weight = call.weight
    if weight.dim() == 2:
        return weight.numel()
    read, placed = (gradients, call.inputs) if call.transposed else (call.inputs, gradients)
    return max(weight.numel(), read.shape[1] * weight.shape[2:].numel() * placed.shape[2:].numel())


# ---------------------------------------------------------------- the recursion, layer by layer


def _flat_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The layers of nested nn.Sequentials, in the order in which they are called."""
    flat: list[tuple[str, nn.Module]] = []

    def walk(module: nn.Module, prefix: str) -> None:
        if type(module).forward is not nn.Sequential.forward:  # a subclass may call its layers in another way
            raise ValueError(f"the recursion needs an nn.Sequential, got {type(module).__name__}; use mc or ggn")
        for name, layer in module._modules.items():  # named_children would leave out what comes a second time
            if isinstance(layer, nn.Sequential):
                walk(layer, f"{prefix}{name}.")
            elif layer is not None:
                flat.append((prefix + name, layer))

    walk(model, "")
    with_weights = [id(layer.weight) for _, layer in flat if isinstance(layer, nn.Linear | nn.Conv2d)]
    if len(set(with_weights)) < len(with_weights):
        raise ValueError("the recursion needs layers with weights of their own, got one that is used twice; use mc")
    return flat


def _apply(layer: nn.Module, value: Tensor) -> Tensor:
    """The layer's output; `value` stays as it is even where the layer works in place."""
    return layer(value.clone() if getattr(layer, "inplace", False) else value)  # type: ignore[no-any-return]


@torch.no_grad()
def _trace_layers(layers: list[tuple[str, nn.Module]], images: Tensor) -> tuple[list[Tensor], Tensor]:
    """The input of each layer, and the softmax of the last layer's output (B, C)."""
    values, value = [], images
    for _, layer in layers:
        values.append(value)
        value = _apply(layer, value)
    return values, value.softmax(1)


def conv_input(layer: nn.Conv2d, inputs: Tensor) -> Tensor:
    """(B, C, H, W) padded as the layer pads it."""
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    return F.pad(inputs, layer._reversed_padding_repeated_twice, mode=mode)


@torch.no_grad()
def _weight_diagonal(layer: nn.Linear | nn.Conv2d, value: Tensor, hessian: Tensor) -> Tensor:
    """sum_b sum_p Hpre[b, n, p] a[b, s, p]^2, shaped like the weight: the gradient of a linear map at a^2."""
    if isinstance(layer, nn.Linear):
        return torch.einsum("b...n,b...c->nc", hessian, value.square())
    padded, shape, how = conv_input(layer, value.square()), list(layer.weight.shape), (layer.stride, 0, layer.dilation)
    diagonal: Tensor = conv2d_weight(padded, shape, hessian, *how, layer.groups)  # type: ignore[no-untyped-call]
    return diagonal


def _back_one(layer: nn.Module, value: Tensor, hessian: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Diagonal Hessian and gradient with respect to a layer's input, from those of its output."""
    point = value.detach().requires_grad_()
    if isinstance(layer, nn.Linear | nn.Conv2d):
        squared = {"weight": layer.weight.detach().square()}
        if layer.bias is not None:
            squared["bias"] = torch.zeros_like(layer.bias)
        (back,) = torch.autograd.grad(torch.func.functional_call(layer, squared, (point,)), point, hessian)
        (slope,) = torch.autograd.grad(layer(point), point, gradient)
        return back, slope
    if isinstance(layer, nn.Flatten | nn.MaxPool2d | nn.Identity | nn.Dropout):  # Jacobian entries are 0 or 1
        output = _apply(layer, point)
        (back,) = torch.autograd.grad(output, point, hessian, retain_graph=True)
        (slope,) = torch.autograd.grad(output, point, gradient)
        return back, slope
    if isinstance(layer, nn.ReLU | nn.LeakyReLU | nn.Tanh | nn.Sigmoid | nn.Softplus | nn.ELU | nn.GELU | nn.SiLU):
        (first,) = torch.autograd.grad(_apply(layer, point).sum(), point, create_graph=True)
        second = torch.zeros_like(point)
        if first.requires_grad:
            (second,) = torch.autograd.grad(first.sum(), point, allow_unused=True, materialize_grads=True)
        first = first.detach()
        return (first.square() * hessian + second * gradient).clamp(min=0), first * gradient
    raise ValueError(f"the recursion has no rule for {type(layer).__name__}; use mc or ggn")
