"""Baselines: importance scores from torch-pruning, ranked to a budget. With coupling.py the only file that knows it."""

from typing import Any

import torch
import torch_pruning as tp
from torch import Tensor, nn

from compressnas.budget import Budget, fewest, uniform
from compressnas.coupling import pruning_group
from compressnas.recipe import Magnitude
from compressnas.slim import SlimArch
from compressnas.surgery import find_groups


def magnitude(model: nn.Module, example: Tensor, settings: Magnitude, seed: int) -> tuple[SlimArch, dict[str, Any]]:
    """L2 magnitude of each unit's coupled weights, one shot, to the budget -> the decision, and facts for the report.

    `scope: uniform` keeps the same fraction of every layer; `global` ranks all units by their importance over the mean
    of their layer, per FLOP saved.

    Args:
        model: the trained dense network; not changed.
        example: (1, C, H, W) an input.
    """
    found = find_groups(model, example, ("coupled",))
    importance = tp.importance.MagnitudeImportance(p=2, group_reduction="mean", normalizer="mean")
    scores = {s.name: importance(pruning_group(model, example, s.name)).detach() for s in found.sets}
    budget = Budget.of(settings.target, model, example)
    alive = {s.name: torch.ones(s.size, dtype=torch.bool, device=example.device) for s in found.sets}
    choose = {"uniform": uniform, "global": fewest}[settings.scope]
    left = choose(budget.meter(model, found.sets, example), alive, scores, budget.limit)
    kept = {name: tuple(flags.nonzero()[:, 0].tolist()) for name, flags in left.items()}
    sizes = {s.name: s.size for s in found.sets}
    facts = {s.name: {"kind": s.kind, "size": s.size, "norm": scores[s.name].tolist()} for s in found.sets}
    return SlimArch(kept, sizes, {"method": "magnitude", "scope": settings.scope, "seed": seed}), facts
