"""How well estimates of the NTK trace norm follow the exact one, and what labels and images matter (NASI, Table 7).

    python tools/studies/nasi_trace.py --space S1 --data c10.npz --cells 100 --out runs/nasi_trace

Cells are drawn uniformly. Each network is initialised by its own seed; the same images for all of them. Batch norms
have the statistics of these images and are frozen then, for all estimates: only so has a sample a gradient of its own.
Per cell: the exact trace (equation 8, 64 images), the sum of the squared per-sample gradients (equation 10), the
mini-batch gradient (equation 11) of 4 to 128 images, and for 64 the same with random labels and with Gaussian images.
Finished cells are not repeated. Prints a Markdown table of Pearson and Spearman correlations over the cells.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from scipy.stats import pearsonr, spearmanr
from torch import Tensor

from compressnas.data import load_data
from compressnas.nasi.ntk import batch_gradient, exact_trace, freeze_statistics, initialise, sample_gradients
from compressnas.nasi.proxies import random_cells
from compressnas.recipe import Npz
from compressnas.spaces import SPACES
from compressnas.spaces.cell import Kept, Space

BATCHES = (4, 8, 16, 32, 64, 128)
EXACT = 64  # images of the exact trace
SHAPE, CLASSES = (3, 32, 32), 10


def space_named(name: str) -> Space:
    return SPACES["nasbench1shot1"](space=name) if name in ("S1", "S2", "S3") else SPACES[name]()


def measured(space: Space, kept: Kept, seed: int, parameterisation: str, real: tuple[Tensor, Tensor]) -> dict[str, Any]:
    """All estimates of one cell."""
    network = space.supernet(kept, SHAPE, CLASSES)
    scales = initialise(network, parameterisation, torch.Generator().manual_seed(seed))
    images, labels = real
    generator = torch.Generator().manual_seed(0)
    others, noise = (
        torch.randint(CLASSES, labels.shape, generator=generator),
        torch.randn(images.shape, generator=generator),
    )
    found: dict[str, Any] = {}
    for size in BATCHES:
        freeze_statistics(network, images[:size])
        found[f"batch {size}"] = batch_gradient(network, images[:size], labels[:size], scales)
    freeze_statistics(network, images[:EXACT])
    found["exact"] = exact_trace(network, images[:EXACT], scales)
    found["sum"] = sample_gradients(network, images[:EXACT], labels[:EXACT], scales)
    found["random labels"] = batch_gradient(network, images[:EXACT], others[:EXACT], scales)
    freeze_statistics(network, noise[:EXACT])
    found["random images"] = batch_gradient(network, noise[:EXACT], labels[:EXACT], scales)
    return found


PAIRS = [*((f"batch {size}", "exact") for size in BATCHES), ("sum", "exact")]
PAIRS += [("random labels", "batch 64"), ("random images", "batch 64")]


def table(name: str, lines: list[dict[str, Any]]) -> Iterator[str]:
    yield f"| {name}, {len(lines)} cells | Pearson | Spearman |"
    yield "|---|---|---|"
    for one, other in PAIRS:
        values = [[line[key] for line in lines] for key in (one, other)]
        yield f"| {one} against {other} | {pearsonr(*values)[0]:.3f} | {spearmanr(*values)[0]:.3f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--space", default="S1", choices=["S1", "S2", "S3", "nasbench201"])
    parser.add_argument("--data", type=Path, required=True, help="npz of images")
    parser.add_argument("--cells", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the cells")
    parser.add_argument("--parameterisation", default="standard", choices=["standard", "ntk"])
    parser.add_argument("--out", type=Path, default=Path("runs/nasi_trace"))
    arguments = parser.parse_args()
    data = load_data(Npz(name="npz", path=str(arguments.data)), 0)
    chosen = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(arguments.seed))
    real = data.train.__getitems__(chosen[: max(BATCHES)].tolist())
    space = space_named(arguments.space)
    cells = random_cells(space, arguments.cells, torch.Generator().manual_seed(arguments.seed))
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / f"{arguments.space}-{arguments.parameterisation}-{arguments.seed}.jsonl"
    done = path.read_text().splitlines() if path.exists() else []
    for number, kept in enumerate(cells[len(done) :], start=len(done)):
        line = {"cell": space.text(kept), **measured(space, kept, number, arguments.parameterisation, real)}
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(f"{number + 1}/{len(cells)}", file=sys.stderr, flush=True)
    lines = [json.loads(line) for line in path.read_text().splitlines()[: arguments.cells]]
    print("\n".join(table(arguments.space, lines)))


if __name__ == "__main__":
    main()
