"""Budgets: what a smaller network costs, and which groups go so that it costs no more."""

import math
from collections.abc import Mapping

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from compressnas.budget import Budget, Meter, fewest, uniform
from compressnas.groups import GroupSet
from compressnas.measure import cost
from compressnas.recipe import Target
from compressnas.slim import SlimArch
from compressnas.surgery import find_groups, remove

EXAMPLE = torch.zeros(1, 2, 8, 8)
Flags = dict[str, Tensor]


def small_lenet() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 8, (3, 2)), nn.ReLU(), nn.Flatten(),
        nn.Linear(48, 10), nn.ReLU(), nn.Linear(10, 3, bias=False),
    )  # fmt: skip


MODEL = small_lenet()
SETS = {
    kinds: find_groups(MODEL, EXAMPLE, kinds).sets
    for kinds in (("filter", "row"), ("coupled",), ("filter", "row", "column", "shape"))
}
UNITS = SETS["filter", "row"]


def all_of(sets: tuple[GroupSet, ...]) -> Flags:
    return {s.name: torch.ones(s.size, dtype=torch.bool) for s in sets}


def some_of(sets: tuple[GroupSet, ...], seed: int, part: float = 0.6) -> Flags:
    """Random flags, at least one per set."""
    generator = torch.Generator().manual_seed(seed)
    flags = {s.name: torch.rand(s.size, generator=generator) < part for s in sets}
    for alive in flags.values():
        alive[int(torch.randint(len(alive), (), generator=generator))] = True
    return flags


def scores_of(sets: tuple[GroupSet, ...], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {s.name: torch.rand(s.size, generator=generator) for s in sets}


def lists(flags: Mapping[str, Tensor]) -> dict[str, list[int]]:
    return {name: alive.nonzero()[:, 0].tolist() for name, alive in flags.items()}


# ---------------------------------------------------------------- limits and meters


def test_a_target_below_one_is_a_fraction_of_the_dense_network() -> None:
    whole = cost(MODEL, EXAMPLE)
    assert Budget.of(Target(flops=0.25), MODEL, EXAMPLE) == Budget("flops", 0.25 * whole.flops)
    assert Budget.of(Target(params=0.5), MODEL, EXAMPLE) == Budget("params", 0.5 * whole.params)
    assert Budget.of(Target(flops=5000.0), MODEL, EXAMPLE) == Budget("flops", 5000)
    assert Budget.of(Target(params=2.0), MODEL, EXAMPLE) == Budget("params", 2)
    assert Budget.of(None, MODEL, EXAMPLE) == Budget("flops", math.inf)


@pytest.mark.parametrize("kinds", SETS, ids=" ".join)
@pytest.mark.parametrize("kind", ["flops", "params"])
def test_the_meter_reads_what_the_removed_network_costs(kind: str, kinds: tuple[str, ...]) -> None:
    """Exactly for whole units; never less where columns or kernel positions go too."""
    sets = SETS[kinds]
    meter = Budget(kind, 0).meter(MODEL, sets, EXAMPLE)
    assert meter(all_of(sets)) == pytest.approx(getattr(cost(MODEL, EXAMPLE), kind))
    for seed in range(4):
        kept = some_of(sets, seed)
        slim = SlimArch({n: tuple(i) for n, i in lists(kept).items()}, {s.name: s.size for s in sets})
        real = getattr(cost(remove(MODEL, EXAMPLE, slim, torch.randn(2, 2, 8, 8))[0], EXAMPLE), kind)
        if "column" in kinds:
            assert meter(kept) >= real - 1e-6
        else:
            assert meter(kept) == pytest.approx(real)


def test_flops_can_be_read_whatever_the_budget_is_in() -> None:
    kept = some_of(UNITS, 0)
    expected = Budget("flops", 0).meter(MODEL, UNITS, EXAMPLE)(kept)
    assert Budget("params", 0).flops_meter(MODEL, UNITS, EXAMPLE)(kept) == expected


# ---------------------------------------------------------------- dropping the fewest


def one_by_one(meter: Meter, alive: Flags, scores: Mapping[str, Tensor], limit: float) -> Flags:
    """The slow twin: the cost of each group measured, then the worst score per cost dropped until it is enough.

    Then the best of each set that was dropped comes back, while it fits, in the order of all.
    """
    left = {name: flags.clone() for name, flags in alive.items()}
    order = []
    for name, indices in lists(alive).items():
        best = max(indices, key=lambda i: float(scores[name][i]))
        for index in indices:
            without = {n: flags.clone() for n, flags in alive.items()}
            without[name][index] = False
            if index != best:
                order.append((float(scores[name][index]) / (meter(alive) - meter(without)), name, index))
    dropped = []
    for _, name, index in sorted(order):
        if meter(left) <= limit:
            break
        left[name][index] = False
        dropped.insert(0, (name, index))
    while dropped:
        name, index = dropped.pop(0)
        left[name][index] = True
        if meter(left) > limit:
            left[name][index] = False
            dropped = [one for one in dropped if one[0] != name]
    return left


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 999), st.floats(0.01, 1.1), st.sampled_from([("filter", "row"), ("coupled",)]))
def test_fewest_is_that_of_dropping_one_by_one(seed: int, fraction: float, kinds: tuple[str, ...]) -> None:
    sets = SETS[kinds]
    meter = Budget("flops", 0).meter(MODEL, sets, EXAMPLE)
    alive, scores = some_of(sets, seed, 0.8), scores_of(sets, seed)
    before = lists(alive)
    limit = fraction * meter(alive)
    left = fewest(meter, alive, scores, limit)
    assert lists(left) == lists(one_by_one(meter, alive, scores, limit))
    assert lists(alive) == before
    for name, flags in left.items():
        assert bool((alive[name] | ~flags).all())  # nothing that was gone comes back
        best = max(before[name], key=lambda i: float(scores[name][i]))
        assert bool(flags[best])
    assert meter(left) <= limit or all(int(flags.sum()) == 1 for flags in left.values())


