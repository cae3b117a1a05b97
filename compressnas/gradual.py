"""A criterion takes a network to its target, in one step or several, with training between them."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from compressnas.baselines import Evidence, group_norm
from compressnas.bayes.prune import Decision, expanded
from compressnas.data import DataSet, batches
from compressnas.decide import choose
from compressnas.inputs import Inputs
from compressnas.measure import cost
from compressnas.recipe import Baseline, Target
from compressnas.reconstruct import reconstruct
from compressnas.slim import SlimArch
from compressnas.surgery import Found, find_groups, remove, same_groups
from compressnas.train import Work, fit, stage_seed

STAGE = "step {}"  # of a stage of training that comes before this step


def criterion_prune(dense: nn.Module, data: DataSet, settings: Baseline, work: Work) -> Decision:
    """Remove the least important channels until the target is met.

    Step k of n leads to f^(k/n) of the cost of the dense network, where f of it is the target. Each round of training
    is a stage of its own, so that an interrupted run goes on in it.

    Raises:
        InputError: nothing can be pruned, or the loss is not finite.
        RunFailed: no removal could be proved.
    """
    example = data.train[0][0][None].to(work.device)
    images = data.validation.__getitems__(range(min(16, len(data.validation))))[0].to(work.device)
    found = find_groups(dense, example, ("coupled",), settings.approximate)
    whole = SlimArch({s.name: tuple(range(s.size)) for s in found.sets}, {s.name: s.size for s in found.sets})
    network, origin = copy.deepcopy(dense).to(work.device), dict(whole.kept)
    for step in range(1, settings.steps + 1):
        if settings.training is not None and (step > 1 or settings.group_norm > 0):
            penalty = group_norm(network, example, settings.group_norm) if settings.group_norm > 0 else None
            network = fit(network, data, settings.training, work, stage=STAGE.format(step), before_step=penalty)
        target = _of_step(settings.target, dense, example, step / settings.steps)
        seed = stage_seed(work.seed, "criterion" if step == 1 else f"criterion {step}")
        some = batches(data.train, settings.batch_size, shuffle=True, seed=seed)
        evidence = Evidence(some, batches=settings.batches, seed=work.seed)
        slim, facts = choose(
            network, example, settings.kind, target, None, settings.round_to, evidence, (), 1, settings.scope, found
        )
        if settings.reconstruct and any(slim.removed(name) for name in slim.sizes):
            network = reconstruct(network, example, slim, some, progress=work.progress)
        if step < settings.steps and any(slim.removed(name) for name in slim.sizes):
            network, slim, _, _ = remove(network, example, slim, images)
            origin = _composed(origin, slim)
            left = same_groups(network, example, ("coupled",), whole.sizes)
            found = Found(left, found.left_alone, approximate=found.approximate)
    model = expanded(dense, network, example, SlimArch(origin, whole.sizes))
    kept = {**whole.kept, **_composed(origin, slim)}
    return Decision(model, SlimArch(kept, whole.sizes, slim.origin), _in_full(facts, origin, whole.sizes))


def _of_step(target: Target, dense: nn.Module, example: Inputs, part: float) -> Target:
    """What a step leads to, in FLOPs or parameters: a fraction would be one of what the steps before have left."""
    if target.kind == "latency":
        return target  # which has a single step
    whole = cost(dense, example)
    kind, limit = target.limit({"flops": whole.flops, "params": whole.params})
    now = float(getattr(whole, kind))
    return Target(**{kind: now * min(limit / now, 1.0) ** part})


def _composed(origin: Mapping[str, Sequence[int]], slim: SlimArch) -> dict[str, tuple[int, ...]]:
    """What is kept, in the numbers of the dense network."""
    return {name: tuple(indices[i] for i in slim.kept[name]) for name, indices in origin.items() if name in slim.kept}


def _in_full(
    facts: Mapping[str, Mapping[str, Any]], origin: Mapping[str, Sequence[int]], sizes: Mapping[str, int]
) -> dict[str, dict[str, Any]]:
    """The importance of every group of the dense network; 0 for those that went before the last step."""
    full = {}
    for name, fact in facts.items():
        norm = torch.zeros(sizes[name])
        norm[list(origin[name])] = torch.tensor(fact["norm"])
        full[name] = {**fact, "size": sizes[name], "norm": norm.tolist()}
    return full
