"""Bayesian pruning inside a training loop of one's own."""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn

from compressnas.api import remove
from compressnas.bayes.curvature import Curvatures, diagonal_curvature
from compressnas.bayes.prior import GroupPrior
from compressnas.bayes.prune import grown, penalty_strengths, settled
from compressnas.bayes.scores import Loss
from compressnas.budget import Budget
from compressnas.coupling import one_line
from compressnas.errors import InputError
from compressnas.faults import faults_of
from compressnas.gauge import Gauge
from compressnas.inputs import Inputs, map_tensors
from compressnas.interface import samples, take
from compressnas.proof import Proof
from compressnas.recipe import Bayes
from compressnas.slim import SlimArch
from compressnas.surgery import find_groups

PROOF_SAMPLES = 16
OF_THE_LOOP = (
    "kind", "epochs", "lr", "batch_size", "momentum", "weight_decay", "updates_per_epoch", "distill", "temperature",
    "control", "scope", "falls_in",
)  # fmt: skip


class BayesPruner:
    """Shrinks a network while it trains: a proximal step after each optimizer step, a variance update now and then.

        pruner = BayesPruner(model, example_inputs, lam=1e-3, target={"flops": 0.5})
        for epoch in range(epochs):
            for x, y in loader:
                optimizer.zero_grad(); loss_fn(model(x), y).backward(); optimizer.step()
                pruner.shrink(optimizer)
            pruner.update(loader)
        small, proof = pruner.finish()

    The weights of the model shrink in place, to exact zero where a group goes; its modules keep their shapes until
    `finish`, which leaves it as it is and returns a smaller one.

    Attributes:
        reached: whether the target is met; from then on nothing shrinks any more, and what is zero stays zero.
        left_alone: (group set, reason) of what is not pruned.
    """

    def __init__(
        self,
        model: nn.Module,
        example_inputs: Inputs,
        *,
        groups: str | Iterable[str] = "coupled",
        seed: int = 0,
        **settings: Any,
    ) -> None:
        """Find the groups of `model`, and start with gamma = omega = 1.

        Args:
            model: the network that is trained, on its device. One that is wrapped for several devices, or compiled, is
                unwrapped.
            example_inputs: a tensor, a tuple of arguments or a mapping of named ones.
            groups: coupled, filter, row, column or shape, or several of them.
            seed: of the targets that the curvature draws.
            settings: those of method `bayes` in a recipe, with the same meaning and defaults: lam, lam_cost_power,
                lam_growth (a factor for each update), target ({"flops": x} or {"params": x}, a fraction below 1),
                curvature ({"kind": ..., "samples": ..., "batch_size": ...}), curvature_scale, rule, threshold,
                approximate (whether channels that a norm averages over may go, too).

        Raises:
            InputError: a setting is not one of these or out of range, the network cannot be traced, or nothing of it
                can be pruned.
        """
        self.settings = _settings(groups, settings)
        self.model = _unwrapped(model)
        self._device = _device(self.model)
        # What is about shapes happens on the CPU, as does the proof, which needs float64.
        twin, self._example = copy.deepcopy(self.model).cpu(), _moved(example_inputs, torch.device("cpu"))
        found = find_groups(twin, self._example, self.settings.groups, self.settings.approximate)
        trained = {name for name, p in self.model.named_parameters() if p.requires_grad}
        frozen = [s.name for s in found.sets if not {m.parameter for m in s.members} <= trained]
        sets = [s for s in found.sets if s.name not in frozen]
        self._approximate = any(s.name in found.approximate for s in sets)
        self.left_alone = (*found.left_alone, *((name, "it holds weights that are not trained") for name in frozen))
        if not sets:
            raise InputError(f"nothing can be pruned: {'; '.join(f'{n}: {r}' for n, r in self.left_alone)}")
        self._lams = penalty_strengths(twin, sets, self._example, self.settings)
        budget = Budget.of(self.settings.target, twin, self._example)
        self._gauge = Gauge(budget, twin, sets, self._example)
        self._prior = GroupPrior(self.model, sets, self._lams, self.settings.curvature_scale, samples=1)
        self._generator, self._seed, self._updates = torch.Generator().manual_seed(seed), seed, 0
        self._proof_inputs: Any = None  # until there are real ones
        self.reached = self._met()

    # ------------------------------------------------------------ in the loop

    def shrink(self, optimizer: torch.optim.Optimizer) -> None:
        """The proximal step of the optimizer step just taken; its size is the current learning rate of each weight.

        Raises:
            InputError: the optimizer does not hold the weights that shrink.
        """
        rates = self._rates(optimizer)
        before = self._count()
        self._prior.shrink(dict.fromkeys(rates, 0.0) if self.reached else rates)
        if not self.reached and self._count() < before:
            self.reached = self._met()

    def update(self, loader: Iterable[Any], loss: Loss | None = None) -> None:
        """A variance update: curvature of the loss, and from it gamma and omega of every group.

        Reads `curvature.samples` samples and no more, in eval mode; does nothing once the target is reached. In a
        process group the curvature is the mean of all processes.

        Args:
            loader: yields (inputs, targets); inputs a tensor, a tuple of arguments or a mapping of named ones.
            loss: (output, targets) -> scalar, the mean over a batch: the curvature is then its empirical Fisher. None
                is for cross-entropy where targets are whole numbers, and for squared errors where they are not.

        Raises:
            InputError: no batch, one of another form, outputs that need a loss, or curvature that is not finite.
        """
        if self.reached:
            return
        self._prior.samples = _training_samples(loader, self._prior)
        self._prior.lams = grown(self._lams, self.settings.lam_growth, self._updates)
        kind = self.settings.curvature.kind
        try:
            curvature = diagonal_curvature(self.model, self._batches(loader), kind, self._generator, loss)
        except ValueError as error:
            raise InputError(f"curvature: {error}") from error
        _average_over_processes(curvature)
        if not all(bool(value.isfinite().all()) for value in curvature.values()):
            raise InputError("the curvature is not finite: are the weights and the inputs?")
        self._prior.update(curvature)
        self._updates += 1
        self.reached = self._met()

    @property
    def groups_alive(self) -> dict[str, int]:
        """Group set -> how many of its groups are not zero yet."""
        return {name: int(alive.sum()) for name, alive in self._prior.alive.items()}

    # ------------------------------------------------------------ interrupted and resumed

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs of the pruner, besides the model's and the optimizer's: tensors and numbers only."""
        prior = {key: {n: t.clone() for n, t in values.items()} for key, values in self._prior.state().items()}
        return {"prior": prior, "updates": self._updates, "generator": self._generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken. The model has to hold its weights of that time already.

        Raises:
            InputError: it was taken of other groups.
        """
        try:
            prior, updates, generator = state["prior"], int(state["updates"]), state["generator"]
            found = {key: {name: len(value) for name, value in prior[key].items()} for key in self._prior.state()}
        except (KeyError, TypeError, AttributeError) as error:
            raise InputError(f"this is no state of a BayesPruner: {one_line(error)}") from error
        own = {s.name: s.size for s in self._prior.sets}
        for sizes in found.values():
            if sizes != own:
                other = sorted(set(sizes.items()) ^ set(own.items()))[0][0]
                raise InputError(f"the state was taken of other groups: {other} differs")
        self._prior.load_state(prior)
        self._updates = updates
        self._generator.set_state(generator.cpu())
        self._prior.lams = grown(self._lams, self.settings.lam_growth, max(updates - 1, 0))
        self.reached = self._met()

    # ------------------------------------------------------------ the end

    def slim(self) -> SlimArch:
        """What stays if it ends now: what the rule keeps, and where that misses the target the best by gamma per cost.

        `origin` says whether shrinking alone reached the target, and whether the decision does.

        Raises:
            InputError: the target is not reached, and there was no update that could tell what to remove.
        """
        alive, enough = settled(self._prior, self._gauge, self.settings)
        if not enough and self._updates == 0:
            raise InputError("the target is not reached, and without update(loader) nothing tells what else may go")
        kept = {name: tuple(flags.nonzero()[:, 0].tolist()) for name, flags in alive.items()}
        origin: dict[str, str | int | float] = {"method": "bayes", "seed": self._seed, "lam": self.settings.lam}
        origin |= {"groups": ", ".join(self.settings.groups), "rule": self.settings.rule}
        origin |= {"updates": self._updates, "reached_while_shrinking": enough}
        origin |= {"within_target": self._gauge.met(alive)}  # every set keeps a group, which may be too many
        origin |= {"approximate": True} if self._approximate else {}
        return SlimArch(kept, {s.name: s.size for s in self._prior.sets}, origin)

    def finish(self) -> tuple[nn.Module, Proof]:
        """The network without what has gone, a new one, and the proof that it is the masked one.

        Raises:
            InputError: as `slim`.
            RunFailed: no removal could be proved.
        """
        whole = copy.deepcopy(self.model).cpu()
        small, proof = remove(whole, self._example, self.slim(), self._proof_inputs)
        return small.to(self._device), proof

    # ------------------------------------------------------------ inside

    def _count(self) -> int:
        return int(torch.stack([alive.sum() for alive in self._prior.alive.values()]).sum())

    def _met(self) -> bool:
        """Whether what is alive costs no more than the target; never without one."""
        alive = {name: flags.cpu() for name, flags in self._prior.alive.items()}
        return self.settings.target is not None and self._gauge.met(alive)

    def _rates(self, optimizer: torch.optim.Optimizer) -> dict[str, float]:
        """Group set -> the learning rate of the layer that makes its units."""
        if not hasattr(optimizer, "param_groups"):
            raise InputError(f"expected an optimizer, got {type(optimizer).__name__}")
        held = {id(p): float(group["lr"]) for group in optimizer.param_groups for p in group["params"]}
        parameters = dict(self.model.named_parameters())
        wanted = dict.fromkeys(m.parameter for s in self._prior.sets for m in s.members)
        missing = [name for name in wanted if id(parameters[name]) not in held]
        if missing:
            raise InputError(
                f"the optimizer does not hold {missing[0]}, one of {len(missing)} weights that shrink: build it from "
                "the parameters of the model that the pruner was given"
            )
        return {s.name: held[id(parameters[s.members[0].parameter])] for s in self._prior.sets}

    def _batches(self, loader: Iterable[Any]) -> Iterator[tuple[Inputs, Any]]:
        """(inputs, targets) on the model's device, `curvature.samples` in all, `curvature.batch_size` at a time."""
        wanted, taken = self.settings.curvature, 0
        for item in loader:
            if not isinstance(item, tuple | list) or len(item) != 2:
                raise InputError(f"expected a loader of (inputs, targets), got {type(item).__name__}")
            count = min(samples(item[0]), wanted.samples - taken)
            if taken == 0:
                some = take(item[0], torch.arange(min(count, PROOF_SAMPLES)))
                self._proof_inputs = _moved(some, torch.device("cpu"))
            for start in range(0, count, wanted.batch_size):
                rows = torch.arange(start, min(start + wanted.batch_size, count))
                yield _moved(take(item[0], rows), self._device), _moved(take(item[1], rows), self._device)
            taken += count
            if taken >= wanted.samples:
                return


