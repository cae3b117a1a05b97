"""Layers that a removal puts in place of ordinary ones: they read less of their input."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import wrap_torch_function


class SelectLinear(nn.Linear):
    """A linear layer that reads only some of its input features.

    Weight (N, len(indices)); input (..., C) with C > max(indices).
    """

    indices: Tensor
    of: int

    def __init__(self, dense: nn.Linear, indices: Tensor) -> None:
        """Take over the columns `indices` (sorted, int64) of `dense`, and its bias."""
        kept = int(indices.numel())
        super().__init__(kept, dense.out_features, dense.bias is not None, dense.weight.device, dense.weight.dtype)
        chosen = dense.indices[indices] if isinstance(dense, SelectLinear) else indices
        self.of = dense.of if isinstance(dense, SelectLinear) else dense.in_features
        self.register_buffer("indices", chosen.clone())
        with torch.no_grad():
            self.weight.copy_(dense.weight[:, indices])
            if dense.bias is not None:
                self.bias.copy_(dense.bias)

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input.index_select(-1, self.indices), self.weight, self.bias)

    def whole(self) -> nn.Linear:
        """The linear layer that reads every feature again, with zeros where this one reads nothing."""
        dense = nn.Linear(self.of, self.out_features, self.bias is not None, self.weight.device, self.weight.dtype)
        with torch.no_grad():
            dense.weight.zero_()
            dense.weight[:, self.indices] = self.weight
            if self.bias is not None:
                dense.bias.copy_(self.bias)
        return dense

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, selected from {self.of}"


class CroppedConv2d(nn.Conv2d):
    """A convolution whose kernel lost border rows or columns: the input is padded, or cropped, unevenly instead.

    Input (B, C, H, W) as for the whole kernel; the output has the size that the whole kernel gives.
    """

    pads: tuple[int, int, int, int]  # left, right, top, bottom; negative: cropped

    def __init__(self, dense: nn.Conv2d, rows: tuple[int, int], columns: tuple[int, int]) -> None:
        """Keep kernel rows `rows[0]:rows[1]` and columns `columns[0]:columns[1]` of `dense`, which pads with zeros."""
        (top, bottom), (left, right) = rows, columns
        super().__init__(
            dense.in_channels,
            dense.out_channels,
            (bottom - top, right - left),
            dense.stride,  # type: ignore[arg-type]
            0,
            dense.dilation,  # type: ignore[arg-type]
            dense.groups,
            dense.bias is not None,
            "zeros",
            dense.weight.device,
            dense.weight.dtype,
        )
        before: Sequence[int] = dense._reversed_padding_repeated_twice
        pad_left, pad_right, pad_top, pad_bottom = dense.pads if isinstance(dense, CroppedConv2d) else before
        (height, width), (step_y, step_x) = dense.kernel_size, dense.dilation
        self.pads = (
            pad_left - left * step_x,
            pad_right - (width - right) * step_x,
            pad_top - top * step_y,
            pad_bottom - (height - bottom) * step_y,
        )
        with torch.no_grad():
            self.weight.copy_(dense.weight[:, :, top:bottom, left:right])
            if dense.bias is not None and self.bias is not None:
                self.bias.copy_(dense.bias)

    def forward(self, input: Tensor) -> Tensor:
        if min(self.pads) < 0 < max(self.pads):  # padded first: the crop may reach into the padding
            input = F.pad(input, [max(pad, 0) for pad in self.pads])
            return super().forward(F.pad(input, [min(pad, 0) for pad in self.pads]))
        return super().forward(F.pad(input, self.pads))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, pads={self.pads}"  # type: ignore[no-untyped-call]


class PrunedAttention(nn.MultiheadAttention):
    """Multi-head attention that lost heads or inputs: its heads together need not be as wide as its inputs.

    Inputs, masks and outputs as for `nn.MultiheadAttention`. The width of a head, and with it the scale of its scores,
    is what it was.
    """

    def __init__(self, dense: nn.MultiheadAttention) -> None:
        """Take over the parameters of `dense`, of which rows of whole heads may be gone already."""
        nn.Module.__init__(self)
        for name, value in vars(dense).items():
            if not name.startswith("_"):
                setattr(self, name, value)
        for name, parameter in dense.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        for name in dense._parameters.keys() - self._parameters.keys():
            self.register_parameter(name, None)
        self.out_proj = dense.out_proj
        self.training = dense.training
        self._qkv_same_embed_dim = False  # keeps torch's encoder layers off their fast path, which fixes the width
        self.told()

    def told(self) -> None:
        """The number of heads follows the shapes of the parameters."""
        self.num_heads = self.out_proj.weight.shape[1] // self.head_dim
        self.embed_dim = self.out_proj.weight.shape[0]

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As `nn.MultiheadAttention.forward`; the weights are averaged over the heads that are left."""
        batched = query.dim() == 3
        first = self.batch_first or not batched
        q, k, v = (t if first else t.transpose(0, 1) for t in (query, key, value))
        if not batched:
            q, k, v = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        out, weights = pruned_attention(
            q,
            k,
            v,
            self.num_heads,
            self.in_proj_weight,
            self.q_proj_weight,
            self.k_proj_weight,
            self.v_proj_weight,
            self.in_proj_bias,
            self.out_proj.weight,
            self.out_proj.bias,
            self.dropout if self.training else 0.0,
            key_padding_mask,
            attn_mask,
            need_weights,
            is_causal,
        )
        if weights is not None:
            weights = weights.mean(1) if average_attn_weights else weights
        if not batched:
            out, weights = out.squeeze(0), None if weights is None else weights.squeeze(0)
        return out if first else out.transpose(0, 1), weights


