"""FLOPs and parameters against the formulas, and against a slow twin that really multiplies."""

import copy
import itertools
import logging

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compressnas.errors import InputError
from compressnas.inputs import Inputs
from compressnas.measure import cost, theoretical_flops


def lenet5(a: int = 20, b: int = 50, c: int = 500) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, a, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(a, b, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(16 * b, c), nn.ReLU(), nn.Linear(c, 10),
    )  # fmt: skip


DIGIT = torch.zeros(1, 1, 28, 28)


class CroppedConv(nn.Conv2d):
    """As removal leaves it: the kernel has lost a border row, so a row of the input is never read."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.pad(x, (0, 0, -1, 0)))


class SelectingLinear(nn.Linear):
    """As removal leaves it: reads some of the features only."""

    def __init__(self, kept: list[int], n_out: int) -> None:
        super().__init__(len(kept), n_out)
        self.register_buffer("kept", torch.tensor(kept))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.index_select(1, self.get_buffer("kept")))


class Twice(nn.Module):
    """One convolution, used twice, and a module that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1))
        self.idle = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(F.relu(self.body(x)))
        return y


class Functional(nn.Module):
    """A convolution without a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.ones(3, 1, 3, 3))
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(F.conv2d(x, self.kernel).mean((2, 3)))
        return y


def slow_conv(weight: Tensor, image: Tensor, layer: nn.Conv2d) -> tuple[int, int]:
    """Walk over every output element and every weight it reads; count the products with a weight that is not zero,
    and the outputs that have one. image (C, H, W), weight (C_out, C_in / groups, K, K)."""
    rows, columns = (int(n) for n in layer.padding)
    padded = F.pad(image, (columns, columns, rows, rows))
    c_out, c_in, kh, kw = weight.shape
    reach = (layer.dilation[0] * (kh - 1) + 1, layer.dilation[1] * (kw - 1) + 1)
    products = outputs = 0
    for top in range(0, padded.shape[1] - reach[0] + 1, layer.stride[0]):
        for left in range(0, padded.shape[2] - reach[1] + 1, layer.stride[1]):
            assert top + reach[0] <= padded.shape[1] and left + reach[1] <= padded.shape[2]
            for unit in range(c_out):
                reads = itertools.product(range(c_in), range(kh), range(kw))
                here = sum(1 for c, i, j in reads if weight[unit, c, i, j] != 0)
                products += here
                outputs += here > 0
    return products, outputs


def test_dense_lenet5_has_the_published_cost() -> None:
    found = cost(lenet5(), DIGIT)
    assert found.flops == 20 * 25 * 24**2 + 50 * 20 * 25 * 8**2 + 800 * 500 + 500 * 10 == 2_293_000
    assert found.flops_bias_convention == 2_308_230
    assert found.params == 20 * 26 + 50 * 501 + 500 * 801 + 10 * 501
    assert found.by_layer == {"0": 288_000, "3": 1_600_000, "7": 400_000, "9": 5_000}
    assert found.uncounted == {"aten::max_pool2d": 2}


def test_dense_lenet_300_100() -> None:
    net = nn.Sequential(
        nn.Flatten(), nn.Linear(784, 300), nn.ReLU(), nn.Linear(300, 100), nn.ReLU(), nn.Linear(100, 10)
    )
    found = cost(net, DIGIT)
    assert found.flops == 784 * 300 + 300 * 100 + 100 * 10
    assert found.flops_bias_convention == 785 * 300 + 301 * 100 + 101 * 10


@pytest.mark.parametrize("batch", [1, 3])
def test_counts_one_image_whatever_the_batch(batch: int) -> None:
    assert cost(lenet5(2, 3, 4), DIGIT.expand(batch, -1, -1, -1)) == cost(lenet5(2, 3, 4), DIGIT)


LAYERS = {
    "plain": nn.Conv2d(2, 3, 3),
    "strided": nn.Conv2d(2, 3, (3, 2), stride=(2, 1), padding=(1, 0)),
    "dilated": nn.Conv2d(2, 2, 2, dilation=2, bias=False),
    "grouped": nn.Conv2d(4, 6, 3, groups=2, padding=1),
    "depthwise": nn.Conv2d(4, 4, 3, groups=4),
    "one by one": nn.Conv2d(3, 2, 1),
}


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_convolutions_agree_with_counting_by_hand(layer: nn.Conv2d) -> None:
    net, image = copy.deepcopy(layer), torch.zeros(1, layer.in_channels, 6, 7)
    weight = net.weight.data
    products, outputs = slow_conv(weight, image[0], layer)
    found = cost(net, image)
    assert (found.flops, found.flops_bias_convention) == (products, products + outputs)
    assert theoretical_flops(net, image) == (products, products + outputs)
    weight[torch.rand(weight.shape, generator=torch.Generator().manual_seed(0)) < 0.5] = 0
    weight[1] = 0  # a unit that is gone, and takes its bias with it
    products, outputs = slow_conv(weight, image[0], layer)
    assert theoretical_flops(net, image) == (products, products + outputs)
    assert cost(net, image) == found


def test_zero_weights_of_linear_layers_are_free() -> None:
    net = nn.Linear(4, 3)
    net.weight.data = torch.tensor([[1.0, 0, 0, 2], [0, 0, 0, 0], [0, 3, 0, 0]])
    assert theoretical_flops(net, torch.zeros(1, 4)) == (3, 3 + 2)
    assert theoretical_flops(net, torch.zeros(1, 5, 4)) == (3 * 5, (3 + 2) * 5)  # five positions, one image


@pytest.mark.parametrize("groups", [1, 2])
def test_transposed_convolution(groups: int) -> None:
    net = nn.ConvTranspose2d(4, 6, 3, stride=2, groups=groups)
    image = torch.zeros(1, 4, 5, 5)
    out = net(image)[0]
    dense = 4 * (6 // groups) * 9 * 25
    assert cost(net, image).flops == dense
    assert cost(net, image).flops_bias_convention == dense + out.numel()
    net.weight.data[: 4 // groups, 1] = 0  # all that feeds output 1 (of the first group)
    net.weight.data[0, 0] = 0  # output 0 lives on the other inputs of its group
    lost = (4 // groups + 1) * 9 * 25
    assert theoretical_flops(net, image) == (dense - lost, dense - lost + out.numel() - out[0].numel())


def test_a_module_used_twice_counts_twice() -> None:
    net, image = Twice(), torch.zeros(1, 2, 4, 4)
    found = cost(net, image)
    assert found.by_layer == {"body.0": 2 * 2 * 2 * 9 * 16, "idle": 0}
    assert found.flops_bias_convention == 2 * (2 * 9 + 1) * 2 * 16
    net.get_parameter("body.0.weight").data[0] = 0
    assert theoretical_flops(net, image) == (2 * 2 * 9 * 16, 2 * (2 * 9 + 1) * 16)


def test_layers_that_crop_or_select_count_what_they_read() -> None:
    net = nn.Sequential(CroppedConv(1, 2, (2, 3)), nn.Flatten(), SelectingLinear([0, 2, 5], 4))
    image = torch.zeros(1, 1, 6, 6)
    found = cost(net, image)
    assert found.by_layer == {"0": 2 * 6 * 4 * 4, "2": 12}
    assert found.flops_bias_convention == (6 + 1) * 2 * 16 + (3 + 1) * 4
    assert theoretical_flops(net, image) == (found.flops, found.flops_bias_convention)


def test_operations_without_a_layer_are_counted_for_the_module_that_runs_them() -> None:
    found = cost(Functional(), torch.zeros(1, 1, 4, 4))
    assert found.by_layer == {"": 27 * 4, "head": 6}
    assert found.flops_bias_convention == (9 + 1) * 3 * 4 + (3 + 1) * 2


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors:UserWarning")  # torch, on such a layer
def test_a_layer_without_outputs_is_listed() -> None:
    net = nn.Sequential(nn.Linear(5, 0), nn.Linear(0, 3))
    found = cost(net, torch.zeros(1, 5))
    assert (found.flops, found.by_layer, found.flops_bias_convention) == (0, {"0": 0, "1": 0}, 3)
    assert theoretical_flops(net, torch.zeros(1, 5)) == (0, 0)


def test_norms_are_in_fvcores_count_and_never_free() -> None:
    net = nn.Sequential(nn.Conv2d(1, 2, 3, bias=False), nn.BatchNorm2d(2))
    found = cost(net, torch.zeros(1, 1, 5, 5))
    conv = 2 * 9 * 9
    assert found.by_layer == {"0": conv} and found.flops > conv
    assert theoretical_flops(net, torch.zeros(1, 1, 5, 5))[0] == found.flops
    net.get_parameter("0.weight").data[:] = 0
    assert theoretical_flops(net, torch.zeros(1, 1, 5, 5)) == (found.flops - conv, 0)


def test_counts_in_eval_mode() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.BatchNorm1d(3))  # in training mode one image is an error
    assert cost(net, torch.zeros(1, 1, 2, 2)) == cost(net.eval(), torch.zeros(1, 1, 2, 2))


def test_the_given_network_is_left_alone(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> None:
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Dropout(), nn.Flatten(), nn.Linear(18, 3)).double()
    net[2].eval()
    image = torch.randn(4, 1, 5, 5, dtype=torch.float64)
    net(image).sum().backward()
    calls: list[int] = []
    net[0].register_forward_hook(lambda *_: calls.append(1))
    before = copy.deepcopy(net.state_dict())
    gradients = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    flags = [m.training for m in net.modules()]
    with caplog.at_level(logging.DEBUG):
        cost(net, image)
        theoretical_flops(net, image.float())  # the dtype of the example need not be the network's
    assert all(torch.equal(before[k], v) for k, v in net.state_dict().items())
    assert all(torch.equal(g, p.grad) for g, p in zip(gradients, net.parameters(), strict=True) if p.grad is not None)
    assert flags == [m.training for m in net.modules()]
    assert [len(m._forward_hooks) for m in net.modules()] == [0, 1, 0, 0, 0, 0]
    assert not caplog.records and capfd.readouterr() == ("", "")


class Attending(nn.Module):
    """Attention of torch's own layer, as it is called in different ways."""

    def __init__(self, **how: object) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)
        self.how = how

    def forward(self, query: Tensor, memory: Tensor) -> Tensor:
        y: Tensor = self.attend(query, memory, memory, **self.how)[0]
        return y


