"""Bayesian pruning: the loop over a network that turns a penalty and variance updates into a decision."""

import copy
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from compressnas.baselines import Evidence, scores
from compressnas.bayes.curvature import diagonal_curvature
from compressnas.bayes.prior import GroupPrior
from compressnas.bayes.switches import switch_curvature
from compressnas.budget import Budget
from compressnas.coupling import output_sets
from compressnas.data import DataSet, batches
from compressnas.errors import InputError
from compressnas.gauge import Gauge
from compressnas.groups import GroupSet, KeptFractions, group_sizes, layer_weights, norms, weights_of
from compressnas.inputs import Inputs
from compressnas.measure import cost
from compressnas.progress import Step
from compressnas.recipe import Bayes, Train
from compressnas.reconstruct import reconstruct
from compressnas.slim import SlimArch
from compressnas.surgery import Found, find_groups, origins, remove, same_groups
from compressnas.train import (
    Work,
    channels_last,
    evaluate,
    sgd,
    stage_seed,
    task_loss,
    train_epoch,
    training_batches,
)

STAGE = "shrink"
NEXT_TO_NOTHING = 1e-30
LARGEST_LAM = 1e30  # empties every group in one step, and is finite in float32


@dataclass(frozen=True)
class Decision:
    """What a method decided.

    Attributes:
        model: the network the decision is about, dense in shape, with the weights that it ended on.
        slim: which groups stay.
        groups: group set -> kind, gamma, omega, norm, size, for the report.
        notes: what a user should know about how it was decided.
    """

    model: nn.Module
    slim: SlimArch
    groups: Mapping[str, Mapping[str, Any]]
    notes: tuple[str, ...] = ()


def penalty_strengths(model: nn.Module, sets: Sequence[GroupSet], example: Inputs, settings: Bayes) -> dict[str, float]:
    """lam of each group set: settings.lam * (FLOPs per weight of its groups / FLOPs per weight of the network)^power
    * the factors whose pattern its name matches.

    With strong curvature the penalty on a group tends to lam |g| log ||w_g||: at power 1 a group is charged for the
    FLOPs that go with it, at power 0 for its weights.

    Raises:
        InputError: a pattern matches no group set.
    """
    for pattern in settings.lam_factors:
        if not any(fnmatchcase(s.name, pattern) for s in sets):
            names = ", ".join(s.name for s in sets)
            raise InputError(f"method.lam_factors: {pattern!r} matches no group set; there are {names}")
    layer_flops, weights = cost(model, example).by_layer, weights_of(model)
    total_weights = sum(weights[w].numel() for own in layer_weights(model).values() for w in own)
    mean = max(sum(layer_flops.values()), 1) / max(total_weights, 1)
    alive = {s.name: torch.ones(s.size, dtype=torch.bool) for s in sets}
    fractions = KeptFractions(model, sets, output_sets(model, example))
    result = {}
    for group_set in sets:
        without_first = dict(alive)
        without_first[group_set.name] = torch.arange(group_set.size) > 0
        left = fractions(without_first)
        saved = sum(flops * (1 - left.get(name, 1.0)) for name, flops in layer_flops.items())
        per_weight = saved / float(group_sizes(group_set, weights)[0])
        strength = settings.lam * max(per_weight / mean, 1e-3) ** settings.lam_cost_power
        strength *= math.prod(f for pattern, f in settings.lam_factors.items() if fnmatchcase(group_set.name, pattern))
        result[group_set.name] = min(strength, LARGEST_LAM)
    return result


def grown(lams: Mapping[str, float], growth: float, times: float) -> dict[str, float]:
    """lam growth^times of each group set, as far as float32 goes."""
    try:
        factor = growth**times
    except OverflowError:
        factor = LARGEST_LAM
    return {name: min(lam * factor, LARGEST_LAM) for name, lam in lams.items()}


