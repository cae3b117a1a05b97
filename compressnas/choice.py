"""The groups a decision is made of: how they rank, and how they may be counted."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property

import torch
from torch import Tensor, nn

from compressnas.baselines import Evidence, scores
from compressnas.coupling import Coupling
from compressnas.errors import InputError
from compressnas.groups import GroupSet, Member
from compressnas.inputs import Inputs
from compressnas.surgery import Found, find_groups


@dataclass(frozen=True)
class Choice:
    """The groups there are, how they rank, and how they may be counted."""

    sets: Sequence[GroupSet]
    importance: Mapping[str, Tensor]
    floors: Mapping[str, int]
    round_to: int
    coupled: Coupling | None
    approximate: bool = False  # whether a norm averages over units of these sets

    def channels(self, alive: Mapping[str, Tensor]) -> int:
        """How many channels of all sets stay, of (G,) bool for each."""
        return sum(int(alive[s.name].sum()) * units(s) for s in self.sets)

    def all_channels(self, of: Mapping[str, int]) -> int:
        """How many channels all sets have, or had when they were `of` groups."""
        return sum(of.get(s.name, s.size) * units(s) for s in self.sets)

    def everything(self) -> dict[str, Tensor]:
        """(G,) True for each set: nothing is removed."""
        return {s.name: torch.ones(s.size, dtype=torch.bool) for s in self.sets}

    def rounded(self, group_set: GroupSet, count: float) -> int:
        """A number of groups that makes a multiple of `round_to` channels; all of them where there are fewer."""
        step = self.step(group_set)
        return int(min(max(round(count / step) * step, self.floors[group_set.name]), group_set.size))

    def step(self, group_set: GroupSet) -> int:
        return max(1, self.round_to // math.gcd(self.round_to, units(group_set)))

    def best(self, counts: Mapping[str, int]) -> dict[str, Tensor]:
        """The most important groups of each set -> (G,) bool. Every layer keeps something to read."""
        alive = {}
        for s in self.sets:
            ranked = self.ranked[s.name]
            alive[s.name] = torch.zeros(s.size, dtype=torch.bool, device=ranked.device)
            alive[s.name][ranked[: counts[s.name]]] = True
            _keep_readable(self.lonely[s.name], alive[s.name], ranked)
        return alive

    @cached_property
    def ranked(self) -> dict[str, Tensor]:
        """Group set -> (G,) its groups, the most important first."""
        return {s.name: self.importance[s.name].argsort(descending=True, stable=True) for s in self.sets}

    @cached_property
    def lonely(self) -> dict[str, list[Member]]:
        """Group set -> members that have some of its groups and nothing else: a layer that these alone feed or make."""
        return {
            s.name: [m for m in s.members if bool((m.group_of >= 0).all()) and len(set(m.group_of.tolist())) < s.size]
            for s in self.sets
        }

    def uniform(self, fraction: float) -> dict[str, int]:
        """How many groups of each set are this fraction of it."""
        return {s.name: self.rounded(s, fraction * s.size) for s in self.sets}

    def nearest(self, fraction: float, of: Mapping[str, int]) -> dict[str, int]:
        """This fraction of `of` (or else of what there is) of each set, rounded up or down so that all together come
        nearest to it.
        """
        asked = {s.name: fraction * of.get(s.name, s.size) for s in self.sets}
        counts = {s.name: self.rounded(s, asked[s.name]) for s in self.sets}
        off = {s.name: (counts[s.name] - asked[s.name]) * units(s) for s in self.sets}
        total = sum(off.values())
        sign = 1 if total > 0 else -1
        for s in sorted(self.sets, key=lambda s: sign * off[s.name] / (self.step(s) * units(s)), reverse=True):
            other = self.rounded(s, counts[s.name] - sign * self.step(s))
            change = (other - counts[s.name]) * units(s)
            if sign * off[s.name] > 0 and abs(total + change) < abs(total):
                counts[s.name], total = other, total + change
        return counts


def _keep_readable(lonely: Sequence[Member], alive: Tensor, ranked: Tensor) -> None:
    """Each layer that makes or reads units of this set alone keeps its best one: an empty layer cuts the network."""
    for member in lonely:
        if not bool(alive[member.group_of].any()):
            inside = set(member.group_of.tolist())
            alive[next(g for g in ranked.tolist() if g in inside)] = True


def choices(
    model: nn.Module,
    example: Inputs,
    method: str,
    evidence: Evidence,
    round_to: int = 1,
    ignore: Sequence[str] = (),
    min_channels: int = 1,
    found: Found | None = None,
    approximate: bool = False,
) -> Choice:
    """All groups that may go, ranked by `method`; arguments as those of `decide`.

    Raises:
        InputError: a value is out of range, the network cannot be traced, or nothing of it can be pruned.
    """
    for name, count in (("round_to", round_to), ("min_channels", min_channels)):
        if count < 1:
            raise InputError(f"{name} {count}: expected a whole number of at least 1")
    found = found or find_groups(model, example, ("coupled",), approximate)
    sets = [s for s in found.sets if not any(_matches(s.name, pattern) for pattern in ignore)]
    if not sets:
        raise InputError(f"nothing is left to prune: ignore={list(ignore)} matches every group set")
    floors = {s.name: min(_least(s, min_channels, round_to), s.size) for s in sets}
    changing = any(s.name in found.approximate for s in sets)
    return Choice(sets, scores(method, model, sets, evidence), floors, round_to, found.coupled, changing)


def _matches(name: str, pattern: str) -> bool:
    layer = name.partition(":")[0].removesuffix(".out")
    return fnmatchcase(name, pattern) or fnmatchcase(layer, pattern)


def units(group_set: GroupSet) -> int:
    """How many channels of its own layer go with one group."""
    return max(1, int((group_set.members[0].group_of >= 0).sum()) // group_set.size)


def _least(group_set: GroupSet, channels: int, round_to: int) -> int:
    """The fewest groups that hold this many channels, or one multiple of round_to."""
    return max(1, math.ceil(max(channels, min(round_to, group_set.size * units(group_set))) / units(group_set)))