@wrap_torch_function(lambda query, *rest, **more: (query,))  # so that a run on channel numbers sees it as one layer
def pruned_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    num_heads: int,
    in_proj_weight: Tensor | None,
    q_proj_weight: Tensor | None,
    k_proj_weight: Tensor | None,
    v_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    dropout_p: float = 0.0,
    key_padding_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    need_weights: bool = False,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Attention over heads that need not fill the width of the inputs.

    Args:
        query: (B, L, E).
        key, value: (B, S, E_k), (B, S, E_v).
        num_heads: n; the projections give n heads of D channels.
        in_proj_weight: (3 n D, E), or None and three weights (n D, E), (n D, E_k), (n D, E_v).
        in_proj_bias: (3 n D,) or None.
        out_proj_weight: (E_out, n D).
        out_proj_bias: (E_out,) or None.
        key_padding_mask: (B, S); True, or a number that is added to the score.
        attn_mask: (L, S) or (B n, L, S), likewise.
        need_weights: whether the attention weights are returned, too.
        is_causal: without an `attn_mask`: position i sees the positions up to i.

    Returns:
        (B, L, E_out), and (B, n, L, S) or None.
    """
    if in_proj_weight is not None:
        ways: Sequence[Tensor | None] = in_proj_weight.chunk(3)
    else:
        ways = q_proj_weight, k_proj_weight, v_proj_weight
    biases = (None,) * 3 if in_proj_bias is None else in_proj_bias.chunk(3)
    q, k, v = (
        F.linear(x, w, b).reshape(*x.shape[:2], num_heads, -1).transpose(1, 2)  # type: ignore[arg-type]
        for x, w, b in zip((query, key, value), ways, biases, strict=True)
    )  # (B, n, L or S, D)
    mask = _added(attn_mask, q.dtype)
    if mask is not None and mask.dim() == 3:
        mask = mask.reshape(-1, num_heads, *mask.shape[1:])
    if attn_mask is None and is_causal:
        mask = _added(torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1), q.dtype)
    if key_padding_mask is not None:
        padding = _added(key_padding_mask, q.dtype)
        assert padding is not None
        mask = padding[:, None, None] if mask is None else mask + padding[:, None, None]
    weights = None
    if need_weights:
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        weights = F.dropout((scores if mask is None else scores + mask).softmax(-1), dropout_p, dropout_p > 0)
        mixed = weights @ v
    else:
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout_p)
    return F.linear(mixed.transpose(1, 2).flatten(2), out_proj_weight, out_proj_bias), weights


def _added(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A mask as numbers that are added to scores."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, -math.inf)
