"""The gradient of the trace norm by the drawn path, beside double backward through the whole mixture: time, memory.

    OMP_NUM_THREADS=1 python tools/bench_nasi.py [--space nasbench201] [--steps 3] [--batch 64]

Both sides take the same drawn architectures of a supernet at full size (NAS-Bench-201: 5 cells a stage, 16 channels;
DARTS: 8 cells, 16 channels), Gaussian images, channels last, batch norm with the statistics of the batch. Time: they
take turns in one process, after one small step each (torch compiles derivatives at the first one); the sums over the
steps are compared.
Memory: each side in a process of its own, malloc set so that what is freed goes back; the kernel's high-water mark
above what was resident before the step. Linux only. The gradients of the two sides are compared as well, in float32.

The exit code is 1 when the drawn path is not at least 2 times as fast at half of the memory.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compressnas.nasi.gradient import trace_gradient
from compressnas.nasi.gumbel import draw
from compressnas.spaces import SPACES
from compressnas.spaces.cell import Choice, Space
from compressnas.train import channels_last

SPEED, MEMORY = 2.0, 0.5  # targets: times as fast, part of the memory
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
Step = Callable[[nn.Module, Tensor, Tensor, Mapping[str, Tensor]], tuple[float, dict[str, Tensor]]]


def double_backward(
    network: nn.Module, images: Tensor, labels: Tensor, hot: Mapping[str, Tensor]
) -> tuple[float, dict[str, Tensor]]:
    """The plain way: all candidates are computed, and the norm of the gradient is differentiated through all."""
    weights = {name: one.clone().requires_grad_() for name, one in hot.items()}

    def mix(choice: Choice, candidates: Sequence[Callable[[], Tensor]]) -> Tensor:
        parts = [weight * one() for weight, one in zip(weights[choice.name], candidates, strict=True)]
        return torch.stack(parts).sum(0)

    loss = F.cross_entropy(network(images, way=mix), labels)
    found = torch.autograd.grad(loss, list(network.parameters()), create_graph=True, allow_unused=True)
    trace = torch.stack([one.square().sum() for one in found if one is not None]).sum()
    by_weight = torch.autograd.grad(trace, list(weights.values()), allow_unused=True)
    return float(trace.detach()), {
        name: torch.zeros_like(weights[name]) if one is None else one
        for name, one in zip(weights, by_weight, strict=True)
    }


SIDES: dict[str, Step] = {"drawn path": trace_gradient, "double backward": double_backward}


class Bench:
    """A supernet, a batch, and the architectures that are drawn."""

    def __init__(self, space: Space, batch: int) -> None:
        torch.manual_seed(0)
        self.space = space
        self.network = channels_last(space.supernet(None, (3, 32, 32), 10))
        images = torch.randn(batch, 3, 32, 32).to(memory_format=torch.channels_last)
        self.images, self.labels = images, torch.randint(10, (batch,))
        for module in self.network.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.track_running_stats = False

    def hot(self, step: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(step)
        return {c.name: draw(torch.zeros(len(c.candidates)), c.keep, 1.0, generator).hot for c in self.space.choices}

    def step(self, side: str, step: int, batch: int | None = None) -> tuple[float, dict[str, Tensor]]:
        return SIDES[side](self.network, self.images[:batch], self.labels[:batch], self.hot(step))


def compare_times(bench: Bench, steps: int) -> tuple[dict[str, float], float]:
    """Seconds of each side, and the largest relative difference of their gradients."""
    seconds, apart = dict.fromkeys(SIDES, 0.0), 0.0
    for side in SIDES:
        bench.step(side, 0, batch=2)
    for step in range(steps):
        found = {}
        for side in SIDES if step % 2 == 0 else reversed(SIDES):
            started = time.perf_counter()
            found[side] = bench.step(side, step)[1]
            seconds[side] += time.perf_counter() - started
        one, other = (torch.cat(list(found[side].values())) for side in SIDES)
        apart = max(apart, float((one - other).abs().max() / other.abs().max().clamp(min=1e-30)))
    return seconds, apart


def peak_megabytes(side: str, arguments: argparse.Namespace) -> float:
    command = [sys.executable, __file__, "--measure", side, "--space", arguments.space, "--batch", str(arguments.batch)]
    done = subprocess.run(command, env={**os.environ, **MALLOC}, capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout.splitlines()[-1])["peak_bytes"]) / 1e6


def measure_own_peak(bench: Bench, side: str) -> int:
    """Bytes of the first step, in this process."""
    bench.step(side, 0, batch=2)
    Path("/proc/self/clear_refs").write_text("5")  # reset the high-water mark
    before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    bench.step(side, 0)
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024 - before


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--space", default="nasbench201", choices=sorted(SPACES))
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--measure", choices=SIDES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    bench = Bench(SPACES[arguments.space](), arguments.batch)
    if arguments.measure:
        print(json.dumps({"peak_bytes": measure_own_peak(bench, arguments.measure)}))
        return 0
    seconds, apart = compare_times(bench, arguments.steps)
    peaks = {side: peak_megabytes(side, arguments) for side in SIDES}
    print(f"{arguments.space}, batch {arguments.batch}, {arguments.steps} steps, {torch.get_num_threads()} thread(s)")
    for side in SIDES:
        print(f"{side:<16} {seconds[side] / arguments.steps:7.2f} s a step, peak {peaks[side]:8.0f} MB")
    (ours, plain), (ours_mb, plain_mb) = seconds.values(), peaks.values()
    print(f"{plain / ours:.2f} times as fast, {ours_mb / plain_mb:.2f} of the memory, gradients {apart:.0e} apart")
    reached = plain / ours >= SPEED and ours_mb / plain_mb <= MEMORY
    print(f"targets: {SPEED:g} times as fast, {MEMORY:g} of the memory: {'reached' if reached else 'MISSED'}")
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