def test_fewest_drops_nothing_when_the_limit_is_met() -> None:
    meter, alive = Budget("flops", 0).meter(MODEL, UNITS, EXAMPLE), all_of(UNITS)
    assert lists(fewest(meter, alive, scores_of(UNITS, 0), meter(alive))) == lists(alive)
    assert lists(fewest(meter, alive, scores_of(UNITS, 0), math.inf)) == lists(alive)


def test_fewest_goes_as_near_as_can_be() -> None:
    scores = scores_of(UNITS, 0)
    left = fewest(Budget("flops", 0).meter(MODEL, UNITS, EXAMPLE), all_of(UNITS), scores, 0.0)
    assert lists(left) == {name: [int(value.argmax())] for name, value in scores.items()}


def test_fewest_takes_what_is_cheap_to_lose_first() -> None:
    """Equal scores: what frees the most FLOPs goes first."""
    meter, alive = Budget("flops", 0).meter(MODEL, UNITS, EXAMPLE), all_of(UNITS)
    scores = {name: torch.ones(len(flags)) for name, flags in alive.items()}
    left = fewest(meter, alive, scores, meter(alive) - 1)
    saved = {}
    for name in alive:
        less = {**alive, name: torch.arange(len(alive[name])) > 0}
        saved[name] = meter(alive) - meter(less)
    dearest = max(saved, key=lambda name: saved[name])
    assert {name: int(flags.sum()) for name, flags in left.items()} == {
        name: len(flags) - (name == dearest) for name, flags in alive.items()
    }


# ---------------------------------------------------------------- the same part of every set


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 999), st.floats(0.01, 1.1))
def test_uniform_keeps_the_largest_part_that_fits(seed: int, fraction: float) -> None:
    meter = Budget("flops", 0).meter(MODEL, UNITS, EXAMPLE)
    alive, scores = some_of(UNITS, seed, 0.8), scores_of(UNITS, seed)
    limit = fraction * meter(alive)

    def keep(part: float) -> dict[str, list[int]]:
        kept = {}
        for name, indices in lists(alive).items():
            best = sorted(indices, key=lambda i: -float(scores[name][i]))
            kept[name] = sorted(best[: max(1, round(part * len(indices)))])
        return kept

    def fits(kept: Mapping[str, list[int]]) -> bool:
        return meter({n: torch.isin(torch.arange(len(f)), torch.tensor(kept[n])) for n, f in alive.items()}) <= limit

    counts = {len(indices) for indices in lists(alive).values()}
    parts = {(k + 0.5) / n for n in counts for k in range(n)}  # where rounding takes one more

    def largest(sides: tuple[float, ...]) -> dict[str, list[int]]:
        near = sorted({0.0, 1.0} | {part + side for part in parts for side in sides})
        return next((keep(part) for part in reversed(near) if fits(keep(part))), keep(0.0))

    # exactly at such a part some sets round up and others down: a fraction that bisection may or may not meet
    assert lists(uniform(meter, alive, scores, limit)) in (largest((-1e-6, 1e-6)), largest((-1e-6, 0.0, 1e-6)))
