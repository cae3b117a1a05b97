"""The LeNets of the papers."""

import pytest
import torch
from torch import nn

from compressnas.errors import InputError
from compressnas.groups import structure
from compressnas.measure import cost
from compressnas.models import BUILDERS


@pytest.mark.parametrize(
    "name, widths, parameters", [("lenet5", "20-50-800-500", 431_080), ("lenet300_100", "784-300-100", 266_610)]
)
def test_sizes_are_those_of_the_papers(name: str, widths: str, parameters: int) -> None:
    model = BUILDERS[name]((1, 28, 28), 10)
    assert structure(model) == widths
    assert sum(p.numel() for p in model.parameters()) == parameters


def test_lenet5_costs_what_the_papers_print() -> None:
    assert cost(BUILDERS["lenet5"]((1, 28, 28), 10), torch.zeros(1, 1, 28, 28)).flops_bias_convention == 2_308_230


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize("shape, classes", [((1, 28, 28), 10), ((3, 32, 32), 100), ((2, 16, 21), 2)])
def test_any_image_that_is_large_enough(name: str, shape: tuple[int, int, int], classes: int) -> None:
    model = BUILDERS[name](shape, classes)
    for batch in (1, 2, 5):
        assert model(torch.zeros(batch, *shape)).shape == (batch, classes)


@pytest.mark.parametrize("shape", [(1, 15, 28), (1, 28, 15), (3, 8, 8)])
def test_images_too_small_for_two_poolings_are_refused(shape: tuple[int, int, int]) -> None:
    message = f"lenet5 needs images of at least 16 x 16 pixels, got {shape[1]} x {shape[2]}"
    with pytest.raises(InputError, match=message):
        BUILDERS["lenet5"](shape, 10)
    BUILDERS["lenet300_100"](shape, 10)


@pytest.mark.parametrize("name", BUILDERS)
def test_nothing_but_layers_that_the_papers_have(name: str) -> None:
    allowed = nn.Sequential | nn.Conv2d | nn.Linear | nn.ReLU | nn.MaxPool2d | nn.Flatten
    assert all(isinstance(module, allowed) for module in BUILDERS[name]((1, 28, 28), 10).modules())
    torch.manual_seed(0)
    first = BUILDERS[name]((1, 28, 28), 10).state_dict()
    torch.manual_seed(0)
    second = BUILDERS[name]((1, 28, 28), 10).state_dict()
    assert all(torch.equal(first[key], second[key]) for key in first)
