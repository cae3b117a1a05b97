"""Constant channels: what they add moves on before they go, or the result says that it is lost."""

import pytest
import torch
from torch import Tensor, nn

from compressnas.proof import relative_difference
from compressnas.slim import SlimArch
from compressnas.surgery import find_groups, remove


def constant(kernel: int = 1, padding: int = 0, bias: bool = True, scale: float = 0.0) -> nn.Sequential:
    """Channels 0 to 3 of the first layer are 0.7 after the norm, whatever the input, where `scale` is 0."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 5, kernel, padding=padding, bias=bias), nn.ReLU(), nn.Flatten(), nn.LazyLinear(3),
    )  # fmt: skip
    model(torch.zeros(1, 2, 6, 6))
    with torch.no_grad():
        model[1].weight[:4] = scale  # type: ignore[index]
        model[1].bias[:4] = 0.7  # type: ignore[index]
        model[1].running_mean.copy_(torch.randn(8))  # type: ignore[union-attr, operator]
    return model.eval()


SLIM = SlimArch({"0.out": (4, 5, 6, 7)}, {"0.out": 8})
IMAGES = torch.randn(4, 2, 6, 6, generator=torch.Generator().manual_seed(1))


def removed(model: nn.Module, slim: SlimArch = SLIM):  # type: ignore[no-untyped-def]
    small, _, _, proof = remove(model, IMAGES[:1], slim, IMAGES)
    return small, proof


@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("bias", [True, False])
def test_a_constant_moves_into_the_next_bias(kernel: int, bias: bool) -> None:
    """The network stays what it was, not what it would be without these channels; the given one is not touched."""
    model = constant(kernel, bias=bias)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    small, proof = removed(model)
    assert proof.folded.folded == {"0.out": (0, 1, 2, 3)} and not proof.folded.lost
    assert small[0].weight.shape[0] == 4 and small[3].weight.shape[1] == 4
    assert relative_difference(model, small, IMAGES) < 1e-6
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    double, *_ = remove(model.double(), IMAGES[:1].double(), SLIM, IMAGES.double())
    assert relative_difference(model, double, IMAGES) < 1e-12  # what was left was the rounding of the bias


def test_a_constant_that_ends_at_the_padding_is_told() -> None:
    model = constant(3, padding=1)
    small, proof = removed(model)
    assert not proof.folded.folded and proof.verdict == "equal"
    assert proof.folded.lost == {"0.out": "3 reads it with padding, where its constant ends"}
    assert relative_difference(model, small, IMAGES) > 1e-3


def test_what_is_not_constant_is_not_folded() -> None:
    _, proof = removed(constant(scale=0.5))
    assert not proof.folded.folded and not proof.folded.lost


def test_a_layer_of_a_bias_alone() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(72, 6), nn.Sigmoid(), nn.Linear(6, 3))
    with torch.no_grad():
        model[1].weight[2:4] = 0  # type: ignore[index]
    small, proof = removed(model, SlimArch({"1.out": (0, 3, 4, 5)}, {"1.out": 6}))
    assert proof.folded.folded == {"1.out": (2,)}  # 1 is no constant: it is masked
    masked = nn.Sequential(*model)
    with torch.no_grad():
        masked[3].weight[:, 1] = 0  # type: ignore[index]
    assert relative_difference(masked, small, IMAGES) < 1e-6


class Added(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Linear(72, 4), nn.Linear(72, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.one(x.flatten(1)) + self.two(x.flatten(1)))
        return y


def test_two_layers_that_are_added_are_constant_only_together() -> None:
    torch.manual_seed(0)
    model = Added()
    with torch.no_grad():
        model.one.weight[:2] = 0
    _, proof = removed(model, SlimArch({"one.out": (2, 3)}, {"one.out": 4}))
    assert not proof.folded.folded
    assert [s.name for s in find_groups(model, IMAGES).sets] == ["one.out"]
