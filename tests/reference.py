"""The slow, obvious twin of every formula: loops, float64, exact fractions; nothing is shared with the package."""

import copy
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compressnas.groups import GroupSet, Member
from compressnas.spaces.cell import Choice

# ---------------------------------------------------------------- bayes/variance.py, one number at a time


def _inverse(value: Fraction | float) -> Fraction | float:
    """1/value with 1/0 = infinity and 1/infinity = 0."""
    if value == 0:
        return math.inf
    return Fraction(0) if value == math.inf else 1 / value


def _exact(value: float) -> Fraction | float:
    return value if math.isinf(value) else Fraction(value)


def posterior_variance(gamma: float, precision: float) -> float:
    """C = 1 / (1/gamma + H/lam)."""
    return float(_inverse(_inverse(_exact(gamma)) + _exact(precision)))


def combined_variance(gammas: Sequence[float]) -> float:
    """1/gamma = sum_j 1/gamma_j."""
    return float(_inverse(sum((_inverse(_exact(g)) for g in gammas), Fraction(0))))


def slope(gamma: float, precision: float) -> float:
    """a = 1/gamma - C/gamma^2 by its definition; the limits H/lam at gamma = 0 and 0 at gamma = infinity."""
    return overlapping_slope(gamma, [], precision)


def overlapping_slope(gamma: float, others: Sequence[float], precision: float) -> float:
    """a_j = 1/gamma_j - C/gamma_j^2, C from the prior that all groups together make. At gamma_j = 0 its limit."""
    if gamma == math.inf:
        return 0.0
    rest = sum((_inverse(_exact(g)) for g in others), Fraction(0)) + _exact(precision)
    if gamma == 0:
        return float(rest)
    own = Fraction(gamma)
    return float(1 / own - _inverse(1 / own + rest) / own**2)


def gated_variance(own: float, predecessors: float) -> float:
    """Eq. 6: the two precisions add up."""
    return combined_variance([own, predecessors])


# ---------------------------------------------------------------- groups.py, one weight at a time


def places(member: Member, shape: Sequence[int]) -> dict[int, list[tuple[int, ...]]]:
    """Group -> the places of its weights in the parameter; -1 holds those that belong to no group."""
    found: dict[int, list[tuple[int, ...]]] = {}
    for place in itertools.product(*(range(n) for n in shape)):
        number = 0  # the row-major number of the place along the member's axes
        for axis in member.axes:
            number = number * shape[axis] + place[axis]
        found.setdefault(int(member.group_of[number]), []).append(place)
    return found


def group_weights(group_set: GroupSet, group: int, weights: Mapping[str, Tensor]) -> list[float]:
    """Every weight of one group, member after member."""
    return [
        float(weights[m.parameter][place])
        for m in group_set.members
        for place in places(m, weights[m.parameter].shape).get(group, [])
    ]


def norm(values: Sequence[float]) -> float:
    return math.sqrt(math.fsum(v * v for v in values))


def kept_fraction(
    name: str, weight: Tensor, sets: Sequence[GroupSet], kept: Mapping[str, Tensor], kernel_axes: tuple[int, ...]
) -> float:
    """Part of one layer's weights that stays: counted one by one, kernel rows and columns up to the outermost alive."""
    left = [set(range(n)) for n in weight.shape]
    for group_set in sets:
        for member in (*group_set.members, *group_set.readers):
            if member.parameter != name:
                continue
            alive = [
                place
                for group, group_places in places(member, weight.shape).items()
                if group < 0 or bool(kept[group_set.name][group])
                for place in group_places
            ]
            for axis in member.axes:
                left[axis] &= {place[axis] for place in alive}
    for axis in kernel_axes:
        left[axis] = set(range(min(left[axis]), max(left[axis]) + 1)) if left[axis] else set()
    stays = sum(
        all(place[a] in left[a] for a in range(weight.dim()))
        for place in itertools.product(*(range(n) for n in weight.shape))
    )
    return stays / weight.numel()


# ---------------------------------------------------------------- bayes/prior.py and bayes/penalty.py


