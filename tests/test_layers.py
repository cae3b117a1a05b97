"""Layers that read less: they compute what the whole layer with zeros computes."""

import pytest
import torch
from torch import Tensor, nn

from compressnas.layers import CroppedConv2d, SelectLinear


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float64)


def zeroed(conv: nn.Conv2d, rows: tuple[int, int], columns: tuple[int, int]) -> nn.Conv2d:
    """Zeros everywhere but in `rows` and `columns` of the kernel, in place."""
    inside = torch.zeros(conv.kernel_size, dtype=torch.bool)
    inside[slice(*rows), slice(*columns)] = True
    with torch.no_grad():
        conv.weight.mul_(inside)
    return conv


CONVOLUTIONS = {
    "plain": {"kernel_size": 5},
    "padded": {"kernel_size": 5, "padding": 1},
    "widely_padded": {"kernel_size": 5, "padding": 2},
    "strided": {"kernel_size": 5, "stride": 2, "padding": 2},
    "dilated": {"kernel_size": 5, "dilation": 2, "padding": 3},
    "uneven_padding_and_stride": {"kernel_size": 5, "stride": (1, 3), "padding": (0, 2), "dilation": (2, 1)},
    "same": {"kernel_size": 5, "padding": "same", "dilation": (1, 2)},
    "even_kernel_same": {"kernel_size": (5, 6), "padding": "same"},
    "no_bias": {"kernel_size": 5, "bias": False},
    "grouped": {"kernel_size": 5, "groups": 2, "padding": 2},
}


@pytest.mark.parametrize("rows, columns", [((1, 4), (0, 5)), ((0, 2), (3, 4)), ((2, 5), (1, 5)), ((4, 5), (0, 1))])
@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")  # the dense layer of the comparison does
def test_cropped_is_the_convolution_with_zero_borders(
    name: str, rows: tuple[int, int], columns: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    dense = zeroed(nn.Conv2d(4, 6, **CONVOLUTIONS[name]).double(), rows, columns)  # type: ignore[arg-type]
    small = CroppedConv2d(dense, rows, columns)
    assert small.weight.shape == (*dense.weight.shape[:2], rows[1] - rows[0], columns[1] - columns[0])
    for batch in (1, 2, 5):
        images = drawn(batch, 4, 13, 12)
        torch.testing.assert_close(small(images), dense(images), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rows, columns", [((4, 5), (0, 5)), ((0, 1), (4, 5)), ((3, 5), (0, 2))])
def test_a_crop_may_reach_into_the_padding_of_a_tiny_map(rows: tuple[int, int], columns: tuple[int, int]) -> None:
    torch.manual_seed(0)
    dense = zeroed(nn.Conv2d(2, 3, 5, padding=2).double(), rows, columns)
    for size in (1, 2):
        images = drawn(3, 2, size, size)
        torch.testing.assert_close(CroppedConv2d(dense, rows, columns)(images), dense(images), rtol=1e-12, atol=1e-12)


def test_cropping_twice_is_cropping_once() -> None:
    torch.manual_seed(0)
    dense = zeroed(nn.Conv2d(2, 3, 5, stride=2, padding=1).double(), (2, 4), (1, 3))
    once = CroppedConv2d(dense, (0, 4), (1, 5))
    twice = CroppedConv2d(once, (2, 4), (0, 2))
    images = drawn(2, 2, 9, 9)
    assert twice.kernel_size == (2, 2)
    torch.testing.assert_close(twice(images), dense(images), rtol=1e-12, atol=1e-12)


def test_selecting_reads_what_the_zero_columns_leave() -> None:
    torch.manual_seed(0)
    dense, read = nn.Linear(7, 3).double(), torch.tensor([0, 2, 6])
    small = SelectLinear(dense, read)
    unread = torch.ones(7, dtype=torch.bool)
    unread[read] = False
    with torch.no_grad():
        dense.weight[:, unread] = 0
    assert small.weight.shape == (3, 3)
    for shape in ((1, 7), (2, 7), (5, 4, 7)):
        torch.testing.assert_close(small(drawn(*shape)), dense(drawn(*shape)), rtol=1e-12, atol=1e-12)
    whole = small.whole()
    assert type(whole) is nn.Linear
    assert torch.equal(whole.weight, dense.weight) and torch.equal(whole.bias, dense.bias)


def test_selecting_twice_is_selecting_once() -> None:
    torch.manual_seed(0)
    dense = nn.Linear(8, 2, bias=False).double()
    twice = SelectLinear(SelectLinear(dense, torch.tensor([1, 3, 4, 7])), torch.tensor([0, 2, 3]))
    assert twice.indices.tolist() == [1, 4, 7] and twice.of == 8
    once = SelectLinear(dense, torch.tensor([1, 4, 7]))
    assert torch.equal(twice(drawn(2, 8)), once(drawn(2, 8)))


def test_a_reloaded_selection_reads_the_same_features() -> None:
    dense = nn.Linear(5, 2).double()
    saved = SelectLinear(dense, torch.tensor([1, 4]))
    fresh = SelectLinear(nn.Linear(5, 2).double(), torch.tensor([0, 1]))
    fresh.load_state_dict(saved.state_dict())
    assert torch.equal(fresh(drawn(3, 5)), saved(drawn(3, 5)))
