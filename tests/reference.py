"""The slow, obvious twin of every formula: loops, float64, exact fractions; nothing is shared with the package."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction

import torch
from torch import Tensor, nn

from compressnas.groups import GroupSet, Member

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
