"""Weights that stay are fitted to what the layers gave before: against a slow twin, and on random networks."""

import copy
from importlib import import_module
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_surgery_random import FEW, NETWORKS, built
from torch import Tensor, nn

import compressnas as cn
from compressnas.progress import Progress
from compressnas.proof import relative_difference
from compressnas.slim import SlimArch
from compressnas.surgery import find_groups, masked

rooms = import_module("compressnas.reconstruct")  # the package has a function of that name


def batches(*inputs: Any) -> list[tuple[Any, None]]:
    return [(one, None) for one in inputs]


def error(model: nn.Module, other: nn.Module, inputs: Tensor) -> float:
    with torch.no_grad():
        difference = model.eval()(inputs) - other.eval()(inputs)
    return float(difference.norm())


# ---------------------------------------------------------------- one layer, against its definition


def twin(dense: nn.Conv2d, had: Tensor, has: Tensor, kept: list[int]) -> tuple[Tensor, Tensor]:
    """Position by position in float64: the mean-free least squares, with the ridge towards the weights there were."""
    k, s, p = dense.kernel_size[0], dense.stride[0], int(dense.padding[0])
    rows, given = [], []
    for x, now in zip(had.double(), has.double(), strict=True):
        y = dense.double()(x[None])[0]
        now = nn.functional.pad(now, (p, p, p, p))
        for i in range(y.shape[1]):
            for j in range(y.shape[2]):
                rows.append(now[kept, i * s : i * s + k, j * s : j * s + k].reshape(-1))
                given.append(y[:, i, j])
    a, b = torch.stack(rows), torch.stack(given).detach()
    mean_a, mean_b = a.mean(0), b.mean(0)
    a, b = a - mean_a, b - mean_b
    before = dense.weight.detach().double()[:, kept].flatten(1)
    ridge = rooms.RIDGE * float((a.T @ a).diagonal().mean())
    wide = torch.cat([a, ridge**0.5 * torch.eye(a.shape[1], dtype=a.dtype)])
    high = torch.cat([b, ridge**0.5 * before.T])
    solved = torch.linalg.lstsq(wide, high).solution.T
    return solved.reshape(len(before), len(kept), k, k), mean_b - solved @ mean_a


def test_a_layer_is_solved_as_its_formula_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rooms, "POSITIONS", 10**6)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 5, 3, padding=1), nn.ReLU(), nn.Conv2d(5, 4, 3, stride=2, padding=1), nn.Flatten()
    )
    images = torch.randn(40, 2, 8, 8)
    slim = SlimArch({"0.out": (0, 2, 3)}, {"0.out": 5})
    fitted = cn.reconstruct(model, images[:1], slim, batches(images[:20], images[20:]))
    inner = model[1](model[0](images)).detach()
    weight, bias = twin(model[2], inner, inner, [0, 2, 3])  # type: ignore[arg-type]
    model.float()
    assert torch.allclose(fitted[2].weight[:, [0, 2, 3]].double(), weight, atol=1e-5)  # type: ignore[index, union-attr]
    assert torch.allclose(fitted[2].bias.double(), bias, atol=1e-5)  # type: ignore[index, union-attr, operator]
    assert not fitted[2].weight[:, [1, 4]].any()  # type: ignore[index, union-attr]
    assert torch.equal(fitted[0].weight, model[0].weight)  # type: ignore[index, arg-type]


