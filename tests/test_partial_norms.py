"""Channels that a norm averages over: removed where that is asked for, proved but for the norm, and the change said."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_surgery_random import FEW
from torch import Tensor, nn
from torch.nn.utils import parametrize

import compressnas as cn
from compressnas import surgery
from compressnas.__main__ import main
from compressnas.coupling import INEXACT
from compressnas.inputs import Inputs
from compressnas.partial_norms import norms_over
from compressnas.surgery import Removal, find_groups, masked


class Tokens(nn.Module):
    """A residual stream of 16 channels, normed before each reader; `norm` is called with the width."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm1, self.norm2 = nn.Linear(6, 16), norm(16), norm(16)
        self.up, self.down, self.head = nn.Linear(16, 24), nn.Linear(24, 16), nn.Linear(16, 5)
        self.position = nn.Parameter(torch.randn(1, 4, 16))
        self.token = nn.Parameter(torch.randn(1, 1, 16))
        for parameter in (*self.norm1.parameters(), *self.norm2.parameters()):
            nn.init.uniform_(parameter, 0.5, 1.5)

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, 3, 6) -> (B, 5)."""
        embedded = torch.cat([self.token.expand(tokens.shape[0], -1, -1), self.embed(tokens)], 1) + self.position
        embedded = embedded + self.down(torch.relu(self.up(self.norm1(embedded))))
        return self.head(self.norm2(embedded).mean(1))  # type: ignore[no-any-return]


class Images(nn.Module):
    """Convolutions with a norm that takes (B, C, H, W)."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.norm, self.body = nn.Conv2d(2, 12, 3), norm(12), nn.Conv2d(12, 8, 3)
        self.head = nn.Linear(8, 3)
        for parameter in self.norm.parameters():
            nn.init.uniform_(parameter, 0.5, 1.5)

    def forward(self, images: Tensor) -> Tensor:
        """(B, 2, 8, 8) -> (B, 3)."""
        return self.head(torch.relu(self.body(torch.relu(self.norm(self.stem(images))))).mean((2, 3)))  # type: ignore[no-any-return]


