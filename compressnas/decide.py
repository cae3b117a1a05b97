"""A budget and a criterion in, the decision what stays out."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from compressnas.baselines import CRITERIA, Evidence, Loss
from compressnas.budget import Budget, Meter
from compressnas.choice import Choice, choices
from compressnas.coupling import INEXACT
from compressnas.errors import InputError
from compressnas.faults import faults_of
from compressnas.inputs import Inputs
from compressnas.latency import Stopwatch
from compressnas.measure import cost
from compressnas.recipe import TARGETS, Target
from compressnas.slim import SlimArch
from compressnas.surgery import Found, removed_network

SCOPES = ("global", "uniform")
CLOSE = 0.02  # relative distance to a target that counts as hit
EXCHANGES = 10  # trades at most, to come nearer to a budget,
PARTNERS = 8  # of this many sets with this many others
TRIES = 6  # times that a network is exported and timed, to come near to a latency
LARGEST_FRACTION = 0.999  # of FLOPs: what is 1 or more counts them
CORRECTIONS = 4  # times that the budget is solved again, with what the last network really cost


def decide(
    model: nn.Module,
    example_inputs: Inputs,
    method: str = "magnitude",
    target: Mapping[str, float] | None = None,
    ratio: float | None = None,
    round_to: int = 1,
    data: Iterable[Any] | None = None,
    loss: Loss | None = None,
    ignore: Sequence[str] = (),
    min_channels: int = 1,
    scope: str = "uniform",
    seed: int = 0,
    groups: Found | None = None,
    ratio_of: Mapping[str, int] | None = None,
    approximate: bool = False,
) -> SlimArch:
    """Choose which channels stay.

    Args:
        model: the trained network; not changed.
        example_inputs: a tensor, a tuple of arguments or a mapping of named ones.
        method: magnitude (L2), magnitude_l1, bn_scale, fpgm, taylor or random.
        target: {"flops": x}, {"params": x} or {"latency": x}: below 1 the fraction of the cost that may be kept,
            otherwise the cost; latency is ONNX Runtime's for `example_inputs`, one thread, in microseconds, and takes
            an export for each of a few tries.
        ratio: instead of a target: the fraction of the channels of each layer that goes; where `round_to` is wide for
            it, of all layers together.
        round_to: layers keep a multiple of this many channels, where they have that many.
        data: (inputs, targets) batches, for `taylor`.
        loss: (output, targets) -> scalar; default cross-entropy.
        ignore: patterns of layer or group set names to leave alone, such as `layer1.*`.
        min_channels: the fewest channels that a layer keeps.
        scope: `uniform` keeps the same fraction of every layer; `global` ranks all groups by importance, relative to
            their layer, per cost, and may leave a layer next to nothing.
        seed: for `random`.
        groups: what `find_groups(model, example_inputs)` gave, where it was called already; it is not called again.
        ratio_of: for several steps with `ratio`: the `sizes` of the first decision. Then each step says what part of
            the dense network's channels has gone after it, and rounding does not add up.
        approximate: channels that a norm averages over may go, too, see `find_groups`; `remove` measures what that
            changes. `groups` were found with it, or without.

    Returns:
        The decision; `origin` says what was asked and what the network will cost.

    Raises:
        InputError: a value is out of range, the network cannot be traced, or nothing of it can be pruned.
    """
    wanted = _wanted(target, ratio, scope, method)
    if ratio is None and ratio_of is not None:
        raise InputError("ratio_of: expected only with ratio")
    if approximate and groups is not None and INEXACT in dict(groups.left_alone).values():
        raise InputError("groups: found without approximate; expected find_groups(..., approximate=True)")
    evidence = Evidence(data, loss, seed=seed)
    return choose(
        model, example_inputs, method, wanted, ratio, round_to, evidence, ignore, min_channels, scope, groups, ratio_of,
        approximate,
    )[0]  # fmt: skip


def choose(
    model: nn.Module,
    example_inputs: Inputs,
    method: str,
    wanted: Target | None,
    ratio: float | None,
    round_to: int,
    evidence: Evidence,
    ignore: Sequence[str],
    min_channels: int,
    scope: str,
    found: Found | None = None,
    ratio_of: Mapping[str, int] | None = None,
    approximate: bool = False,
) -> tuple[SlimArch, dict[str, dict[str, Any]]]:
    """What `decide` does, with the importance of every group for the report."""
    choice = choices(model, example_inputs, method, evidence, round_to, ignore, min_channels, found, approximate)
    origin: dict[str, str | int | float] = {
        "method": method,
        "scope": scope,
        "seed": evidence.seed,
        "round_to": round_to,
    }
    origin |= {"approximate": True} if choice.approximate else {}
    if wanted is None:
        assert ratio is not None
        alive = choice.best(choice.nearest(1 - ratio, ratio_of or {}))
        origin |= {"ratio": ratio, "reached_ratio": 1 - choice.channels(alive) / choice.all_channels(ratio_of or {})}
    else:
        find = _to_latency if wanted.kind == "latency" else _to_budget
        alive, kind, limit, reached = find(model, example_inputs, choice, wanted, scope)
        origin |= {f"target_{kind}": limit, f"reached_{kind}": reached}
    kept = {name: tuple(flags.nonzero()[:, 0].tolist()) for name, flags in alive.items()}
    facts = {s.name: {"kind": s.kind, "size": s.size, "norm": choice.importance[s.name].tolist()} for s in choice.sets}
    return SlimArch(kept, {s.name: s.size for s in choice.sets}, origin), facts


def _wanted(target: Mapping[str, float] | None, ratio: float | None, scope: str, method: str) -> Target | None:
    if (target is None) == (ratio is None):
        raise InputError(f"expected exactly one of target and ratio, got target={target}, ratio={ratio}")
    if ratio is not None and not 0 <= ratio < 1:
        raise InputError(f"ratio {ratio}: expected a number in 0 <= ratio < 1")
    if method not in CRITERIA:
        raise InputError(f"method {method!r}: expected one of {', '.join(CRITERIA)}")
    if scope not in SCOPES:
        raise InputError(f"scope {scope!r}: expected one of {', '.join(SCOPES)}")
    if target is None:
        return None
    if len(target) != 1 or not set(target) <= set(TARGETS):
        raise InputError(f"target {dict(target)}: expected exactly one of {', '.join(TARGETS)}")
    ((kind, value),) = target.items()
    if not (isinstance(value, int | float) and 0 < value < math.inf):
        raise InputError(f"target {kind} {value!r}: expected a number above 0")
    try:
        return Target(**{kind: float(value)})
    except ValueError as error:  # pydantic's
        raise InputError(f"target: {'; '.join(faults_of(cast(Any, error), Target, target))}") from error


def _to_budget(
    model: nn.Module, example: Inputs, choice: Choice, wanted: Target, scope: str
) -> tuple[dict[str, Tensor], str, float, float]:
    """Solve for the budget, look at what the network then really costs, and solve again for what was off."""
    dense = cost(model, example)
    kind, limit = wanted.limit({"flops": dense.flops, "params": dense.params})
    meter = Budget(kind, limit).meter(model, choice.sets, example, choice.coupled)
    everything = meter(choice.everything())
    solve = {"global": _global, "uniform": _uniform}[scope]
    goal = limit * everything / float(getattr(dense, kind))
    best: tuple[float, dict[str, Tensor], float] | None = None
    for _ in range(CORRECTIONS):
        alive = solve(choice, meter, goal)
        real = float(getattr(cost(removed_network(model, example, choice.sets, alive, choice.coupled), example), kind))
        off = abs(real - limit) / limit + (real > limit)  # the nearest that is not above it
        if best is None or off < best[0]:
            best = (off, alive, real)
        if limit * (1 - CLOSE / 4) <= real <= limit or all(bool(flags.all()) for flags in alive.values()):
            break
        goal *= limit / real * (1 - CLOSE / 8 if real > limit else 1)
    assert best is not None
    return best[1], kind, limit, best[2]


def _to_latency(
    model: nn.Module, example: Inputs, choice: Choice, wanted: Target, scope: str
) -> tuple[dict[str, Tensor], str, float, float]:
    """FLOPs are set until ONNX Runtime is as fast as asked: latency goes about as a power of them."""
    best: tuple[float, dict[str, Tensor], float, float] | None = None
    with Stopwatch(model, example) as watch:
        assert wanted.latency is not None
        flops = wanted.latency  # a fraction is a first guess as it is, without a measurement
        if flops >= 1:
            flops = min(flops / watch.against_dense(model)[1], 1.0)
        for _ in range(TRIES):
            alive = _to_budget(model, example, choice, Target(flops=min(flops, LARGEST_FRACTION)), scope)[0]
            own, dense = watch.against_dense(removed_network(model, example, choice.sets, alive, choice.coupled))
            limit = wanted.limit({"latency": dense})[1]
            off = abs(own - limit) / limit + (own > limit)
            if best is None or off < best[0]:
                best = (off, alive, limit, own)
            if limit * (1 - CLOSE) <= own <= limit or flops >= LARGEST_FRACTION >= own / limit:
                break
            power = math.log(min(own / dense, 0.99)) / math.log(min(flops, 0.99))
            flops *= (limit * (1 - CLOSE / 2) / own) ** (1 / min(max(power, 0.3), 3.0))
    assert best is not None
    return best[1], "latency", best[2], best[3]


def _bisected(counts: Callable[[float], dict[str, int]], choice: Choice, meter: Meter, limit: float) -> dict[str, int]:
    """The largest knob in 0..1 whose network costs at most `limit`."""
    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if meter(choice.best(counts(middle))) <= limit else (low, middle)
    return counts(low)


def _uniform(choice: Choice, meter: Meter, limit: float) -> dict[str, Tensor]:
    return choice.best(_filled(choice, meter, limit, _bisected(choice.uniform, choice, meter, limit)))


def _global(choice: Choice, meter: Meter, limit: float) -> dict[str, Tensor]:
    """Groups in order of importance (relative to their set) per cost (relative to the mean of all groups)."""
    whole = choice.everything()
    total = meter(whole)
    worth: dict[str, Tensor] = {}
    for s in choice.sets:
        less = {**whole, s.name: torch.arange(s.size) > 0}
        saved = max(total - meter(less), total * 1e-9)
        worth[s.name] = choice.importance[s.name].cpu() / saved
    ranked = torch.cat(list(worth.values())).sort().values

    def counts(fraction: float) -> dict[str, int]:
        if fraction == 0:
            return dict(choice.floors)
        threshold = ranked[min(int((1 - fraction) * len(ranked)), len(ranked) - 1)]
        return {s.name: choice.rounded(s, float((worth[s.name] >= threshold).sum())) for s in choice.sets}

    return choice.best(_filled(choice, meter, limit, _bisected(counts, choice, meter, limit)))


def _filled(choice: Choice, meter: Meter, limit: float, counts: dict[str, int]) -> dict[str, int]:
    """Give back what rounding left over: one step at a time, the best next groups first, while it fits."""
    counts = dict(counts)
    sorted_worth = {s.name: choice.importance[s.name].sort(descending=True).values for s in choice.sets}
    open_sets = {s.name: s for s in choice.sets if counts[s.name] < s.size}
    while open_sets:
        following = {
            name: float(sorted_worth[name][counts[name] : counts[name] + choice.step(s)].mean())
            for name, s in open_sets.items()
        }
        name = max(following, key=lambda n: following[n])
        more = {**counts, name: min(counts[name] + choice.step(open_sets[name]), open_sets[name].size)}
        if meter(choice.best(more)) <= limit:
            counts = more
        if counts != more or counts[name] == open_sets[name].size:
            del open_sets[name]
    return _exchanged(choice, meter, limit, counts)


def _exchanged(choice: Choice, meter: Meter, limit: float, counts: dict[str, int]) -> dict[str, int]:
    """Come nearer to the limit by trading: one step more of one set for some steps less of another.

    Where the groups of a small network are large, no single one fits into what is left.
    """

    def spent(some: Mapping[str, int]) -> float:
        return meter(choice.best(some))

    reached = spent(counts)
    for _ in range(EXCHANGES):
        if reached >= limit * (1 - CLOSE / 4):
            break
        offers: list[tuple[float, dict[str, int]]] = []
        steps = {s.name: choice.step(s) for s in choice.sets}
        less = {s.name: counts[s.name] - steps[s.name] for s in choice.sets}
        saved = {s.name: reached - spent({**counts, s.name: less[s.name]}) for s in choice.sets if less[s.name] > 0}
        payers = sorted((s for s in choice.sets if saved.get(s.name, 0) > 0), key=lambda s: saved[s.name])[:PARTNERS]
        for taker in [s for s in choice.sets if counts[s.name] + steps[s.name] <= s.size][:PARTNERS]:
            more = {**counts, taker.name: counts[taker.name] + steps[taker.name]}
            over = spent(more) - limit
            for payer in payers:
                left = counts[payer.name] - math.ceil(over / saved[payer.name]) * steps[payer.name]
                if payer is not taker and left >= choice.floors[payer.name]:
                    offers.append((spent({**more, payer.name: left}), {**more, payer.name: left}))
        fitting = [offer for offer in offers if reached < offer[0] <= limit]
        if not fitting:
            break
        reached, counts = max(fitting, key=lambda offer: offer[0])
    return counts
