"""Removal on the LeNets: what is left computes what the masked network computes, and so does its ONNX file."""

import copy
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compressnas import surgery
from compressnas.errors import InputError, RunFailed
from compressnas.export import export_onnx, verify
from compressnas.layers import CroppedConv2d, SelectLinear
from compressnas.models import BUILDERS
from compressnas.proof import relative_difference
from compressnas.slim import SlimArch
from compressnas.surgery import Removal, find_groups, masked, origins, remove

EXAMPLE = torch.zeros(1, 1, 28, 28)
WIDTHS = {  # units, inputs or kernel positions of each group set
    "conv1.out": 20, "conv1.shape": 25, "conv2.out": 50, "conv2.shape": 500,
    "fc1.in": 800, "fc1.out": 500, "fc2.in": 500,
}  # fmt: skip


def drawn_images(number: int = 8) -> Tensor:
    return torch.randn(number, 1, 28, 28, generator=torch.Generator().manual_seed(7))


def lenet(name: str = "lenet5") -> nn.Module:
    """Random weights and biases: an untrained bias is small enough to hide a fault."""
    torch.manual_seed(3)
    model = BUILDERS[name]((1, 28, 28), 10)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape))
    return model


def decision(sizes: dict[str, int], ratio: float, seed: int = 0) -> SlimArch:
    """A random one that removes about `ratio` of every set."""
    generator = torch.Generator().manual_seed(seed)
    kept = {n: (torch.rand(s, generator=generator) >= ratio).nonzero()[:, 0].tolist() for n, s in sizes.items()}
    return SlimArch({n: tuple(k) for n, k in kept.items()}, sizes)


def without(**gone: Sequence[int]) -> SlimArch:
    """LeNet-5 without these groups: `conv1_out=[3]`."""
    named = {name.replace("_", "."): indices for name, indices in gone.items()}
    kept = {name: tuple(i for i in range(WIDTHS[name]) if i not in set(out)) for name, out in named.items()}
    return SlimArch(kept, {name: WIDTHS[name] for name in named})


def by_hand(model: nn.Module, slim: SlimArch) -> nn.Module:
    """The masked LeNet, written without the dependency graph: zeros where the weights read a removed group."""
    result = copy.deepcopy(model)
    layers = [name for name, layer in result.named_children() if isinstance(layer, nn.Conv2d | nn.Linear)]
    with torch.no_grad():
        for name in slim.sizes:
            layer, suffix = name.split(".")
            for group in slim.removed(name):
                if suffix == "in":
                    result.get_submodule(layer).weight[:, group] = 0
                elif suffix == "shape":
                    result.get_submodule(layer).weight.flatten(1)[:, group] = 0
                else:
                    reader = result.get_submodule(layers[layers.index(layer) + 1]).weight
                    places = reader.shape[1] // slim.sizes[name]  # 4 x 4 where the flattened maps are read
                    reader[:, group * places : (group + 1) * places] = 0
    return result


@pytest.fixture(scope="module")
def found_sets() -> dict[tuple[str, tuple[str, ...]], dict[str, int]]:
    """Sizes of the group sets of a network and kinds; finding is the slow part and does not depend on the test."""
    cases = {("lenet5", kinds) for kinds in LENET5} | {("lenet300_100", kinds) for kinds in LENET300}
    nets = {name: lenet(name) for name, _ in cases}
    return {case: {s.name: s.size for s in find_groups(nets[case[0]], EXAMPLE, case[1]).sets} for case in cases}


LENET5 = [
    ("filter",), ("row",), ("column",), ("shape",), ("coupled",),
    ("filter", "row"), ("filter", "shape"), ("coupled", "shape"), ("coupled", "column", "shape"),
    ("filter", "row", "column", "shape"),
]  # fmt: skip
LENET300 = [("row",), ("column",), ("coupled",), ("row", "column"), ("coupled", "column")]
CASES = [("lenet5", kinds) for kinds in LENET5] + [("lenet300_100", kinds) for kinds in LENET300]