class ChannelsLast(nn.LayerNorm):
    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Encoder(nn.Module):
    def __init__(self, norm_first: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(6, 16)
        self.layer = nn.TransformerEncoderLayer(16, 4, 24, batch_first=True, norm_first=norm_first)
        self.head = nn.Linear(16, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layer(self.embed(tokens)).mean(1))  # type: ignore[no-any-return]


TOKENS, PIXELS = torch.randn(6, 3, 6, generator=torch.Generator().manual_seed(1)), torch.randn(6, 2, 8, 8)
NETWORKS: dict[str, tuple[Callable[[], nn.Module], Tensor, str]] = {
    "layer_norm": (lambda: Tokens(nn.LayerNorm), TOKENS, "embed.out"),
    "without_bias": (lambda: Tokens(lambda n: nn.LayerNorm(n, bias=False)), TOKENS, "embed.out"),
    "rms_norm": (lambda: Tokens(nn.RMSNorm), TOKENS, "embed.out"),
    "rms_norm_eps": (lambda: Tokens(lambda n: nn.RMSNorm(n, eps=0.1)), TOKENS, "embed.out"),
    "one_group": (lambda: Images(lambda n: nn.GroupNorm(1, n, eps=0.1)), PIXELS, "stem.out"),
    "channels_last": (lambda: Images(ChannelsLast), PIXELS, "stem.out"),
    "channels_and_places": (lambda: Images(lambda n: nn.LayerNorm((n, 6, 6))), PIXELS, "stem.out"),
    "encoder": (lambda: Encoder(False), TOKENS, "embed.out"),
    "encoder_norm_first": (lambda: Encoder(True), TOKENS, "embed.out"),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_it_is_proved_but_for_the_norm_and_the_change_is_said(name: str, tmp_path: Path) -> None:
    make, inputs, wide = NETWORKS[name]
    model = make().eval()
    assert wide not in [s.name for s in find_groups(model, inputs[:1]).sets]
    found = cn.find_groups(model, inputs[:1], approximate=True)
    assert wide in [s.name for s in found.sets] and wide in found.approximate
    slim = cn.decide(model, inputs[:1], ratio=0.5, approximate=True)
    assert slim.origin["approximate"] is True
    small, proof = cn.remove(model, inputs[:1], slim, inputs)
    assert proof.verdict == "approximate" and wide in proof.approximate and not proof.left_alone
    assert proof.max_relative_difference <= 1e-9
    with torch.no_grad():
        before, after = masked(model, inputs[:1], slim).double()(inputs.double()), small.double()(inputs.double())
    change = float((before - after).abs().max() / before.abs().max())
    assert change > 1e-4 and proof.change == pytest.approx(change, rel=1e-3)
    small.float()
    assert cn.measure(small, inputs[:1]).params < 0.7 * cn.measure(model, inputs[:1]).params
    assert cn.export_onnx(small, inputs[:1], tmp_path / "model.onnx").max_abs_diff < 1e-4
    cn.save(small, slim, tmp_path / "saved")
    with torch.no_grad():
        assert torch.equal(cn.load(make().eval(), tmp_path / "saved")(inputs), small(inputs))


def test_without_it_such_channels_stay_and_the_reason_is_said() -> None:
    model, inputs, wide = NETWORKS["layer_norm"][0]().eval(), TOKENS, "embed.out"
    slim = cn.decide(model, inputs[:1], ratio=0.5)
    assert wide not in slim.sizes and "approximate" not in slim.origin
    assert dict(find_groups(model, inputs[:1]).left_alone)[wide] == INEXACT
    by_hand = cn.SlimArch({wide: tuple(range(8)), "up.out": (0, 1)}, {wide: 16, "up.out": 24})
    proof = cn.remove(model, inputs[:1], by_hand, inputs)[1]
    assert proof.verdict == "partly" and dict(proof.left_alone) == {wide: INEXACT} and proof.change == 0
    said = cn.SlimArch(by_hand.kept, by_hand.sizes, {"approximate": True})
    assert cn.remove(model, inputs[:1], said, inputs)[1].verdict == "approximate"


def test_a_decision_that_takes_no_such_channel_is_equal() -> None:
    model = NETWORKS["layer_norm"][0]().eval()
    slim = cn.SlimArch({"embed.out": tuple(range(16)), "up.out": (0, 1)}, {"embed.out": 16, "up.out": 24},
                       {"approximate": True})  # fmt: skip
    proof = cn.remove(model, TOKENS[:1], slim, TOKENS)[1]
    assert (proof.verdict, proof.approximate, proof.change) == ("equal", (), 0.0)


def test_idle_channels_that_nobody_decided_on_stay() -> None:
    """Without their channel the norm would average over less."""
    model, inputs, wide = NETWORKS["one_group"][0]().eval(), PIXELS, "stem.out"
    positions = 12 * 9
    slim = cn.SlimArch({"body.shape": tuple(range(9, positions))}, {"body.shape": positions})
    small, proof = cn.remove(model, inputs[:1], slim, inputs)
    assert proof.verdict == "equal" and proof.max_relative_difference <= 1e-9
    assert small.get_parameter("stem.weight").shape[0] == 12
    both = cn.SlimArch({**slim.kept, wide: tuple(range(1, 12))}, {**slim.sizes, wide: 12}, {"approximate": True})
    small, proof = cn.remove(model, inputs[:1], both, inputs)
    assert proof.verdict == "approximate" and small.get_parameter("stem.weight").shape[0] == 11


def test_channels_decided_to_stay_stay_idle_or_not() -> None:
    model, inputs, wide = NETWORKS["one_group"][0]().eval(), PIXELS, "stem.out"
    positions = 12 * 9
    kept = {"body.shape": tuple(range(9, positions)), wide: tuple(range(12))}
    slim = cn.SlimArch(kept, {"body.shape": positions, wide: 12}, {"approximate": True})
    small, proof = cn.remove(model, inputs[:1], slim, inputs)
    assert proof.verdict == "equal" and small.get_parameter("stem.weight").shape[0] == 12


class Apart(nn.Module):
    """A norm averages over the first half of what a layer makes."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.made, self.norm, self.left, self.right = nn.Linear(5, 16), norm(8), nn.Linear(8, 6), nn.Linear(8, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, values: Tensor) -> Tensor:
        made = self.made(values)
        both = self.left(self.norm(made[..., :8])) + self.right(made[..., 8:])
        return self.head(torch.relu(both))  # type: ignore[no-any-return]


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
@pytest.mark.parametrize("approximate", [False, True])
def test_units_beside_those_that_a_norm_averages_over_go_exactly(
    norm: Callable[[int], nn.Module], approximate: bool
) -> None:
    model, values = Apart(norm).eval(), torch.randn(7, 5)
    found = cn.find_groups(model, values[:1], approximate=approximate)
    assert {s.name: s.size for s in found.sets} == {"made.out": 8, "left.out": 6} and not found.approximate
    assert dict(found.left_alone)["made.out"] == f"8 of its 16 units: {INEXACT}"
    proof = cn.remove(model, values[:1], cn.decide(model, values[:1], ratio=0.5, approximate=approximate), values)[1]
    assert proof.verdict == "equal" and proof.change == 0


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm])
def test_a_norm_over_the_places_of_each_channel_is_exact(kind: Callable[..., nn.Module], affine: bool) -> None:
    torch.manual_seed(0)
    norm = kind(10, elementwise_affine=affine)
    model = nn.Sequential(nn.Conv1d(3, 8, 3, padding=1), norm, nn.Conv1d(8, 6, 3), nn.ReLU(), nn.Flatten()).eval()
    signals = torch.randn(4, 3, 10)
    slim = cn.decide(model, signals[:1], ratio=0.5)
    proof = cn.remove(model, signals[:1], slim, signals)[1]
    assert "0.out" in slim.sizes and proof.verdict == "equal" and not proof.left_alone


def test_what_changes_nothing_is_equal_flag_or_not() -> None:
    """A branch of scale zero, as LayerScale may start."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.skip, self.made, self.norm, self.read = (
                nn.Linear(5, 3),
                nn.Linear(5, 8),
                nn.LayerNorm(8),
                nn.Linear(8, 3),
            )
            self.scale = nn.Parameter(torch.zeros(3))

        def forward(self, values: Tensor) -> Tensor:
            return self.skip(values) + self.scale * self.read(self.norm(self.made(values)))  # type: ignore[no-any-return]

    model, values = Scaled().eval(), torch.randn(7, 5)
    for origin in ({}, {"approximate": True}):
        slim = cn.SlimArch({"made.out": (0, 3)}, {"made.out": 8}, origin)
        small, proof = cn.remove(model, values[:1], slim, values)
        assert (proof.verdict, proof.approximate, proof.change) == ("equal", (), 0.0)
        assert small.get_parameter("made.weight").shape[0] == 2


def test_groups_found_without_it_are_refused() -> None:
    model = NETWORKS["layer_norm"][0]().eval()
    with pytest.raises(cn.InputError, match=r"groups: found without approximate; expected find_groups\("):
        cn.decide(model, TOKENS[:1], ratio=0.5, groups=cn.find_groups(model, TOKENS[:1]), approximate=True)
    least = [cn.reachable(model, TOKENS[:1], steps=2, approximate=flag)[-1].params_kept for flag in (False, True)]
    assert least[1] < 0.3 * least[0]


def test_a_norm_whose_scale_is_a_buffer() -> None:
    model = NETWORKS["layer_norm"][0]()
    for norm in (model.get_submodule("norm1"), model.get_submodule("norm2")):
        scale = norm.weight.detach().clone()  # type: ignore[operator, union-attr]
        del norm.weight
        norm.register_buffer("weight", scale)
    model.eval()
    slim = cn.decide(model, TOKENS[:1], ratio=0.5, approximate=True)
    proof = cn.remove(model, TOKENS[:1], slim, TOKENS)[1]
    assert proof.approximate == ("embed.out",) and not proof.left_alone


@pytest.mark.parametrize("part", ["embed.weight", "norm1.weight", "position", "up.weight"])
def test_a_swapped_index_is_found(part: str) -> None:
    model = NETWORKS["layer_norm"][0]().eval()

    def swapping(network: nn.Module, example: Inputs, slim: cn.SlimArch, select: bool) -> tuple[nn.Module, Removal]:
        small, removal = surgery._removed(network, example, slim, select)
        weight = small.get_parameter(part).data
        if weight.shape[-1] == 8:
            weight[..., [0, 1]] = weight[..., [1, 0]]
        else:
            weight[[0, 1]] = weight[[1, 0]]
        return small, removal

    slim = cn.SlimArch({"embed.out": tuple(range(8))}, {"embed.out": 16}, {"approximate": True})
    with pytest.raises(cn.RunFailed, match=r"nothing could be proved: embed\.out: removal changes the output"):
        surgery.remove(model, TOKENS[:1], slim, TOKENS, remover=swapping)


@FEW
@given(st.sampled_from(sorted(NETWORKS)), st.integers(0, 99))
def test_norms_over_what_is_left_are_those_of_the_smaller_network(name: str, seed: int) -> None:
    """Any decision: the masked network with such norms is the removed one."""
    generator = torch.Generator().manual_seed(seed)
    make, inputs, _ = NETWORKS[name]
    model = make().eval()
    sizes = {s.name: s.size for s in find_groups(model, inputs[:1], approximate=True).sets}
    kept = {}
    for n, size in sizes.items():
        count = int(torch.randint(1, size + 1, (), generator=generator))
        kept[n] = tuple(sorted(torch.randperm(size, generator=generator)[:count].tolist()))
    slim = cn.SlimArch(kept, sizes, {"approximate": True})
    proof = cn.remove(model, inputs[:1], slim, inputs)[1]
    assert not proof.left_alone and proof.max_relative_difference <= 1e-9


def test_other_norms_are_left_as_they_are() -> None:
    model = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.Linear(16, 16), nn.LayerNorm(16)).eval()
    inputs = torch.randn(3, 6)
    with torch.no_grad():
        expected = model[:2](inputs)
        with norms_over(model, {"3.weight": {0: torch.arange(4)}}):
            first, second = model[:2](inputs), model(inputs)
            assert torch.equal(nn.functional.layer_norm(inputs, (6,)), nn.LayerNorm(6)(inputs))
    assert torch.equal(first, expected) and not torch.allclose(second, model(inputs))


