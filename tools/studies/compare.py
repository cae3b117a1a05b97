"""A Bayes recipe against baselines and training from scratch: same FLOPs, same total number of epochs, several seeds.

    python tools/studies/compare.py --root DATA --recipe mnist/lenet5_90k --seeds 5 --workers 2 --baselines magnitude
    python tools/studies/compare.py --recipe cifar10/resnet20_quick --seeds 3 --workers 2 --scratch
        --set 'data={name: npz, path: c10.npz, augment: [flip, crop]}' --set model.weights=resnet20.pt
        --baselines magnitude fpgm taylor random group_norm magnitude+reconstruct

For each seed: (1) the recipe as it is; (2) each baseline, from the same dense network to the FLOPs that (1) reached,
fine-tuned like (1), for the epochs that (1) spent on shrinking and fine-tuning (group_norm trains in the first of
them); (3) the structure that (1) found, with fresh weights: `labels` trains it for all epochs of (1), and `teacher` as
(2), with the dense network as the teacher that (1) has, whose epochs count as spent. All choices were made on the
validation split; each run reads the test split once, at its end. Runs that are finished are not repeated; killed ones
are resumed.

Prints a Markdown table; the paired differences come with their 95 % t-interval.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml

SAME = ("lr", "batch_size", "momentum", "weight_decay", "precision")  # of training before, as of fine-tuning
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


def base_of(arguments: argparse.Namespace, seed: int) -> Path:
    out: Path = arguments.out
    return out / f"{Path(arguments.recipe).stem}-seed{seed}"


def common(arguments: argparse.Namespace, seed: int) -> list[str]:
    root = [f"data.root={arguments.root}"] if arguments.root else []
    return [f"seed={seed}", *arguments.set, *root]


def others(arguments: argparse.Namespace, seed: int) -> Iterator[tuple[Path, list[str]]]:
    """Folder and settings of each run that the recipe's own run is compared with."""
    base, shared = base_of(arguments, seed), common(arguments, seed)
    epochs = {}
    for line in (base / "history.jsonl").read_text().splitlines():
        record = json.loads(line)
        epochs[record["stage"]] = record["epoch"]
    flops = point(base, "slim")["flops"]
    after = epochs.get("shrink", 0) + epochs["finetune"]
    resolved = yaml.safe_load((base / "recipe.yaml").read_text())
    weights = [f"model.weights={base / 'dense.safetensors'}", "model.fresh=[]", "train=null"]
    for name in arguments.baselines:
        kind, _, reconstruct = name.partition("+")
        method = {"kind": kind, "target": {"flops": float(flops)}, "scope": arguments.scope}
        spent = 0
        if kind == "group_norm":
            training = {k: resolved["finetune"][k] for k in SAME}
            method |= {"kind": "magnitude", "group_norm": arguments.group_norm, "training": {"epochs": 1, **training}}
            spent = 1
        if reconstruct:
            method["reconstruct"] = True
        settings = [f"method={json.dumps(method)}", f"finetune.epochs={after - spent}"]
        yield Path(f"{base}-{name}"), [*shared, *weights, *settings]
    given = f"method={{kind: given, path: {base / 'slim.json'}, fresh: true}}"
    if "labels" in arguments.scratch:
        rate = arguments.scratch_lr or (resolved["train"] or resolved["finetune"])["lr"]
        alone = ["train=null", "model.weights=null", "finetune.distill=0", f"finetune.lr={rate}"]
        alone.append(f"finetune.epochs={after + epochs.get('train', 0)}")
        yield Path(f"{base}-scratch"), [*shared, *alone, given]
    if "teacher" in arguments.scratch:
        yield Path(f"{base}-scratch-teacher"), [*shared, *weights, given, f"finetune.epochs={after}"]


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
    parser.add_argument("--workers", type=int, default=1, help="runs at a time, one thread each")
    parser.add_argument("--out", type=Path, default=Path("runs/study"))
    parser.add_argument(
        "--baselines",
        nargs="*",
        default=[],
        help="criteria to compare with, see `compressnas list`; "
        "group_norm (magnitude after an epoch with that regulariser); each also with +reconstruct",
    )
    parser.add_argument("--group-norm", type=float, default=5e-4, help="strength of that regulariser")
    parser.add_argument("--scratch", nargs="*", choices=["labels", "teacher"], default=["labels"])
    parser.add_argument("--scope", choices=["uniform", "global"], default="uniform", help="of the baselines")
    parser.add_argument("--scratch-lr", type=float, help="learning rate of `labels`; default: the dense network's")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="for every run")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(arguments.workers) as pool:
        own = [(base_of(arguments, seed), common(arguments, seed)) for seed in arguments.seeds]
        list(pool.map(lambda one: run(arguments.recipe, *one), own))
        rest = [one for seed in arguments.seeds for one in others(arguments, seed)]
        list(pool.map(lambda one: run(arguments.recipe, *one), rest))
    print(table(arguments))


if __name__ == "__main__":
    main()