WAYS: dict[str, dict[str, object]] = {
    "alone": {"need_weights": False},
    "with its weights": {},
    "with a mask": {"attn_mask": torch.zeros(3, 5)},
    "with a mask, alone": {"attn_mask": torch.zeros(3, 5), "need_weights": False},
}


@pytest.mark.parametrize("how", WAYS.values(), ids=WAYS)
def test_attention_counts_its_products(how: dict[str, object]) -> None:
    net, example = Attending(**how), (torch.zeros(2, 3, 8), torch.zeros(2, 5, 8))
    before = torch.backends.mha.get_fastpath_enabled()
    found = cost(net, example)
    heads, width = 2, 4
    products = heads * 3 * 5 * width + heads * 3 * 5 * width  # q k', attn v
    projections = 8 * 8 * (3 + 5 + 5 + 3)  # q, k, v, out
    assert found.flops == products + projections
    assert found.by_layer == {"attend": projections, "attend.out_proj": 0}
    assert found.flops_bias_convention == projections + 8 * (3 + 5 + 5 + 3)
    assert not any("attention" in name or "baddbmm" in name for name in found.uncounted)
    assert theoretical_flops(net, example) == (found.flops, found.flops_bias_convention)
    assert torch.backends.mha.get_fastpath_enabled() == before