def settled(prior: GroupPrior, gauge: Gauge, settings: Bayes) -> tuple[dict[str, Tensor], bool]:
    """What stays: what the rule keeps, and if that costs more than it may, only the best of it by gamma per cost.

    Returns:
        Group set -> (G,) bool on the CPU, and whether the rule alone was enough.
    """
    kept = prior.kept(settings.rule, settings.threshold)
    gamma = {name: value.cpu() for name, value in prior.gamma.items()}
    alive = {name: _flags(indices, gamma[name]) for name, indices in kept.items()}
    if gauge.met(alive):
        return alive, True
    scores = {name: gamma[name] / gamma[name][flags].mean() for name, flags in alive.items()}  # layers differ in scale
    return gauge.fewest(alive, scores), False


def expanded(dense: nn.Module, small: nn.Module, example: Inputs, slim: SlimArch) -> nn.Module:
    """`dense` with the tensors of `small`, what is left of it by `slim`, where they came from.

    Elsewhere weights are zero, and buffers (the statistics of norms) what they were.
    """
    full = copy.deepcopy(dense)
    if not any(slim.removed(name) for name in slim.sizes):
        full.load_state_dict(small.state_dict())
        return full
    places, left = origins(dense, example, slim), dict(small.named_buffers())
    for name, buffer in full.named_buffers():
        if name in places:
            _scatter(buffer, left[name], places[name])
        elif name in left and left[name].shape == buffer.shape:  # counters and the like
            buffer.copy_(left[name])
    weights, own = weights_of(full), weights_of(small)
    for name, weight in weights.items():
        weight.zero_()
        _scatter(weight, own[name], places[name])
    return full


def _scatter(full: Tensor, small: Tensor, places: Tensor) -> None:
    """Write the elements of `small` to the flat (row-major) places of `full`, in place; -1 is none."""
    flat = full.reshape(-1).clone()
    inside = places.reshape(-1) >= 0
    flat[places.reshape(-1)[inside].to(flat.device)] = small.reshape(-1)[inside.to(small.device)].to(flat)
    full.copy_(flat.reshape(full.shape))  # row-major, whatever the memory format


def bayes_prune(model: nn.Module, data: DataSet, settings: Bayes, work: Work, found: Found | None = None) -> Decision:
    """Train with the re-weighted group Lasso, update the variances, and decide by what has collapsed.

    Args:
        model: the trained dense network; not changed.
        found: what find_groups says of it, where that is known already.

    Raises:
        InputError: the groups do not fit the network, or the loss is not finite.
        RunFailed: no removal could be proved.
    """
    loop = _Loop(model, data, settings, work, found)
    loop.run()
    return loop.decide()


