"""How long it takes to thin a network without training: `decide` + `remove`, proof included, against torch-pruning.

    python tools/bench_decide.py [--model resnet50] [--pixels 224] [--runs 3] [--threads 2]

Ours: magnitude to half of the FLOPs, groups found and tried, the budget solved, removal, proof in float64. The named
alternative: torch-pruning's own BasePruner with its magnitude importance, one step, to about the same FLOPs; it tries
and proves nothing. Weights are random; the time does not depend on them. The two take turns in one process; medians.
The exit code is 1 when ours takes longer than 20 s on 2 threads.
"""

import argparse
import copy
import statistics
import sys
import time
import warnings
from collections.abc import Callable

import torch
import torch_pruning as tp
import torchvision
from torch import Tensor, nn

import compressnas as cn

TARGET = 20.0  # seconds


def ours(model: nn.Module, example: Tensor) -> nn.Module:
    small, proof = cn.remove(model, example, cn.decide(model, example, target={"flops": 0.5}))
    assert proof.verdict == "equal", proof
    return small


def theirs(model: nn.Module, example: Tensor) -> nn.Module:
    model = copy.deepcopy(model)
    last = [m for m in model.modules() if isinstance(m, nn.Linear)][-1:]
    importance = tp.importance.MagnitudeImportance(p=2)
    tp.pruner.BasePruner(model, example, importance, pruning_ratio=0.3, ignored_layers=last).step()
    return model


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet50", help="of torchvision")
    parser.add_argument("--pixels", type=int, default=224)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    model = torchvision.models.get_model(arguments.model, weights=None).eval()
    example = torch.randn(1, 3, arguments.pixels, arguments.pixels)
    dense = cn.measure(model, example).flops
    sides: dict[str, Callable[[nn.Module, Tensor], nn.Module]] = {"decide + remove": ours, "BasePruner": theirs}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    left = {}
    for _ in range(arguments.runs):
        for name, side in sides.items():
            started = time.perf_counter()
            small = side(model, example)
            seconds[name].append(time.perf_counter() - started)
            left[name] = cn.measure(small, example).flops / dense
    print(f"{arguments.model}, {arguments.pixels} pixels, {arguments.threads} threads, {arguments.runs} runs each")
    for name, values in seconds.items():
        each = ", ".join(f"{value:.1f}" for value in values)
        print(f"{name:<16} {statistics.median(values):6.1f} s (each {each}), FLOPs kept {left[name]:.3f}")
    own, other = (statistics.median(values) for values in seconds.values())
    print(f"ratio {own / other:.2f}; target at most {TARGET:.0f} s")
    return int(own > TARGET)


if __name__ == "__main__":
    sys.exit(main())
