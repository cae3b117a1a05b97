"""The loop that shrinks a network, where the penalty is far too strong."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from compressnas.baselines import Evidence, scores
from compressnas.bayes import prune
from compressnas.data import DataSet, load_data
from compressnas.errors import InputError
from compressnas.measure import cost
from compressnas.models import BUILDERS
from compressnas.progress import Progress
from compressnas.proof import relative_difference
from compressnas.recipe import Bayes, Curvature, Synthetic, Target
from compressnas.slim import SlimArch
from compressnas.surgery import find_groups, masked, remove
from compressnas.train import Work, make_work


@pytest.fixture
def data() -> DataSet:
    settings = Synthetic(name="synthetic", shape=(1, 16, 16), classes=3, train=32, validation=8, test=8)
    return load_data(settings, seed=0)


def shrunk(data: DataSet, work: Work | None = None, **settings: Any) -> tuple[torch.nn.Module, prune.Decision]:
    torch.manual_seed(0)
    model = BUILDERS["lenet5"](data.shape, 3)
    settings = {"curvature": Curvature(samples=16, batch_size=16), **settings}
    bayes = Bayes(kind="bayes", groups=("coupled",), batch_size=16, **settings)
    return model, prune.bayes_prune(model, data, bayes, work or make_work("cpu", 0, None, Progress(quiet=True)))


def test_a_layer_shrinks_to_one_unit_and_the_others_go_on(data: DataSet, monkeypatch: pytest.MonkeyPatch) -> None:
    lams = {"conv1.out": 1e20, "conv2.out": 1e-9, "fc1.out": 1e-9}
    monkeypatch.setattr(prune, "penalty_strengths", lambda *_: lams)
    _, decision = shrunk(data, epochs=2, updates_per_epoch=2, lam_growth=1e20)  # the others go an epoch later
    kept = {name: len(indices) for name, indices in decision.slim.kept.items()}
    assert kept == {"conv1.out": 1, "conv2.out": 1, "fc1.out": 1}
    images = data.validation.__getitems__(range(8))[0]
    *_, proof = remove(decision.model, images[:1], decision.slim, images)
    assert proof.verdict == "equal"


def test_a_lam_that_outgrows_every_number_empties_all_groups_but_one(data: DataSet) -> None:
    _, decision = shrunk(data, epochs=3, lam=1e300, lam_growth=1e300)
    assert [len(indices) for indices in decision.slim.kept.values()] == [1, 1, 1]
    assert all(bool(p.isfinite().all()) for p in decision.model.parameters())


def test_a_network_that_learns_from_the_dense_one_alone_starts_with_nothing_to_learn(data: DataSet) -> None:
    work = make_work("cpu", 0, None, Progress(quiet=True))
    shrunk(data, work, epochs=1, lam=1e-9, distill=1.0)
    assert work.history["shrink"][0]["loss"] < 1e-3  # the labels alone would make it about log 3


# ---------------------------------------------------------------- the target sets the pace


def on_budget(data: DataSet, work: Work | None = None, **settings: Any) -> tuple[torch.nn.Module, prune.Decision]:
    return shrunk(data, work, control="budget", target={"flops": 0.3}, epochs=3, **settings)


def test_the_cost_falls_evenly_to_the_target(data: DataSet) -> None:
    work = make_work("cpu", 0, None, Progress(quiet=True))
    model, decision = on_budget(data, work, updates_per_epoch=2)
    images = data.validation.__getitems__(range(8))[0]
    small, _, _, proof = remove(decision.model, images[:1], decision.slim, images)
    assert proof.verdict == "equal" and not decision.notes
    dense = cost(model, images[:1]).flops
    assert 0.24 <= cost(small, images[:1]).flops / dense <= 0.3  # a filter of the first layer is a tenth of the rest
    kept = [record["flops"] / dense for record in work.history["shrink"]]
    assert len(kept) == 3 and all(
        0.8 * f <= k <= f for k, f in zip(kept, (0.3 ** (1 / 3), 0.3 ** (2 / 3), 0.3), strict=True)
    )
    assert all(0 <= g <= 1 for fact in decision.groups.values() for g in fact["gamma"])  # of switches that stand at 1


@pytest.mark.parametrize("scope", ["global", "uniform"])
def test_the_cost_may_fall_early_and_what_is_left_trains_on(data: DataSet, scope: str) -> None:
    work = make_work("cpu", 0, None, Progress(quiet=True))
    on_budget(data, work, falls_in=0.3, updates_per_epoch=2, scope=scope)
    first, *later = [record["flops"] for record in work.history["shrink"]]
    assert later == [first, first] and len({record["loss"] for record in work.history["shrink"]}) == 3


def test_with_no_epochs_all_that_is_to_go_goes_at_once(tmp_path: Path) -> None:
    settings = Synthetic(name="synthetic", shape=(1, 16, 16), classes=3, train=600, validation=64, test=8)
    data, work = load_data(settings, seed=0), make_work("cpu", 0, None, Progress(quiet=True), tmp_path)
    images, many = data.validation.__getitems__(range(64))[0], Curvature(samples=600, batch_size=100)

    def pruned(**more: Any) -> tuple[torch.nn.Module, prune.Decision]:
        return shrunk(data, work, control="budget", target={"flops": 0.5}, epochs=0, curvature=many, **more)

    model, plain = pruned()
    assert "shrink" not in work.history or not work.history["shrink"]
    again = pruned()[1]  # from its checkpoint
    assert again.slim == plain.slim
    assert all(torch.equal(a, b) for a, b in zip(plain.model.parameters(), again.model.parameters(), strict=True))
    (tmp_path / "shrink.pt").unlink()
    fitted = pruned(reconstruct=True)[1]
    assert fitted.slim == plain.slim  # decided before
    small, _, _, proof = remove(fitted.model, images[:1], fitted.slim, images[:8])
    assert proof.verdict == "equal" and cost(small, images[:1]).flops <= 0.5 * cost(model, images[:1]).flops
    with torch.no_grad():
        lost = [(d.model.eval()(images) - model.eval()(images)).norm() for d in (fitted, plain)]
    assert lost[0] < lost[1]


def test_evidence_says_how_many_and_norms_which(data: DataSet) -> None:
    work = make_work("cpu", 0, None, Progress(quiet=True))

    def decided(**more: Any) -> tuple[torch.nn.Module, SlimArch]:
        model, decision = shrunk(data, work, control="budget", target={"flops": 0.4}, epochs=0, **more)
        return model, decision.slim

    model, by_evidence = decided()
    _, by_norm = decided(within="norm")
    assert {n: len(k) for n, k in by_norm.kept.items()} == {n: len(k) for n, k in by_evidence.kept.items()}
    assert by_norm != by_evidence
    sets = find_groups(model, data.train[0][0][None], ("coupled",)).sets
    importance = scores("magnitude", model, sets, Evidence())
    for name, kept in by_norm.kept.items():
        best = importance[name].argsort(descending=True)[: len(kept)]
        assert sorted(best.tolist()) == list(kept)


def test_among_groups_of_no_evidence_the_smallest_go(data: DataSet, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Bayes(kind="bayes", groups=("coupled",), control="budget", target=Target(flops=0.4), within="norm")
    loop = prune._Loop(
        BUILDERS["lenet5"](data.shape, 3), data, settings, make_work("cpu", 0, None, Progress(quiet=True))
    )
    norms = {name: torch.rand(size) for name, size in loop.sizes.items()}
    monkeypatch.setattr(prune, "scores", lambda *_: norms)
    dealt = loop._in_order_of_norm({name: torch.zeros(size, dtype=torch.float64) for name, size in loop.sizes.items()})
    assert all(dealt[name].argsort().tolist() == norms[name].argsort().tolist() for name in norms)


def test_what_goes_in_a_round_goes_at_once_where_the_rest_is_fitted(data: DataSet) -> None:
    model, decision = on_budget(data, reconstruct=True)
    images = data.validation.__getitems__(range(8))[0]
    small, _, _, proof = remove(decision.model, images[:1], decision.slim, images)
    assert proof.verdict == "equal" and cost(small, images[:1]).flops <= 0.3 * cost(model, images[:1]).flops


def test_interrupted_on_the_way_it_ends_the_same(
    data: DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = on_budget(data)[1]
    one_epoch = prune._Loop._one_epoch

    def stopping(loop: Any, *rest: Any) -> None:
        if loop.epoch == 2:
            raise KeyboardInterrupt
        one_epoch(loop, *rest)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(prune._Loop, "_one_epoch", stopping)
        on_budget(data, make_work("cpu", 0, None, Progress(quiet=True), tmp_path))
    found = on_budget(data, make_work("cpu", 0, None, Progress(quiet=True), tmp_path))[1]
    assert found.slim == expected.slim
    states = found.model.state_dict()
    assert all(torch.equal(tensor, states[name]) for name, tensor in expected.model.state_dict().items())


# ---------------------------------------------------------------- back to the shape of the dense network


def with_norms(channels: int = 1) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(channels, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        nn.Linear(32, 7), nn.BatchNorm1d(7, affine=False), nn.ReLU(), nn.Linear(7, 3),
    )  # fmt: skip


def stirred(model: nn.Module) -> nn.Module:
    """Trained on: other weights and other statistics."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith("num_batches_tracked"):
                buffer += 5
            else:
                buffer.copy_(torch.rand_like(buffer) + 0.5)
    return model