class _Loop:
    """The network while it shrinks: it is made physically smaller as groups die, when only whole units can."""

    def __init__(
        self, dense: nn.Module, data: DataSet, settings: Bayes, work: Work, found: Found | None = None
    ) -> None:
        self.data, self.settings, self.work = data, settings, work
        self.dense = copy.deepcopy(dense).to(work.device)
        self.example = data.train[0][0][None].to(work.device)
        self.proof_images = data.validation.__getitems__(range(min(16, len(data.validation))))[0].to(work.device)
        found = found or find_groups(self.dense, self.example, settings.groups, settings.approximate)
        if not found.sets:
            raise InputError(f"nothing can be pruned: {'; '.join(f'{n}: {r}' for n, r in found.left_alone)}")
        self.left_alone = found.left_alone
        self.kind_of_decision: dict[str, str | int | float] = {"approximate": True} if found.approximate else {}
        self.sizes = {s.name: s.size for s in found.sets}
        self.lams = penalty_strengths(self.dense, found.sets, self.example, settings)
        self.budget = Budget.of(settings.target, self.dense, self.example)
        self.compacts = all(s.name.endswith(".out") for s in found.sets)
        self.loss_fn = task_loss(settings, self.dense)
        self.epoch, self.reached = 0, False
        self.going: dict[str, Tensor] = {}  # group set -> (G,) bool: what fades in this round
        self._adopt(copy.deepcopy(self.dense), {s.name: tuple(range(s.size)) for s in found.sets}, found.sets)

    def _adopt(
        self, model: nn.Module, origin: dict[str, tuple[int, ...]], sets: Sequence[GroupSet] | None = None
    ) -> None:
        """Go on with `model`, whose groups are those numbered `origin` of the dense network."""
        self.model = channels_last(model.to(self.work.device))
        self.origin = origin
        self.sets = tuple(sets or same_groups(self.model, self.example, self.settings.groups, origin))
        samples, scale = len(self.data.train), self.settings.curvature_scale
        self.prior = GroupPrior(self.model, self.sets, self.lams, scale, samples)
        self.gauge = Gauge(self.budget, self.model, self.sets, self.example)
        sgd_settings = self.settings.model_dump(include={"lr", "batch_size", "momentum", "weight_decay", "epochs"})
        self.optimizer = sgd(self.model, Train(**sgd_settings))

    # ------------------------------------------------------------ the loop

    def run(self) -> None:
        settings, work = self.settings, self.work
        self._restore()
        if settings.epochs == 0:
            return self._at_once()
        loader = work.accelerator.prepare(training_batches(self.data, settings.batch_size, work, STAGE, self.epoch))
        with work.progress.stage(STAGE, settings.epochs * len(loader)) as step:
            step(self.epoch * len(loader))
            while self.epoch < settings.epochs and not self.reached:
                self._one_epoch(loader, step)
                self._save()

    def _at_once(self) -> None:
        """Down to the target with no training."""
        if not self.reached:
            self._choose_next(0.0, 0.0)
            self._drop(0.0)
            if self.compacts:
                self._compact()
            self.reached = True
            self._save()

    def _one_epoch(self, loader: Any, step: Step) -> None:
        """Rounds of: variance update, proximal SGD, removal of what died."""
        started, work, steps = time.perf_counter(), self.work, len(loader)
        iterator, taken, losses, errors = iter(loader), 0, 0.0, 0.0
        while taken < steps and not self.reached:
            round_steps = min(-(-steps // self.settings.updates_per_epoch), steps - taken)
            if self.settings.control == "lam":
                self._update(taken / steps)
            elif (self.epoch + taken / steps) / self.settings.epochs < self.settings.falls_in:
                self._choose_next(taken / steps, (taken + round_steps) / steps)
                if self.settings.reconstruct:
                    self._drop(taken / steps)
            else:  # the target is reached: what is left trains on
                self.going, round_steps = {}, steps - taken
            loss, error, count = self._one_round(iterator, round_steps, step)
            taken, losses, errors = taken + count, losses + loss * count, errors + error * count
            if self.compacts:
                self._compact()
        self.epoch += 1
        error = evaluate(self.model, self.data.validation, work.device, place=f"{STAGE}, epoch {self.epoch}")
        step(0, error=f"{error:.2%}")
        work.record(
            STAGE,
            epoch=self.epoch,
            loss=losses / taken,
            train_error=errors / taken,
            error=error,
            groups_alive={name: int(alive.sum()) for name, alive in self.prior.alive.items()},
            flops=round(self.budget.flops_meter(self.model, self.sets, self.example)(self.prior.alive)),
            seconds=time.perf_counter() - started,
        )

    def _one_round(self, iterator: Iterator[Any], steps: int, step: Step) -> tuple[float, float, int]:
        """`steps` optimizer steps, each with its proximal step -> loss, training error, steps taken."""
        taken, show = 0, {"groups_alive": self._groups_alive()}
        has_target = self.settings.target is not None  # without one every epoch is run

        def after_step() -> bool:
            nonlocal taken
            taken += 1
            if self.settings.control == "budget":
                left = steps - taken  # what is to go fades to nothing in equal steps
                self.prior.fade({n: torch.where(goes, left / (left + 1), 1.0) for n, goes in self.going.items()})
                return taken == steps
            self.prior.shrink(self.settings.lr)
            show["groups_alive"] = self._groups_alive()
            self.reached = has_target and self.gauge.met(self.prior.alive)
            return self.reached or taken == steps

        place = f"{STAGE}, epoch {self.epoch + 1}"
        loss, error = train_epoch(
            self.model,
            self.optimizer,
            iterator,
            self.work,
            place=place,
            step=step,
            loss_fn=self.loss_fn,
            after_step=after_step,
            show=show,
        )
        return loss, error, taken

    def _groups_alive(self) -> int:
        return sum(int(alive.sum()) for alive in self.prior.alive.values())

    def _update(self, part: float) -> None:
        """One variance update from fresh training images, after this part of the epoch."""
        self.prior.lams = grown(self.lams, self.settings.lam_growth, self.epoch + part)
        some, generator = self._some_images(part)
        self.prior.update(diagonal_curvature(self.model, some, self.settings.curvature.kind, generator))

    def _choose_next(self, part: float, then: float) -> None:
        """One update of the switches, and what fades until the part `then` of the epoch is done.

        The cost falls by the same factor in each round, to the target at the end of the last one in which it falls.
        """
        some, generator = self._some_images(part)
        settings, exact = self.settings, self.settings.curvature.kind == "ggn"
        held = switch_curvature(self.model, self.sets, some, generator, exact=exact)
        evidence = self.prior.update_switches(held)
        done = (self.epoch + then) / settings.epochs / settings.falls_in if settings.epochs else 1.0
        dense, alive = self.gauge.cost(self.dense), {n: flags.cpu() for n, flags in self.prior.alive.items()}
        goal = dense * min(self.budget.limit / dense, 1.0) ** min(done, 1.0)
        sizes = self.sizes if settings.scope == "uniform" else None
        if settings.within == "norm":
            evidence = self._in_order_of_norm(evidence)
        left = self.gauge.fewest(alive, evidence, goal, sizes)
        self.going = {n: (flags & ~left[n]).to(self.prior.alive[n].device) for n, flags in alive.items()}

    def _in_order_of_norm(self, evidence: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The evidence of each set, dealt out anew: the most of it to the group of the largest norm, and so on."""
        importance = scores("magnitude", self.model, self.sets, Evidence())
        dealt = {}
        for name, value in evidence.items():
            norm = importance[name].to(value).masked_fill(~self.prior.alive[name].to(value.device), -1)
            dealt[name] = torch.empty_like(value)
            ranked = torch.arange(len(value), 0, -1, device=value.device) * NEXT_TO_NOTHING  # where evidence is equal
            dealt[name][norm.argsort(descending=True, stable=True)] = value.sort(descending=True).values + ranked
        return dealt

    def _drop(self, part: float) -> None:
        """What is to go goes now; the weights that stay are fitted to that, if they are to be."""
        if self.settings.reconstruct:
            alive = {n: flags & ~self.going[n] for n, flags in self.prior.alive.items()}
            some, _ = self._some_images(part)
            fitted = reconstruct(self.model, self.example, self._decision(alive), some, progress=self.work.progress)
            self.model.load_state_dict(fitted.state_dict())
        self.prior.fade({n: (~goes).float() for n, goes in self.going.items()})
        self.going = {}

    def _decision(self, alive: Mapping[str, Tensor]) -> SlimArch:
        """What stays of the network as it is now."""
        kept = {name: tuple(flags.nonzero()[:, 0].tolist()) for name, flags in alive.items()}
        return SlimArch(kept, {s.name: s.size for s in self.sets}, self.kind_of_decision)

    def _some_images(self, part: float) -> tuple[Iterator[tuple[Tensor, Tensor]], torch.Generator]:
        """Fresh training batches for the curvature, and what draws its targets."""
        wanted = self.settings.curvature
        seed = stage_seed(self.work.seed, f"curvature {self.epoch + part:.6f}")
        loader = batches(self.data.train, wanted.batch_size, shuffle=True, seed=seed)
        taken = -(-wanted.samples // wanted.batch_size)
        device = self.work.device
        some = ((x.to(device), y.to(device)) for _, (x, y) in zip(range(taken), loader, strict=False))
        return some, torch.Generator().manual_seed(seed)

    def _compact(self) -> None:
        """Remove the units that are dead already: later epochs cost what is left. The proof is that of any removal."""
        decision = self._decision(self.prior.alive)
        if not any(decision.removed(name) for name in decision.sizes):
            return
        old = self.prior
        small, kept, _, _ = remove(self.model, self.example, decision, self.proof_images)
        self._adopt(small, {name: tuple(self.origin[name][i] for i in kept.kept[name]) for name in kept.sizes})
        self.prior.take_over(old, kept.kept)

    # ------------------------------------------------------------ checkpoints

    def _save(self) -> None:
        state = {"epoch": self.epoch, "reached": self.reached, "origin": {n: list(i) for n, i in self.origin.items()}}
        state |= {"model": self.model.state_dict(), "prior": self.prior.state()}
        self.work.save(STAGE, {**state, "optimizer": self.optimizer.state_dict()})

    def _restore(self) -> None:
        state = self.work.load(STAGE)
        if state is None:
            return
        try:
            origin = {name: tuple(indices) for name, indices in state["origin"].items()}
            compact = any(len(origin[name]) < size for name, size in self.sizes.items())
            if compact:
                decision = SlimArch(origin, self.sizes, self.kind_of_decision)
                small = remove(self.dense, self.example, decision, self.proof_images)[0]
                self._adopt(small, origin)
            self.model.load_state_dict(state["model"])
            self.prior.load_state(state["prior"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.epoch, self.reached = int(state["epoch"]), bool(state["reached"])
        except (KeyError, ValueError, RuntimeError) as error:
            raise InputError(f"the checkpoint of stage {STAGE} does not fit this recipe; use --overwrite") from error

    # ------------------------------------------------------------ deciding

    def decide(self) -> Decision:
        """What stays, in the numbers of the dense network, and the dense network with the weights it ended on."""
        settings = self.settings
        notes = [f"{name} is left alone: {reason}" for name, reason in self.left_alone]
        alive, reached = settled(self.prior, self.gauge, settings)
        if not reached:
            notes.append(
                "the target was not reached while shrinking: the rest went by gamma (over the mean of its set) per cost"
            )
        original = {n: tuple(self.origin[n][i] for i in alive[n].nonzero()[:, 0].tolist()) for n in alive}
        origin: dict[str, str | int | float] = {"method": "bayes", "seed": self.work.seed, "lam": settings.lam}
        origin |= {"groups": ", ".join(settings.groups), "rule": settings.rule, "epochs": self.epoch}
        slim = SlimArch(original, self.sizes, origin | self.kind_of_decision)
        return Decision(self._expanded(), slim, self._group_facts(), tuple(notes))

    def _expanded(self) -> nn.Module:
        return expanded(self.dense, self.model, self.example, SlimArch(self.origin, self.sizes))

    def _group_facts(self) -> dict[str, dict[str, Any]]:
        """gamma, omega and norm of every group of the dense network; gone ones have 0."""
        facts = {}
        weights = weights_of(self.model)
        for group_set in self.sets:
            name = group_set.name
            values = {
                "gamma": self.prior.gamma[name],
                "omega": self.prior.omega[name],
                "norm": norms(group_set, weights),
            }
            full = {key: torch.zeros(self.sizes[name]) for key in values}
            for key, value in values.items():
                full[key][list(self.origin[name])] = value.cpu()
            facts[name] = {
                "kind": group_set.kind,
                "size": self.sizes[name],
                **{key: [_number(v) for v in value.tolist()] for key, value in full.items()},
            }
        return facts


def _flags(indices: Sequence[int], like: Tensor) -> Tensor:
    flags = torch.zeros(like.shape[0], dtype=torch.bool, device=like.device)
    flags[list(indices)] = True
    return flags


def _number(value: float) -> float | None:
    return value if abs(value) != float("inf") else None
