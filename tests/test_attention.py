"""nn.MultiheadAttention: whole heads go, and what is left is attention that is narrower than its inputs."""

import itertools

import pytest
import torch
from torch import nn

import compressnas as cn
from compressnas.inputs import call
from compressnas.layers import PrunedAttention

WIDTH, HEADS = 16, 4


class Attending(nn.Module):
    """Attention between two layers, of a sequence to itself or to another; (B, 7, 6) -> (B, 5)."""

    def __init__(self, cross: bool = False, **settings: object) -> None:
        super().__init__()
        self.cross = cross
        self.before = nn.Linear(6, WIDTH)
        self.other = nn.Linear(6, int(str(settings.get("kdim", WIDTH)))) if cross else None
        self.attend = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, **settings)  # type: ignore[arg-type]
        self.after = nn.Linear(WIDTH, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query = self.before(x).relu()
        key = query if self.other is None else self.other(x).relu()
        mixed: torch.Tensor = self.attend(query, key, key)[0]
        return self.after(mixed).mean(1)  # type: ignore[no-any-return]


def examples() -> dict[str, tuple[nn.Module, object]]:
    torch.manual_seed(0)
    sequence, other = torch.randn(3, 7, WIDTH), torch.randn(3, 5, WIDTH)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, batch_first=True)
    return {
        "self": (Attending(), torch.randn(2, 7, 6)),
        "without bias": (Attending(bias=False), torch.randn(2, 7, 6)),
        "cross": (Attending(cross=True), torch.randn(2, 7, 6)),
        "cross, own widths": (Attending(cross=True, kdim=12, vdim=12), torch.randn(2, 7, 6)),
        "encoder": (nn.TransformerEncoder(layer, 2), sequence),
        "sequence first": (nn.TransformerEncoderLayer(WIDTH, HEADS, 32), sequence),
        "decoder": (nn.TransformerDecoderLayer(WIDTH, HEADS, 32, batch_first=True), (sequence, other)),
    }


@pytest.mark.parametrize("name", list(examples()))
def test_heads_go_step_by_step_are_proved_saved_and_exported(name: str, tmp_path: object) -> None:
    model, example = examples()[name]
    torch.manual_seed(1)
    heads = next(m for m in model.modules() if isinstance(m, nn.MultiheadAttention)).num_heads
    small, slims = model, []
    for left in (heads // 2, heads // 4):
        slims.append(cn.decide(small, example, ratio=0.5))  # type: ignore[arg-type]
        small, proof = cn.remove(small, example, slims[-1])  # type: ignore[arg-type]
        assert proof.verdict == "equal" and not proof.left_alone
        attentions = [m for m in small.modules() if isinstance(m, nn.MultiheadAttention)]
        assert [m.num_heads for m in attentions] == [left] * len(attentions)
    cn.save(small, slims[-1], str(tmp_path))
    loaded = cn.load(examples()[name][0], str(tmp_path))
    torch.testing.assert_close(call(loaded.eval(), example), call(small.eval(), example))  # type: ignore[arg-type]
    if name in ("encoder", "cross, own widths"):  # a conversion takes seconds
        assert cn.export_onnx(small, example, f"{tmp_path}/model.onnx").max_abs_diff < 1e-5  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["self", "encoder", "without bias", "sequence first"])
def test_heads_without_weights_leave_their_constant_behind(name: str) -> None:
    """The values of an emptied head are its bias, at every position: attention passes that on to the output."""
    model, example = examples()[name]
    with torch.no_grad():
        for attention in [m for m in model.modules() if isinstance(m, nn.MultiheadAttention)]:
            assert attention.in_proj_weight is not None
            attention.in_proj_weight.reshape(3, HEADS, -1)[:, 1] = 0
            if attention.in_proj_bias is not None:
                nn.init.normal_(attention.in_proj_bias)
    sizes = {
        s.name: s.size for s in cn.find_groups(model, example).sets if s.name.endswith("attend.out") or s.size == HEADS
    }  # type: ignore[arg-type]
    slim = cn.SlimArch(dict.fromkeys(sizes, (0, 2, 3)), sizes)
    small, proof = cn.remove(model, example, slim)  # type: ignore[arg-type]
    assert proof.verdict == "equal" and not proof.folded.lost
    assert set(proof.folded.folded) == ({} if name == "without bias" else sizes).keys()
    torch.testing.assert_close(call(small.eval(), example), call(model.eval(), example), rtol=1e-4, atol=1e-5)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["flops", "params"])
