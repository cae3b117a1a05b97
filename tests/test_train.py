"""Training that goes wrong says so at once, and says where."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from compressnas.augment import Augment
from compressnas.data import DataSet, load_data
from compressnas.errors import InputError
from compressnas.models import BUILDERS
from compressnas.progress import Progress
from compressnas.recipe import Synthetic, Train
from compressnas.train import evaluate, fit, make_work


@pytest.fixture
def data() -> DataSet:
    settings = Synthetic(name="synthetic", shape=(1, 6, 6), classes=3, train=24, validation=8, test=8)
    return load_data(settings, seed=0)


def trained(data: DataSet, **settings: float) -> nn.Module:
    torch.manual_seed(0)
    model = BUILDERS["lenet300_100"](data.shape, 3)
    work = make_work("cpu", 0, None, Progress(quiet=True))
    return fit(model, data, Train(epochs=1, batch_size=24, **settings), work, stage="finetune")


def test_a_single_step_that_is_too_large_is_told(data: DataSet) -> None:
    """No further step would meet the loss that is not finite."""
    with pytest.raises(InputError, match=r"^finetune, epoch 1.*finite; try a smaller learning rate$"):
        trained(data, lr=1e30)


def test_an_error_is_never_read_off_outputs_that_are_not_finite(data: DataSet) -> None:
    model = BUILDERS["lenet300_100"](data.shape, 3)
    with torch.no_grad():
        next(iter(model.parameters()))[0, 0] = float("nan")
    with pytest.raises(InputError, match="not finite"):
        evaluate(model, data.test, "cpu")


def test_a_warm_up_longer_than_any_training_is_half_of_it(data: DataSet) -> None:
    trained(data, warmup=1e308)


def test_a_stage_may_be_augmented_in_its_own_way(data: DataSet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Instead of what the data section says; an empty list switches it off."""
    used: list[str] = []

    def note(name: str) -> Augment:
        def change(images: Tensor, black: Tensor, generator: torch.Generator) -> Tensor:
            used.append(name)
            return images

        return change

    monkeypatch.setattr("compressnas.data.AUGMENTS", {name: note(name) for name in ("shift", "nudge")})
    shifting = replace(data, augment=("shift",))
    for augment, expected in ((None, ["shift"]), (("nudge",), ["nudge"]), ((), [])):
        used.clear()
        model, work = BUILDERS["lenet300_100"](data.shape, 3), make_work("cpu", 0, None, Progress(quiet=True))
        fit(model, shifting, Train(epochs=1, batch_size=24, augment=augment), work, stage="train")
        assert used == expected