def test_a_norm_with_a_computed_scale_spares_the_layers_behind_it() -> None:
    """It stays with what it averages over, flag or not."""
    torch.manual_seed(0)
    layers = (
        nn.Conv2d(2, 8, 3),
        nn.GroupNorm(1, 8),
        nn.Conv2d(8, 6, 3),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )
    model = nn.Sequential(*layers, nn.Linear(6, 3)).eval()
    parametrize.register_parametrization(model[1], "weight", nn.Tanh())
    for approximate in (False, True):
        found = cn.find_groups(model, PIXELS[:1], approximate=approximate)
        assert "2.out" in [s.name for s in found.sets] and "0.out" in dict(found.left_alone)


def test_the_bayes_pruner_takes_such_channels() -> None:
    model = NETWORKS["rms_norm"][0]()
    pruner = cn.BayesPruner(model, TOKENS[:1], lam=0.5, target={"params": 0.25}, approximate=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    labels = torch.randint(0, 5, (6,), generator=torch.Generator().manual_seed(0))
    for _ in range(60):
        if pruner.reached:
            break
        pruner.update([(TOKENS, labels)])
        for _ in range(5):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(TOKENS), labels).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            pruner.shrink(optimizer)
    assert pruner.slim().origin["approximate"] is True and pruner.slim().removed("embed.out")
    proof = pruner.finish()[1]
    assert proof.verdict == "approximate" and not proof.left_alone
    assert "embed.out" in dict(cn.BayesPruner(model, TOKENS[:1], lam=0.5).left_alone)


