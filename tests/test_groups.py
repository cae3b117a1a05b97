"""Sums, norms, masks and kept fractions of groups against loops over single weights."""

import itertools
import math
from collections.abc import Sequence

import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from compressnas.groups import (
    GroupSet,
    Member,
    group_sizes,
    group_sums,
    kept_fractions,
    mask_groups,
    modules_with_weights,
    norms,
    scale_groups,
    squared_norms,
    structure,
    weights_of,
)
from compressnas.slim import SlimArch
from compressnas.surgery import find_groups, remove

GROUPS = 4


@st.composite
def members(draw: st.DrawFn) -> tuple[Member, Tensor]:
    """A member with any axes of any parameter of 1 to 4 axes, and the parameter."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    axes = sorted(draw(st.sets(st.integers(0, len(shape) - 1), min_size=1)))
    count = math.prod(shape[axis] for axis in axes)
    group_of = draw(st.lists(st.integers(-1, GROUPS - 1), min_size=count, max_size=count) | st.just(None))
    if group_of is None:  # what most sets have: place i is group i
        group_of = [i if i < GROUPS else -1 for i in range(count)]
    weight = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
    if draw(st.booleans()) and weight.dim() == 4:
        weight = weight.to(memory_format=torch.channels_last)
    return Member("w", tuple(axes), torch.tensor(group_of)), weight


@settings(deadline=None)
@given(members())
def test_sums_of_a_member(given_one: tuple[Member, Tensor]) -> None:
    member, weight = given_one
    places = reference.places(member, weight.shape)
    expected = [math.fsum(float(weight[place]) for place in places.get(g, [])) for g in range(GROUPS)]
    assert member.sums(weight, GROUPS).tolist() == pytest.approx(expected, abs=1e-12)


@settings(deadline=None)
@given(members(), st.sampled_from([0.0, 1.0]))
def test_spread_of_a_member(given_one: tuple[Member, Tensor], outside: float) -> None:
    member, weight = given_one
    per_group = torch.arange(2, 2 + GROUPS, dtype=torch.float64)
    spread = member.spread(per_group, weight, outside).expand_as(weight)
    for group, places in reference.places(member, weight.shape).items():
        for place in places:
            assert float(spread[place]) == (outside if group < 0 else float(per_group[group]))


@settings(deadline=None)
@given(members(), st.sets(st.integers(0, GROUPS - 1)))
def test_scaling_and_masking_in_place(given_one: tuple[Member, Tensor], kept: set[int]) -> None:
    member, weight = given_one
    factors = torch.tensor([0.5, 0.0, 2.0, 1.0])
    for act, factor in (
        (lambda w: scale_groups([member], {"w": w}, factors), factors.tolist()),
        (lambda w: mask_groups([member], {"w": w}, sorted(kept), GROUPS), [float(g in kept) for g in range(GROUPS)]),
    ):
        changed = weight.clone()
        act(changed)
        for group, places in reference.places(member, weight.shape).items():
            for place in places:
                assert float(changed[place]) == float(weight[place]) * (1.0 if group < 0 else factor[group])


@settings(deadline=None)
@given(st.lists(members(), min_size=1, max_size=3))
def test_norms_sums_and_sizes_of_a_set(parts: list[tuple[Member, Tensor]]) -> None:
    own = tuple(Member(f"w{i}", m.axes, m.group_of) for i, (m, _) in enumerate(parts))
    weights = {f"w{i}": w for i, (_, w) in enumerate(parts)}
    group_set = GroupSet("all", "coupled", GROUPS, own)
    values = [reference.group_weights(group_set, g, weights) for g in range(GROUPS)]
    assert norms(group_set, weights).tolist() == pytest.approx([reference.norm(v) for v in values])
    assert squared_norms(group_set, weights).tolist() == pytest.approx([reference.norm(v) ** 2 for v in values])
    assert group_sums(group_set, weights).tolist() == pytest.approx([math.fsum(v) for v in values], abs=1e-12)
    assert group_sizes(group_set, weights).tolist() == [len(v) for v in values]


# ---------------------------------------------------------------- what is left of the layers


def small_lenet() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(3, 4, (3, 2)), nn.ReLU(), nn.Flatten(),
        nn.Linear(24, 5), nn.ReLU(), nn.Linear(5, 3),
    )  # fmt: skip


EXAMPLE = torch.zeros(1, 2, 8, 8)
COMBINATIONS = (
    ("filter", "row"), ("coupled",), ("column",), ("shape",), ("filter", "shape", "row", "column"),
    ("coupled", "shape", "column"),
)  # fmt: skip


def some_kept(sets: Sequence[GroupSet], seed: int, part: float) -> dict[str, Tensor]:
    """Random flags, at least one per set."""
    generator = torch.Generator().manual_seed(seed)
    kept = {s.name: torch.rand(s.size, generator=generator) < part for s in sets}
    for flags in kept.values():
        flags[int(torch.randint(len(flags), (), generator=generator))] = True
    return kept


@pytest.mark.parametrize("kinds", COMBINATIONS, ids=" ".join)
def test_kept_fractions_count_the_weights_that_are_left(kinds: tuple[str, ...]) -> None:
    model = small_lenet()
    sets, weights = find_groups(model, EXAMPLE, kinds).sets, weights_of(model)
    for seed, part in itertools.product(range(5), (0.1, 0.3, 0.8)):
        kept = some_kept(sets, seed, part)
        found = kept_fractions(model, sets, kept)
        assert set(found) == {"0", "3", "6", "8"}
        for layer, fraction in found.items():
            name = f"{layer}.weight"
            kernel_axes = (2, 3) if weights[name].dim() == 4 else ()
            assert fraction == pytest.approx(reference.kept_fraction(name, weights[name], sets, kept, kernel_axes))


def test_kept_fractions_of_a_kernel_that_lost_its_border_and_a_hole() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 5))
    group_set = GroupSet("0.shape", "shape", 25, (Member("0.weight", (1, 2, 3), torch.arange(25)),))
    kernel = torch.zeros(5, 5, dtype=torch.bool)
    kernel[1, 2] = kernel[4, 3] = True  # rows 1..4 and columns 2..3 span them; the rows between are not gone
    assert kept_fractions(model, [group_set], {"0.shape": kernel.reshape(-1)}) == {"0": pytest.approx(4 * 2 / 25)}
    assert kept_fractions(model, [group_set], {"0.shape": torch.zeros(25, dtype=torch.bool)}) == {"0": 0.0}


@pytest.mark.parametrize("kinds", COMBINATIONS, ids=" ".join)
def test_kept_fractions_are_those_of_the_removed_network(kinds: tuple[str, ...]) -> None:
    """Exactly, where whole units go; removal may find more where columns and positions leave units without a reader."""
    model = small_lenet()
    sets = find_groups(model, EXAMPLE, kinds).sets
    images = torch.randn(3, 2, 8, 8)
    for seed in range(3):
        kept = some_kept(sets, seed, 0.6)
        indices = {name: tuple(flags.nonzero()[:, 0].tolist()) for name, flags in kept.items()}
        small = remove(model, EXAMPLE, SlimArch(indices, {s.name: s.size for s in sets}), images)[0]
        whole = {name: layer.weight.numel() for name, layer in modules_with_weights(model)}
        left = {name: layer.weight.numel() / whole[name] for name, layer in modules_with_weights(small)}
        found = kept_fractions(model, sets, kept)
        if all(s.name.endswith(".out") for s in sets):
            assert found == pytest.approx(left)
        assert all(found[name] >= left[name] - 1e-9 for name in left)


def test_nothing_gone_leaves_everything() -> None:
    model = small_lenet()
    sets = find_groups(model, EXAMPLE, ("coupled", "shape", "column")).sets
    kept = {s.name: torch.ones(s.size, dtype=torch.bool) for s in sets}
    assert kept_fractions(model, sets, kept) == {"0": 1.0, "3": 1.0, "6": 1.0, "8": 1.0}


def test_layers_and_widths_in_order() -> None:
    model = small_lenet()
    assert [name for name, _ in modules_with_weights(model)] == ["0", "3", "6", "8"]
    assert structure(model) == "3-4-24-5"
    assert structure(nn.Sequential(nn.Flatten(), nn.Linear(784, 300), nn.ReLU(), nn.Linear(300, 10))) == "784-300"


def test_weights_of_shares_memory_and_leaves_autograd_out() -> None:
    model = small_lenet()
    weights = weights_of(model)
    weights["8.bias"].fill_(7.0)
    assert model[8].bias.tolist() == [7.0] * 3
    assert not any(weight.requires_grad for weight in weights.values())
