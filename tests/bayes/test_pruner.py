"""Pruning inside a training loop of one's own: what shrinks, when it stops, what comes out."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from compressnas.bayes import pruner as module
from compressnas.bayes.pruner import BayesPruner
from compressnas.errors import InputError
from compressnas.groups import weights_of
from compressnas.measure import cost
from compressnas.proof import relative_difference
from compressnas.recipe import Bayes, Curvature, Target
from compressnas.surgery import masked

EXAMPLE = torch.zeros(1, 1, 8, 8)
FEW = {"samples": 32, "batch_size": 16}
Loader = DataLoader[tuple[Tensor, ...]]


def convolutional() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(54, 12), nn.ReLU(), nn.Linear(12, 3),
    )  # fmt: skip


def patches_of_light(count: int = 64) -> Loader:
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(3, (count,), generator=generator)
    images = torch.randn(count, 1, 8, 8, generator=generator)
    images[:, 0, :3, :3] += labels[:, None, None]
    return DataLoader(TensorDataset(images, labels), 16)


def sgd(model: nn.Module, lr: float = 0.05) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr, momentum=0.9)


def trained(
    model: nn.Module, pruner: BayesPruner, loader: Loader, epochs: int, optimizer: torch.optim.Optimizer | None = None
) -> None:
    optimizer = optimizer or sgd(model)
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            pruner.shrink(optimizer)
        pruner.update(loader)


def zeros(model: nn.Module) -> dict[str, Tensor]:
    return {name: weight == 0 for name, weight in weights_of(model).items()}


# ---------------------------------------------------------------- the loop


@pytest.mark.parametrize("optimizer", [sgd, lambda m: torch.optim.AdamW(m.parameters(), 0.02)], ids=["SGD", "AdamW"])
def test_it_shrinks_until_the_target_is_reached_and_then_stops(
    optimizer: Callable[[nn.Module], torch.optim.Optimizer],
) -> None:
    model, loader = convolutional(), patches_of_light()
    pruner = BayesPruner(model, EXAMPLE, lam=0.2, target={"flops": 0.5}, curvature=FEW)
    assert not pruner.reached
    assert pruner.groups_alive == {"0.out": 6, "5.out": 12}
    steps = optimizer(model)
    trained(model, pruner, loader, 10, steps)
    assert pruner.reached
    slim, alive, gone = pruner.slim(), pruner.groups_alive, zeros(model)
    assert {name: len(kept) for name, kept in slim.kept.items()} == alive
    trained(model, pruner, loader, 2, steps)  # goes on training
    assert pruner.groups_alive == alive
    assert slim.kept == pruner.slim().kept
    for name, now in zeros(model).items():
        assert bool(now[gone[name]].all())  # momentum or not
    before = {name: weight.clone() for name, weight in weights_of(model).items()}
    pruner.shrink(steps)
    pruner.update(loader)
    assert all(torch.equal(weight, before[name]) for name, weight in weights_of(model).items())

    small, proof = pruner.finish()
    assert proof.verdict == "equal" and proof.images == 16
    assert 0 < cost(small, EXAMPLE).flops <= 0.5 * cost(model, EXAMPLE).flops
    images = next(iter(loader))[0]
    assert relative_difference(model, small, images) < 1e-9  # of the very network that was trained
    assert small.training == model.training
    assert all(torch.equal(weight, before[name]) for name, weight in weights_of(model).items())


def test_what_misses_the_target_goes_by_gamma_per_cost() -> None:
    model, loader = convolutional(), patches_of_light()
    pruner = BayesPruner(model, EXAMPLE, lam=1e-6, target={"params": 0.3}, curvature=FEW)
    with pytest.raises(InputError, match=r"without update\(loader\) nothing tells"):
        pruner.finish()
    trained(model, pruner, loader, 1)
    assert not pruner.reached
    slim = pruner.slim()
    assert (slim.origin["reached_while_shrinking"], slim.origin["within_target"]) == (False, True)
    small, proof = pruner.finish()
    assert proof.verdict == "equal"
    assert cost(small, EXAMPLE).params <= 0.3 * cost(model, EXAMPLE).params
    assert relative_difference(masked(model, EXAMPLE, slim), small, next(iter(loader))[0]) < 1e-9
    for name, kept in slim.kept.items():  # the largest gamma of each set
        gamma = pruner._prior.gamma[name]
        assert sorted(gamma.topk(len(kept)).indices.tolist()) == list(kept)


def test_a_target_out_of_reach_is_told() -> None:
    pruner = BayesPruner(convolutional(), EXAMPLE, lam=1e-6, target={"params": 5.0}, curvature=FEW)
    pruner.update(patches_of_light())
    slim = pruner.slim()
    assert [len(kept) for kept in slim.kept.values()] == [1, 1]
    assert slim.origin["within_target"] is False


def test_without_a_target_what_is_zero_goes_and_may_be_nothing() -> None:
    model = convolutional()
    pruner, optimizer = BayesPruner(model, EXAMPLE, lam=0.01), sgd(model)
    small, proof = pruner.finish()
    assert proof.verdict == "equal" and proof.max_relative_difference < 1e-12
    assert cost(small, EXAMPLE).flops == cost(model, EXAMPLE).flops
    with torch.no_grad():
        model[5].weight[3:] *= 1e-9  # type: ignore[index,operator]
        model[7].weight[:, 3:] *= 1e-9  # type: ignore[index,operator]
    pruner.shrink(optimizer)
    assert not pruner.reached
    assert pruner.finish()[0][5].out_features == 3  # type: ignore[index]


def test_the_step_is_the_learning_rate_of_the_moment_and_of_each_layer() -> None:
    model = convolutional()
    pruner = BayesPruner(model, EXAMPLE, lam=0.5)
    twin = copy.deepcopy(pruner._prior)
    groups = [{"params": model[0:2].parameters(), "lr": 0.01}, {"params": model[5:].parameters()}]  # type: ignore
    optimizer = torch.optim.SGD(groups, 0.1)
    optimizer.param_groups[1]["lr"] *= 0.5  # what a schedule does
    pruner.shrink(optimizer)
    twin.shrink({"0.out": 0.01, "5.out": 0.05})
    for name, weight in weights_of(model).items():
        assert torch.equal(weight, weights_of(twin.model)[name])


def test_lam_grows_with_each_update() -> None:
    model, loader = convolutional(), patches_of_light()
    pruner = BayesPruner(model, EXAMPLE, lam=1e-3, lam_growth=3.0, curvature=FEW)
    first = dict(pruner._prior.lams)
    for times in range(3):
        pruner.update(loader)
        assert pruner._prior.lams == pytest.approx({name: lam * 3.0**times for name, lam in first.items()})


# ---------------------------------------------------------------- updates


def test_update_reads_only_the_samples_it_was_told_to() -> None:
    model, read = convolutional(), []

    class Counted(TensorDataset):
        def __getitem__(self, index: int) -> tuple[Tensor, ...]:
            read.append(index)
            return super().__getitem__(index)

    loader = DataLoader(Counted(*patches_of_light().dataset.tensors), 10)  # type: ignore[attr-defined]
    pruner = BayesPruner(model, EXAMPLE, curvature={"samples": 25, "batch_size": 4})
    sizes: list[int] = []
    model.register_forward_pre_hook(lambda _, args: sizes.append(len(args[0])))
    pruner.update(loader)
    assert len(read) == 30  # whole batches of the loader
    assert sizes == [4, 4, 2, 4, 4, 2, 4, 1]
    assert pruner._prior.samples == 64
    assert all(bool((omega != 1).any()) for omega in pruner._prior.omega.values())


def test_each_update_draws_anew_and_a_seed_repeats_them_all() -> None:
    def omegas(seed: int) -> list[list[float]]:
        pruner = BayesPruner(convolutional(), EXAMPLE, seed=seed, curvature=FEW)
        found = []
        for _ in range(2):
            pruner._prior.gamma = {n: torch.ones_like(g) for n, g in pruner._prior.gamma.items()}
            pruner.update(patches_of_light())
            found.append(pruner._prior.omega["5.out"].tolist())
        return found

    assert omegas(1) == omegas(1)
    assert omegas(1) != omegas(2)
    assert omegas(1)[0] != omegas(1)[1]


def test_interrupted_and_resumed_it_ends_as_undisturbed(tmp_path: Path) -> None:
    def begin() -> tuple[nn.Module, BayesPruner, torch.optim.Optimizer]:
        model = convolutional()
        pruner = BayesPruner(model, EXAMPLE, lam=1e-2, lam_growth=1.5, target={"flops": 0.4}, curvature=FEW)
        return model, pruner, sgd(model)

    loader = patches_of_light()
    whole, pruner, optimizer = begin()
    trained(whole, pruner, loader, 6, optimizer)
    first, pruner_of_first, optimizer = begin()
    trained(first, pruner_of_first, loader, 3, optimizer)
    state = {"model": first.state_dict(), "optimizer": optimizer.state_dict(), "pruner": pruner_of_first.state_dict()}
    torch.save(state, tmp_path / "checkpoint.pt")
    trained(first, pruner_of_first, loader, 1, optimizer)  # what is saved does not move on
    state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    second, pruner_of_second, optimizer = begin()
    second.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    pruner_of_second.load_state_dict(state["pruner"])
    trained(second, pruner_of_second, loader, 3, optimizer)
    torch.testing.assert_close(second.state_dict(), whole.state_dict(), rtol=0, atol=0)
    assert pruner_of_second.slim().to_json() == pruner.slim().to_json()
    assert sum(pruner.groups_alive.values()) < 18


@pytest.mark.parametrize(
    ("state", "message"),
    [({}, "no state of a BayesPruner: 'prior'"), (None, "no state of a BayesPruner"), ("other", "0.out differs")],
)
def test_a_state_of_other_groups_is_told(state: Any, message: str) -> None:
    pruner = BayesPruner(convolutional(), EXAMPLE)
    if state == "other":
        state = BayesPruner(nn.Sequential(nn.Conv2d(1, 5, 3), nn.Conv2d(5, 2, 3)), EXAMPLE).state_dict()
    with pytest.raises(InputError, match=message):
        pruner.load_state_dict(state)


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Linear(5, 6), nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, one: Tensor, two: Tensor) -> Tensor:
        out: Tensor = self.head(torch.relu(self.one(one) + self.two(two)))
        return out


@pytest.mark.parametrize("named", [False, True], ids=["tuple", "dict"])
@pytest.mark.parametrize("given", [False, True], ids=["squares", "loss"])
def test_several_inputs_and_a_regression(named: bool, given: bool) -> None:
    torch.manual_seed(0)
    model = TwoInputs()

    def inputs(count: int) -> Any:
        both = torch.randn(count, 5), torch.randn(count, 4)
        return dict(zip(("one", "two"), both, strict=True)) if named else both

    loader = [(inputs(8), torch.randn(8, 2)) for _ in range(3)]
    pruner = BayesPruner(model, inputs(1), lam=0.05, target={"params": 0.5}, curvature={"samples": 20})
    assert list(pruner.groups_alive.values()) == [6]
    optimizer, losses = sgd(model), []

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        losses.append(len(output))
        return F.mse_loss(output, targets)

    for _ in range(40):
        for x, y in loader:
            optimizer.zero_grad()
            F.mse_loss(model(**x) if named else model(*x), y).backward()  # type: ignore[arg-type]
            optimizer.step()
            pruner.shrink(optimizer)
        pruner.update(loader, loss if given else None)
    assert pruner._prior.samples == 24
    assert losses[:3] == ([8, 8, 4] if given else [])
    small, proof = pruner.finish()
    assert proof.verdict == "equal" and proof.images == 8
    assert small.one.out_features == small.two.out_features == small.head.in_features < 6


def test_the_samples_of_a_stream_are_told_by_the_scale() -> None:
    def stream() -> Iterator[tuple[Tensor, Tensor]]:
        yield torch.randn(4, 1, 8, 8), torch.randint(3, (4,))

    with pytest.raises(InputError, match="give their number as curvature_scale"):
        BayesPruner(convolutional(), EXAMPLE).update(stream())
    pruner = BayesPruner(convolutional(), EXAMPLE, curvature_scale=1000.0)
    pruner.update(stream())
    assert pruner.finish()[1].images == 4


def test_processes_come_to_the_same_curvature(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their mean: here all four are alike, and a sum over them is four times the own one."""
    alone, together = (BayesPruner(convolutional(), EXAMPLE, curvature=FEW) for _ in range(2))
    alone.update(patches_of_light())
    summed = []
    batches = list(patches_of_light())  # a DataLoader would ask for more of torch.distributed
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda value: summed.append(value.mul_(4)))
    together.update(batches)
    assert len(summed) == 3
    for name, omega in alone._prior.omega.items():
        assert torch.equal(together._prior.omega[name], omega)