@pytest.mark.parametrize("name, kinds", CASES, ids=lambda value: value if isinstance(value, str) else "+".join(value))
@pytest.mark.parametrize("ratio", [0.2, 0.6, 0.95])
def test_removed_is_masked(name: str, kinds: tuple[str, ...], ratio: float, found_sets: dict[object, dict[str, int]]):
    model, slim = lenet(name), decision(found_sets[name, kinds], ratio, seed=len(kinds))
    small, realised, _, proof = remove(model, EXAMPLE, slim, drawn_images())
    assert proof.verdict == "equal" and not proof.left_alone and proof.max_relative_difference <= 1e-9
    assert realised == slim
    whole = by_hand(model, slim)
    for batch in (1, 2, 5):
        assert relative_difference(whole, small, drawn_images(batch)) <= 1e-9
    assert relative_difference(whole, masked(model, EXAMPLE, slim), drawn_images()) == 0
    if kinds != ("shape",) or ratio > 0.9:  # a few positions are zero, but not removed
        assert sum(p.numel() for p in small.parameters()) < sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    "name, kinds, ratio",
    [
        ("lenet5", ("filter", "row", "column", "shape"), 0.4),
        ("lenet5", ("coupled", "shape"), 0.9),
        ("lenet300_100", ("row", "column"), 0.5),
        ("lenet300_100", ("coupled",), 0.8),
    ],
)
def test_onnx_is_masked(
    name: str, kinds: tuple[str, ...], ratio: float, found_sets: dict[object, dict[str, int]], tmp_path: Path
) -> None:
    model, slim = lenet(name), decision(found_sets[name, kinds], ratio, seed=1)
    small, _, removal, _ = remove(model, EXAMPLE, slim, drawn_images())
    assert removal.selected or "column" not in kinds
    path = tmp_path / "model.onnx"
    export_onnx(small, drawn_images(), path, {}, threads=1)
    check = verify(path, by_hand(model, slim), drawn_images(), threads=1)
    assert set(check.by_batch) == {1, 2, 5} and check.max_abs_diff <= 1e-4 * check.max_abs_output


# ---------------------------------------------------------------- what goes and what stays


def test_a_removed_filter_takes_its_bias_and_what_reads_it() -> None:
    model = lenet()
    small, _, removal, _ = remove(
        model, EXAMPLE, without(conv1_out=[0, 7], conv2_out=range(1, 50), fc1_out=[499]), drawn_images()
    )
    shapes = {name: tuple(p.shape) for name, p in small.named_parameters()}
    assert shapes == {
        "conv1.weight": (18, 1, 5, 5), "conv1.bias": (18,),
        "conv2.weight": (1, 18, 5, 5), "conv2.bias": (1,),
        "fc1.weight": (499, 16), "fc1.bias": (499,),
        "fc2.weight": (10, 499), "fc2.bias": (10,),
    }  # fmt: skip
    assert removal.units == {"conv1.out": (0, 7), "conv2.out": tuple(range(1, 50)), "fc1.out": (499,)}
    assert not removal.masks and not removal.cropped and not removal.selected
    kept = [i for i in range(20) if i not in (0, 7)]
    assert torch.equal(small.conv1.weight, model.conv1.weight[kept])
    assert torch.equal(small.conv2.weight[0], model.conv2.weight[0, kept])


@pytest.mark.parametrize("name", ["conv1.out", "conv2.out", "fc1.out"])
def test_one_unit_of_a_set_stays_when_all_are_removed(name: str) -> None:
    model, slim = lenet(), SlimArch({name: ()}, {name: WIDTHS[name]})
    small, _, removal, proof = remove(model, EXAMPLE, slim, drawn_images())
    assert len(removal.units[name]) == WIDTHS[name] - 1
    assert small.get_submodule(name.removesuffix(".out")).weight.shape[0] == 1
    assert proof.verdict == "equal" and relative_difference(by_hand(model, slim), small, drawn_images()) <= 1e-9
    assert removal.masks  # what reads the last unit is zero and has to stay zero


def test_an_emptied_input_channel_removes_the_filter_that_fills_it() -> None:
    slim = without(conv2_shape=range(3 * 25, 4 * 25), conv1_shape=[12])
    small, _, removal, _ = remove(lenet(), EXAMPLE, slim, drawn_images())
    assert removal.units == {"conv1.out": (3,)}
    assert small.conv1.weight.shape == (19, 1, 5, 5) and small.conv2.weight.shape == (50, 19, 5, 5)


