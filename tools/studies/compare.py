"""A Bayes recipe against baselines and training from scratch: same FLOPs, same total number of epochs, several seeds.

    python tools/studies/compare.py --root DATA --recipe mnist/lenet5_90k --seeds 5 --workers 2 --baselines magnitude
    python tools/studies/compare.py --recipe cifar10/resnet20 --set data.path=c10.npz --set method.target.flops=0.25
        --baselines magnitude fpgm taylor random --scratch

For each seed: (1) the recipe as it is; (2) each baseline, from the same dense network to the FLOPs that (1) reached,
fine-tuned like (1), for the epochs that (1) spent on shrinking and fine-tuning; (3) the structure that (1) found, with
fresh weights: `labels` trains it for all epochs of (1), and `teacher` as (2), with the dense network as the teacher
that (1) has, whose epochs count as spent. All choices were made on the validation split; each run reads the test split
once, at its end. Runs that are finished are not repeated; killed ones are resumed.

Prints a Markdown table; the paired differences come with their 95 % t-interval.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml

T_975 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}


def run(recipe: str, out: Path, settings: list[str]) -> None:
    """One run in a process of its own, resumed if it was begun, skipped if it is done."""
    if (out / "report.html").exists():
        return
    command = [sys.executable, "-m", "compressnas", "run", recipe, "--out", str(out), "--quiet"]
    command += ["--resume"] if out.exists() else []
    for setting in settings:
        command += ["--set", setting]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr}")


def point(out: Path, name: str) -> dict[str, Any]:
    lines = (json.loads(line) for line in (out / "points.jsonl").read_text().splitlines())
    return next(line for line in lines if line["point"] == name)


def one_seed(arguments: argparse.Namespace, seed: int) -> None:
    base = arguments.out / f"{Path(arguments.recipe).stem}-seed{seed}"
    common = [f"seed={seed}", *arguments.set]
    if arguments.root:
        common.append(f"data.root={arguments.root}")
    base.parent.mkdir(parents=True, exist_ok=True)
    run(arguments.recipe, base, common)
    epochs = {}
    for line in (base / "history.jsonl").read_text().splitlines():
        record = json.loads(line)
        epochs[record["stage"]] = record["epoch"]
    flops = point(base, "slim")["flops"]
    after = epochs.get("shrink", 0) + epochs["finetune"]
    resolved = yaml.safe_load((base / "recipe.yaml").read_text())
    weights = [f"model.weights={base / 'dense.safetensors'}", "model.fresh=[]", "train=null"]
    for name in arguments.baselines:
        method = f"method={{kind: {name}, target: {{flops: {float(flops)}}}, scope: {arguments.scope}}}"
        run(arguments.recipe, Path(f"{base}-{name}"), [*common, *weights, method, f"finetune.epochs={after}"])
    given = f"method={{kind: given, path: {base / 'slim.json'}, fresh: true}}"
    if "labels" in arguments.scratch:
        rate = arguments.scratch_lr or (resolved["train"] or resolved["finetune"])["lr"]
        alone = ["train=null", "model.weights=null", "finetune.distill=0", f"finetune.lr={rate}"]
        alone.append(f"finetune.epochs={after + epochs.get('train', 0)}")
        run(arguments.recipe, Path(f"{base}-scratch"), [*common, *alone, given])
    if "teacher" in arguments.scratch:
        taught = [*weights, given, f"finetune.epochs={after}"]
        run(arguments.recipe, Path(f"{base}-scratch-teacher"), [*common, *taught])


def table(arguments: argparse.Namespace) -> str:
    stem = Path(arguments.recipe).stem
    rows = ["| network | test error, % (each seed) | mean | validation | FLOPs, fvcore | with biases | structures |"]
    rows.append("|---|---|---|---|---|---|---|")
    errors: dict[str, list[float]] = {}
    ends = {"dense": ("", "dense"), "Bayes": ("", "slim")}
    ends |= {name: (f"-{name}", "slim") for name in arguments.baselines}
    ends |= {"from scratch": ("-scratch", "slim")} if "labels" in arguments.scratch else {}
    ends |= {"from scratch, teacher": ("-scratch-teacher", "slim")} if "teacher" in arguments.scratch else {}
    for name, (suffix, which) in ends.items():
        points = [point(arguments.out / f"{stem}-seed{seed}{suffix}", which) for seed in arguments.seeds]
        errors[name] = [100 * p["error"] for p in points]
        rows.append(
            f"| {name} | {', '.join(f'{e:.2f}' for e in errors[name])} | {statistics.mean(errors[name]):.3f} "
            f"| {100 * statistics.mean(p['validation_error'] for p in points):.3f} "
            f"| {statistics.mean(p['flops'] for p in points):,.0f} "
            f"| {statistics.mean(p['flops_bias_convention'] for p in points):,.0f} (at most "
            f"{max(p['flops_bias_convention'] for p in points):,}) | {', '.join(p['structure'] for p in points)} |"
        )
    for other in [name for name in errors if name not in ("dense", "Bayes")] if len(arguments.seeds) > 1 else []:
        pairs = [b - o for b, o in zip(errors["Bayes"], errors[other], strict=True)]
        mean, spread = statistics.mean(pairs), statistics.stdev(pairs) / math.sqrt(len(pairs))
        half = T_975[len(pairs) - 1] * spread
        rows.append(f"\nBayes - {other}: {mean:+.3f} points, 95 % interval {mean - half:+.3f} to {mean + half:+.3f}.")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", required=True)
    parser.add_argument("--root", help="folder of the data set")
    parser.add_argument("--seeds", type=lambda text: range(int(text)), default=range(5), help="how many, from 0")
    parser.add_argument("--workers", type=int, default=1, help="seeds at a time, one thread each")
    parser.add_argument("--out", type=Path, default=Path("runs/study"))
    parser.add_argument("--baselines", nargs="*", default=[], help="criteria to compare with, see `compressnas list`")
    parser.add_argument("--scratch", nargs="*", choices=["labels", "teacher"], default=["labels"])
    parser.add_argument("--scope", choices=["uniform", "global"], default="uniform", help="of the baselines")
    parser.add_argument("--scratch-lr", type=float, help="learning rate of `labels`; default: the dense network's")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="for every run")
    arguments = parser.parse_args()
    with ThreadPoolExecutor(arguments.workers) as pool:
        list(pool.map(lambda seed: one_seed(arguments, seed), arguments.seeds))
    print(table(arguments))


if __name__ == "__main__":
    main()
