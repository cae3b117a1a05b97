"""A criterion in several steps, with training between them, is one decision about the dense network."""

from pathlib import Path
from typing import Any

import pytest
import torch
from test_recipe import GOOD, Write, told, write
from torch import nn

from compressnas.bayes.prune import Decision
from compressnas.data import DataSet, load_data
from compressnas.decide import decide
from compressnas.gradual import criterion_prune
from compressnas.measure import cost
from compressnas.models import BUILDERS
from compressnas.progress import Progress
from compressnas.recipe import Baseline, Synthetic, Target, Train
from compressnas.surgery import masked, remove
from compressnas.train import make_work

__all__ = ["write"]
ROUND = Train(epochs=1, lr=0.01, batch_size=16)


@pytest.fixture(scope="module")
def data() -> DataSet:
    settings = Synthetic(name="synthetic", shape=(3, 16, 16), classes=3, train=32, validation=8, test=8)
    return load_data(settings, seed=0)


@pytest.fixture(scope="module")
def dense(data: DataSet) -> nn.Module:
    torch.manual_seed(0)
    return BUILDERS["resnet20"](data.shape, 3).eval()


def pruned(dense: nn.Module, data: DataSet, folder: Path | None = None, **settings: Any) -> Decision:
    work = make_work("cpu", 0, None, Progress(quiet=True), folder)
    baseline = Baseline(kind="magnitude", target=Target(flops=0.4), scope="uniform", **settings)
    return criterion_prune(dense, data, baseline, work)


def test_the_last_of_several_steps_reaches_the_target(dense: nn.Module, data: DataSet) -> None:
    before = {name: tensor.clone() for name, tensor in dense.state_dict().items()}
    decision = pruned(dense, data, steps=3, training=ROUND)
    images = data.validation.__getitems__(range(8))[0]
    small, _, _, proof = remove(decision.model, images[:1], decision.slim, images)
    assert proof.verdict == "equal"
    assert cost(small, images[:1]).flops / cost(dense, images[:1]).flops == pytest.approx(0.4, rel=0.05)
    for name, fact in decision.groups.items():  # 0 where a step before the last one has removed it
        gone = {i for i, norm in enumerate(fact["norm"]) if norm == 0}
        assert len(fact["norm"]) == decision.slim.sizes[name] and not gone & set(decision.slim.kept[name])
    assert any(0 in fact["norm"] for fact in decision.groups.values())
    assert all(torch.equal(tensor, before[name]) for name, tensor in dense.state_dict().items())


def test_the_rest_may_be_fitted_to_what_has_gone(dense: nn.Module) -> None:
    settings = Synthetic(name="synthetic", shape=(3, 16, 16), classes=3, train=256, validation=8, test=8)
    data = load_data(settings, seed=0)
    plain, fitted = (pruned(dense, data, reconstruct=yes) for yes in (False, True))
    assert fitted.slim == plain.slim
    images = data.train.__getitems__(range(64))[0]
    with torch.no_grad():
        away = [(masked(d.model, images[:1], d.slim).eval()(images) - dense(images)).norm() for d in (fitted, plain)]
    assert away[0] < 0.8 * away[1]
    assert remove(fitted.model, images[:1], fitted.slim, images[:8])[3].verdict == "equal"


def test_one_step_is_what_decide_says(dense: nn.Module, data: DataSet) -> None:
    example = data.train[0][0][None]
    expected = decide(dense, example, target={"flops": 0.4}, scope="uniform")
    assert pruned(dense, data).slim.kept == expected.kept


def test_finished_rounds_are_not_trained_again(dense: nn.Module, data: DataSet, tmp_path: Path) -> None:
    first = pruned(dense, data, tmp_path, steps=2, training=ROUND)
    stamps = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    again = pruned(dense, data, tmp_path, steps=2, training=ROUND)
    assert stamps and {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == stamps
    assert again.slim == first.slim
    states = first.model.state_dict()
    assert all(torch.equal(tensor, states[name]) for name, tensor in again.model.state_dict().items())


def test_the_group_norm_regulariser_pulls_at_the_weak_groups(dense: nn.Module, data: DataSet) -> None:
    still = Train(epochs=4, lr=0.01, batch_size=16, weight_decay=0.0)
    spread = []
    for strength in (1e-9, 0.05):
        norms = [
            torch.tensor(f["norm"]) for f in pruned(dense, data, training=still, group_norm=strength).groups.values()
        ]
        spread.append(sum(float(norm.min() / norm.mean()) for norm in norms))
    assert spread[1] < 0.99 * spread[0]


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ("target: {flops: 0.5}, training: {epochs: 1}", "method: training: "),
        ("target: {flops: 0.5}, group_norm: 0.1", "method: group_norm: "),
        ("target: {latency: 0.5}, steps: 2", "method: steps: "),
        ("target: {flops: 0.5}, steps: 0", "method.steps: "),
    ],
)
def test_settings_that_would_do_nothing_are_refused(write: Write, settings: str, fault: str) -> None:
    assert told(write(GOOD), f"method={{kind: magnitude, {settings}}}").startswith(fault)
