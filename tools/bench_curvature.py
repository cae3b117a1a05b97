"""What one variance update costs beside training: time against an epoch, peak memory against a training step.

    OMP_NUM_THREADS=1 python tools/bench_curvature.py [--root FOLDER_WITH_MNIST]

LeNet-5 (20-50-800-500), filter and row groups. An update is everything that `compressnas run` does for one: curvature
from 2,048 images in batches of 128, then new gamma and omega. Images are random unless --root is given: the values do
not change the cost.

Time: an epoch of full MNIST is 60,000 / 128 = 469 steps; 60 are timed and scaled. Steps and updates take turns, and the
medians are compared, so that other work on the machine hits both.

Memory: each kind runs in a fresh process with one malloc setting: every block of 64 KB or more has its own mapping that
goes back when it is freed, so that the resident set follows what is really held, oneDNN's scratch included (torch's own
profiler does not see that). The peak is the high-water mark of the kernel, reset after imports, network, data and one
step with a single image, minus what was resident then. Both sides run four batches. A training step holds its
gradients, an update its sums over batches. Linux only.

The exit code is 1 when `mc`, the default, misses a target.
"""

import argparse
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from compressnas.bayes.curvature import ESTIMATORS, diagonal_curvature
from compressnas.bayes.prior import GroupPrior
from compressnas.data import load_data
from compressnas.models.lenet import lenet5
from compressnas.recipe import TorchvisionData
from compressnas.surgery import find_groups
from compressnas.train import channels_last

TRAINING_IMAGES = 60_000
TIME_TARGET, MEMORY_TARGET = 0.5, 1.3
ALL_AT_ONCE = "vmap(grad)"  # the named alternative: all per-sample gradients of a batch at once
KINDS = (*ESTIMATORS, ALL_AT_ONCE)
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}

Batches = list[tuple[Tensor, Tensor]]


def images_and_labels(root: str | None, count: int) -> tuple[Tensor, Tensor]:
    """(N, 1, 28, 28) and (N,): MNIST's training images, or random ones."""
    if root is None:
        generator = torch.Generator().manual_seed(0)
        return torch.randn(count, 1, 28, 28, generator=generator), torch.randint(10, (count,), generator=generator)
    return load_data(TorchvisionData(name="mnist", root=root), 0).train.__getitems__(range(count))


class Bench:
    """A network with its optimizer and prior, and the two things that are compared."""

    def __init__(self, images: Tensor, labels: Tensor, batch: int) -> None:
        torch.manual_seed(0)
        self.model = channels_last(lenet5((1, 28, 28), 10))
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01, momentum=0.9, nesterov=True)
        sets = find_groups(self.model, images[:1], ("filter", "row")).sets
        self.prior = GroupPrior(self.model, sets, {s.name: 1e-3 for s in sets}, "summed", TRAINING_IMAGES)
        self.batches: Batches = list(zip(images.split(batch), labels.split(batch), strict=True))

    def train(self, batches: Batches) -> None:
        self.model.train()
        for images, labels in batches:
            loss = F.cross_entropy(self.model(images), labels)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()

    def update(self, kind: str, batches: Batches) -> None:
        generator = torch.Generator().manual_seed(0)
        if kind == ALL_AT_ONCE:
            curvature = all_at_once(self.model, batches, generator)
        else:
            curvature = diagonal_curvature(self.model, batches, kind, generator)
        self.prior.update(curvature)


def all_at_once(model: nn.Module, batches: Batches, generator: torch.Generator) -> dict[str, Tensor]:
    """The one-sample Monte-Carlo GGN from torch.func.vmap(grad): the per-sample gradients of all weights."""
    model.eval()
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def loss(weights: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(model, weights, (image[None],)), label[None])

    total = {name: torch.zeros_like(w) for name, w in weights.items()}
    for images, _ in batches:
        with torch.no_grad():
            drawn = torch.multinomial(model(images).softmax(1), 1, generator=generator)[:, 0]
        gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(weights, images, drawn)
        for name, gradient in gradients.items():
            total[name] += gradient.square().sum(0)
    count = sum(len(images) for images, _ in batches)
    return {name: value / count for name, value in total.items()}


