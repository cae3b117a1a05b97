"""Channel numbers: what torch does with the elements, it does with the tags; what is not followed is kept."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compressnas.tags import OUTPUT, PLANS, Trace
from compressnas.tracing import trace

UNITS = 6


class Between(nn.Module):
    """Something happens between two convolutions, the first of six units."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.change = change
        self.first, self.bias = nn.Conv2d(2, UNITS, 1), nn.Parameter(torch.randn(UNITS, 1, 1))
        with torch.no_grad():
            width = change(torch.randn(2, UNITS, 4, 4)).shape[1]
        self.last = nn.Conv2d(width, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.change(self.first(x) + self.bias))
        return y


def followed(change: Callable[[Tensor], Tensor]) -> Trace:
    model = Between(change).train()
    found = trace(model, lambda network: network(torch.randn(2, 2, 4, 4)))
    assert model.training and not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    return found


def ids(found: Trace, name: str, axis: int, plan: str = "free") -> list[int]:
    """The class of each place, 0 for those of no unit of the first layer."""
    classes = found.under(plan)
    place = {(s.name, s.axis): [classes.find(tag) for tag in s.ids.tolist()] for s in found.slices}
    units = place["first.weight", 0]
    return [units.index(root) + 1 if root in units else 0 for root in place[name, axis]]


def doubled(x: Tensor) -> Tensor:
    x = x.clone()
    x.mul_(2).add_(1)
    return x


def activated(x: Tensor) -> Tensor:
    """What torch marks as pointwise in neither form, or in one of the two."""
    x = F.hardswish(F.logsigmoid(F.hardswish(x.clone(), inplace=True)))
    return F.mish(F.gelu(x), inplace=True).masked_fill_(torch.tensor(False), 0)


READS = {
    "nothing": (lambda x: x, [1, 2, 3, 4, 5, 6]),
    "in place": (doubled, [1, 2, 3, 4, 5, 6]),
    "activated": (activated, [1, 2, 3, 4, 5, 6]),
    "flip": (lambda x: x.flip(1), [6, 5, 4, 3, 2, 1]),
    "roll": (lambda x: x.roll(2, 1), [5, 6, 1, 2, 3, 4]),
    "slice": (lambda x: x[:, 1:5:2], [2, 4]),
    "index": (lambda x: x[:, torch.tensor([3, 3, 0])], [4, 4, 1]),
    "cat": (lambda x: torch.cat([x[:, :2], x], 1), [1, 2, 1, 2, 3, 4, 5, 6]),
    "shuffle": (lambda x: x.view(2, 2, 3, 4, 4).transpose(1, 2).reshape(2, 6, 4, 4), [1, 4, 2, 5, 3, 6]),
    "channels last": (lambda x: x.permute(0, 2, 3, 1).relu().permute(0, 3, 1, 2), [1, 2, 3, 4, 5, 6]),
    "pooled": (lambda x: F.interpolate(F.avg_pool2d(F.gelu(x), 2), scale_factor=2), [1, 2, 3, 4, 5, 6]),
    "gated": (lambda x: x * x.mean((2, 3), keepdim=True).sigmoid(), [1, 2, 3, 4, 5, 6]),
    "padded": (lambda x: F.pad(x, (0, 0, 0, 0, 1, 1)), [0, 1, 2, 3, 4, 5, 6, 0]),
    "halves added": (lambda x: x[:, :3] + x[:, 3:], [1, 2, 3]),
}


@pytest.mark.parametrize("name", READS)
def test_the_next_layer_reads_what_torch_put_there(name: str) -> None:
    change, expected = READS[name]
    assert ids(followed(change), "last.weight", 1) == expected


def test_what_is_added_lives_together() -> None:
    found = followed(lambda x: x[:, :3] + x[:, 3:])
    assert ids(found, "first.weight", 0) == [1, 2, 3, 1, 2, 3]
    assert ids(found, "bias", 0) == ids(found, "first.bias", 0) == [1, 2, 3, 1, 2, 3]


def test_plans_tie_what_a_chunk_or_a_view_splits() -> None:
    def halves(x: Tensor) -> Tensor:
        one, two = x.chunk(2, 1)
        return torch.cat([one.relu(), two], 1)

    found = followed(halves)
    assert ids(found, "first.weight", 0) == [1, 2, 3, 4, 5, 6]
    assert ids(found, "first.weight", 0, "within") == [1, 2, 3, 1, 2, 3]
    heads = followed(lambda x: x.view(2, 2, 3, 4, 4).softmax(-1).reshape(2, 6, 4, 4))
    assert ids(heads, "first.weight", 0, "within") == [1, 2, 3, 1, 2, 3]
    assert ids(heads, "first.weight", 0, "whole") == [1, 1, 1, 4, 4, 4]


KEPT = {
    "softmax": (lambda x: x.softmax(1), "compared with other channels by softmax"),
    "norm": (lambda x: x / x.norm(dim=1, keepdim=True), "averaged or compared with other channels"),
    "cumsum": (lambda x: x.cumsum(1), "compared with other channels by cumsum"),
    "fft": (lambda x: torch.fft.rfft(x, dim=1).real.float(), "which is not followed"),
    "matrix": (lambda x: torch.einsum("nchw,cd->ndhw", x, torch.ones(6, 5)), ""),
    "fixed width": (lambda x: x + torch.ones(6, 1, 1), "whose width is fixed"),
    "spread": (lambda x: x[:, :1] * x, "spread over the channels"),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_mixes_channels_keeps_them(name: str) -> None:
    change, reason = KEPT[name]
    found = followed(change)
    classes = found.under("free")
    reasons = {classes.find(tag): why for tag, why in classes.reasons.items()}
    units = next(s.ids for s in found.slices if (s.name, s.axis) == ("first.weight", 0)).tolist()
    kept = [reasons.get(classes.find(tag), "") for tag in units]
    assert any(kept) and any(reason in why for why in kept)
    if name not in ("spread",):
        assert all(kept)


def test_units_that_reach_the_output_say_so() -> None:
    found = followed(lambda x: x)
    last = next(s.ids for s in found.slices if (s.name, s.axis) == ("last.weight", 0)).tolist()
    assert all(found.classes.reasons[tag] == OUTPUT for tag in last)
    assert all(found.under(plan).find(1) for plan in PLANS)
