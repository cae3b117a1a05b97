"""Diagonal curvature of the mean loss with respect to weights: GGN, Monte-Carlo GGN, empirical Fisher, a recursion.

All estimates are means over samples, averaged over as many batches as given; nothing is kept between batches but the
sums. The network is evaluated in eval mode (batch norm uses its running statistics), so samples do not mix.

Without a loss the targets say what it is. Whole numbers: mean cross-entropy over the samples (and over the positions
of a sample, where each has its class). Floating-point numbers: 1/2 ||y - f||^2 summed over the outputs of a sample.
With a loss, the mean over a batch, it is the empirical Fisher: squared per-sample gradients at the true targets.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.grad import conv2d_weight
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from compressnas.inputs import Inputs, call, tensors_of

Curvatures = dict[str, Tensor]
Loss = Callable[[Any, Any], Tensor]  # output, targets -> scalar, the mean over the batch
Score = list[Tensor]  # the gradients of some score with respect to the outputs of the network, sample by sample


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
    output, outputs, calls = _forward(model, inputs)
    score = _true_score(output, outputs, targets, loss) if loss else _drawn_score(outputs, targets, generator)
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
    outputs = _differentiable(output, samples_of(inputs))
    score = _true_score(output, outputs, targets, loss) if loss else _drawn_score(outputs, targets, generator)
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    return _squared_sums(named, outputs, _signed(score, generator) if loss else score)


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
    output, outputs, calls = _forward(model, inputs)
    scores = [_true_score(output, outputs, targets, loss)] if loss else _hessian_columns(outputs, targets)
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
        ValueError: no batch was given, or the kind has no rule for such outputs and targets.
    """
    total: Curvatures = {}
    samples = 0
    with _eval_mode(model), torch.enable_grad():
        for inputs, targets in batches:
            for name, value in ESTIMATORS[kind](model, inputs, targets, generator, loss).items():
                total[name] = value.detach() if name not in total else total[name].add_(value.detach())
            samples += samples_of(inputs)
    if samples == 0:
        raise ValueError("curvature needs at least one batch")
    return {name: value.div_(samples) for name, value in total.items()}


def samples_of(inputs: Inputs) -> int:
    """B, the first axis of the first tensor."""
    tensors = tensors_of(inputs)
    if not tensors or tensors[0].dim() == 0:
        raise ValueError("expected inputs whose first tensor has the samples on its first axis")
    return tensors[0].shape[0]


# ---------------------------------------------------------------- scores: what is propagated back from the outputs


def _drawn_score(outputs: list[Tensor], targets: Any, generator: torch.Generator) -> Score:
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


def _hessian_columns(outputs: list[Tensor], targets: Any) -> Iterator[Score]:
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


def _true_score(output: Any, outputs: list[Tensor], targets: Any, loss: Loss) -> Score:
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


def _signed(score: Score, generator: torch.Generator) -> Score:
    """Each sample's score times a random sign: then (sum_i g_i)^2 has the mean sum_i g_i^2, whatever the scores are."""
    signs = torch.randint(2, (len(score[0]),), generator=generator).to(score[0]) * 2 - 1  # (B,)
    return [part * signs.to(part).reshape(-1, *[1] * (part.dim() - 1)) for part in score]


def _differentiable(output: Any, samples: int) -> list[Tensor]:
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


# ---------------------------------------------------------------- calls: what a weight was applied to


@dataclass(frozen=True)
class Call:
    """One call of a linear map or a convolution.

    Attributes:
        weight: (N, C), (N, C / groups, *kernel), or transposed (C, N / groups, *kernel).
        inputs: (B, ..., C), or (B, C, *positions).
        stride, padding, dilation: of a convolution, one entry (two for padding, before and after) per kernel axis;
            none for a linear map.
    """

    weight: Tensor
    inputs: Tensor
    stride: tuple[int, ...] = ()
    padding: tuple[tuple[int, int], ...] = ()
    dilation: tuple[int, ...] = ()
    groups: int = 1
    transposed: bool = False


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Call:
    return Call(weight, input.detach())


