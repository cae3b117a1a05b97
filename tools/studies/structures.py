"""Prune networks of awkward structure: all ratios, roundings and numbers of steps, proved and exported.

    python tools/studies/structures.py STRUCTURES.py

The file holds STRUCTURES: name -> (build, shape of the input, text). Ratios 0.3 and 0.7, channels in multiples of 1 and
8, one step and three; after each step the removal is proved, after the last one the ONNX file is verified. `removed` is
the part of the channels asked for that went, of all convolutions and linear layers but the last one, whether they can
go or not. Prints a Markdown table.
"""

import argparse
import importlib.util
import itertools
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

import compressnas as cn


def structures(path: Path) -> dict[str, Any]:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return dict(module.STRUCTURES)


def channels(model: nn.Module) -> int:
    """Of all layers but the last one, whose outputs are the network's."""
    layers = [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    return sum(m.out_channels if isinstance(m, nn.Conv2d) else m.out_features for m in layers[:-1])


def pruned(model: nn.Module, example: torch.Tensor, ratio: float, round_to: int, steps: int) -> tuple[nn.Module, str]:
    """The network after so many steps, and the verdicts of their proofs."""
    sizes, verdicts = None, []
    for step in range(1, steps + 1):
        slim = cn.decide(model, example, ratio=ratio * step / steps, round_to=round_to, ratio_of=sizes)
        model, proof = cn.remove(model, example, slim)
        sizes, verdicts = sizes or slim.sizes, [*verdicts, proof.verdict]
    return model, ", ".join(verdicts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="Python file with STRUCTURES")
    warnings.simplefilter("ignore")
    print("| structure | ratio | multiples of | steps | removed, of what was asked | proofs | ONNX |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for name, (build, shape, _) in structures(parser.parse_args().file).items():
        for ratio, round_to, steps in itertools.product((0.3, 0.7), (1, 8), (1, 3)):
            torch.manual_seed(0)
            model, example = build().eval(), torch.randn(shape)
            small, verdicts = pruned(model, example, ratio, round_to, steps)
            with tempfile.TemporaryDirectory() as folder:
                check = cn.export_onnx(small, example, Path(folder) / "model.onnx")
            gone = 1 - channels(small) / channels(model)
            cells = [name, ratio, round_to, steps, f"{gone / ratio:.2f}", verdicts, f"{check.max_abs_diff:.0e}"]
            print("|", " | ".join(map(str, cells)), "|", flush=True)


if __name__ == "__main__":
    main()
