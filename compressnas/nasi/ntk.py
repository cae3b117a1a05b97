"""The trace norm of the neural tangent kernel of a network, exact and by estimates (NASI, section 3.2).

Every function takes a network whose batch norms are in the mode in which the trace is meant, and leaves it as it was:
in training mode (statistics of the batch) or in eval mode (see `freeze_statistics`). What goes by samples
(`exact_trace`, `sample_gradients`) needs eval mode, since with statistics of the batch one sample moves the others.

In the NTK parameterisation (Jacot et al., arXiv 1806.07572) weights are drawn from N(0, 1) and scaled by 1/sqrt(fan-in)
inside the layer. A layer with weights W = omega / sqrt(fan-in) has grad_omega = grad_W / sqrt(fan-in), so that it takes
weights drawn with this scale and `scales`, factors on the squares of the gradients, and no other layer.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from compressnas.errors import InputError

AT_ONCE = 16  # samples whose gradients are in memory
Scales = Mapping[str, float]  # parameter -> factor on its squared gradient; 1 where it is not named


@torch.no_grad()
def initialise(network: nn.Module, parameterisation: str, generator: torch.Generator) -> Scales:
    """Draw the weights, in place -> the factors that go with them.

    Args:
        network: on the CPU.
        parameterisation: `standard`, as the layers draw them themselves; or `ntk`, N(0, 1) scaled by 1/sqrt(fan-in),
            biases zero.
    """
    seed = int(torch.randint(2**31, (1,), generator=generator))
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would also move the generators of a GPU
        for module in network.modules():
            if callable(reset := getattr(module, "reset_parameters", None)):
                reset()
    if parameterisation == "standard":
        return {}
    scales = {}
    for name, parameter in network.named_parameters():
        if parameter.dim() > 1:
            fan_in = parameter[0].numel()
            parameter.normal_(generator=generator).mul_(1 / math.sqrt(fan_in))
            scales[name] = 1 / fan_in
        elif name.endswith("bias"):
            parameter.zero_()
    return scales


@torch.no_grad()
def freeze_statistics(network: nn.Module, images: Tensor) -> None:
    """Give batch norms the statistics of this batch, and put the network in eval mode, in place."""
    norms = [m for m in network.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.track_running_stats]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the mean over all batches seen, which is one
    try:
        network.train()(images)
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
        network.eval()


@contextmanager
def no_tracking(network: nn.Module) -> Iterator[None]:
    """Batch norms in training mode take the statistics of the batch, and leave their running ones as they are."""
    norms = [m for m in network.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    tracking = [norm for norm in norms if norm.training and norm.track_running_stats]
    for norm in tracking:
        norm.track_running_stats = False
    try:
        yield
    finally:
        for norm in tracking:
            norm.track_running_stats = True


def exact_trace(network: nn.Module, images: Tensor, scales: Scales | None = None) -> float:
    """sum_x || grad_theta f(x) ||_F^2 (equation 8).

    Args:
        images: (B, C, H, W).
    """
    parameters = {name: p.detach() for name, p in network.named_parameters()}
    with torch.no_grad():
        classes = network(images[:1]).shape[1]

    def output(values: dict[str, Tensor], image: Tensor, which: Tensor) -> Tensor:
        found: Tensor = functional_call(network, values, (image[None],))[0] @ which
        return found

    by_sample = vmap(grad(output), in_dims=(None, 0, None))
    unit = torch.eye(classes, dtype=images.dtype, device=images.device)
    chunks = torch.split(images, AT_ONCE)
    return sum(squares(by_sample(parameters, some, one), scales) for some in chunks for one in unit)


def hutchinson_trace(
    network: nn.Module, images: Tensor, draws: int, generator: torch.Generator, scales: Scales | None = None
) -> float:
    """Mean of || grad_theta <u, f(X)> ||^2 over u of random signs: unbiased for equation 8, in either norm mode.

    Args:
        draws: number of u, a backward pass each.
    """
    total = 0.0
    for _ in range(draws):
        with no_tracking(network):
            outputs = network(images)
        signs = 2 * torch.randint(2, outputs.shape, generator=generator).to(outputs) - 1
        total += squares(gradients((outputs * signs).sum(), network), scales)
    return total / draws


def sample_gradients(network: nn.Module, images: Tensor, labels: Tensor, scales: Scales | None = None) -> float:
    """sum_x || grad_theta L_x ||^2 with cross-entropy L (the first bound of equation 10)."""
    parameters = {name: p.detach() for name, p in network.named_parameters()}

    def loss(values: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(network, values, (image[None],)), label[None])

    by_sample = vmap(grad(loss), in_dims=(None, 0, 0))
    chunks = zip(torch.split(images, AT_ONCE), torch.split(labels, AT_ONCE), strict=True)
    return sum(squares(by_sample(parameters, some, of), scales) for some, of in chunks)


def batch_gradient(network: nn.Module, images: Tensor, labels: Tensor, scales: Scales | None = None) -> float:
    """|| (1/B) sum_x grad_theta L_x ||^2 with cross-entropy L (equation 11, without its constants)."""
    with no_tracking(network):
        loss = F.cross_entropy(network(images), labels)
    return squares(gradients(loss, network), scales)


def finite(trace: float, where: str) -> float:
    """The trace itself. Raises InputError where it is NaN or infinite."""
    if not math.isfinite(trace):
        raise InputError(f"{where}: the trace norm is {trace}; the weights or the images are too large, or not finite")
    return trace


def gradients(value: Tensor, network: nn.Module) -> dict[str, Tensor]:
    """Parameter -> its gradient; those that `value` does not depend on are left out."""
    named = dict(network.named_parameters())
    if not value.requires_grad:
        return {}
    found = torch.autograd.grad(value, list(named.values()), allow_unused=True)
    return {name: one for name, one in zip(named, found, strict=True) if one is not None}


def squares(found: Mapping[str, Tensor], scales: Scales | None) -> float:
    """Sum of the squared gradients, each with its factor."""
    factors = scales or {}
    return sum(factors.get(name, 1.0) * float(one.double().square().sum()) for name, one in found.items())