def test_attention_as_a_function() -> None:
    class Functional(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    q, k, v = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 6)
    found = cost(Functional(), (q, k, v))
    assert (found.flops, found.by_layer, found.uncounted) == (2 * 3 * 3 * 4 + 2 * 3 * 3 * 6, {}, {})


def test_a_transformer_layer_is_counted_in_full() -> None:
    net, tokens = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), torch.zeros(4, 5, 8)
    found = cost(net, tokens)
    norms = found.flops - (4 * 64 * 5 + 2 * 5 * 5 * 8 + 2 * 8 * 16 * 5)
    assert 0 < norms <= 2 * 5 * 5 * 8  # fvcore's count of a norm is 5 a value
    assert found.by_layer == {"self_attn": 4 * 64 * 5, "self_attn.out_proj": 0, "linear1": 640, "linear2": 640}
    net.linear1.weight.data[0] = 0
    assert theoretical_flops(net, tokens)[0] == found.flops - 8 * 5


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(9, 4), nn.Sequential(nn.Linear(4, 3))
        self.head = nn.Linear(3, 2)

    def forward(self, ids: Tensor, x: Tensor, times: int = 1) -> dict[str, object]:
        hidden = self.body(self.embed(ids) + x)
        return {"hidden": (hidden,), "logits": self.head(hidden) * times}


@pytest.mark.parametrize("rows", [1, 3])
def test_several_inputs(rows: int) -> None:
    ids, x = torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, 4)
    examples: list[Inputs] = [(ids, x), {"x": x, "ids": ids, "times": 2}, (ids, x, 2), [ids, x.double()]]
    for example in examples:
        found = cost(Pair(), example)
        assert found.by_layer == {"body.0": 12, "head": 6} and found.flops == 18
        assert found.flops_bias_convention == 15 + 8
        net = Pair()
        net.body[0].weight.data[:2] = 0  # type: ignore[index, union-attr]
        assert theoretical_flops(net, example) == (18 - 8, 23 - 10)


@pytest.mark.parametrize(
    ("layer", "size", "each"),
    [
        (nn.Conv1d(2, 3, 3), (7,), 2 * 3 * 3 * 5),
        (nn.Conv3d(2, 3, 2, groups=1), (3, 3, 3), 2 * 3 * 8 * 8),
        (nn.ConvTranspose1d(2, 3, 3), (4,), 2 * 3 * 3 * 4),
        (nn.ConvTranspose3d(2, 4, 2, groups=2), (2, 2, 2), 2 * 2 * 8 * 8),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_convolutions_of_one_and_three_dimensions(layer: nn.Module, size: tuple[int, ...], each: int) -> None:
    example = torch.zeros(2, 2, *size)
    assert cost(layer, example).flops == each == theoretical_flops(layer, example)[0]
    weight = layer.get_parameter("weight").data
    weight[:, :1] = 0
    share = weight.shape[1] if isinstance(layer, nn.ConvTranspose1d | nn.ConvTranspose3d) else 2
    assert theoretical_flops(layer, example)[0] == each - each // share


def test_an_example_without_a_sample() -> None:
    with pytest.raises(InputError, match="expected a tensor of at least one sample"):
        cost(Pair(), {"ids": torch.zeros(0, dtype=torch.int64), "x": torch.zeros(0, 4)})
