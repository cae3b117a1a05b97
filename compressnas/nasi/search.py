"""Algorithm 1 of NASI (arXiv 2109.00817): one step of ascent of the expected, constrained trace norm.

All steps are taken at alpha = 0. So T and dT/dalpha of a step depend neither on the steps before it nor on the
constraint: they are recorded first, and put together by `ascent`.

The penalty of equation 12 sees the cells that are drawn, not the one that is decided on, which is put together from the
best of each choice: its trace may be far above nu. With `checks` the constraint of equation 7 is applied to decisions
themselves: in the order of their alpha, the first one is taken whose own trace is at most nu.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from compressnas.nasi.gradient import decided_trace, drawn_trace, trace_gradient
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
        kept: the candidates with the largest alpha of each choice, of the cells that compute something; with checks,
            of those among them that keep to nu.
        alpha: choice -> (O,): alpha* = Delta, as it starts from 0.
        traces: T of each step.
        limits: nu of each step.
        checked: the decisions whose own trace was taken, in order, and these traces.
    """

    kept: Kept
    alpha: Mapping[str, Tensor]
    traces: tuple[float, ...]
    limits: tuple[float, ...]
    checked: tuple[tuple[Kept, float], ...] = ()


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
    search = _Search(space, network, scales, batch, settings, work)
    nu_0 = settings.nu_0
    if nu_0 is None and settings.nu != "geometric":
        nu_0 = search.mean_trace()
    traces, gradients = search.recorded()
    limits = limits_of(traces, settings.nu, nu_0 or 0.0)
    alpha = ascent(traces, gradients, limits, settings.mu, settings.xi)
    checked = search.checked(alpha, limits[-1])
    return Found(decided(space, alpha, limits[-1], checked), alpha, tuple(traces), tuple(limits), checked)


def limits_of(traces: Sequence[float], nu: str, nu_0: float) -> list[float]:
    """nu of each step: `fixed`; `adaptive`, the mean of nu_0 and the traces before it (equation 40); or `geometric`.

    The geometric mean is that of all traces above 0, the same one for all steps: traces spread over decades, and a mean
    of them says little more than what the largest is.
    """
    if nu == "fixed":
        return [nu_0] * len(traces)
    if nu == "geometric":
        logs = [math.log(trace) for trace in traces if trace > 0]
        return [math.exp(sum(logs) / len(logs)) if logs else 0.0] * len(traces)
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


def decided(space: Space, alpha: Mapping[str, Tensor], nu: float, checked: Sequence[tuple[Kept, float]] = ()) -> Kept:
    """The decision with the largest alpha; where some were checked, the first of those with a trace up to nu.

    If none has, the one with the smallest trace.
    """
    if not checked:
        return space.best(alpha)
    return next((kept for kept, trace in checked if trace <= nu), min(checked, key=lambda one: one[1])[0])


# ---------------------------------------------------------------- steps


def _initialised(
    space: Space, shape: tuple[int, int, int], classes: int, settings: Nasi, work: Work
) -> tuple[nn.Module, Scales]:
    """theta_0, the same one for all steps; batch norms take the statistics of each batch."""
    network = space.supernet(None, shape, classes)
    generator = torch.Generator().manual_seed(stage_seed(work.seed, STAGE))
    scales = initialise(network, settings.parameterisation, generator)
    return channels_last(network.train().to(work.device)), scales


@dataclass(frozen=True)
class _Search:
    """What the traces of a search are taken of.

    Attributes:
        network: the supernet with theta_0.
    """

    space: Space
    network: nn.Module
    scales: Scales
    batch: Batch
    settings: Nasi
    work: Work

    def recorded(self) -> tuple[list[float], dict[str, Tensor]]:
        """T of each step, and choice -> (T, O) dT/dalpha."""
        steps, work = self.settings.steps, self.work
        state = work.load(STAGE) or {"traces": [], "gradients": {c.name: [] for c in self.space.choices}}
        traces, gradients = state["traces"], state["gradients"]
        with work.progress.stage(STAGE, steps) as bar:
            bar(len(traces))
            for step in range(len(traces), steps):
                drawn = self._draw(str(step))
                hot = {name: one.hot for name, one in drawn.items()}
                trace, by_weight = trace_gradient(self.network, *self._images(step), hot, self.scales)
                traces.append(finite(trace, f"{STAGE}, step {step + 1}"))
                for name, one in by_weight.items():
                    gradients[name].append(drawn[name].gradient(one).cpu())
                bar(1, trace=f"{trace:.3g}")
                if (step + 1) % SAVE_EVERY == 0 or step + 1 == steps:
                    work.save(STAGE, {"traces": traces, "gradients": gradients})
        return traces[:steps], {name: torch.stack(one[:steps]) for name, one in gradients.items()}

    def mean_trace(self) -> float:
        """The mean T of some drawn architectures (equation 39)."""
        total, samples = 0.0, self.settings.nu_samples
        with self.work.progress.stage(f"{STAGE}, nu", samples) as bar:
            for number in range(samples):
                hot = {name: one.hot for name, one in self._draw(f"nu {number}").items()}
                trace = drawn_trace(self.network, *self._images(number), hot, self.scales)
                total += finite(trace, f"{STAGE}, architecture {number + 1} for nu")
                bar(1, trace=f"{trace:.3g}")
        return total / samples

    def checked(self, alpha: Mapping[str, Tensor], nu: float) -> tuple[tuple[Kept, float], ...]:
        """Decisions by falling alpha and their traces, up to the first one that keeps to nu; on the same images."""
        if self.settings.checks == 0:
            return ()
        images, checked = self._images(self.settings.steps), list[tuple[Kept, float]]()  # images that no step has seen
        with self.work.progress.stage(f"{STAGE}, checks", self.settings.checks) as bar:
            for kept in itertools.islice(self.space.ranked(alpha), self.settings.checks):
                trace = decided_trace(self.network, *images, kept, self.scales)
                checked.append((kept, finite(trace, f"{STAGE}, check {len(checked) + 1}")))
                bar(1, trace=f"{trace:.3g}")
                if trace <= nu:
                    break
        return tuple(checked)

    def _draw(self, name: str) -> dict[str, Drawn]:
        """One architecture of p_alpha at alpha = 0."""
        seed = stage_seed(self.work.seed, f"{STAGE} {name}")
        generator = torch.Generator().manual_seed(seed)
        tau, device = self.settings.tau, self.work.device
        return {
            c.name: draw(torch.zeros(len(c.candidates)), c.keep, tau, generator, device) for c in self.space.choices
        }

    def _images(self, step: int) -> tuple[Tensor, Tensor]:
        images, labels = self.batch(step)
        device = self.work.device
        return images.to(device, memory_format=torch.channels_last), labels.to(device)