def _settings(groups: str | Iterable[str], settings: Mapping[str, Any]) -> Bayes:
    for name in OF_THE_LOOP:
        if name in settings:
            raise InputError(f"{name} is a matter of the training loop, the pruner has no such setting")
    given = {"kind": "bayes", "groups": groups if isinstance(groups, str) else tuple(groups), **settings}
    try:
        return Bayes.model_validate(given)
    except ValueError as error:  # pydantic's
        raise InputError("; ".join(faults_of(cast(Any, error), Bayes, given))) from error


def _unwrapped(model: nn.Module) -> nn.Module:
    """The network itself: what torch.compile, DataParallel and DistributedDataParallel wrap shares its weights."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def _device(model: nn.Module) -> torch.device:
    parameter = next(model.parameters(), None)
    if parameter is None:
        raise InputError("the model has no parameters")
    return parameter.device


def _moved(values: Any, device: torch.device) -> Any:
    return map_tensors(values, lambda tensor: tensor.to(device))


def _training_samples(loader: Iterable[Any], prior: GroupPrior) -> int:
    """N, which the scale `summed` needs."""
    if prior.scale != "summed":
        return prior.samples
    if isinstance(loader, Sequence):
        return sum(samples(inputs) for inputs, _ in loader)
    try:
        return len(loader.dataset)  # type: ignore[attr-defined]
    except (AttributeError, TypeError):
        raise InputError(
            "the loader does not tell how many training samples there are (it has no dataset with a length): give "
            "their number as curvature_scale"
        ) from None


def _average_over_processes(curvature: Curvatures) -> None:
    """Every process has to come to the same gamma, or the copies of a network would drift apart."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        for value in curvature.values():
            torch.distributed.all_reduce(value)
            value /= torch.distributed.get_world_size()