def test_emptied_columns_remove_the_units_that_nothing_else_reads() -> None:
    slim = without(fc1_in=[*range(7 * 16, 8 * 16), 200, 300], fc2_in=[4])
    small, _, removal, _ = remove(lenet(), EXAMPLE, slim, drawn_images())
    assert removal.units == {"conv2.out": (7,), "fc1.out": (4,)}
    assert removal.selected == {"fc1": 800 - 16 - 2} and isinstance(small.fc1, SelectLinear)
    assert small.fc1.weight.shape == (499, 782) and small.conv2.weight.shape[0] == 49


def test_unread_pixels_are_not_read() -> None:
    slim = SlimArch({"fc1.in": tuple(range(100, 700, 2))}, {"fc1.in": 784})
    small, _, removal, _ = remove(lenet("lenet300_100"), EXAMPLE, slim, drawn_images())
    assert removal.selected == {"fc1": 300} and small.fc1.weight.shape == (300, 300)
    assert small.fc1.indices.tolist() == list(range(100, 700, 2))
    images = drawn_images(2)
    noise = images.clone()
    noise.flatten(1)[:, 1::2] = torch.nan
    assert torch.equal(small(noise), small(images))


def test_inputs_stay_when_they_shall_not_be_selected() -> None:
    model, slim = lenet("lenet300_100"), SlimArch({"fc1.in": tuple(range(5, 784))}, {"fc1.in": 784})
    small, _, removal, _ = remove(model, EXAMPLE, slim, drawn_images(), select_inputs=False)
    assert not removal.selected and type(small.fc1) is nn.Linear
    assert int((removal.masks["fc1.weight"] == 0).sum()) == 5 * 300
    selecting = remove(model, EXAMPLE, slim, drawn_images())[0]
    whole = surgery.without_selection(selecting)
    assert type(whole.fc1) is nn.Linear and torch.equal(whole.fc1.weight, small.fc1.weight)


class Conv(nn.Module):
    """One convolution whose kernel can be cropped, and a second that tells its channels apart."""

    def __init__(self, **settings: int) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(2, 4, 5, **settings), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(F.leaky_relu(self.conv(x)).amax((2, 3)))
        return y


def positions(rows: range, columns: range, holes: Sequence[tuple[int, int]] = ()) -> tuple[int, ...]:
    """Kernel positions (c, kh, kw) of a 2-channel 5 x 5 kernel."""
    keep = torch.zeros(2, 5, 5)
    keep[:, rows.start : rows.stop, columns.start : columns.stop] = 1
    for row, column in holes:
        keep[:, row, column] = 0
    return tuple(keep.flatten().nonzero()[:, 0].tolist())


