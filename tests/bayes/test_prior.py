"""The prior over groups: its updates against loops, and the traps that would keep useless units or lose useful ones."""

import functools
import math
from collections.abc import Mapping

import pytest
import reference
import torch
from torch import Tensor, nn

from compressnas.bayes.curvature import diagonal_curvature
from compressnas.bayes.prior import GroupPrior
from compressnas.groups import GroupSet, Member, group_sizes, norms, weights_of
from compressnas.surgery import find_groups

SAMPLES = 40
EXAMPLE = torch.zeros(1, 1, 8, 8)


def small_lenet(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(3, 4, 2), nn.ReLU(), nn.Flatten(),
        nn.Linear(16, 5), nn.ReLU(), nn.Linear(5, 3),
    ).double()  # fmt: skip


@functools.cache
def sets_of(kinds: tuple[str, ...]) -> tuple[GroupSet, ...]:
    return find_groups(small_lenet().float(), EXAMPLE, kinds).sets


def prior_of(
    kinds: tuple[str, ...] = ("filter", "row"), lam: float = 1e-2, scale: str = "summed", seed: int = 0
) -> GroupPrior:
    lams = {s.name: lam * (1 + i) for i, s in enumerate(sets_of(kinds))}
    return GroupPrior(small_lenet(seed), sets_of(kinds), lams, scale, SAMPLES)


def some_curvature(model: nn.Module, seed: int = 1) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.rand(w.shape, generator=generator, dtype=w.dtype) for n, w in weights_of(model).items()}


def no_curvature(model: nn.Module) -> dict[str, Tensor]:
    return {name: torch.zeros_like(weight) for name, weight in weights_of(model).items()}


def numbers(values: Mapping[str, Tensor]) -> dict[str, list[float]]:
    return {name: value.tolist() for name, value in values.items()}


COMBINATIONS = (
    ("filter", "row"),
    ("coupled",),
    ("row", "column"),
    ("filter", "shape"),
    ("filter", "shape", "row", "column"),
    ("coupled", "shape", "column"),
)

# ---------------------------------------------------------------- updates against loops


@pytest.mark.parametrize("scale", ["summed", "consistent", "paper"])
@pytest.mark.parametrize("kinds", COMBINATIONS, ids=" ".join)
def test_update_of_overlapping_groups_is_that_of_loops(kinds: tuple[str, ...], scale: str) -> None:
    prior = prior_of(kinds, scale=scale)
    generator = torch.Generator().manual_seed(5)
    for name, gamma in prior.gamma.items():
        prior.gamma[name] = torch.rand(gamma.shape, generator=generator, dtype=torch.float64) + 0.01
    weights, curvature = weights_of(prior.model), some_curvature(prior.model)
    weights["0.weight"][1, 0, 2] = 0  # weights that are gone already do not count
    curvature["3.weight"][:, :, 0] = 0
    curvature["6.weight"] -= 0.3  # what is negative is clamped
    factors = {"summed": dict.fromkeys(prior.lams, SAMPLES), "consistent": {n: 1 / v for n, v in prior.lams.items()}}
    factor = factors.get(scale, dict.fromkeys(prior.lams, 1.0))
    precision = {n: {w: c.clamp(min=0) * factor[n] for w, c in curvature.items()} for n in prior.lams}
    omega, gamma = reference.updated_prior(prior.sets, weights, precision, numbers(prior.gamma))
    both = (curvature, {name: weight.clone() for name, weight in weights.items()})

    prior.update(curvature)
    for group_set in prior.sets:
        name = group_set.name
        held = [
            any(
                c > 0 and w != 0 for c, w in zip(*(reference.group_weights(group_set, g, v) for v in both), strict=True)
            )
            for g in range(group_set.size)
        ]
        expected = [g if h else 0.0 for g, h in zip(gamma[name], held, strict=True)]
        assert prior.omega[name].tolist() == pytest.approx(omega[name], rel=1e-12), name
        assert prior.gamma[name].tolist() == pytest.approx(expected, rel=1e-12), name
        assert prior.alive[name].tolist() == held