def seconds(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def measure_time(options: argparse.Namespace) -> tuple[float, dict[str, float]]:
    """Seconds of an epoch, and of one update of each kind."""
    bench = Bench(*images_and_labels(options.root, options.samples), options.batch)
    epoch_steps = math.ceil(TRAINING_IMAGES / options.batch)
    steps = [bench.batches[i % len(bench.batches)] for i in range(options.steps)]
    bench.train(bench.batches[:2])  # warm up
    epochs: list[float] = []
    updates: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(options.repeats):
        for kind in KINDS:
            epochs.append(seconds(lambda: bench.train(steps)) * epoch_steps / options.steps)
            updates[kind].append(seconds(lambda kind=kind: bench.update(kind, bench.batches)))  # type: ignore[misc]
    return statistics.median(epochs), {kind: statistics.median(times) for kind, times in updates.items()}


def peak_megabytes(options: argparse.Namespace, what: str) -> float:
    """Peak memory of `what` in processes of its own, in MB above what was there before; their median."""
    command = [sys.executable, __file__, "--measure", what, "--batch", str(options.batch)]
    peaks = []
    for _ in range(options.repeats):
        done = subprocess.run(command, env={**os.environ, **MALLOC}, capture_output=True, text=True, check=True)
        peaks.append(float(json.loads(done.stdout)["peak_bytes"]) / 1e6)
    return statistics.median(peaks)


def measure_own_peak(what: str, batch: int) -> int:
    """Bytes, in this process: see the top of the file."""
    bench = Bench(*images_and_labels(None, 4 * batch), batch)

    def work(batches: Batches) -> None:
        if what == "train":
            bench.train(batches)
        else:
            bench.update(what, batches)

    one = bench.batches[0]
    work([(one[0][:1], one[1][:1])])  # code that is loaded late, momentum buffers
    bench.optimizer.zero_grad()
    Path("/proc/self/clear_refs").write_text("5")  # reset the high-water mark
    before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    work(bench.batches)
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024 - before


def report(options: argparse.Namespace) -> int:
    epoch, updates = measure_time(options)
    step = peak_megabytes(options, "train")
    peaks = {kind: peak_megabytes(options, kind) for kind in KINDS}
    table = Table(
        title=f"one update of {options.samples:,} images, batch {options.batch}, {torch.get_num_threads()} thread(s)"
    )
    for heading in ("kind", "s", "/ epoch", "peak MB", "/ training step"):
        table.add_column(heading, justify="left" if heading == "kind" else "right")
    table.add_row("training", f"{epoch:.2f}", "1", f"{step:.1f}", "1")
    for kind in KINDS:
        table.add_row(
            kind,
            f"{updates[kind]:.2f}",
            f"{updates[kind] / epoch:.3f}",
            f"{peaks[kind]:.1f}",
            f"{peaks[kind] / step:.2f}",
        )
    console = Console()
    console.print(table)
    reached = updates["mc"] / epoch <= TIME_TARGET and peaks["mc"] / step <= MEMORY_TARGET
    console.print(
        f"an epoch is {options.steps} timed steps scaled to {math.ceil(TRAINING_IMAGES / options.batch)}; targets for "
        f"mc: <= {TIME_TARGET} epochs, <= {MEMORY_TARGET} x the memory: {'reached' if reached else 'MISSED'}"
    )
    return 0 if reached else 1


def main() -> int:
    parser = argparse.ArgumentParser(description="Time and memory of one variance update, LeNet-5.")
    parser.add_argument("--root", help="folder of MNIST as torchvision keeps it; random images without")
    parser.add_argument("--samples", type=int, default=2048, help="images of one update")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--steps", type=int, default=60, help="training steps timed at a time")
    parser.add_argument("--repeats", type=int, default=3, help="rounds; medians are reported")
    parser.add_argument("--measure", choices=("train", *KINDS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure is not None:
        print(json.dumps({"peak_bytes": measure_own_peak(options.measure, options.batch)}))
        return 0
    return report(options)


if __name__ == "__main__":
    sys.exit(main())