SETTINGS = [
    {"padding": 0},
    {"padding": 1},
    {"padding": 2},
    {"padding": 2, "stride": 2},
    {"padding": 1, "dilation": 2},
    {"padding": 2, "stride": 3, "dilation": 2},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("rows, columns", [(range(1, 4), range(1, 4)), (range(0, 4), range(2, 5)), (range(4, 5),) * 2])
def test_empty_borders_are_cropped_and_empty_insides_stay_zero(
    settings: dict[str, int], rows: range, columns: range
) -> None:
    torch.manual_seed(1)
    model = Conv(**settings)
    holes = [(rows.start + 1, columns.start + 1)] if len(rows) > 2 else []
    slim = SlimArch({"conv.shape": positions(rows, columns, holes)}, {"conv.shape": 50})
    images = torch.randn(5, 2, 15, 14)
    small, _, removal, proof = remove(model, images[:1], slim, images)
    assert removal.cropped == {"conv": ((5, 5), (len(rows), len(columns)))}
    assert small.conv.weight.shape == (4, 2, len(rows), len(columns))
    whole = copy.deepcopy(model)
    with torch.no_grad():
        whole.conv.weight.flatten(1)[:, list(slim.removed("conv.shape"))] = 0
    assert relative_difference(whole, small, images) <= 1e-9 and proof.verdict == "equal"
    assert set(removal.masks) == ({"conv.weight"} if holes else set())
    if holes:
        assert int((removal.masks["conv.weight"] == 0).sum()) == 4 * 2
        assert bool((small.conv.weight[removal.masks["conv.weight"] == 0] == 0).all())


@pytest.mark.parametrize("mode", ["reflect", "circular"])
def test_a_kernel_that_pads_with_other_than_zeros_is_not_cropped(mode: str) -> None:
    torch.manual_seed(1)
    model = Conv(padding=2, padding_mode=mode)  # type: ignore[arg-type]
    slim, images = (
        SlimArch({"conv.shape": positions(range(1, 4), range(1, 4))}, {"conv.shape": 50}),
        torch.randn(3, 2, 9, 9),
    )
    small, _, removal, proof = remove(model, images, slim, images)
    assert proof.verdict == "equal" and not removal.cropped and removal.masks
    assert not isinstance(small.conv, CroppedConv2d)


@pytest.mark.parametrize("name, kinds", [CASES[-1], ("lenet5", ("filter", "row", "column", "shape"))])
def test_a_removed_network_can_be_pruned_again(name: str, kinds: tuple[str, ...]) -> None:
    model = lenet(name)
    for seed in (0, 1):
        sets = find_groups(model, EXAMPLE, kinds)
        slim = decision({s.name: s.size for s in sets.sets}, 0.3, seed)
        small, realised, _, _ = remove(model, EXAMPLE, slim, drawn_images())
        assert relative_difference(masked(model, EXAMPLE, realised), small, drawn_images(3)) <= 1e-9
        assert sum(p.numel() for p in small.parameters()) < sum(p.numel() for p in model.parameters())
        model = small
    expected = {"conv2.out": "is read by a layer that selects its inputs already"} if name == "lenet5" else {}
    assert dict(sets.left_alone) == expected


# ---------------------------------------------------------------- a function of the decision alone


def facts(small: nn.Module, removal: Removal) -> dict[str, object]:
    shapes = {name: tuple(p.shape) for name, p in small.state_dict().items()}
    masks = {name: mask.tolist() for name, mask in removal.masks.items()}
    return {"shapes": shapes, "masks": masks, "units": removal.units, "cropped": removal.cropped}


def test_the_removal_does_not_depend_on_the_weights(found_sets: dict[object, dict[str, int]]) -> None:
    kinds = ("filter", "row", "column", "shape")
    slim = decision(found_sets["lenet5", kinds], 0.5)
    model, other = lenet(), BUILDERS["lenet5"]((1, 28, 28), 10)
    with torch.no_grad():  # zeros that nobody decided about
        other.conv1.weight[:4] = other.conv1.bias[:4] = 0
        other.conv2.weight[:, 2] = 0
        other.conv2.weight[:, :, 0] = 0
        other.fc1.weight[:, 5] = other.fc2.weight[:, 7] = 0
    first, second = (remove(m, EXAMPLE, slim, drawn_images()) for m in (model, other))
    assert facts(first[0], first[2]) == facts(second[0], second[2])
    second[0].load_state_dict(first[0].state_dict())  # what a resumed run relies on
    assert torch.equal(second[0](drawn_images()), first[0](drawn_images()))


@pytest.mark.parametrize("name, kinds", [CASES[9], CASES[7], CASES[-1]], ids=["all", "coupled+shape", "lenet300"])
def test_origins_say_where_each_weight_came_from(
    name: str, kinds: tuple[str, ...], found_sets: dict[object, dict[str, int]]
) -> None:
    model, slim = lenet(name), decision(found_sets[name, kinds], 0.6)
    small = remove(model, EXAMPLE, slim, drawn_images())[0]
    before, places = dict(model.named_parameters()), origins(model, EXAMPLE, slim)
    assert set(places) == {name for name, _ in small.named_parameters()}
    for parameter, weight in small.named_parameters():
        flat, where = before[parameter].flatten(), places[parameter]
        expected = torch.where(where >= 0, flat[where.clamp(min=0)], torch.zeros(()))
        assert torch.equal(weight, expected)
        taken = where[where >= 0]
        assert len(taken.unique()) == len(taken)


def test_the_network_that_is_pruned_stays_as_it_was() -> None:
    model = lenet()
    model.conv1.weight.requires_grad_(False)
    model.train()
    model.pool1.eval()
    state = copy.deepcopy(model.state_dict())
    found = find_groups(model, EXAMPLE, ("coupled",))
    slim = decision({s.name: s.size for s in found.sets}, 0.5)
    with torch.no_grad():
        small = remove(model, EXAMPLE, slim, drawn_images())[0]
    masked(model, EXAMPLE, slim)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert [m.training for m in (model, model.conv1, model.pool1)] == [True, True, False]
    for network in (model, small):
        assert [n for n, p in network.named_parameters() if not p.requires_grad] == ["conv1.weight"]


# ---------------------------------------------------------------- finding


def test_group_sets_of_lenet5_hold_what_the_table_says() -> None:
    model = lenet()
    sets = {s.name: s for s in find_groups(model, EXAMPLE, ("coupled", "column", "shape")).sets}
    assert {name: s.size for name, s in sets.items()} == WIDTHS
    assert list(sets) == [
        "conv1.shape", "conv1.out", "conv2.shape", "conv2.out", "fc1.in", "fc1.out", "fc2.in",
    ]  # fmt: skip
    coupled = sets["conv2.out"]
    assert [(m.parameter, m.axes) for m in coupled.members] == [("conv2.weight", (0,)), ("fc1.weight", (1,))]
    assert [m.parameter for m in coupled.readers] == ["fc1.weight"]
    assert [m.parameter for m in coupled.writers] == ["conv2.bias"]
    filters = find_groups(model, EXAMPLE, ("filter",)).sets
    assert [(s.name, s.kind, [m.parameter for m in s.members]) for s in filters] == [
        ("conv1.out", "filter", ["conv1.weight"]),
        ("conv2.out", "filter", ["conv2.weight"]),
    ]
    assert [s.name for s in find_groups(model, EXAMPLE, ("row",)).sets] == ["fc1.out"]


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(x.flatten(1))
        return hidden, self.head(hidden)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.two(self.one(x.flatten(1))))
        return y