def test_a_weight_that_one_set_holds_twice() -> None:
    """A layer whose inputs and outputs are one coupled axis: its weight W[n, c] belongs to group n and to group c."""
    model = nn.Linear(3, 3).double()
    order = torch.arange(3)
    units = GroupSet("units", "coupled", 3, (Member("weight", (0,), order), Member("weight", (1,), order.flip(0))))
    prior = GroupPrior(model, [units], {"units": 1.0}, "paper", SAMPLES)
    prior.gamma["units"] = torch.tensor([0.2, 0.5, 1.5], dtype=torch.float64)
    curvature = some_curvature(model)
    omega, gamma = reference.updated_prior(
        [units], weights_of(model), {"units": curvature}, {"units": prior.gamma["units"].tolist()}
    )
    prior.update(curvature)
    assert prior.omega["units"].tolist() == pytest.approx(omega["units"], rel=1e-12)
    assert prior.gamma["units"].tolist() == pytest.approx(gamma["units"], rel=1e-12)


@pytest.mark.parametrize("kinds", COMBINATIONS, ids=" ".join)
def test_penalty_is_that_of_loops(kinds: tuple[str, ...]) -> None:
    prior = prior_of(kinds)
    prior.update(some_curvature(prior.model))
    weights = weights_of(prior.model)
    expected = sum(
        prior.lams[s.name] * float(prior.omega[s.name][g]) * reference.norm(reference.group_weights(s, g, weights))
        for s in prior.sets
        for g in range(s.size)
    )
    assert prior.penalty() == pytest.approx(expected, rel=1e-6)  # it is a float32 sum


@pytest.mark.parametrize("kinds", COMBINATIONS, ids=" ".join)
def test_shrink_takes_step_lam_omega_from_each_norm(kinds: tuple[str, ...]) -> None:
    """Set after set; a group whose norm is no larger than that goes to exact zero."""
    prior = prior_of(kinds, lam=1.0)
    prior.update(some_curvature(prior.model))
    weights = {n: w.clone() for n, w in weights_of(prior.model).items()}
    step = 0.02
    for group_set in prior.sets:
        sizes = [reference.norm(reference.group_weights(group_set, g, weights)) for g in range(group_set.size)]
        thresholds = [step * prior.lams[group_set.name] * omega for omega in prior.omega[group_set.name].tolist()]
        if all(size <= threshold for size, threshold in zip(sizes, thresholds, strict=True)):
            thresholds[sizes.index(max(sizes))] = 0  # one group stays
        for group, (size, threshold) in enumerate(zip(sizes, thresholds, strict=True)):
            for member in group_set.members:
                for place in reference.places(member, weights[member.parameter].shape).get(group, []):
                    weights[member.parameter][place] *= max(0.0, 1 - threshold / size) if size else 0.0
    prior.shrink(step)
    for group_set in prior.sets:
        for member in group_set.members:
            name = member.parameter
            torch.testing.assert_close(weights_of(prior.model)[name], weights[name], rtol=1e-12, atol=1e-15)


def test_each_set_may_have_a_step_of_its_own() -> None:
    prior, twin = prior_of(lam=1.0), prior_of(lam=1.0)
    steps = {name: 0.01 * (1 + i) for i, name in enumerate(prior.lams)}
    prior.shrink(steps)
    for name, step in steps.items():
        twin.lams[name] *= step / 0.01
    twin.shrink(0.01)
    for name, weight in weights_of(prior.model).items():
        torch.testing.assert_close(weight, weights_of(twin.model)[name], rtol=1e-12, atol=0)


# ---------------------------------------------------------------- traps