@pytest.mark.parametrize("kept", [0.4, 0.8, 1.0])
def test_expanded_and_masked_is_the_compact_network(kept: float) -> None:
    dense, example = stirred(with_norms(2)).double().eval(), torch.randn(4, 2, 16, 16, dtype=torch.float64)
    sets = find_groups(dense, example, ("coupled",)).sets
    assert [s.name for s in sets] == ["0.out", "4.out", "9.out"]
    slim = SlimArch(
        {s.name: tuple(sorted(torch.randperm(s.size)[: round(kept * s.size)].tolist())) for s in sets},
        {s.name: s.size for s in sets},
    )
    small = stirred(remove(dense, example, slim, example)[0])
    full = prune.expanded(dense, small, example, slim)
    assert relative_difference(masked(full, example, slim), small, example) < 1e-12
    assert {n: t.shape for n, t in full.state_dict().items()} == {n: t.shape for n, t in dense.state_dict().items()}
    assert int(full.get_buffer("1.num_batches_tracked")) == int(small.get_buffer("1.num_batches_tracked"))
    gone = list(slim.removed("0.out"))
    assert torch.equal(full.get_buffer("1.running_mean")[gone], dense.get_buffer("1.running_mean")[gone])


def test_what_the_loop_decides_on_is_what_it_trained(data: DataSet) -> None:
    curvature = Curvature(samples=16, batch_size=16)
    settings = Bayes(kind="bayes", groups=("coupled",), batch_size=16, epochs=3, lam=0.2, curvature=curvature)
    loop = prune._Loop(with_norms(), data, settings, make_work("cpu", 0, None, Progress(quiet=True)))
    loop.run()
    whole = SlimArch(loop.origin, loop.sizes)
    assert any(whole.removed(name) for name in whole.sizes)
    images = data.validation.__getitems__(range(8))[0]
    assert relative_difference(masked(loop.decide().model, images[:1], whole), loop.model, images) < 1e-12


def test_factors_on_lam_by_pattern() -> None:
    model, example = BUILDERS["lenet5"]((1, 16, 16), 3), torch.zeros(1, 1, 16, 16)
    sets = find_groups(model, example, ("coupled",)).sets
    plain, factored = (
        prune.penalty_strengths(model, sets, example, Bayes(kind="bayes", groups=("coupled",), lam_factors=factors))
        for factors in ({}, {"conv*": 2.0, "conv2.out": 3.0})
    )
    assert factored == pytest.approx(
        {"conv1.out": 2 * plain["conv1.out"], "conv2.out": 6 * plain["conv2.out"], "fc1.out": plain["fc1.out"]}
    )
    with pytest.raises(InputError, match=r"'fc9.\*' matches no group set; there are conv1.out, conv2.out, fc1.out"):
        prune.penalty_strengths(model, sets, example, Bayes(kind="bayes", lam_factors={"fc9.*": 2.0}))
