"""The loop that shrinks a network, where the penalty is far too strong."""

from typing import Any

import pytest
import torch

from compressnas.bayes import prune
from compressnas.data import DataSet, load_data
from compressnas.errors import InputError
from compressnas.models import BUILDERS
from compressnas.progress import Progress
from compressnas.recipe import Bayes, Curvature, Synthetic
from compressnas.surgery import find_groups, remove
from compressnas.train import make_work


@pytest.fixture
def data() -> DataSet:
    settings = Synthetic(name="synthetic", shape=(1, 16, 16), classes=3, train=32, validation=8, test=8)
    return load_data(settings, seed=0)


def shrunk(data: DataSet, **settings: Any) -> tuple[torch.nn.Module, prune.Decision]:
    torch.manual_seed(0)
    model = BUILDERS["lenet5"](data.shape, 3)
    curvature = Curvature(samples=16, batch_size=16)
    bayes = Bayes(kind="bayes", groups=("coupled",), batch_size=16, curvature=curvature, **settings)
    return model, prune.bayes_prune(model, data, bayes, make_work("cpu", 0, None, Progress(quiet=True)))


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