REFUSED = [
    (lambda: lenet("lenet300_100"), EXAMPLE, ("filter",), "no group of kind filter .no convolution"),
    (lambda: lenet("lenet300_100"), EXAMPLE, ("shape",), "no group of kind shape .no convolution"),
    (lenet, EXAMPLE, ("coupled", "filter"), "coupled holds what filter and row hold"),
    (lenet, torch.zeros(1, 3, 28, 28), ("filter",), r"cannot be traced at an input of shape \(1, 3, 28, 28\)"),
    (lenet, torch.zeros(1, 1, 40, 40), ("row",), "cannot be traced"),
    (TwoOutputs, torch.zeros(1, 4), ("row",), "body.out is left alone: its units reach the output"),
    (Tied, torch.zeros(1, 4), ("row",), "no group of kind row .one.out is left alone"),
    (lambda: nn.Linear(4, 2), torch.zeros(1, 4), ("row",), "no group of kind row"),
    (lambda: nn.Sequential(nn.Linear(4, 2)), torch.zeros(1, 4), ("row",), "no group of kind row"),
]


@pytest.mark.parametrize("build, example, kinds, message", REFUSED, ids=[case[-1][:24] for case in REFUSED])
def test_what_has_no_groups_is_refused(build, example: Tensor, kinds: tuple[str, ...], message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InputError, match=message) as caught:
        find_groups(build(), example, kinds)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "slim, message",
    [
        (SlimArch({"conv9.out": (0,)}, {"conv9.out": 4}), "group set conv9.out, which this network does not have"),
        (SlimArch({"conv1.out": (0,)}, {"conv1.out": 21}), "conv1.out has 20 groups here, 21 in the decision"),
        (SlimArch({"fc2.out": (0,)}, {"fc2.out": 10}), "group set fc2.out, which"),  # its units are the classes
    ],
)
def test_a_decision_of_another_network_is_refused(slim: SlimArch, message: str) -> None:
    for use in (lambda: remove(lenet(), EXAMPLE, slim, drawn_images()), lambda: masked(lenet(), EXAMPLE, slim)):
        with pytest.raises(InputError, match=message):
            use()


# ---------------------------------------------------------------- proving