def test_budgets_count_heads(kind: str) -> None:
    model, example = examples()["encoder"]
    slim = cn.decide(model, example, target={kind: 0.6})  # type: ignore[arg-type]
    small, _ = cn.remove(model, example, slim)  # type: ignore[arg-type]
    before, after = (getattr(cn.measure(m, example), kind) for m in (model, small))  # type: ignore[arg-type]
    assert 0.57 <= after / before <= 0.6
    assert after == slim.origin[f"reached_{kind}"]


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("weights", [True, False])
def test_with_all_heads_it_is_torch_attention(first: bool, separate: bool, weights: bool) -> None:
    torch.manual_seed(0)
    own = {"kdim": 5, "vdim": 6} if separate else {}
    dense = nn.MultiheadAttention(8, 2, batch_first=first, **own).double().eval()  # type: ignore[arg-type]
    nn.init.normal_(dense.in_proj_bias)
    pruned = PrunedAttention(dense)
    shapes = [(3, 4, 8), (3, 6, own.get("kdim", 8)), (3, 6, own.get("vdim", 8))]
    q, k, v = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    padding, causal = torch.rand(3, 6) > 0.7, torch.ones(4, 6, dtype=torch.bool).triu(1)
    padding[:, 0] = False
    if not first:
        q, k, v = (t.transpose(0, 1) for t in (q, k, v))
    scores, of_heads = torch.randn(4, 6, dtype=torch.float64), torch.randn(6, 4, 6, dtype=torch.float64)
    for pad, mask in itertools.product((None, padding), (None, causal, scores, of_heads)):
        if pad is not None and mask is not None and mask.is_floating_point():
            pad = torch.zeros(3, 6, dtype=torch.float64).masked_fill(pad, -torch.inf)  # torch wants one kind of mask
        for average in (True, False):
            given = {"key_padding_mask": pad, "attn_mask": mask, "need_weights": weights}
            given |= {"average_attn_weights": average, "is_causal": mask is causal}
            expected, found = dense(q, k, v, **given), pruned(q, k, v, **given)
            torch.testing.assert_close(found[0], expected[0])
            torch.testing.assert_close(found[1], expected[1])
    one = [t[0] if first else t[:, 0] for t in (q, k, v)]
    for found_one, expected_one in zip(pruned(*one), dense(*one), strict=True):
        torch.testing.assert_close(found_one, expected_one)


class MaskedByHead(Attending):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.before(x).relu()
        mask = torch.zeros(len(x) * HEADS, 7, 7, dtype=y.dtype)
        mixed: torch.Tensor = self.attend(y, y, y, attn_mask=mask)[0]
        return self.after(mixed).mean(1)  # type: ignore[no-any-return]


class Watched(Attending):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.before(x).relu()
        mixed, weights = self.attend(y, y, y)
        return self.after(mixed).mean(1) + weights.square().sum()  # type: ignore[no-any-return]


@pytest.mark.parametrize("model", [MaskedByHead(), Watched()])
def test_heads_that_the_code_counts_are_left_alone(model: nn.Module) -> None:
    found = cn.find_groups(model, torch.randn(2, 7, 6))
    assert [s.name for s in found.group_sets] == ["before.out", "attend.out_proj.out"]
    assert [name for name, _ in found.left_alone] == ["attend.out"]


@pytest.mark.parametrize("setting", ["add_bias_kv", "add_zero_attn"])
def test_attention_with_keys_of_its_own_is_left_alone(setting: str) -> None:
    with pytest.raises(cn.InputError, match="is read by attention that adds keys of its own"):
        cn.find_groups(Attending(**{setting: True}), torch.randn(2, 7, 6))
