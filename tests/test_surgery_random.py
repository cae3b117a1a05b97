"""Removal on random small networks: equal to the masked network, or left alone with a reason; never anything else."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from compressnas.errors import InputError, RunFailed
from compressnas.proof import relative_difference
from compressnas.slim import SlimArch
from compressnas.surgery import find_groups, masked, remove

WIDTH = 8  # channels between blocks: divisible by what splits, groups and norms need


def conv(c_in: int, c_out: int, size: int = 3, **rest: int | bool) -> nn.Conv2d:
    return nn.Conv2d(c_in, c_out, size, padding=size // 2, **rest)  # type: ignore[arg-type]


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(conv(WIDTH, 6, bias=False), nn.BatchNorm2d(6), nn.ReLU(), conv(6, WIDTH))
        self.norm = nn.BatchNorm2d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return F.leaky_relu(x + self.norm(self.body(x)))


class Concat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.mix = conv(WIDTH, 3), conv(WIDTH, 5, 1), conv(8 + WIDTH, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.leaky_relu(self.mix(torch.cat([F.relu(self.one(x)), x, self.two(x)], 1)))


class ConcatAdded(nn.Module):
    """Two narrow layers side by side are added to a wide one."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.wide = conv(WIDTH, 3), conv(WIDTH, 5), conv(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.one(x), self.two(x)], 1) + self.wide(x)