@pytest.mark.parametrize("kinds", [("filter", "row"), ("row", "column"), ("coupled",)], ids=" ".join)
def test_a_dead_unit_goes(kinds: tuple[str, ...]) -> None:
    """It never fires, so that it has no curvature; alone in its weights it would get omega = 0 and gamma = infinity."""
    prior = prior_of(kinds)
    with torch.no_grad():
        weights_of(prior.model)["6.bias"].copy_(torch.tensor([2.0, 2.0, -100.0, 2.0, 2.0]))
    images = torch.randn(20, 1, 8, 8, dtype=torch.float64)
    curvature = diagonal_curvature(
        prior.model, [(images, torch.zeros(20, dtype=torch.int64))], "ggn", torch.Generator()
    )
    assert bool((curvature["6.weight"][2] == 0).all())
    prior.update(curvature)
    assert prior.alive["6.out"].tolist() == [True, True, False, True, True]
    assert float(prior.gamma["6.out"][2]) == 0
    weights = weights_of(prior.model)
    assert bool((weights["6.weight"][2] == 0).all())
    assert float(weights["6.bias"][2]) == 0  # the bias goes along
    assert all(bool(torch.isfinite(value).all()) for value in prior.gamma.values())


@pytest.mark.parametrize("kinds", COMBINATIONS, ids=" ".join)
def test_no_curvature_anywhere_empties_nothing_and_is_forgotten(kinds: tuple[str, ...]) -> None:
    """It would make every gamma infinite, and infinity never comes back: the penalty would be off for good."""
    prior, twin = prior_of(kinds), prior_of(kinds)
    before = {name: weight.clone() for name, weight in weights_of(prior.model).items()}
    prior.update(no_curvature(prior.model))
    assert all(bool(alive.all()) for alive in prior.alive.values())
    assert all(torch.equal(weight, before[name]) for name, weight in weights_of(prior.model).items())
    for one in (prior, twin):
        one.update(some_curvature(one.model))
    assert numbers(prior.gamma) == numbers(twin.gamma)
    assert numbers(prior.omega) == numbers(twin.omega)


@pytest.mark.parametrize("kinds", COMBINATIONS, ids=" ".join)
def test_at_least_one_group_of_each_set_stays(kinds: tuple[str, ...]) -> None:
    prior = prior_of(kinds, lam=1e6)
    prior.update(some_curvature(prior.model))
    for _ in range(3):
        prior.shrink(1.0)
        prior.update(some_curvature(prior.model))
    for group_set in prior.sets:
        assert int(prior.alive[group_set.name].sum()) == 1
        assert len(prior.kept("keep_at_zero", 0.1)[group_set.name]) == 1
        assert int((norms(group_set, weights_of(prior.model)) > 0).sum()) == 1
    assert bool(prior.model(EXAMPLE.double() + 1).isfinite().all())


def test_the_floor_keeps_the_largest_groups() -> None:
    prior = prior_of(lam=1e6)
    sizes = {s.name: norms(s, weights_of(prior.model)) for s in prior.sets}
    prior.shrink(1.0, floor=2)
    for name, alive in prior.alive.items():
        assert set(alive.nonzero()[:, 0].tolist()) == set(sizes[name].topk(2).indices.tolist())


def test_emptied_groups_take_their_bias_along_and_never_come_back() -> None:
    """Momentum, or a gradient that a reader sends, fills them again after every step."""
    prior = prior_of()
    prior.update(some_curvature(prior.model))
    weights = weights_of(prior.model)
    with torch.no_grad():
        weights["3.weight"][1] *= 1e-9
    prior.shrink(0.1)
    assert prior.alive["3.out"].tolist() == [True, False, True, True]
    assert float(prior.gamma["3.out"][1]) == 0
    others = weights["3.bias"][[0, 2, 3]].clone()
    for act in (lambda: prior.shrink(0.1), lambda: prior.update(some_curvature(prior.model))):
        with torch.no_grad():
            weights["3.weight"][1] = 5.0
            weights["3.bias"][1] = 5.0
        act()
        assert prior.alive["3.out"].tolist() == [True, False, True, True]
        assert float(prior.gamma["3.out"][1]) == 0
        assert bool((weights["3.weight"][1] == 0).all())
        assert float(weights["3.bias"][1]) == 0
    assert torch.equal(weights["3.bias"][[0, 2, 3]], others)