# ---------------------------------------------------------------- what it is given


def test_settings_are_those_of_a_recipe() -> None:
    pruner = BayesPruner(convolutional(), EXAMPLE)
    assert pruner.settings == Bayes(kind="bayes", groups=("coupled",))
    own = set(Bayes.model_fields) - set(module.OF_THE_LOOP) - {"groups"}
    assert own >= {"lam", "lam_cost_power", "lam_growth", "curvature", "curvature_scale", "rule", "threshold", "target"}
    pruner = BayesPruner(
        convolutional(), EXAMPLE, groups=["filter", "row"], target=Target(flops=0.5), curvature=Curvature(samples=9)
    )
    assert pruner.settings.groups == ("filter", "row") and pruner.settings.curvature.samples == 9


@pytest.mark.parametrize(
    "given, message",
    [
        ({"lamb": 1.0}, "lamb: unknown key; did you mean 'lam'"),
        ({"lam": -1.0, "rule": "all"}, "lam: expected a number >= 0, got -1.0; rule: expected one of keep_at_zero"),
        ({"target": {"flops": 0.5, "params": 0.5}}, "exactly one of flops, params"),
        ({"epochs": 3}, "epochs is a matter of the training loop"),
        ({"groups": "filters"}, "groups.*expected one of filter.*did you mean 'filter'"),
        ({"groups": ["coupled", "row"]}, "coupled holds what filter and row hold"),
    ],
)
def test_a_wrong_setting_is_told(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        BayesPruner(convolutional(), EXAMPLE, **given)


def test_an_optimizer_of_another_model_is_told() -> None:
    model = convolutional()
    pruner = BayesPruner(model, EXAMPLE)
    for other, message in (
        (sgd(convolutional()), r"does not hold 0.weight, one of 3 weights"),
        (torch.optim.SGD(model[5].parameters(), 0.1), r"does not hold 0.weight, one of 2 weights"),  # type: ignore
        (model, "expected an optimizer, got Sequential"),
    ):
        with pytest.raises(InputError, match=message):
            pruner.shrink(other)  # type: ignore[arg-type]


def test_a_wrong_loader_is_told() -> None:
    pruner = BayesPruner(convolutional(), EXAMPLE, curvature_scale="paper")
    x, y = torch.randn(4, 1, 8, 8), torch.randint(3, (4,))
    for loader, message in (
        ([], "at least one batch"),
        ([x], r"a loader of \(inputs, targets\), got Tensor"),
        ([(x, y[:, None])], "no logits of classes"),
        ([(x * float("nan"), y)], "not finite"),
    ):
        with pytest.raises(InputError, match=message):
            pruner.update(loader)
    assert all(bool((omega == 1).all()) for omega in pruner._prior.omega.values())  # as if nothing had been


def test_frozen_weights_are_left_alone() -> None:
    model = convolutional()
    model[0].requires_grad_(False)  # type: ignore[index]
    pruner = BayesPruner(model, EXAMPLE)
    assert set(pruner.groups_alive) == {"5.out"}
    assert ("0.out", "it holds weights that are not trained") in pruner.left_alone
    pruner.shrink(torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1))
    model.requires_grad_(False)
    with pytest.raises(InputError, match=r"nothing can be pruned: 0\.out: it holds weights"):
        BayesPruner(model, EXAMPLE)
    with pytest.raises(InputError, match="no parameters"):
        BayesPruner(nn.ReLU(), EXAMPLE)


# ---------------------------------------------------------------- wrapped models


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/one", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_wrapped_models_are_unwrapped(process_group: None) -> None:
    wraps: list[Callable[[nn.Module], Any]] = [nn.parallel.DistributedDataParallel, nn.DataParallel, torch.compile]
    for wrap in [*wraps, lambda model: torch.compile(nn.parallel.DistributedDataParallel(model))]:
        model = convolutional()
        wrapped = wrap(model)
        pruner = BayesPruner(wrapped, EXAMPLE, curvature=FEW)
        assert pruner.model is model
        assert set(pruner.groups_alive) == {"0.out", "5.out"}
        pruner.shrink(sgd(wrapped))
        pruner.update(patches_of_light(32))
        assert type(pruner.finish()[0]) is nn.Sequential
