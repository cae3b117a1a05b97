"""The prior over the groups of a network: what lives between variance updates, and what it decides."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from compressnas.bayes import penalty, variance
from compressnas.groups import GroupSet, Member, group_sums, norms, scale_groups, weights_of

TRIFLE = 1e-9  # part of a precision


class GroupPrior:
    """Prior variance and re-weighting coefficient of every group of a network.

    State between the proximal steps (`shrink`) and the variance updates (`update`); everything it computes stands in
    `variance.py` and `penalty.py`.

    Attributes:
        gamma: group set -> (G,) prior variance, from 1 on; 0 for a group that is gone.
        omega: group set -> (G,) re-weighting coefficient, from 1 on.
        alive: group set -> (G,) bool; a group that was emptied never comes back.
    """

    def __init__(
        self, model: nn.Module, sets: Sequence[GroupSet], lams: Mapping[str, float], scale: str | float, samples: int
    ) -> None:
        """Start with gamma = omega = 1 (algorithm 1).

        Args:
            model: the network whose weights are shrunk in place.
            sets: the group sets; they may overlap.
            lams: group set -> penalty strength lam.
            scale: a name in `variance.SCALES`, or a number, see `variance.scaled_curvature`.
            samples: number of training samples N.
        """
        self.model, self.lams, self.scale, self.samples = model, dict(lams), scale, samples
        device = next(model.parameters()).device
        self.sets = tuple(_on(s, device) for s in sets)
        self.gamma = {s.name: torch.ones(s.size, device=device) for s in sets}
        self.omega = {s.name: torch.ones(s.size, device=device) for s in sets}
        self.alive = {s.name: torch.ones(s.size, dtype=torch.bool, device=device) for s in sets}

    @torch.no_grad()
    def penalty(self) -> float:
        """The re-weighted group Lasso at the current weights."""
        weights = weights_of(self.model)
        terms = (penalty.group_lasso(norms(s, weights), self.omega[s.name], self.lams[s.name]) for s in self.sets)
        return float(sum(terms, torch.zeros(())))

    @torch.no_grad()
    def shrink(self, step: float | Mapping[str, float], floor: int = 1) -> None:
        """One proximal step after an optimizer step of size `step`, one for all or one for each group set.

        Overlapping sets are taken one after another.

        The `floor` largest groups of a set are never emptied: a layer without units cuts the network in two.
        A group that reaches zero takes its bias along (the writers), so that its unit does nothing from now on.
        """
        weights = weights_of(self.model)
        for group_set in self.sets:
            name, sizes = group_set.name, norms(group_set, weights)
            own_step = step[name] if isinstance(step, Mapping) else step
            factors = penalty.proximal_factors(sizes, self.omega[name], self.lams[name], own_step)
            factors = torch.where(self.alive[name], factors, torch.zeros_like(factors))
            if int((factors > 0).sum()) < floor:
                best = torch.where(self.alive[name], sizes, -torch.ones_like(sizes)).topk(floor).indices
                factors[best] = 1.0
            scale_groups(group_set.members, weights, factors)
            self.alive[name] = factors > 0
            self.gamma[name] = torch.where(self.alive[name], self.gamma[name], 0.0)
            scale_groups(group_set.writers, weights, self.alive[name].to(factors))

    @torch.no_grad()
    def update(self, curvature: Mapping[str, Tensor]) -> None:
        """One variance update: C, slopes, omega and gamma of every group, from the curvature of every weight.

        A group whose weights have no curvature is dead, and goes: nothing holds it, and alone in its weights it would
        get omega = 0 and gamma = infinity, out of the penalty's reach. A set without any curvature stays as it was: to
        empty it would cut the network in two, and no gamma comes back from infinity.

        Args:
            curvature: weight name -> diagonal curvature of the mean loss, shaped like the weight.
        """
        weights = weights_of(self.model)
        slopes = {s.name: self._slope_sums(s, weights, curvature) for s in self.sets}
        for group_set in self.sets:
            name = group_set.name
            sizes = norms(group_set, weights)
            omega = variance.omega_from_slopes(slopes[name])
            gamma = variance.group_gamma(sizes, omega)
            living = self.alive[name] & self._held(group_set, weights, curvature) & torch.isfinite(gamma) & (gamma > 0)
            if bool(living.any()):
                self.omega[name], self.gamma[name], self.alive[name] = omega, torch.where(living, gamma, 0.0), living
        self.shrink(0.0)  # empties what was found dead

    @torch.no_grad()
    def update_switches(self, curvature: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A variance update of one switch for each group, at 1 where the group is there -> evidence, set -> (G,).

        The prior variance of a switch, and with it that of its group, collapses to 0 where the data hold it with a
        precision of at most 1. There the evidence is 0 but for a trifle, so that these groups have an order, too.

        Args:
            curvature: group set -> (G,), of the mean loss in the switches.
        """
        evidence = {}
        for name, value in curvature.items():
            precision = variance.scaled_curvature(value, self.lams[name], self.scale, self.samples)
            gamma = variance.switch_gamma(precision)
            self.gamma[name] = torch.where(self.alive[name], gamma.to(self.gamma[name]), 0.0)
            self.omega[name] = variance.omega_from_slopes(variance.slope(gamma, precision)).to(self.omega[name])
            evidence[name] = variance.switch_evidence(precision) + TRIFLE * precision
        return evidence

    @torch.no_grad()
    def fade(self, factors: Mapping[str, Tensor]) -> None:
        """Scale what reads each group, group set -> (G,) factors, 1 if none; where it is 0 the group is emptied."""
        weights = weights_of(self.model)
        for group_set in [s for s in self.sets if s.name in factors]:
            own = factors[group_set.name].to(self.gamma[group_set.name])
            scale_groups(group_set.readers, weights, own)
            self.alive[group_set.name] &= own > 0
        self.shrink(0.0)

    def _held(self, group_set: GroupSet, weights: Mapping[str, Tensor], curvature: Mapping[str, Tensor]) -> Tensor:
        """(G,) bool: some weight that is not zero has curvature."""
        names = {member.parameter for member in group_set.members}
        return group_sums(group_set, {n: ((curvature[n] > 0) & (weights[n] != 0)).float() for n in names}) > 0

    def _slope_sums(
        self, group_set: GroupSet, weights: Mapping[str, Tensor], curvature: Mapping[str, Tensor]
    ) -> Tensor:
        """sum_{i in g} a_i -> (G,), over the weights that are not zero yet."""
        total = torch.zeros_like(norms(group_set, weights))
        for number, member in enumerate(group_set.members):
            weight = weights[member.parameter]
            precision = variance.scaled_curvature(
                curvature[member.parameter], self.lams[group_set.name], self.scale, self.samples
            )
            gamma = member.spread(self.gamma[group_set.name], weight, 1.0).expand_as(weight)
            others = self._other_precision(group_set, number, weight)
            each = variance.overlapping_slope(gamma, others, precision)
            total += member.sums(torch.where(weight == 0, torch.zeros_like(each), each), group_set.size)
        return total

    def _other_precision(self, own: GroupSet, number: int, weight: Tensor) -> Tensor:
        """sum_k 1/gamma_k over the other groups that hold each weight of member `number`, shaped like the weight."""
        total = torch.zeros_like(weight)
        for other in self.sets:
            for place, member in enumerate(other.members):
                itself = other.name == own.name and place == number
                if not itself and member.parameter == own.members[number].parameter:
                    precision = torch.where(self.alive[other.name], 1 / self.gamma[other.name], 0.0)
                    total += member.spread(precision, weight, 0.0)
        return total

    def kept(self, rule: str, threshold: float) -> dict[str, tuple[int, ...]]:
        """Group set -> indices that stay: the not yet emptied, and with rule `threshold` those of gamma above it.

        At least the group with the largest gamma of each set stays.
        """
        result = {}
        for group_set in self.sets:
            stays = self.alive[group_set.name].clone()
            if rule == "threshold":
                stays &= self.gamma[group_set.name] > threshold
            if not bool(stays.any()):
                stays[self.gamma[group_set.name].argmax()] = True
            result[group_set.name] = tuple(stays.nonzero()[:, 0].tolist())
        return result

    def take_over(self, old: "GroupPrior", kept: Mapping[str, Sequence[int]]) -> None:
        """Go on where `old` was, for a network of which only the groups `kept` (numbers of `old`) are left."""
        for name, indices in kept.items():
            for own, theirs in ((self.gamma, old.gamma), (self.omega, old.omega), (self.alive, old.alive)):
                own[name] = theirs[name][list(indices)].clone()

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Everything that a resumed run needs."""
        return {"gamma": dict(self.gamma), "omega": dict(self.omega), "alive": dict(self.alive)}

    def load_state(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """The inverse of `state`."""
        for attribute in ("gamma", "omega", "alive"):
            own = getattr(self, attribute)
            own.update({name: value.to(own[name].device) for name, value in state[attribute].items()})


def _on(group_set: GroupSet, device: torch.device) -> GroupSet:
    """The same groups with their numbers on the device of the weights."""

    def moved(members: Sequence[Member]) -> tuple[Member, ...]:
        return tuple(replace(member, group_of=member.group_of.to(device)) for member in members)

    return replace(
        group_set,
        members=moved(group_set.members),
        readers=moved(group_set.readers),
        writers=moved(group_set.writers),
    )