class Chunk(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.part = conv(WIDTH, WIDTH), conv(WIDTH // 2, WIDTH // 2)

    def forward(self, x: Tensor) -> Tensor:
        one, two = self.first(x).chunk(2, 1)
        return torch.cat([F.leaky_relu(self.part(two)), one], 1)


class ChunkAdded(nn.Module):
    """Unit i and unit i + 4 are added: they live or die together."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = conv(WIDTH, WIDTH), conv(WIDTH // 2, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        one, two = self.first(x).chunk(2, 1)
        return F.leaky_relu(self.last(one + two))


class Sliced(nn.Module):
    """Half of the channels is read by one layer, all of them by another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.some, self.all = conv(WIDTH, WIDTH), conv(4, WIDTH, 1), conv(WIDTH, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return F.leaky_relu(self.some(x[:, :4]) - self.all(x))


class UnevenSplit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.one, self.two = conv(WIDTH, WIDTH), conv(3, 4), conv(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        one, two = torch.split(self.first(x), [3, 5], 1)
        return torch.cat([self.one(one), self.two(two)], 1)


class Gated(nn.Module):
    """Squeeze and excite."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(WIDTH, 3), nn.Linear(3, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate: Tensor = torch.sigmoid(self.up(F.leaky_relu(self.down(x.mean((2, 3))))))
        return x * gate[:, :, None, None]


class ZeroPadded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.wide = conv(WIDTH, 4), conv(4, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.narrow(x)
        return F.leaky_relu(self.wide(F.leaky_relu(x)) + F.pad(x, (0, 0, 0, 0, 2, 2)))


class LayerNormed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = conv(WIDTH, 6), nn.LayerNorm(6), nn.Linear(6, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.norm(self.first(x).permute(0, 2, 3, 1)))
        return y.permute(0, 3, 1, 2)


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: nn.Sequential(conv(WIDTH, WIDTH), nn.LeakyReLU()),
    "normed": lambda: nn.Sequential(conv(WIDTH, WIDTH, bias=False), nn.BatchNorm2d(WIDTH), nn.LeakyReLU()),
    "strided": lambda: nn.Sequential(conv(WIDTH, WIDTH, 5, stride=2), nn.PReLU(WIDTH)),
    "depthwise": lambda: nn.Sequential(
        conv(WIDTH, WIDTH, groups=WIDTH), nn.BatchNorm2d(WIDTH), nn.ReLU6(), conv(WIDTH, WIDTH, 1)
    ),
    "grouped": lambda: nn.Sequential(conv(WIDTH, WIDTH, groups=2), nn.LeakyReLU()),
    "multiplied": lambda: nn.Sequential(conv(WIDTH, 2 * WIDTH, groups=WIDTH), conv(2 * WIDTH, WIDTH, 1)),
    "group_normed": lambda: nn.Sequential(conv(WIDTH, WIDTH), nn.GroupNorm(2, WIDTH)),
    "instance_normed": lambda: nn.Sequential(conv(WIDTH, WIDTH), nn.InstanceNorm2d(WIDTH, affine=True)),
    "transposed": lambda: nn.Sequential(nn.ConvTranspose2d(WIDTH, WIDTH, 2), nn.LeakyReLU()),
    "shuffled": lambda: nn.Sequential(conv(WIDTH, 4 * WIDTH, 1), nn.PixelShuffle(2), nn.AvgPool2d(2)),
    "residual": Residual,
    "concat": Concat,
    "concat_added": ConcatAdded,
    "chunk": Chunk,
    "chunk_added": ChunkAdded,
    "sliced": Sliced,
    "uneven_split": UnevenSplit,
    "gated": Gated,
    "zero_padded": ZeroPadded,
    "layer_normed": LayerNormed,
}
HEADS: dict[str, Callable[[], nn.Module]] = {
    "mean": lambda: nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(WIDTH, 3)),
    "flat": lambda: nn.Sequential(
        nn.AdaptiveMaxPool2d(2), nn.Flatten(), nn.Linear(4 * WIDTH, 9), nn.LeakyReLU(), nn.Linear(9, 3)
    ),
    "softmax": lambda: nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(WIDTH, 2), nn.Softmax(1)),
    "convolution": lambda: nn.Sequential(conv(WIDTH, 3, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
    "none": lambda: nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()),
}


class Network(nn.Module):
    def __init__(self, blocks: list[str], head: str, head_first: bool) -> None:
        super().__init__()
        if head_first:  # registered first, run last
            self.head = HEADS[head]()
        self.stem = conv(2, WIDTH)
        self.blocks = nn.ModuleList(BLOCKS[name]() for name in blocks)
        self.head = HEADS[head]()

    def forward(self, x: Tensor) -> Tensor:
        x = F.leaky_relu(self.stem(x))
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.head(x)
        return y


def built(blocks: list[str], head: str, head_first: bool, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = Network(blocks, head, head_first)
    with torch.no_grad():  # no zeros and ones
        for tensor in (*model.parameters(), *(b for b in model.buffers() if b.is_floating_point())):
            tensor.add_(0.2 * torch.rand(tensor.shape))
    return model


def check(model: nn.Module, kinds: tuple[str, ...], ratio: float, seed: int) -> dict[str, str]:
    """Find, decide at random, remove, compare -> what was left alone, with the reason."""
    generator = torch.Generator().manual_seed(seed)
    example = torch.randn(1, 2, 8, 8, generator=generator)
    images = torch.randn(3, 2, 8, 8, generator=generator)
    before = copy.deepcopy(model.state_dict())
    found = find_groups(model, example, kinds)
    assert all(reason.strip() and "\n" not in reason for _, reason in found.left_alone)
    sizes = {s.name: s.size for s in found.sets}
    kept = {n: (torch.rand(s, generator=generator) >= ratio).nonzero()[:, 0].tolist() for n, s in sizes.items()}
    slim = SlimArch({name: tuple(indices) for name, indices in kept.items()}, sizes)
    small, realised, removal, proof = remove(model, example, slim, images[:2])
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert relative_difference(masked(model, example, realised), small, images) <= 1e-9
    assert realised == slim.without({name for name, _ in proof.left_alone})
    for group_set in found.sets:
        name = group_set.name
        if ".out" in name and realised.removed(name):  # no silent no-op
            member, layer = group_set.members[0], name.rpartition(".")[0]
            gone = torch.isin(member.group_of, torch.tensor(realised.removed(name)[1:] or realised.removed(name)))
            axis = member.axes[0]  # all groups decided away: one stays
            left = model.get_submodule(layer).weight.shape[axis] - int(gone.sum())
            assert small.get_submodule(layer).weight.shape[axis] <= left + (not realised.kept[name])
    parameters = dict(small.named_parameters())
    assert all(bool((parameters[name][mask == 0] == 0).all()) for name, mask in removal.masks.items())
    return dict(found.left_alone) | dict(proof.left_alone)


NETWORKS = st.builds(
    built,
    st.lists(st.sampled_from(sorted(BLOCKS)), min_size=1, max_size=3),
    st.sampled_from(sorted(HEADS)),
    st.booleans(),
    st.integers(0, 99),
)
FEW = settings(max_examples=40, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))


@FEW
@given(NETWORKS, st.sampled_from([0.2, 0.5, 0.9]), st.integers(0, 99))
def test_coupled_units_are_removed_exactly_or_left_alone(model: nn.Module, ratio: float, seed: int) -> None:
    try:
        check(model, ("coupled",), ratio, seed)
    except InputError as error:  # nothing at all can be removed: the message says why
        assert "no group of kind coupled" in str(error) and "left alone" in str(error)


@FEW
@given(NETWORKS, st.sampled_from([("shape",), ("filter", "shape"), ("shape", "coupled")]), st.integers(0, 99))
def test_kernel_positions_are_removed_exactly_or_left_alone(
    model: nn.Module, kinds: tuple[str, ...], seed: int
) -> None:
    try:
        check(model, kinds, 0.6, seed)
    except InputError as error:
        assert "no group of kind" in str(error)


PRUNED = set(BLOCKS) - {"zero_padded", "sliced", "uneven_split", "layer_normed"}  # robust, but not by idleness


@pytest.mark.parametrize("name", sorted(PRUNED))
def test_ordinary_blocks_are_pruned_whole(name: str) -> None:
    model = built([name, "plain"], "flat", head_first=True, seed=1)
    left_alone = check(model, ("coupled",), 0.5, 1)
    assert not left_alone


@pytest.mark.parametrize(
    "name, left, reason",
    [
        ("zero_padded", "blocks.0.wide.out", "4 of its 8 units: meets something whose width is fixed"),
        ("sliced", "blocks.0.first.out", "removing units fails"),
        ("uneven_split", "blocks.0.first.out", "removing units fails"),
        ("layer_normed", "blocks.0.first.out", "a norm averages over its units"),
    ],
)
def test_awkward_blocks_are_left_alone_with_a_reason(name: str, left: str, reason: str) -> None:
    left_alone = check(built([name, "plain"], "flat", head_first=False, seed=1), ("coupled",), 0.5, 1)
    assert reason in left_alone[left]


def test_units_that_are_outputs_are_never_removed() -> None:
    model = built(["plain"], "none", head_first=False, seed=0)
    left_alone = check(model, ("coupled",), 0.5, 0)
    assert not left_alone
    assert [s.name for s in find_groups(model, torch.zeros(1, 2, 8, 8), ("coupled",)).sets] == ["stem.out"]
    skipping = built(["residual"], "none", head_first=False, seed=0)
    reasons = dict(find_groups(skipping, torch.zeros(1, 2, 8, 8), ("coupled",)).left_alone)
    assert reasons["stem.out"] == "its units reach the output of the network"


class Auxiliary(nn.Module):
    """A head of its own for training."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.last = conv(3, 6), nn.Linear(6, 4)
        self.aux = nn.Sequential(conv(6, 5, 1), nn.BatchNorm2d(5), nn.Flatten(), nn.Linear(5 * 64, 4))

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        x = self.stem(x)
        y: Tensor = self.last(x.mean((2, 3)))
        return (y, self.aux(x)) if self.training else y


def test_a_head_that_runs_in_training_only_reads_what_is_left() -> None:
    model, example = Auxiliary().train(), torch.randn(2, 3, 8, 8)
    before = copy.deepcopy(model.state_dict())
    found = find_groups(model, example)
    assert [s.name for s in found.sets] == ["stem.out"]
    assert "in training only" in dict(found.left_alone)["aux.0.out"]
    small = remove(model, example, SlimArch({"stem.out": (0, 2, 5)}, {"stem.out": 6}), example)[0]
    assert [tuple(y.shape) for y in small.train()(example)] == [(2, 4), (2, 4)]
    assert model.training and all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


def test_a_set_that_fails_its_trial_is_not_removed_as_a_consequence_of_another_decision() -> None:
    """All positions that read channel 0 go, yet the channel is also read without weights: it has to stay."""
    model = built(["zero_padded"], "mean", head_first=False, seed=0)
    images = torch.randn(3, 2, 8, 8)
    slim = SlimArch({"blocks.0.wide.shape": tuple(range(9, 36))}, {"blocks.0.wide.shape": 36})
    small, realised, removal, proof = remove(model, images, slim, images)
    assert proof.verdict == "equal" and realised == slim and not removal.units
    assert small.blocks[0].narrow.weight.shape[0] == 4  # type: ignore[index, union-attr]


def test_frozen_parameters_are_pruned_and_stay_frozen() -> None:
    model = built(["residual"], "mean", head_first=False, seed=0).requires_grad_(False)
    assert not check(model, ("coupled",), 0.5, 0)
    images = torch.randn(2, 2, 8, 8)
    slim = SlimArch({"blocks.0.body.0.out": (1, 4)}, {"blocks.0.body.0.out": 6})
    small = remove(model, images, slim, images)[0]
    assert not any(p.requires_grad for p in (*small.parameters(), *model.parameters()))


def test_a_network_of_which_nothing_can_be_proved_fails_the_run() -> None:
    """A decision from elsewhere may name what find_groups leaves alone."""
    model, images = built(["layer_normed"], "mean", head_first=False, seed=0), torch.randn(2, 2, 8, 8)
    slim = SlimArch({"blocks.0.first.out": (0, 1, 2)}, {"blocks.0.first.out": 6})
    with pytest.raises(RunFailed, match=r"nothing could be proved: blocks.0.first.out: "):
        remove(model, images, slim, images)


@pytest.mark.parametrize("name", sorted(PRUNED))
def test_the_memory_format_makes_no_difference(name: str) -> None:
    """Pooling to one pixel is computed in another way where channels come last."""
    model = nn.Sequential(
        conv(2, WIDTH), BLOCKS[name](), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(WIDTH, 3)
    )  # fmt: skip
    example = torch.randn(2, 2, 8, 8)
    sets = find_groups(model, example).sets
    last = find_groups(
        model.to(memory_format=torch.channels_last), example.contiguous(memory_format=torch.channels_last)
    ).sets
    assert [(s.name, s.size) for s in last] == [(s.name, s.size) for s in sets]