def updated_prior(
    sets: Sequence[GroupSet],
    weights: Mapping[str, Tensor],
    precision: Mapping[str, Mapping[str, Tensor]],
    gamma: Mapping[str, Sequence[float]],
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """One variance update of groups that may overlap -> (omega, gamma) of each set.

    A weight's prior is the product of the priors of all groups that it is in. Weights that are zero have gone.

    Args:
        precision: group set -> weight name -> H/lam, H or N H.
        gamma: group set -> prior variances before the update.
    """
    homes: dict[tuple[str, tuple[int, ...]], list[tuple[str, int, int]]] = {}  # weight -> (set, member, group)
    for group_set in sets:
        for number, member in enumerate(group_set.members):
            for group, group_places in places(member, weights[member.parameter].shape).items():
                for place in group_places if group >= 0 else []:
                    homes.setdefault((member.parameter, place), []).append((group_set.name, number, group))
    slope_sums = {s.name: [0.0] * s.size for s in sets}
    for (parameter, place), owners in homes.items():
        if float(weights[parameter][place]) == 0:
            continue
        for owner in owners:
            name, _, group = owner
            others = [gamma[n][g] for n, m, g in owners if (n, m, g) != owner]
            slope_sums[name][group] += overlapping_slope(
                gamma[name][group], others, float(precision[name][parameter][place])
            )
    omega = {name: [math.sqrt(s) for s in sums] for name, sums in slope_sums.items()}
    new = {}
    for group_set in sets:
        sizes = [norm(group_weights(group_set, g, weights)) for g in range(group_set.size)]
        new[group_set.name] = [
            0.0 if n == 0 else (math.inf if o == 0 else n / o)
            for n, o in zip(sizes, omega[group_set.name], strict=True)
        ]
    return omega, new


def smallest(objective: Callable[[float], float], low: float, high: float) -> float:
    """Where a convex function of one variable is smallest, by ternary search."""
    for _ in range(200):
        left, right = low + (high - low) / 3, high - (high - low) / 3
        low, high = (low, right) if objective(left) <= objective(right) else (left, high)
    return (low + high) / 2


# ---------------------------------------------------------------- bayes/curvature.py


def dense_ggn(model: nn.Module, images: Tensor, regression: bool = False) -> dict[str, Tensor]:
    """diag J' H J, sample by sample from whole Jacobians, summed over samples; float64, eval mode.

    H is diag p - pp', of a regression the identity.
    """
    weights = {name: p.detach() for name, p in model.named_parameters()}
    total = {name: torch.zeros_like(w) for name, w in weights.items()}
    for image in images:

        def outputs(weights: dict[str, Tensor], image: Tensor = image) -> Tensor:
            result: Tensor = torch.func.functional_call(model, weights, (image[None],))[0]
            return result.reshape(-1)  # (C,)

        p = outputs(weights).softmax(0)
        hessian = torch.eye(len(p), dtype=p.dtype) if regression else torch.diag(p) - torch.outer(p, p)  # (C, C)
        for name, jacobian in torch.func.jacrev(outputs)(weights).items():
            flat = jacobian.reshape(len(p), -1)  # (C, number of weights)
            diagonal = torch.einsum("cw,cd,dw->w", flat, hessian, flat)
            total[name] += diagonal.reshape(weights[name].shape)
    return total


def empirical_fisher(
    model: nn.Module, samples: Sequence[tuple[Tensor, Tensor]], loss: Callable[[Tensor, Tensor], Tensor]
) -> dict[str, Tensor]:
    """Mean of squared gradients, one sample (without its batch axis) at a time."""
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for inputs, target in samples:
        model.zero_grad()
        loss(model(inputs[None]), target[None]).backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                total[name] += parameter.grad**2
    model.zero_grad()
    return {name: value / len(samples) for name, value in total.items()}


def diagonal_recursion(model: nn.Sequential, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Hpre <- max(0, B^2 (M^2)' Hpre + D) with every layer as an explicit matrix M, one sample at a time; summed."""
    total = {f"{n}.weight": torch.zeros_like(layer.weight) for n, layer in _weighted(model)}
    for image, label in zip(images, labels, strict=True):
        values = [image]
        for layer in model:
            values.append(layer(values[-1][None])[0].detach())
        p = values[-1].softmax(0)
        hessian, gradient = p - p**2, p.clone()
        gradient[label] -= 1
        for (name, layer), value in reversed(list(zip(model.named_children(), values[:-1], strict=True))):
            if isinstance(layer, nn.Linear | nn.Conv2d):
                total[f"{name}.weight"] += _weight_diagonal(layer, value, hessian)
            if isinstance(layer, nn.ReLU | nn.Tanh):
                first, second = _derivatives(layer, value.reshape(-1))
                hessian = (first**2 * hessian + second * gradient).clamp(min=0)
                gradient = first * gradient
            else:
                matrix = _matrix(layer, value)
                hessian, gradient = (matrix**2).T @ hessian, matrix.T @ gradient
    return total


def _weighted(model: nn.Sequential) -> list[tuple[str, nn.Linear | nn.Conv2d]]:
    return [(n, layer) for n, layer in model.named_children() if isinstance(layer, nn.Linear | nn.Conv2d)]


def _derivatives(layer: nn.Module, value: Tensor) -> tuple[Tensor, Tensor]:
    """sigma' and sigma''."""
    if isinstance(layer, nn.ReLU):
        return (value > 0).double(), torch.zeros_like(value)
    t = value.tanh()
    return 1 - t**2, -2 * t * (1 - t**2)


def _matrix(layer: nn.Module, value: Tensor) -> Tensor:
    """The layer as a matrix (outputs, inputs): what each output does with each input, of max-pooling at `value`."""
    if isinstance(layer, nn.MaxPool2d):
        kernel = int(layer.kernel_size)  # type: ignore[arg-type]
        channels, height, width = value.shape
        rows = []
        for c, y, x in itertools.product(range(channels), range(height // kernel), range(width // kernel)):
            window = [(c, y * kernel + i, x * kernel + j) for i in range(kernel) for j in range(kernel)]
            row = torch.zeros(value.shape, dtype=torch.float64)
            row[max(window, key=lambda place: float(value[place]))] = 1
            rows.append(row.reshape(-1))
        return torch.stack(rows)
    zero = layer(torch.zeros_like(value)[None])[0].reshape(-1)
    columns = []
    for number in range(value.numel()):
        unit = torch.zeros(value.numel(), dtype=torch.float64)
        unit[number] = 1
        columns.append(layer(unit.reshape(value.shape)[None])[0].reshape(-1) - zero)
    return torch.stack(columns, dim=1).detach()


def _weight_diagonal(layer: nn.Linear | nn.Conv2d, value: Tensor, hessian: Tensor) -> Tensor:
    """sum over positions of Hpre[n, position] a[position, s]^2: position by position, weight by weight."""
    result = torch.zeros_like(layer.weight)
    if isinstance(layer, nn.Linear):
        for n, c in itertools.product(range(layer.out_features), range(layer.in_features)):
            result[n, c] = hessian[n] * value[c] ** 2
        return result
    assert not isinstance(layer.padding, str)  # the tests name it in pixels
    (step_y, step_x), (pad_y, pad_x), (gap_y, gap_x) = layer.stride, layer.padding, layer.dilation
    height, width = layer(value[None]).shape[-2:]
    outputs = hessian.reshape(layer.out_channels, height, width)
    per_group = layer.out_channels // layer.groups
    for n, c, i, j in itertools.product(*(range(s) for s in layer.weight.shape)):
        channel = (n // per_group) * layer.weight.shape[1] + c
        for y, x in itertools.product(range(height), range(width)):
            row, column = y * step_y + i * gap_y - pad_y, x * step_x + j * gap_x - pad_x
            if 0 <= row < value.shape[1] and 0 <= column < value.shape[2]:
                result[n, c, i, j] += outputs[n, y, x] * value[channel, row, column] ** 2
    return result


# ---------------------------------------------------------------- distill.py, one logit at a time


def _softmax(logits: Sequence[float], temperature: float) -> list[float]:
    powers = [math.exp(logit / temperature) for logit in logits]
    return [power / sum(powers) for power in powers]


def distillation_loss(
    student: Sequence[Sequence[float]],
    teacher: Sequence[Sequence[float]],
    labels: Sequence[int],
    weight: float,
    temperature: float,
) -> float:
    """Mean over samples of (1 - weight) CE + weight T^2 sum_c p_c (log p_c - log q_c)."""
    total = 0.0
    for own, other, label in zip(student, teacher, labels, strict=True):
        hard = -math.log(_softmax(own, 1.0)[label])
        p, q = _softmax(other, temperature), _softmax(own, temperature)
        soft = sum(a * (math.log(a) - math.log(b)) for a, b in zip(p, q, strict=True))
        total += (1 - weight) * hard + weight * temperature**2 * soft
    return total / len(labels)


def nasi_delta(
    traces: Sequence[float], gradients: Mapping[str, Tensor], limits: Sequence[float], mu: float, xi: float
) -> dict[str, Tensor]:
    """Equation 17 of NASI step by step, with G_t of R = T - mu max(0, T - nu)."""
    total = {name: torch.zeros_like(one[0]) for name, one in gradients.items()}
    largest = 0.0
    for step, (trace, nu) in enumerate(zip(traces, limits, strict=True)):
        slope = 1 - mu if trace > nu else 1
        steepness = {name: slope * one[step] for name, one in gradients.items()}
        largest = max(largest, math.sqrt(sum(float(x) ** 2 for one in steepness.values() for x in one)))
        for name, one in steepness.items():
            total[name] = total[name] + (one / largest if largest > 0 else 0)
    return {name: xi / len(traces) * one for name, one in total.items()}


# ---------------------------------------------------------------- nasi/ntk.py and nasi/gradient.py, backward passes


def _squared_gradients(value: Tensor, network: nn.Module, scales: Mapping[str, float]) -> float:
    """|| d value / d theta ||^2, each parameter with its factor."""
    network.zero_grad()
    value.backward(retain_graph=True)
    found = {name: p.grad for name, p in network.named_parameters() if p.grad is not None}
    return sum(scales.get(name, 1.0) * float((one**2).sum()) for name, one in found.items())


def dense_trace(network: nn.Module, images: Tensor, scales: Mapping[str, float]) -> float:
    """|| J ||_F^2, J the Jacobian of all outputs of the batch: one output after the other."""
    network = copy.deepcopy(network)
    return sum(_squared_gradients(output, network, scales) for output in network(images).flatten())


def summed_sample_gradients(network: nn.Module, images: Tensor, labels: Tensor, scales: Mapping[str, float]) -> float:
    """sum_x || grad L_x ||^2, one sample after the other."""
    network, total = copy.deepcopy(network), 0.0
    for image, label in zip(images, labels, strict=True):
        total += _squared_gradients(-network(image[None])[0].log_softmax(0)[label], network, scales)
    return total


def squared_batch_gradient(network: nn.Module, images: Tensor, labels: Tensor, scales: Mapping[str, float]) -> float:
    """|| grad (1/B) sum_x L_x ||^2."""
    network = copy.deepcopy(network)
    logits = network(images)
    losses = [-row.log_softmax(0)[label] for row, label in zip(logits, labels, strict=True)]
    return _squared_gradients(torch.stack(losses).mean(), network, scales)


def trace_gradient_by_double_backward(
    network: nn.Module, images: Tensor, labels: Tensor, hot: Mapping[str, Tensor], scales: Mapping[str, float]
) -> tuple[float, dict[str, Tensor]]:
    """T and dT/dw: all candidates are computed and mixed, and T is differentiated through all of it."""
    network = copy.deepcopy(network)
    weights = {name: one.clone().requires_grad_() for name, one in hot.items()}

    def mixture(choice: Choice, candidates: Sequence[Callable[[], Tensor]]) -> Tensor:
        return sum(weights[choice.name][k] * candidate() for k, candidate in enumerate(candidates))  # type: ignore

    named = dict(network.named_parameters())
    loss = F.cross_entropy(network(images, way=mixture), labels)
    slopes = torch.autograd.grad(loss, list(named.values()), create_graph=True, allow_unused=True)
    pairs = [(name, slope) for name, slope in zip(named, slopes, strict=True) if slope is not None]
    trace = sum((scales.get(name, 1.0) * (slope**2).sum() for name, slope in pairs), torch.zeros(()))
    found = torch.autograd.grad(trace, list(weights.values()), materialize_grads=True)
    return float(trace.detach()), dict(zip(weights, found, strict=True))


# ---------------------------------------------------------------- nasi/proxies.py


def _layers(network: nn.Module) -> list[nn.Conv2d | nn.Linear]:
    return [layer for layer in network.modules() if isinstance(layer, nn.Conv2d | nn.Linear)]


def grad_norm(network: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Layer after layer."""
    network = copy.deepcopy(network)
    F.cross_entropy(network(images), labels).backward()
    return sum(
        norm(layer.weight.grad.flatten().tolist()) for layer in _layers(network) if layer.weight.grad is not None
    )


def snip(network: nn.Module, images: Tensor, labels: Tensor) -> float:
    """|dL/dc| at masks c = 1 of all weights."""
    network = copy.deepcopy(network)
    names = [f"{name}.weight" for name, layer in network.named_modules() if isinstance(layer, nn.Conv2d | nn.Linear)]
    values = {name: p.detach() for name, p in network.named_parameters()}
    masks = {name: torch.ones_like(values[name], requires_grad=True) for name in names}
    masked = {name: masks[name] * value if name in masks else value for name, value in values.items()}
    F.cross_entropy(torch.func.functional_call(network, masked, (images,)), labels).backward()
    return sum(float(mask.grad.abs().sum()) for mask in masks.values() if mask.grad is not None)


def grasp(network: nn.Module, images: Tensor, labels: Tensor) -> float:
    """-w' H g with the whole Hessian."""
    network = copy.deepcopy(network)
    sizes = {f"{n}.weight": m.weight.shape for n, m in network.named_modules() if isinstance(m, nn.Conv2d | nn.Linear)}

    def loss(flat: Tensor) -> Tensor:
        parts = flat.split([shape.numel() for shape in sizes.values()])
        values = {name: part.view(shape) for (name, shape), part in zip(sizes.items(), parts, strict=True)}
        return F.cross_entropy(torch.func.functional_call(network, values, (images,)), labels)

    flat = torch.cat([layer.weight.detach().flatten() for layer in _layers(network)])
    hessian = torch.autograd.functional.hessian(loss, flat)
    return -float(flat @ hessian @ torch.autograd.functional.jacobian(loss, flat))


def synflow(without_norms: nn.Module, images: Tensor) -> float:
    """R is linear in every single weight, so that w dR/dw is what R loses without it."""
    network, total = copy.deepcopy(without_norms), 0.0
    ones = torch.ones_like(images[:1])
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(parameter.abs())
        whole = float(network(ones).sum())
        for layer in _layers(network):
            for place in itertools.product(*(range(n) for n in layer.weight.shape)):
                value = float(layer.weight[place])
                layer.weight[place] = 0
                total += whole - float(network(ones).sum())
                layer.weight[place] = value
    return total


def naswot(network: nn.Sequential, images: Tensor) -> float:
    """Bit after bit, and the determinant by its definition, in whole numbers."""
    codes: list[list[bool]] = [[] for _ in images]
    values = images
    for layer in copy.deepcopy(network):
        values = layer(values)
        if isinstance(layer, nn.ReLU):
            for code, value in zip(codes, values, strict=True):
                code.extend(bool(x > 0) for x in value.flatten())
    kernel = [[sum(a == b for a, b in zip(one, other, strict=True)) for other in codes] for one in codes]
    determinant = 0
    for order in itertools.permutations(range(len(images))):
        swaps = sum(a > b for a, b in itertools.combinations(order, 2))
        determinant += (-1) ** swaps * math.prod(kernel[i][j] for i, j in enumerate(order))
    return math.log(determinant) if determinant > 0 else -math.inf


def jacob_cov(network: nn.Module, images: Tensor) -> float:
    """By numpy, as the paper's code has it."""
    images = images.clone().requires_grad_()
    copy.deepcopy(network)(images).sum().backward()
    assert images.grad is not None
    values = np.linalg.eigvalsh(np.corrcoef(images.grad.flatten(1).numpy()))
    return -float(sum(math.log(v + 1e-5) + 1 / (v + 1e-5) for v in values))
