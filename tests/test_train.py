"""Training that goes wrong says so at once, and says where."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compressnas.augment import Augment
from compressnas.data import DataSet, load_data
from compressnas.errors import InputError
from compressnas.models import BUILDERS
from compressnas.progress import Progress
from compressnas.recipe import Finetune, Synthetic, Train
from compressnas.train import evaluate, fit, make_work, task_loss


@pytest.fixture
def data() -> DataSet:
    settings = Synthetic(name="synthetic", shape=(1, 6, 6), classes=3, train=24, validation=8, test=8)
    return load_data(settings, seed=0)


def trained(data: DataSet, **settings: Any) -> nn.Module:
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


def test_in_bfloat16_layers_are_rounded_and_weights_are_not(data: DataSet) -> None:
    """A step in it is close to one in float32, not the same, and leaves no trace in what the network is."""
    plain, rounded = trained(data, lr=0.1), trained(data, lr=0.1, precision="bfloat16")
    for a, b in zip(plain.parameters(), rounded.parameters(), strict=True):
        assert b.dtype == torch.float32
        torch.testing.assert_close(a, b, atol=5e-3, rtol=0)
    assert any(not torch.equal(a, b) for a, b in zip(plain.parameters(), rounded.parameters(), strict=True))
    assert rounded(data.train[0][0][None]).dtype == torch.float32


def test_a_teacher_may_be_listened_to_in_bfloat16(data: DataSet) -> None:
    model = BUILDERS["lenet300_100"](data.shape, 3)
    settings = Finetune(epochs=1, precision="bfloat16", distill=0.5)
    work = make_work("cpu", 0, None, Progress(quiet=True))
    fit(model, data, settings, work, stage="finetune", loss_fn=task_loss(settings, trained(data)))