def test_weights_that_other_sets_took_do_not_count() -> None:
    """The slope of a weight that is already zero would hold a group that is nearly empty."""
    prior = prior_of(("row", "column"), scale="paper")
    with torch.no_grad():
        weights_of(prior.model)["6.weight"][:, 1:] = 0
    prior.update({n: torch.ones_like(w) for n, w in weights_of(prior.model).items()})
    # row group: one weight left, gamma = 1 for itself and its column: a = (1 + 1) / (1 + 1 * (1 + 1)) = 2/3
    assert prior.omega["6.out"].tolist() == pytest.approx([math.sqrt(2 / 3)] * 5)
    assert prior.alive["6.in"].tolist() == [True] + [False] * 15


# ---------------------------------------------------------------- the decision


def test_rule_keep_at_zero_keeps_what_was_not_emptied() -> None:
    prior = prior_of()
    prior.alive["3.out"] = torch.tensor([True, False, False, True])
    prior.gamma["3.out"] = torch.full((4,), 1e-9)
    assert prior.kept("keep_at_zero", 0.5)["3.out"] == (0, 3)


def test_rule_threshold_keeps_gamma_above_it() -> None:
    prior = prior_of()
    prior.gamma["3.out"] = torch.tensor([0.2, 0.05, 0.06, 0.06])
    prior.alive["3.out"] = torch.tensor([True, True, False, True])
    assert prior.kept("threshold", 0.05)["3.out"] == (0, 3)
    assert prior.kept("threshold", 0.2)["3.out"] == (0,)  # none is above: the largest stays


def test_rule_threshold_never_keeps_an_emptied_group() -> None:
    """Not even where its gamma, from before it was emptied, was the largest."""
    prior = prior_of()
    prior.gamma["3.out"] = torch.tensor([0.01, 0.9, 0.02, 0.01])
    with torch.no_grad():
        weights_of(prior.model)["3.weight"][1] = 0
    prior.shrink(0.0)
    assert prior.kept("threshold", 0.05)["3.out"] == (2,)


# ---------------------------------------------------------------- going on elsewhere


def test_a_resumed_prior_goes_on_as_the_first_would() -> None:
    prior = prior_of(("filter", "shape", "row"), lam=1.0)
    prior.update(some_curvature(prior.model))
    prior.shrink(0.3)
    saved = prior.state()
    frozen = {key: numbers(value) for key, value in saved.items()}
    weights = {n: w.clone() for n, w in prior.model.state_dict().items()}

    def go_on(one: GroupPrior) -> dict[str, dict[str, list[float]]]:
        for seed in (7, 8):
            one.shrink(0.1)
            one.update(some_curvature(one.model, seed))
        return {key: numbers(value) for key, value in one.state().items()}

    straight = go_on(prior)
    assert {key: numbers(value) for key, value in saved.items()} == frozen  # what was saved does not move
    other = prior_of(("filter", "shape", "row"), lam=1.0, seed=9)
    other.model.load_state_dict(weights)
    other.load_state(saved)
    assert go_on(other) == straight
    assert all(torch.equal(w, weights_of(prior.model)[n]) for n, w in weights_of(other.model).items())


def test_taking_over_what_is_left_of_a_network() -> None:
    old, new = prior_of(("row",)), prior_of(("row",))
    old.update(some_curvature(old.model))
    old.alive["6.out"][4] = False
    small = GroupSet("6.out", "row", 3, new.sets[0].members)
    new = GroupPrior(new.model, [small], {"6.out": 1.0}, "paper", SAMPLES)
    new.take_over(old, {"6.out": (0, 2, 4)})
    for attribute in ("gamma", "omega", "alive"):
        assert getattr(new, attribute)["6.out"].tolist() == getattr(old, attribute)["6.out"][[0, 2, 4]].tolist()
    new.gamma["6.out"][0] = 5.0
    assert float(old.gamma["6.out"][0]) != 5.0


def test_it_starts_with_ones() -> None:
    prior = prior_of()
    for group_set in prior.sets:
        assert prior.gamma[group_set.name].tolist() == prior.omega[group_set.name].tolist() == [1.0] * group_set.size
        assert bool((group_sizes(group_set, weights_of(prior.model)) > 0).all())