class Faulty:
    """Removes as it should, but takes the unit beside the right one in the sets named `culprits`."""

    def __init__(self, *culprits: str, raises: bool = False) -> None:
        self.culprits, self.raises = culprits, raises

    def __call__(self, model: nn.Module, example: Tensor, slim: SlimArch, select: bool) -> tuple[nn.Module, Removal]:
        kept = dict(slim.kept)
        for name in self.culprits:
            gone = slim.removed(name)
            if gone and self.raises:
                raise RuntimeError(f"{name} is odd\nand this is the second line")
            if gone:
                beside = {(i + 1) % slim.sizes[name] for i in gone}
                kept[name] = tuple(i for i in range(slim.sizes[name]) if i not in beside)
        return surgery._removed(model, example, SlimArch(kept, slim.sizes), select)


def one_of_each() -> SlimArch:
    return without(conv1_out=[3], conv2_out=[11, 12, 40], fc1_out=[100], conv2_shape=[0])


@pytest.mark.parametrize("culprits", [("conv2.out",), ("fc1.out",), ("conv1.out", "fc1.out")])
@pytest.mark.parametrize("raises", [False, True])
def test_a_swapped_index_is_found_and_its_set_left_alone(culprits: tuple[str, ...], raises: bool) -> None:
    model, slim = lenet(), one_of_each()
    small, realised, removal, proof = remove(
        model, EXAMPLE, slim, drawn_images(), remover=Faulty(*culprits, raises=raises)
    )
    assert proof.verdict == "partly" and proof.max_relative_difference <= 1e-9
    assert {name for name, _ in proof.left_alone} == set(culprits)
    for _, reason in proof.left_alone:
        assert ("is odd" in reason if raises else "changes the output by" in reason) and "second line" not in reason
    assert realised == slim.without(set(culprits))
    assert set(removal.units) == {"conv1.out", "conv2.out", "fc1.out"} - set(culprits)
    assert relative_difference(by_hand(model, realised), small, drawn_images()) <= 1e-9


@pytest.mark.parametrize("raises", [False, True])
def test_the_run_fails_when_nothing_can_be_proved(raises: bool) -> None:
    slim = without(conv1_out=[3], fc1_out=[100])
    with pytest.raises(RunFailed, match=r"nothing could be proved: conv1.out: .*; fc1.out: .*") as caught:
        remove(lenet(), EXAMPLE, slim, drawn_images(), remover=Faulty("conv1.out", "fc1.out", raises=raises))
    assert "\n" not in str(caught.value)


def test_an_empty_decision_is_proved_too() -> None:
    model = lenet()
    small, _, removal, proof = remove(model, EXAMPLE, without(conv1_out=[]), drawn_images())
    assert proof.verdict == "equal" and proof.max_relative_difference == 0 and removal == Removal()
    assert torch.equal(small(drawn_images()), model(drawn_images()))

    def broken(model: nn.Module, example: Tensor, slim: SlimArch, select: bool) -> tuple[nn.Module, Removal]:
        other = copy.deepcopy(model)
        torch.nn.init.zeros_(other.get_submodule("fc2").bias)
        return other, Removal()

    with pytest.raises(RunFailed, match="differs from the masked one"):
        remove(model, EXAMPLE, without(conv1_out=[]), drawn_images(), remover=broken)


def test_a_network_that_nothing_comes_through_is_compared_with_other_weights() -> None:
    """Its outputs are the same whatever is removed."""
    model, slim = lenet(), without(conv1_out=[3], fc1_out=[100])
    with torch.no_grad():
        model.get_submodule("fc1").bias.fill_(-1e3)  # no unit of it is ever above zero
    assert remove(model, EXAMPLE, slim, drawn_images())[3].constant
    assert not remove(lenet(), EXAMPLE, slim, drawn_images())[3].constant
    _, _, _, proof = remove(model, EXAMPLE, slim, drawn_images(), remover=Faulty("conv1.out"))
    assert [name for name, _ in proof.left_alone] == ["conv1.out"]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_an_output_that_is_no_number_proves_nothing(value: float) -> None:
    model = lenet()
    with torch.no_grad():
        model.get_submodule("fc2").bias.fill_(value)
    with pytest.raises(RunFailed, match="nothing could be proved"):
        remove(model, EXAMPLE, without(conv1_out=[3]), drawn_images())


def test_outputs_of_different_shapes_are_different() -> None:
    one, two = nn.Sequential(nn.Linear(3, 1)), nn.Sequential(nn.Linear(3, 4))
    assert relative_difference(one, two, torch.randn(2, 3)) == float("inf")  # and not broadcast