@pytest.mark.parametrize("bias", [True, False])
def test_units_that_others_can_stand_for_are_missed_by_nobody(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unit 1 is twice unit 0 and a constant; the next layer is followed by a batch norm where it has no bias."""
    monkeypatch.setattr(rooms, "RIDGE", 1e-9)
    torch.manual_seed(0)
    first, second = nn.Conv2d(2, 4, 3), nn.Conv2d(4, 4, 3, bias=bias)
    with torch.no_grad():
        first.weight[1] = 2 * first.weight[0]
    after: list[nn.Module] = [] if bias else [nn.BatchNorm2d(4)]
    model = nn.Sequential(first, second, *after, nn.ReLU(), nn.Flatten(), nn.Linear(4 * 16, 3)).eval()
    images = torch.randn(300, 2, 8, 8)
    slim = SlimArch({"0.out": (0, 2, 3)}, {"0.out": 4})
    fitted = cn.reconstruct(model, images[:1], slim, batches(images))
    assert error(model, masked(model, images[:1], slim), images) > 1
    assert error(model, fitted, images) < 1e-2
    small, proof = cn.remove(fitted, images[:1], slim)
    assert proof.verdict == "equal" and error(model, small, images) < 1e-2


class Normed(nn.Module):
    """Two convolutions, the second with a batch norm; `beside`: something else reads what the batch norm reads."""

    def __init__(self, beside: bool, norm: nn.Module) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Conv2d(2, 6, 3), nn.Conv2d(6, 4, 3), norm
        self.head, self.beside = nn.Linear(4, 3), beside

    def forward(self, images: Tensor) -> Tensor:
        made = self.second(torch.relu(self.first(images)))
        normed = torch.relu(self.norm(made))
        return self.head((normed + made if self.beside else normed).mean((2, 3)))  # type: ignore[no-any-return]


def trained_norm(**settings: Any) -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(4, **settings)
    for tensor in norm.state_dict().values():
        if tensor.is_floating_point():
            tensor.uniform_(0.5, 2)
    return norm


@pytest.mark.parametrize("case", ["alone", "beside", "no_affine", "no_statistics", "frozen", "subclass"])
def test_filters_in_front_of_a_batch_norm_keep_their_length(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the batch norm can make up for it; the network computes the same with and without."""
    torch.manual_seed(0)
    norm = trained_norm(affine=case != "no_affine", track_running_stats=case != "no_statistics").requires_grad_(
        case != "frozen"
    )
    if case == "subclass":
        norm.__class__ = type("Other", (nn.BatchNorm2d,), {})
    model = Normed(case == "beside", norm).eval()
    images = torch.randn(300, 2, 8, 8)
    slim = SlimArch({"first.out": (0, 2, 3)}, {"first.out": 6})
    fitted = cn.reconstruct(model, images[:1], slim, batches(images))
    monkeypatch.setattr(rooms, "_rescale", lambda *_: None)
    longer = cn.reconstruct(model, images[:1], slim, batches(images))
    plain = masked(model, images[:1], slim)
    lengths = [n.get_submodule("second").weight.flatten(1).norm(dim=1) for n in (fitted, longer, plain)]  # type: ignore[operator]
    assert not torch.allclose(lengths[1], lengths[2], rtol=0.05)  # else there is nothing to see
    assert torch.allclose(lengths[0], lengths[2 if case == "alone" else 1], rtol=1e-5)
    with torch.no_grad():
        assert torch.allclose(fitted(images), longer(images), atol=1e-5)


class Hidden(Normed):
    """Something reads the second convolution as well, and autograd does not show it."""

    def __init__(self, how: str) -> None:
        super().__init__(False, trained_norm())
        self.how = how

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        made = self.second(torch.relu(self.first(images)))
        normed = self.norm(made)
        if self.how == "dropped":  # what the batch norm gives goes nowhere
            normed = torch.relu(made)
        elif self.how == "compared":
            normed = normed * (made > 0.2)
        elif self.how == "gated":
            with torch.no_grad():
                gate = made.abs().mean((2, 3), keepdim=True)
            normed = normed * gate
        elif self.how == "number":
            normed = normed * float(made.abs().mean())
        return self.head(torch.relu(normed).mean((2, 3))), made.detach() if self.how == "returned" else made.new_zeros(
            1
        )


@pytest.mark.parametrize("how", ["dropped", "compared", "gated", "number", "returned"])
def test_filters_keep_their_fit_where_something_else_reads_them_unseen(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model, images = Hidden(how).eval(), torch.randn(300, 2, 8, 8)
    slim = SlimArch({"first.out": (0, 2, 3)}, {"first.out": 6})
    fitted = cn.reconstruct(model, images[:1], slim, batches(images))
    monkeypatch.setattr(rooms, "_rescale", lambda *_: None)
    expected = cn.reconstruct(model, images[:1], slim, batches(images))
    with torch.no_grad():
        for one, other in zip(fitted(images), expected(images), strict=True):
            assert torch.allclose(one, other, atol=1e-5)


class Decoded(nn.Sequential):
    def forward(self, images: Tensor) -> Any:
        logits = super().forward(images)
        return logits if self.training else (logits, logits.numpy().argmax(1))


def test_a_network_that_runs_without_gradients_only_is_fitted() -> None:
    torch.manual_seed(0)
    layers = nn.Conv2d(2, 6, 3), nn.ReLU(), nn.Conv2d(6, 4, 3), nn.Flatten(), nn.Linear(64, 3)
    images, slim = torch.randn(300, 2, 8, 8), SlimArch({"0.out": (0, 1, 5)}, {"0.out": 6})
    fitted = cn.reconstruct(Decoded(*layers).eval(), images[:1], slim, batches(images))
    expected = cn.reconstruct(nn.Sequential(*layers), images[:1], slim, batches(images))
    assert torch.equal(fitted[2].weight, expected[2].weight)  # type: ignore[index, arg-type]


def test_layers_further_on_make_up_for_what_is_lost() -> None:
    """What cannot be seen from the layer that reads the units alone: inputs are those of the network as it is now."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()) for _ in range(4)])
    model.append(nn.Flatten())
    images = torch.randn(200, 4, 6, 6)
    slim = SlimArch({"0.0.out": (0, 1, 2)}, {"0.0.out": 4})
    fitted = cn.reconstruct(model, images[:1], slim, batches(*images.split(64)))
    assert all(not torch.equal(fitted[i][0].weight, model[i][0].weight) for i in (1, 2, 3))  # type: ignore[index]
    assert error(model, fitted, images) < 0.9 * error(model, masked(model, images[:1], slim), images)


# ---------------------------------------------------------------- any network


@FEW
@given(NETWORKS, st.integers(0, 99))
def test_random_networks_lose_less_and_are_removed_exactly(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(400, 2, 8, 8, generator=generator)
    try:
        found = find_groups(model.eval(), images[:1])
    except cn.InputError:
        return
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    sizes = {s.name: s.size for s in found.sets}
    kept = {
        n: tuple(sorted(torch.randperm(s, generator=generator)[: -(-s * 2 // 3)].tolist())) for n, s in sizes.items()
    }
    slim = SlimArch(kept, sizes)
    fitted = cn.reconstruct(model, images[:1], slim, batches(*images.split(128)))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(bool(tensor.isfinite().all()) for tensor in fitted.state_dict().values())
    assert relative_difference(masked(fitted, images[:1], slim), fitted, images[:4]) == 0
    proof = cn.remove(fitted, images[:1], slim, images[:4])[1]
    assert proof.max_relative_difference <= 1e-9
    lost = error(model, masked(model, images[:1], slim), images)
    with torch.no_grad():
        assert error(model, fitted, images) <= 1.05 * lost + 1e-3 * float(model(images).norm())


def test_what_cannot_be_fitted_is_masked_only() -> None:
    images = torch.randn(300, 2, 8, 8)
    model = built(["grouped", "transposed", "multiplied"], "flat", head_first=False, seed=0).eval()
    found = find_groups(model, images[:1])
    slim = SlimArch({s.name: tuple(range(s.size // 2)) for s in found.sets}, {s.name: s.size for s in found.sets})
    fitted, plain = cn.reconstruct(model, images[:1], slim, batches(images)), masked(model, images[:1], slim)
    for name in ("blocks.0.0", "blocks.1.0", "blocks.2.0"):
        assert torch.equal(fitted.get_submodule(name).weight, plain.get_submodule(name).weight)  # type: ignore[arg-type]


def test_frozen_weights_stay_as_they_are() -> None:
    images = torch.randn(300, 2, 8, 8)
    model = built(["residual", "plain"], "mean", head_first=False, seed=0).eval()
    model.get_submodule("blocks.1").requires_grad_(False)
    slim = SlimArch({"stem.out": (0, 1, 2, 5)}, {"stem.out": 8})
    plain = masked(model, images[:1], slim)
    fitted = cn.reconstruct(model, images[:1], slim, batches(images))
    assert torch.equal(fitted.get_parameter("blocks.1.0.weight"), plain.get_parameter("blocks.1.0.weight"))
    assert not torch.equal(
        fitted.get_parameter("blocks.0.body.0.weight"), plain.get_parameter("blocks.0.body.0.weight")
    )


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.twice, self.last = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.twice(self.twice(torch.relu(self.first(x)))))
        return y


def test_a_layer_that_runs_twice_is_masked_only() -> None:
    model, x = Shared(), torch.randn(200, 4)
    found = find_groups(model, x[:1])
    slim = SlimArch({s.name: tuple(range(s.size - 2)) for s in found.sets}, {s.name: s.size for s in found.sets})
    fitted = cn.reconstruct(model, x[:1], slim, batches(x))
    assert torch.equal(fitted.twice.weight, masked(model, x[:1], slim).twice.weight)  # type: ignore[arg-type, union-attr]


def test_too_few_samples_for_a_layer_leave_it_masked() -> None:
    model, x = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)), torch.randn(200, 4)
    slim = SlimArch({"0.out": (0, 1, 2)}, {"0.out": 6})
    plain = masked(model, x[:1], slim)
    few = cn.reconstruct(model, x[:1], slim, batches(x), samples=20)
    assert torch.equal(few[2].weight, plain[2].weight)  # type: ignore[index, arg-type]
    assert not torch.equal(cn.reconstruct(model, x[:1], slim, batches(x))[2].weight, plain[2].weight)  # type: ignore[index, arg-type]


def test_the_same_twice_and_nothing_where_nothing_goes(capsys: pytest.CaptureFixture[str]) -> None:
    images = torch.randn(100, 2, 8, 8)
    model = built(["residual"], "mean", head_first=False, seed=0)
    whole = SlimArch({"stem.out": tuple(range(8))}, {"stem.out": 8})
    same = cn.reconstruct(model, images[:1], whole, batches(images))
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), same.state_dict().values(), strict=True))
    slim = SlimArch({"stem.out": (0, 2)}, {"stem.out": 8})
    rooms.reconstruct(model, images[:1], slim, batches(images), progress=Progress())
    assert "reconstruct 5/5" in capsys.readouterr().out
    one, two = (cn.reconstruct(model, images[:1], slim, batches(images)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), two.state_dict().values(), strict=True))
    assert model.training


class Standardised(nn.Conv2d):
    """What it multiplies with is not its weight."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return nn.functional.conv2d(x, weight, self.bias, padding=1)


def test_a_layer_that_changes_its_weights_is_masked_only() -> None:
    model = nn.Sequential(nn.Conv2d(2, 6, 3), nn.Conv2d(6, 4, 3), Standardised(4, 4, 3), nn.Flatten())
    images, slim = torch.randn(300, 2, 8, 8), SlimArch({"0.out": (0, 1, 5)}, {"0.out": 6})
    plain, fitted = masked(model, images[:1], slim), cn.reconstruct(model, images[:1], slim, batches(images))
    assert not torch.equal(fitted[1].weight, plain[1].weight)  # type: ignore[index, arg-type]
    assert torch.equal(fitted[2].weight, plain[2].weight)  # type: ignore[index, arg-type]


def test_half_precision_is_fitted_in_single() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 6, 3), nn.ReLU(), nn.Conv2d(6, 4, 3), nn.Flatten())
    images, slim = torch.randn(200, 2, 8, 8), SlimArch({"0.out": (0, 1, 5)}, {"0.out": 6})
    expected = cn.reconstruct(model, images[:1], slim, batches(images))
    half = copy.deepcopy(model).bfloat16()
    fitted = cn.reconstruct(half, images[:1].bfloat16(), slim, batches(images.bfloat16()))
    assert fitted[2].weight.dtype == torch.bfloat16  # type: ignore[index, union-attr]
    assert torch.allclose(fitted[2].weight.float(), expected[2].weight, atol=0.02)  # type: ignore[index, union-attr, operator, arg-type]


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right, self.last = nn.Linear(4, 6), nn.Linear(3, 6), nn.Linear(6, 2)

    def forward(self, a: Tensor, b: Tensor) -> dict[str, Tensor]:
        return {"y": self.last(torch.relu(self.left(a) + self.right(b)))}


