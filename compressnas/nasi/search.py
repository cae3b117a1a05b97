"""Algorithm 1 of NASI (arXiv 2109.00817): one step of ascent of the expected, constrained trace norm.

All steps are taken at alpha = 0. So T and dT/dalpha of a step depend neither on the steps before it nor on the
constraint: they are recorded first, and put together by `ascent`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from compressnas.nasi.gradient import drawn_trace, trace_gradient
from compressnas.nasi.gumbel import Drawn, draw
from compressnas.nasi.ntk import Scales, finite, initialise
from compressnas.recipe import Nasi
from compressnas.spaces.cell import Kept, Space
from compressnas.train import Work, channels_last, stage_seed

STAGE = "search"
SAVE_EVERY = 10  # steps
Batch = Callable[[int], tuple[Tensor, Tensor]]  # step -> images (B, C, H, W), labels (B,); the same ones each time


@dataclass(frozen=True)
class Found:
    """What a search found.

    Attributes:
        kept: the candidates with the largest alpha of each choice, of the cells that compute something.
        alpha: choice -> (O,): alpha* = Delta, as it starts from 0.
        traces: T of each step.
        limits: nu of each step.
    """

    kept: Kept
    alpha: Mapping[str, Tensor]
    traces: tuple[float, ...]
    limits: tuple[float, ...]


def nasi_search(
    space: Space, shape: tuple[int, int, int], classes: int, batch: Batch, settings: Nasi, work: Work
) -> Found:
    """Search a space at initialisation; nothing is trained. Goes on from the stage's checkpoint, if there is one.

    Args:
        shape: (C, H, W) of one image.
        batch: the images and labels of a step.

    Raises:
        InputError: no cell of the space computes anything, or the trace norm is not finite.
    """
    space.best({c.name: torch.zeros(len(c.candidates)) for c in space.choices})  # there is a cell to be found
    network, scales = _initialised(space, shape, classes, settings, work)
    nu_0 = settings.nu_0 if settings.nu_0 is not None else _mean_trace(network, scales, space, batch, settings, work)
    traces, gradients = _recorded(network, scales, space, batch, settings, work)
    limits = limits_of(traces, settings.nu, nu_0)
    alpha = ascent(traces, gradients, limits, settings.mu, settings.xi)
    return Found(space.best(alpha), alpha, tuple(traces), tuple(limits))


def limits_of(traces: Sequence[float], nu: str, nu_0: float) -> list[float]:
    """nu of each step: `fixed`, or `adaptive`, the mean of nu_0 and the traces before it (equation 40)."""
    if nu == "fixed":
        return [nu_0] * len(traces)
    return [(nu_0 + sum(traces[:step])) / (step + 1) for step in range(len(traces))]


def ascent(
    traces: Sequence[float], gradients: Mapping[str, Tensor], limits: Sequence[float], mu: float, xi: float = 1.0
) -> dict[str, Tensor]:
    """Delta = (xi / T) sum_t G_t / max_{s <= t} ||G_s|| (equation 17), with G_t = dR/dalpha of equation 12.

    A step without a gradient, since nothing comes through its cell, adds nothing.

    Args:
        traces: T_t of each of the T steps.
        gradients: choice -> (T, O), dT_t/dalpha.
        limits: nu of each step.

    Returns:
        choice -> (O,).
    """
    slope = torch.tensor([1 - mu * (trace > nu) for trace, nu in zip(traces, limits, strict=True)], dtype=torch.float64)
    steps = {name: slope[:, None] * one.double() for name, one in gradients.items()}  # R = T - mu max(0, T - nu)
    largest = torch.cat(list(steps.values()), dim=1).norm(dim=1).cummax(0).values
    weights = torch.where(largest > 0, xi / (len(traces) * largest), 0)
    return {name: (weights[:, None] * one).sum(0) for name, one in steps.items()}


# ---------------------------------------------------------------- steps


def _initialised(
    space: Space, shape: tuple[int, int, int], classes: int, settings: Nasi, work: Work
) -> tuple[nn.Module, Scales]:
    """theta_0, the same one for all steps; batch norms take the statistics of each batch."""
    network = space.supernet(None, shape, classes)
    generator = torch.Generator().manual_seed(stage_seed(work.seed, STAGE))
    scales = initialise(network, settings.parameterisation, generator)
    return channels_last(network.train().to(work.device)), scales


def _recorded(
    network: nn.Module, scales: Scales, space: Space, batch: Batch, settings: Nasi, work: Work
) -> tuple[list[float], dict[str, Tensor]]:
    """T of each step, and choice -> (T, O) dT/dalpha."""
    state = work.load(STAGE) or {"traces": [], "gradients": {c.name: [] for c in space.choices}}
    traces, gradients = state["traces"], state["gradients"]
    with work.progress.stage(STAGE, settings.steps) as bar:
        bar(len(traces))
        for step in range(len(traces), settings.steps):
            drawn = _draw(space, settings.tau, stage_seed(work.seed, f"{STAGE} {step}"), work.device)
            hot = {name: one.hot for name, one in drawn.items()}
            trace, by_weight = trace_gradient(network, *_on(work, batch(step)), hot, scales)
            traces.append(finite(trace, f"{STAGE}, step {step + 1}"))
            for name, one in by_weight.items():
                gradients[name].append(drawn[name].gradient(one).cpu())
            bar(1, trace=f"{trace:.3g}")
            if (step + 1) % SAVE_EVERY == 0 or step + 1 == settings.steps:
                work.save(STAGE, {"traces": traces, "gradients": gradients})
    return traces[: settings.steps], {name: torch.stack(one[: settings.steps]) for name, one in gradients.items()}


def _draw(space: Space, tau: float, seed: int, device: torch.device) -> dict[str, Drawn]:
    """One architecture of p_alpha at alpha = 0."""
    generator = torch.Generator().manual_seed(seed)
    return {c.name: draw(torch.zeros(len(c.candidates)), c.keep, tau, generator, device) for c in space.choices}


def _mean_trace(network: nn.Module, scales: Scales, space: Space, batch: Batch, settings: Nasi, work: Work) -> float:
    """The mean T of some drawn architectures (equation 39)."""
    total = 0.0
    with work.progress.stage(f"{STAGE}, nu", settings.nu_samples) as bar:
        for number in range(settings.nu_samples):
            drawn = _draw(space, settings.tau, stage_seed(work.seed, f"{STAGE} nu {number}"), work.device)
            hot = {name: one.hot for name, one in drawn.items()}
            trace = drawn_trace(network, *_on(work, batch(number)), hot, scales)
            total += finite(trace, f"{STAGE}, architecture {number + 1} for nu")
            bar(1, trace=f"{trace:.3g}")
    return total / settings.nu_samples


def _on(work: Work, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return batch[0].to(work.device, memory_format=torch.channels_last), batch[1].to(work.device)