def _conv(input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0,
          dilation: Any = 1, groups: int = 1) -> Call:  # fmt: skip
    spatial = weight.dim() - 2
    dilations = _each(dilation, spatial)
    if padding == "same":
        gaps = [d * (k - 1) for d, k in zip(dilations, weight.shape[2:], strict=True)]
        pads = tuple((gap // 2, gap - gap // 2) for gap in gaps)
    else:
        pads = tuple((p, p) for p in _each(0 if padding == "valid" else padding, spatial))
    return Call(weight, input.detach(), _each(stride, spatial), pads, dilations, groups)


def _conv_transpose(input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0,
                    output_padding: Any = 0, groups: int = 1, dilation: Any = 1) -> Call:  # fmt: skip
    spatial = weight.dim() - 2
    pads = tuple((p, p) for p in _each(padding, spatial))
    return Call(weight, input.detach(), _each(stride, spatial), pads, _each(dilation, spatial), groups, True)


def _each(value: Any, count: int) -> tuple[int, ...]:
    """One number for every kernel axis, as torch takes them."""
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * count if len(values) == 1 else values


_RULES: dict[Any, Callable[..., Call]] = {
    F.linear: _linear,
    **dict.fromkeys((torch.conv1d, torch.conv2d, torch.conv3d), _conv),
    **dict.fromkeys((torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d), _conv_transpose),
}


class _Calls(TorchFunctionMode):
    """Writes down every call of a linear map or convolution whose weight is a parameter.

    Attributes:
        of: weight name -> its calls, each with where its output stands in the autograd graph: not the output, which
            later layers may overwrite, and which need not live as long.
        unclear: parameters that something else reads, too, or on rows that are no samples.
    """

    def __init__(self, model: nn.Module, samples: int) -> None:
        super().__init__()
        self.samples = samples
        self.names = {id(p): name for name, p in model.named_parameters()}  # shared ones have one name
        self.of: dict[str, list[tuple[Call, GradientEdge]]] = {}
        self.unclear: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = [t for t in tree_leaves(out) if isinstance(t, Tensor) and t.requires_grad]
        if not made:
            return out  # shapes, dtypes, what is computed without gradients
        read = {self.names[id(t)] for t in tree_leaves((args, kwargs)) if id(t) in self.names}
        if func in _RULES:
            one = _RULES[func](*args, **(kwargs or {}))
            name = self.names.get(id(one.weight))
            batched = one.inputs.dim() >= one.weight.dim() > 1  # not a single unbatched sample
            rows_are_samples = batched and out.shape[0] == self.samples
            if name is not None and rows_are_samples:
                self.of.setdefault(name, []).append((one, get_gradient_edge(out)))
                read.discard(name)
        self.unclear |= read
        return out


def _forward(model: nn.Module, inputs: Inputs) -> tuple[Any, list[Tensor], _Calls]:
    """What the network returns, its tensors that depend on weights, and how it used its weights."""
    calls = _Calls(model, samples_of(inputs))
    with calls:
        output = call(model, inputs)
    return output, _differentiable(output, calls.samples), calls


def _squares(
    model: nn.Module, outputs: list[Tensor], calls: _Calls, scores: Iterable[Score], generator: torch.Generator
) -> Curvatures:
    """Squares of per-sample gradients of all scores, summed over samples, weight by weight.

    Weights whose per-sample gradients are out of reach get the square of the sum over samples, at random signs.
    """
    uses = {name: own for name, own in calls.of.items() if name not in calls.unclear}
    weights = {n: p for n, p in model.named_parameters() if p.dim() > 1}
    others = {n: p for n, p in weights.items() if n not in uses and p.requires_grad}
    total = {n: torch.zeros_like(p, requires_grad=False) for n, p in weights.items()}
    edges = [edge for own in uses.values() for _, edge in own]
    for score in scores:
        if others:
            for name, square in _squared_sums(others, outputs, _signed(score, generator)).items():
                total[name] += square
        if edges:
            found = iter(torch.autograd.grad(outputs, edges, score, retain_graph=True, allow_unused=True))
            for name, own in uses.items():
                reached = [(one, g) for (one, _), g in zip(own, found, strict=False) if g is not None]
                if reached:
                    total[name] += _squared_sum(reached)
    return total


def _squared_sums(parameters: dict[str, nn.Parameter], outputs: list[Tensor], score: Score) -> Curvatures:
    """(sum over samples of the gradients of a score)^2, of each of these parameters."""
    gradients = torch.autograd.grad(outputs, list(parameters.values()), score, retain_graph=True, allow_unused=True)
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


def per_sample_gradients(call: Call, inputs: Tensor, gradients: Tensor) -> Tensor:
    """dL_b/dW -> (B, *weight shape).

    A transposed convolution is the gradient of a convolution that reads its output: inputs and gradients swap places.

    Args:
        inputs: (B, ..., C), or (B, C, *positions).
        gradients: dL/d output, (B, ..., N), or (B, N, *positions).
    """
    if call.weight.dim() == 2:
        return torch.einsum("b...n,b...c->bnc", gradients, inputs)
    read, placed = (gradients, inputs) if call.transposed else (inputs, gradients)
    columns = patches(call, read, placed.shape[2:])  # (B, C * kernel, L)
    batch, groups, places = len(inputs), call.groups, columns.shape[-1]
    columns = columns.reshape(batch, groups, -1, places)  # (B, groups, C / groups * kernel, L)
    placed = placed.reshape(batch, groups, -1, places)  # (B, groups, N / groups, L)
    return torch.einsum("bgnl,bgsl->bgns", placed, columns).reshape(batch, *call.weight.shape)


def patches(call: Call, values: Tensor, positions: Sequence[int]) -> Tensor:
    """What the kernel reads at each position: (B, C, *size) -> (B, C * kernel, L); im2col for any number of axes."""
    spatial = len(call.stride)
    values = F.pad(values, [pad for pads in reversed(call.padding) for pad in pads])
    for axis, (size, step, gap) in enumerate(zip(call.weight.shape[2:], call.stride, call.dilation, strict=True)):
        windows = values.unfold(2 + axis, gap * (size - 1) + 1, step)[..., ::gap]
        values = windows.narrow(2 + axis, 0, positions[axis])  # padding of a transposed one may leave room for more
    kernel, places = range(2 + spatial, 2 + 2 * spatial), range(2, 2 + spatial)
    return values.permute(0, 1, *kernel, *places).reshape(len(values), -1, math.prod(positions))


@contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


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