def test_several_named_inputs() -> None:
    model, inputs = Named(), {"a": torch.randn(300, 4), "b": torch.randn(300, 3)}
    example = {name: tensor[:1] for name, tensor in inputs.items()}
    slim = cn.decide(model, example, ratio=0.5)
    fitted, plain = cn.reconstruct(model, example, slim, [(inputs, None)]), masked(model, example, slim)
    with torch.no_grad():
        lost = [(net(**inputs)["y"] - model(**inputs)["y"]).norm() for net in (fitted, plain)]
    assert lost[0] < 0.8 * lost[1]


def test_batches_of_another_form_are_said() -> None:
    model = built(["plain"], "mean", head_first=False, seed=0)
    with pytest.raises(cn.InputError, match=r"data: a batch is Tensor; expected \(inputs, targets\)"):
        cn.reconstruct(model, torch.randn(1, 2, 8, 8), SlimArch({"stem.out": (0,)}, {"stem.out": 8}), [torch.zeros(2)])


def test_other_faults_of_the_data_are_said() -> None:
    model, slim = built(["plain"], "mean", head_first=False, seed=0), SlimArch({"stem.out": (0,)}, {"stem.out": 8})
    images = torch.randn(8, 2, 8, 8)
    with pytest.raises(cn.InputError, match="samples 0: expected a whole number of at least 1"):
        cn.reconstruct(model, images[:1], slim, batches(images), samples=0)
    with pytest.raises(cn.InputError, match=r"data: the network does not run on \(8, 5, 8, 8\)"):
        cn.reconstruct(model, images[:1], slim, batches(torch.randn(8, 5, 8, 8)))


def test_data_that_are_no_numbers_are_said() -> None:
    model, slim = built(["plain"], "mean", head_first=False, seed=0), SlimArch({"stem.out": (0,)}, {"stem.out": 8})
    images = torch.randn(300, 2, 8, 8)
    images[7, 0, 3, 3] = torch.nan
    with pytest.raises(cn.InputError, match=r"data: what layer .* reads or gives for it is not finite"):
        cn.reconstruct(model, images[:1], slim, batches(images))


def test_no_data_is_said() -> None:
    model = built(["plain"], "mean", head_first=False, seed=0)
    with pytest.raises(cn.InputError, match="data: no batch"):
        cn.reconstruct(model, torch.randn(1, 2, 8, 8), SlimArch({"stem.out": (0,)}, {"stem.out": 8}), [])
