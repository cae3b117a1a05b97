"""Prune every classification model of torchvision to a part of its FLOPs: proved, partly left alone, or refused.

    python tools/studies/torchvision_models.py --out runs/torchvision --models 'resnet*' --target 0.5

Weights are random (nothing is downloaded), so nothing ranks the layers: each loses the same part. The input is the
smallest that the model takes and the target can be met at: where windows of attention are mostly padding, what can go
is a smaller part. Each model runs in a process of its own with one thread; finished ones are not repeated. Prints a
Markdown table.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
import torchvision

import compressnas as cn

SIZES = (64, 112, 128, 224, 299)  # pixels
LARGEST = 300e6  # parameters; more are refused


def one_model(name: str, target: float) -> dict[str, Any]:
    """Decide, remove, prove, measure, export."""
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    model = torchvision.models.get_model(name, weights=None).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1 and not parameter.any():  # a last layer that starts at zero would make all outputs equal
            torch.nn.init.normal_(parameter, std=0.02)
    params = sum(p.numel() for p in model.parameters())
    if params > LARGEST:
        return {"verdict": "refused", "why": f"{params / 1e6:.0f} M parameters"}
    started = time.perf_counter()
    for example in _inputs(model):
        found = cn.find_groups(model, example)
        slim = cn.decide(model, example, target={"flops": target}, scope="uniform", groups=found)
        if float(slim.origin["reached_flops"]) <= float(slim.origin["target_flops"]):
            break
    small, proof = cn.remove(model, example, slim)
    seconds = time.perf_counter() - started
    dense, point = cn.measure(model, example), cn.measure(small, example)
    with tempfile.TemporaryDirectory() as folder:
        check = cn.export_onnx(small, example, Path(folder) / "model.onnx")
    return {
        "verdict": proof.verdict, "difference": proof.max_relative_difference, "pixels": example.shape[-1],
        "flops": point.flops / dense.flops, "params": point.params / dense.params, "seconds": seconds,
        "onnx": check.max_abs_diff / check.max_abs_output, "constant": proof.constant,
        "left_alone": dict(found.left_alone) | dict(proof.left_alone),
    }  # fmt: skip


def _inputs(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    for size in SIZES:
        example = torch.randn(1, 3, size, size)
        try:
            with torch.no_grad():
                model(example)
        except (RuntimeError, ValueError, AssertionError):  # too small, or of a fixed size
            continue
        yield example


def run(name: str, arguments: argparse.Namespace) -> None:
    """One model in its own process, unless it is done."""
    path = arguments.out / f"{name}.json"
    if path.exists():
        return
    command = [sys.executable, __file__, "--one", name, "--target", str(arguments.target)]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=arguments.timeout,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        lines = done.stdout.strip().splitlines()
        ended = (done.stderr.strip().splitlines() or ["no output"])[-1]
        result = lines[-1] if done.returncode == 0 and lines else json.dumps({"verdict": "failed", "why": ended})
    except subprocess.TimeoutExpired:
        result = json.dumps({"verdict": "failed", "why": f"not done after {arguments.timeout} s"})
    path.write_text(result + "\n")
    print(name, result[:160], file=sys.stderr, flush=True)


def table(names: list[str], out: Path) -> Iterator[str]:
    yield "| model | pixels | verdict | difference | FLOPs kept | parameters kept | ONNX | s | left alone |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for name in names:
        r = json.loads((out / f"{name}.json").read_text())
        if "flops" not in r:
            yield f"| {name} | | {r['verdict']} | | | | | | {r['why']} |"
            continue
        reasons = sorted(set(r["left_alone"].values()))
        left = f"{len(r['left_alone'])}: {'; '.join(reasons)[:120]}" if reasons else ""
        yield (
            f"| {name} | {r['pixels']} | {r['verdict']} | {r['difference']:.0e} | {r['flops']:.3f} | {r['params']:.3f} "
            f"| {r['onnx']:.0e} | {r['seconds']:.0f} | {left} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="*", help="pattern of names")
    parser.add_argument("--target", type=float, default=0.5, help="part of the FLOPs to keep")
    parser.add_argument("--out", type=Path, default=Path("runs/torchvision"))
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--timeout", type=int, default=900, help="seconds for one model")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        torch.set_num_threads(1)
        print(json.dumps(one_model(arguments.one, arguments.target)))
        return
    names = [n for n in torchvision.models.list_models(torchvision.models) if fnmatchcase(n, arguments.models)]
    arguments.out.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(arguments.workers) as pool:
        list(pool.map(lambda name: run(name, arguments), names))
    print("\n".join(table(names, arguments.out)))


if __name__ == "__main__":
    main()
