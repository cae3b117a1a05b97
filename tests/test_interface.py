"""Names of what goes in and comes out, and samples like given ones."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from compressnas.errors import InputError
from compressnas.inputs import map_tensors, tensors_of
from compressnas.interface import (
    TensorsOnly,
    input_names,
    is_batched,
    more_samples,
    named_tensors,
    output_names,
    samples,
    take,
)

X, Y = torch.ones(2, 3), torch.ones(2)


class Net(nn.Module):
    def forward(self, x: Tensor, *more: Tensor, flag: bool = True, y: Tensor | None = None) -> Tensor:
        return x


@dataclass
class Output:
    logits: Tensor
    hidden: tuple[Tensor, ...]
    loss: None = None


@pytest.mark.parametrize(
    ("inputs", "names"),
    [
        (X, ["x"]),
        ((X,), ["x"]),
        ([X, Y, Y], ["x", "more_0", "more_1"]),
        ({"y": X, "flag": True, "x": Y}, ["y", "x"]),
        (([X, {"a": Y}], None, Y), ["x_0", "x_1_a", "more_1"]),
    ],
)
def test_inputs_are_called_as_in_forward(inputs: Any, names: list[str]) -> None:
    assert input_names(Net(), inputs) == names


def test_too_many_arguments() -> None:
    with pytest.raises(InputError, match=r"2 arguments, Linear\.forward takes 1"):
        input_names(nn.Linear(3, 3), (X, Y))


@pytest.mark.parametrize(
    ("outputs", "names"),
    [
        (X, ["output"]),
        ((X, Y), ["output_0", "output_1"]),
        ({"x": X, "more": [Y, {"deep": X}]}, ["x_out", "more_0", "more_1_deep"]),
        (Output(X, (X, Y)), ["logits", "hidden_0", "hidden_1"]),
        ({"a": {"b": X}, "a_b": Y}, ["a_b", "a_b_out"]),
        (3, []),
    ],
)
def test_outputs_have_one_name_each(outputs: Any, names: list[str]) -> None:
    assert output_names(outputs, ["x"]) == names
    found = [tensor for _, tensor in named_tensors(outputs)]
    assert [id(t) for t in found] == [id(t) for t in tensors_of(outputs)]


def test_tensors_only() -> None:
    class Odd(nn.Module):
        def forward(self, pair: list[Any], times: int) -> Output:
            return Output(pair[0] * times, (pair[1]["a"],))

    wrapped = TensorsOnly(Odd(), ([X, {"a": Y}], 3))
    one, other = wrapped(2 * X, 5 * Y)
    assert torch.equal(one, 6 * X) and torch.equal(other, 5 * Y)


def test_the_batch_is_the_first_dimension_of_the_first_tensor() -> None:
    inputs = {"n": torch.tensor(4), "x": torch.ones(3, 2), "table": torch.ones(5, 3), "ids": torch.arange(3)}
    assert samples(inputs) == 3 and is_batched(inputs) == [False, True, False, True]
    two = take(inputs, torch.tensor([2, 0]))
    assert two["ids"].tolist() == [2, 0] and two["x"].shape == (2, 2) and two["table"].shape == (5, 3)
    for nothing in (torch.tensor(1.0), torch.zeros(0, 2), {"flag": True}):
        with pytest.raises(InputError, match="expected a tensor of at least one sample"):
            samples(nothing)


def test_more_samples_are_like_the_given_ones() -> None:
    mask = torch.tensor([[0.0, -torch.inf]])
    inputs = (torch.tensor([[-2.0, 0.0, 3.0]]), torch.tensor([7]), mask, torch.zeros(1, 4), torch.ones(2, 2))
    x, ids, masks, zeros, table = more_samples(inputs, 5)
    assert torch.equal(x[0], inputs[0][0]) and len(x) == 5 and len(x.unique(dim=0)) == 5
    assert (x[:, 0] <= 0).all() and (x[:, 0] >= -2).all() and (x[:, 1] == 0).all() and (x[:, 2] <= 3).all()
    assert ids.tolist() == [7] * 5 and torch.equal(masks, mask.expand(5, 2)) and torch.equal(table, inputs[4])
    assert (zeros[0] == 0).all() and zeros[1:].std() > 0.5
    assert all(torch.equal(a, b) for a, b in zip(more_samples(inputs, 5), more_samples(inputs, 5), strict=True))
    assert torch.equal(more_samples(torch.arange(4.0), 2), torch.arange(2.0))


class Point(NamedTuple):
    x: Tensor
    y: Tensor


def test_named_tuples_stay_named_tuples() -> None:
    point = Point(torch.ones(2), torch.zeros(3))
    doubled = map_tensors({"p": [point, (point.x, 1)]}, lambda t: t * 2)
    assert isinstance(doubled["p"][0], Point) and doubled["p"][0].x.tolist() == [2, 2]
    assert isinstance(doubled["p"][1], tuple) and doubled["p"][1][1] == 1
