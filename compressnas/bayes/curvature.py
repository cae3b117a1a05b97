"""Diagonal curvature of the mean cross-entropy with respect to weights: GGN, Monte-Carlo GGN, and a recursion.

All estimates are means over samples, averaged over as many batches as given; nothing is kept between batches but the
sums. The network is evaluated in eval mode (batch norm uses its running statistics), so samples do not mix.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.grad import conv2d_weight

Curvatures = dict[str, Tensor]
Use = tuple[nn.Linear | nn.Conv2d, Tensor, GradientEdge]  # a call of a layer: its input, where its output stands
Uses = dict[str, list[Use]]  # weight name -> every call that uses it


def mc(model: nn.Module, images: Tensor, labels: Tensor, generator: torch.Generator) -> Curvatures:
    """Sum over samples of the one-sample Monte-Carlo GGN diagonal, layer by layer.

    Labels are drawn from the model's own softmax; per-sample gradients are squared. Unbiased for the GGN diagonal
    (Martens, New insights on the natural gradient, section 9.2). Per-sample gradients exist for one layer at a time.

    Args:
        images: (B, ...) one batch.
        labels: not used; there for the common signature.
        generator: draws the labels; on the CPU.
    """
    logits, uses = _forward(model, images)
    drawn = _sampled_labels(logits, generator)
    return _squared_per_sample(model, F.cross_entropy(logits, drawn, reduction="sum"), uses)


def mc_batch(model: nn.Module, images: Tensor, labels: Tensor, generator: torch.Generator) -> Curvatures:
    """Sum over samples, from one ordinary backward pass: (sum_i g_i)^2 with sampled labels.

    The scores of sampled labels are independent with mean 0, so the cross terms vanish in expectation: unbiased, with
    more variance than `mc`. Serves any parameter of any module.

    Args:
        images: (B, ...) one batch.
        labels: not used; there for the common signature.
        generator: draws the labels; on the CPU.
    """
    logits = model(images)
    drawn = _sampled_labels(logits, generator)
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    loss = F.cross_entropy(logits, drawn, reduction="sum")
    gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    pairs = zip(named.items(), gradients, strict=True)
    return {n: torch.zeros_like(p) if g is None else g.square() for (n, p), g in pairs}


def ggn(model: nn.Module, images: Tensor, labels: Tensor, generator: torch.Generator) -> Curvatures:
    """Sum over samples of the exact GGN diagonal: one backward pass per class.

    The Hessian of softmax cross-entropy is diag(p) - pp' = SS' with columns s_c = sqrt(p_c) (e_c - p), so the GGN
    diagonal is the sum over c of squared per-sample gradients of s_c' logits.

    Args:
        images: (B, ...) one batch.
        labels: not used; there for the common signature.
        generator: not used; there for the common signature.
    """
    logits, uses = _forward(model, images)
    probabilities = logits.detach().softmax(1)  # (B, C)
    total: Curvatures = {}
    classes = logits.shape[1]
    for c in range(classes):
        column = -probabilities * probabilities[:, c : c + 1].sqrt()  # (B, C)
        column[:, c] += probabilities[:, c].sqrt()
        squares = _squared_per_sample(model, (column * logits).sum(), uses, retain=c < classes - 1)
        for name, square in squares.items():
            total[name] = square if name not in total else total[name].add_(square)
    return total


def recursion(model: nn.Module, images: Tensor, labels: Tensor, generator: torch.Generator) -> Curvatures:
    """Sum over samples of the papers' diagonal recursion, for sequential networks.

    Keeps only the diagonal of the pre-activation Hessian: Hpre <- B^2 ((W^2)' Hpre) + D with B = sigma',
    D = sigma'' dL/da, and diag H_W = Hpre a^2 summed over positions (BayesNAS appendix S3). Starts from diag(p - p^2).
    D may make an entry of Hpre negative, where sigma'' is not 0: it is clamped at 0 before it goes on.

    Args:
        images: (B, ...) one batch.
        labels: (B,) true labels; dL/da of D starts from softmax minus one-hot.
        generator: not used; there for the common signature.

    Raises:
        ValueError: the network is no plain nn.Sequential, calls a layer twice, or holds a layer behind its first
            weights that the recursion has no rule for.
    """
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


ESTIMATORS: dict[str, Callable[[nn.Module, Tensor, Tensor, torch.Generator], Curvatures]] = {
    "mc": mc,
    "mc_batch": mc_batch,
    "ggn": ggn,
    "recursion": recursion,
}


def diagonal_curvature(
    model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], kind: str, generator: torch.Generator
) -> Curvatures:
    """Mean over all samples of all batches, weight name -> tensor shaped like the weight.

    Args:
        batches: (images (B, ...), labels (B,)), on the model's device.
        kind: a name in ESTIMATORS.
        generator: draws the labels of the Monte-Carlo kinds; on the CPU.

    Raises:
        ValueError: no batch was given.
    """
    total: Curvatures = {}
    samples = 0
    with _eval_mode(model):
        for images, labels in batches:
            for name, value in ESTIMATORS[kind](model, images, labels, generator).items():
                total[name] = value.detach() if name not in total else total[name].add_(value.detach())
            samples += images.shape[0]
    if samples == 0:
        raise ValueError("curvature needs at least one batch")
    return {name: value.div_(samples) for name, value in total.items()}


# ---------------------------------------------------------------- per-sample gradients, one layer at a time

CHUNK = 2**18  # elements of im2col patches or per-sample gradients at a time: 1 MB in float32


def squared_gradient_sum(layer: nn.Linear | nn.Conv2d, inputs: Tensor, gradients: Tensor) -> Tensor:
    """sum_b (dL_b/dW)^2, shaped like the layer's weight; positions are summed first, then squared.

    Args:
        inputs: (B, ..., C) for a linear layer, (B, C, H, W) for a convolution.
        gradients: dL/d output, (B, ..., N) or (B, N, H', W').
    """
    return _squared_sum([(layer, inputs, gradients)])


def _squared_sum(uses: Sequence[tuple[nn.Linear | nn.Conv2d, Tensor, Tensor]]) -> Tensor:
    """`squared_gradient_sum` of one weight over all its uses, whose gradients add up before they are squared."""
    layer, inputs, gradients = uses[0]
    if len(uses) == 1 and isinstance(layer, nn.Linear) and inputs.dim() == 2:
        return gradients.square().T @ inputs.square()
    total = torch.zeros_like(layer.weight, requires_grad=False)
    step = max(1, CHUNK // max(_elements(layer, gradients) for layer, _, gradients in uses))
    for start in range(0, inputs.shape[0], step):
        part = slice(start, start + step)
        first, *more = (per_sample_gradients(layer, a[part], g[part]) for layer, a, g in uses)
        for other in more:
            first += other
        total += first.square_().sum(0)
    return total


def _elements(layer: nn.Linear | nn.Conv2d, gradients: Tensor) -> int:
    """Elements that one sample takes: its weight gradient, or its patches where they are more."""
    if isinstance(layer, nn.Linear):
        return layer.weight.numel()
    positions = gradients.shape[-2] * gradients.shape[-1]
    return max(layer.weight.numel(), layer.in_channels * math.prod(layer.kernel_size) * positions)


def per_sample_gradients(layer: nn.Linear | nn.Conv2d, inputs: Tensor, gradients: Tensor) -> Tensor:
    """dL_b/dW -> (B, *weight shape). Arguments as in `squared_gradient_sum`."""
    if isinstance(layer, nn.Linear):
        return torch.einsum("b...n,b...c->bnc", gradients, inputs)
    columns = F.unfold(
        conv_input(layer, inputs), layer.kernel_size, dilation=layer.dilation, stride=layer.stride
    )  # (B, C * kh * kw, L)
    batch, groups = inputs.shape[0], layer.groups
    patches = columns.reshape(batch, groups, -1, columns.shape[-1])  # (B, groups, C/groups * kh * kw, L)
    outputs = gradients.reshape(batch, groups, layer.out_channels // groups, -1)  # (B, groups, N/groups, L)
    return torch.einsum("bgnl,bgsl->bgns", outputs, patches).reshape(batch, *layer.weight.shape)


def conv_input(layer: nn.Conv2d, inputs: Tensor) -> Tensor:
    """(B, C, H, W) padded as the layer pads it."""
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    return F.pad(inputs, layer._reversed_padding_repeated_twice, mode=mode)


def _forward(model: nn.Module, images: Tensor) -> tuple[Tensor, Uses]:
    """Logits (B, C), and for each weight the layers that use it, with their inputs and where their outputs stand in the
    autograd graph: not the outputs, which later layers may overwrite, and which need not live as long.

    Raises:
        ValueError: a layer's first axis is not the samples.
    """
    first_name = {id(p): name for name, p in model.named_parameters()}  # a weight may belong to several layers
    uses: Uses = {}
    handles = []
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            own = uses.setdefault(first_name.get(id(layer.weight), f"{name}.weight"), [])

            def keep(
                layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor, own: list[Use] = own, name: str = name
            ) -> None:
                if output.shape[0] != images.shape[0]:
                    raise ValueError(
                        f"{name} sees {output.shape[0]} rows for {images.shape[0]} samples, so that their gradients "
                        "cannot be told apart; use mc_batch"
                    )
                assert isinstance(layer, nn.Linear | nn.Conv2d)  # nothing else is hooked
                if output.requires_grad:
                    own.append((layer, inputs[0].detach(), get_gradient_edge(output)))

            handles.append(layer.register_forward_hook(keep))
    try:
        logits = model(images)
    finally:
        for handle in handles:
            handle.remove()
    return logits, uses


def _squared_per_sample(model: nn.Module, loss: Tensor, uses: Uses, retain: bool = False) -> Curvatures:
    """Squares of per-sample gradients, summed over samples, weight by weight. `loss` is a sum over samples."""
    edges = [edge for own in uses.values() for _, _, edge in own]
    gradients = iter(torch.autograd.grad(loss, edges, retain_graph=retain, allow_unused=True))
    result: Curvatures = {}
    for name, own in uses.items():
        reached = [(layer, a, g) for (layer, a, _), g in zip(own, gradients, strict=False) if g is not None]
        result[name] = _squared_sum(reached) if reached else torch.zeros_like(model.get_parameter(name))
    return result


def _sampled_labels(logits: Tensor, generator: torch.Generator) -> Tensor:
    """(B, C) -> (B,) labels from the model's softmax, drawn on the CPU so that every device draws the same."""
    return torch.multinomial(logits.detach().softmax(1).cpu(), 1, generator=generator)[:, 0].to(logits.device)


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