# ---------------------------------------------------------------- from the command line

NETWORK = """
from torch import nn

def build(classes):
    norm = nn.GroupNorm(1, 12), nn.ReLU()
    return nn.Sequential(nn.Conv2d(3, 12, 3), *norm, nn.Conv2d(12, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
                         nn.Flatten(), nn.Linear(8, classes))
"""
RECIPE = """
threads: 1
data: {name: synthetic, shape: [3, 8, 8], classes: 3, train: 64, validation: 16, test: 16}
model: {factory: "normed_network:build", args: {classes: 3}}
train: {epochs: 1}
method: {kind: magnitude, target: {flops: 0.4}}
finetune: {epochs: 0}
"""
BAYES = "{kind: bayes, groups: coupled, control: budget, epochs: 1, target: {flops: 0.4}, approximate: true}"


@pytest.mark.parametrize("method", ["magnitude", "steps", "bayes"])
def test_a_run_says_what_it_changed(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "normed_network.py").write_text(NETWORK)
    (tmp_path / "my.yaml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    settings = {
        "magnitude": ["method.approximate=true"],
        "steps": ["method.approximate=true", "method.steps=2", "method.training={epochs: 1}"],
        "bayes": [f"method={BAYES}"],
    }[method]
    assert main(["run", "my.yaml", "--out", "out", *(part for one in settings for part in ("--set", one))]) == 0
    assert "but for norms over what is left, which change it by" in capsys.readouterr().out
    proof = json.loads((tmp_path / "out" / "result.json").read_text())["proof"]
    assert proof["verdict"] == "approximate" and proof["approximate"] == ["0.out"] and not proof["left_alone"]
    assert proof["max_relative_difference"] <= 1e-9 < proof["change"]
    report = (tmp_path / "out" / "report.md").read_text()
    assert (
        "the removal is approximate, as norms average over 0.out" in report and "masked differs from removed" in report
    )
