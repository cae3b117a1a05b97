"""ONNX Runtime latency of thinned networks against their dense ones: what part of the FLOPs saved is time saved.

    python tools/studies/latency.py --models mobilenet_v2 resnet18 --target 0.5 --processes 5

Weights are random: nothing is downloaded, and time does not depend on them. For each model the slim ONNX file is timed
against the dense one, call by call in alternating order, one image, one thread that sleeps while it waits, in several
fresh processes; the figure is the median of their ratios. `gain` is the speed-up over the reduction in FLOPs: 1 when
all that is saved in FLOPs is saved in time. Run it on an idle machine. Prints a Markdown table.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np
import torch
import torchvision

import compressnas as cn
from compressnas.latency import interleaved

GAIN = 0.7  # that is asked for


def export(name: str, arguments: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Write dense.onnx and slim.onnx -> the FLOPs of both, and how different the slim one may be."""
    torch.manual_seed(0)
    model = torchvision.models.get_model(name, weights=None).eval()
    example = torch.randn(1, 3, arguments.pixels, arguments.pixels)
    slim = cn.decide(
        model, example, target={arguments.by: arguments.target}, round_to=arguments.round_to, scope=arguments.scope
    )
    small, proof = cn.remove(model, example, slim)
    assert proof.verdict == "equal", proof
    cn.export_onnx(model, example, folder / "dense.onnx")
    cn.export_onnx(small, example, folder / "slim.onnx")
    return {"dense": cn.measure(model, example).flops, "slim": cn.measure(small, example).flops}


def time_pair(folder: Path, pixels: int, seconds: float) -> float:
    """Dense over slim, medians, in this process."""
    feed_name = "x"
    image = np.random.default_rng(0).standard_normal((1, 3, pixels, pixels), dtype=np.float32)
    files = {name: folder / f"{name}.onnx" for name in ("dense", "slim")}
    found = interleaved(files, {feed_name: image}, runs=10**6, seconds=seconds)
    return found["dense"].p50_ms / found["slim"].p50_ms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["mobilenet_v2", "resnet18"], help="of torchvision")
    parser.add_argument("--target", type=float, default=0.5, help="part of the cost to keep")
    parser.add_argument("--by", default="flops", choices=["flops", "latency"], help="the cost that is given")
    parser.add_argument("--scope", default="uniform", choices=["uniform", "global"])
    parser.add_argument("--round-to", type=int, default=8)
    parser.add_argument("--pixels", type=int, default=224)
    parser.add_argument("--processes", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=15.0, help="of each process")
    parser.add_argument("--time", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    if arguments.time:
        print(json.dumps(time_pair(arguments.time, arguments.pixels, arguments.seconds)))
        return
    print("| model | FLOPs, dense | FLOPs kept | speed-up (each process) | gain |\n|---|---|---|---|---|", flush=True)
    for name in arguments.models:
        with tempfile.TemporaryDirectory() as folder:
            flops = export(name, arguments, Path(folder))
            command = [sys.executable, __file__, "--time", folder, "--pixels", str(arguments.pixels)]
            command += ["--seconds", str(arguments.seconds)]
            ratios = [
                float(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
                for _ in range(arguments.processes)
            ]
        speedup, reduction = statistics.median(ratios), flops["dense"] / flops["slim"]
        each = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        cells = [name, f"{flops['dense']:,}", f"{1 / reduction:.3f}", f"{speedup:.2f} ({each})"]
        print("|", " | ".join([*cells, f"{speedup / reduction:.2f}"]), "|", flush=True)


if __name__ == "__main__":
    main()
