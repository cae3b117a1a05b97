"""Run a network on channel numbers: what each layer that carries parameters does to them. The rest is in tags.py."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten

from compressnas.groups import modules_with_weights
from compressnas.layers import SelectLinear, pruned_attention
from compressnas.tags import Follower, Trace, along, compact, varies

_CONVS = {torch.conv1d: 1, torch.conv2d: 2, torch.conv3d: 3}
_TRANSPOSED = {torch.conv_transpose1d: 1, torch.conv_transpose2d: 2, torch.conv_transpose3d: 3}


def trace(model: nn.Module, run: Callable[[nn.Module], Any]) -> Trace:
    """Run the network once, `run(model)`, in eval mode and without gradients, and follow its channels.

    Where layers are left out, it runs once more in training mode: auxiliary heads read channels only then. Their own
    units stay, as what is proved runs in eval mode.

    The network comes back as it was. Whatever it raises in eval mode is passed on.
    """
    modes = [(module, module.training) for module in model.modules()]
    follower = Follower(model)
    owners: list[nn.Module] = []
    handles = []
    for module in model.modules():
        handles.append(module.register_forward_pre_hook(lambda m, _: owners.append(m)))
        handles.append(module.register_forward_hook(lambda *_: owners.pop() and None, always_call=True))
    follower.owners = owners
    fast_path = torch.backends.mha.get_fastpath_enabled()  # hides what attention is made of
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        model.eval()
        with torch.no_grad(), follower, _Layers(follower):
            output = run(model)
        with torch.no_grad():
            follower.reaches_output(output)
            met = {name for name, _ in follower.axes}
            if any(f"{name}.weight" not in met for name, _ in modules_with_weights(model)):
                _train(follower, model, run)
            follower.finish()
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
        for handle in handles:
            handle.remove()
        for module, training in modes:
            module.training = training
    return follower.result


def _train(follower: Follower, model: nn.Module, run: Callable[[nn.Module], Any]) -> None:
    """Follow the network in training mode, all but its innermost modules: norms and dropout stay as they are."""
    before = len(follower.result.slices)
    for module in model.modules():
        module.training = next(module.children(), None) is not None
    try:
        with follower, _Layers(follower):
            output = run(model)
        follower.reaches_output(output)
    except Exception:  # an auxiliary head may want a larger input: what came before it is followed all the same
        pass
    for one in follower.result.slices[before:]:
        if one.role != "input":
            follower.classes.keep_all(one.ids, "its layer runs in training only, where nothing is proved")


class _Layers(TorchFunctionMode):
    """Hands the calls that carry parameters to the follower as a whole, before torch takes them apart."""

    def __init__(self, follower: Follower) -> None:
        super().__init__()
        self.follower = follower

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, follower = kwargs or {}, self.follower
        rule = _rule(func)
        if rule is None or follower.paused:
            return func(*args, **kwargs)
        follower.paused = True
        try:
            out = func(*args, **kwargs)
            rule(follower, func, out, *args, **kwargs)
        finally:
            follower.paused = False
        return out


def _linear(on: Follower, _: Any, out: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    tags, inputs, units = on.of(input), on.axis(weight, 1, "input"), on.axis(weight, 0, "unit")
    if inputs is None or units is None:
        return _computed(on, out, input, weight)
    if on.owners and isinstance(on.owners[-1], SelectLinear):
        on.keep(tags, "is read by a layer that selects its inputs already")
    on.read(inputs, tags, input.dim() - 1)
    on.ride(bias, units)
    on.set(out, units.expand(out.shape))


def _computed(on: Follower, out: Tensor, *values: Tensor | None) -> None:
    """A layer whose weight is not a parameter: parametrised, shared by a formula, made by another layer."""
    for value in values:
        on.keep(on.of(value) if isinstance(value, Tensor) else None, "meets a weight that is computed")
    on.set(out, None)


def _conv(on: Follower, func: Any, out: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None = None,
          stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1) -> None:  # fmt: skip
    _convolve(on, out, input, weight, bias, groups, _CONVS[func], transposed=False)


def _conv_transpose(on: Follower, func: Any, out: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None = None,
                    stride: Any = 1, padding: Any = 0, output_padding: Any = 0, groups: int = 1,
                    dilation: Any = 1) -> None:  # fmt: skip
    _convolve(on, out, input, weight, bias, groups, _TRANSPOSED[func], transposed=True)


def _convolve(
    on: Follower, out: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None, groups: int, spatial: int,
    transposed: bool,
) -> None:  # fmt: skip
    name = on.names.get(id(weight))
    tags, dim, channels = on.of(input), input.dim() - spatial - 1, input.shape[-spatial - 1]
    if name is None:
        return _computed(on, out, input, weight, bias)
    read_axis, unit_axis = (0, 1) if transposed else (1, 0)
    width = out.shape[dim]
    if groups == 1:
        on.result.convs[name] = ("plain", 1)
        inputs, units = on.axis(weight, read_axis, "input"), on.axis(weight, unit_axis, "unit")
        assert inputs is not None and units is not None
        on.read(inputs, tags, dim)
    elif groups == channels and (not transposed or weight.shape[1] == 1):  # depthwise: channels pass through
        on.result.convs[name] = ("through", groups)
        ids = on.axis(weight, 0, "through")
        assert ids is not None
        units, times = ids, width // channels
        if tags is None:
            on.classes.keep_all(ids, "its inputs are not made by a layer")
        else:
            rows = along(tags, dim).repeat_interleave(times, 0)  # (C_out, m)
            on.classes.merge(ids[:, None].expand_as(rows), rows)
    elif transposed:
        on.keep(tags, "is read by a grouped transposed convolution")
        return on.set(out, None)
    else:
        on.result.convs[name] = ("grouped", groups)
        inputs, ids = on.axis(weight, 1, "input", ("free", "within")), on.axis(weight, 0, "unit")
        assert inputs is not None and ids is not None
        units = ids
        grid, made = torch.zeros(groups, channels // groups, dtype=torch.int64), ids.reshape(groups, -1)
        if tags is None:
            on.classes.keep_all(inputs, "its inputs are not made by a layer")
        else:
            grid = on.channels(tags, dim).reshape(groups, -1)  # (groups, C_in / groups)
        for plan in ("free", "within"):  # the j-th channel of every group
            if tags is not None:
                on.result.ties[plan].append((inputs.expand_as(grid), grid))
            on.tie(made, plan)
        whole = torch.cat([made, grid], 1)  # all channels of a group, with its units
        on.tie(whole.T, "whole")
    on.ride(bias, units)
    shape = [1] * out.dim()
    shape[dim] = width
    on.set(out, units.reshape(shape).expand(out.shape))


def _batch_norm(on: Follower, _: Any, out: Tensor, input: Tensor, running_mean: Tensor | None = None,
                running_var: Tensor | None = None, weight: Tensor | None = None, bias: Tensor | None = None,
                *rest: Any, **more: Any) -> None:  # fmt: skip
    tags = on.of(input)
    vector = None if tags is None else on.channels(tags, 1)
    for tensor in (running_mean, running_var, weight, bias):
        on.ride(tensor, vector)
    on.set(out, tags)


def _layer_norm(on: Follower, _: Any, out: Tensor, input: Tensor, normalized_shape: Sequence[int],
                weight: Tensor | None = None, bias: Tensor | None = None, *rest: Any, **more: Any) -> None:  # fmt: skip
    tags = on.of(input)
    if tags is not None:
        inside = tuple(range(tags.dim() - len(normalized_shape), tags.dim()))
        if not any(varies(tags, d) for d in inside):  # each channel on its own, at places that have their scales
            on.ride(weight, None)
            on.ride(bias, None)
            return on.set(out, tags)
        on.classes.inexact |= set(compact(tags)[0].reshape(-1).tolist())
        tags_inside = tags
        for dim in range(inside[0]):
            first = tags_inside.narrow(dim, 0, 1)
            if varies(tags_inside, dim):  # one scale for all that stands at a place
                on.classes.merge(*compact(first.expand_as(tags_inside), tags_inside))
            tags_inside = first
        tags = tags_inside.expand(out.shape)
        tags_inside = tags_inside.reshape(tags_inside.shape[inside[0] :])
    for tensor in (weight, bias):
        on.ride(tensor, None if tags is None else tags_inside)
    on.set(out, tags)


def _rms_norm(on: Follower, _: Any, out: Tensor, input: Tensor, normalized_shape: Sequence[int],
              weight: Tensor | None = None, *rest: Any, **more: Any) -> None:  # fmt: skip
    _layer_norm(on, _, out, input, normalized_shape, weight)


def _group_norm(on: Follower, _: Any, out: Tensor, input: Tensor, num_groups: int, weight: Tensor | None = None,
                bias: Tensor | None = None, *rest: Any, **more: Any) -> None:  # fmt: skip
    tags = on.of(input)
    vector = None if tags is None else on.channels(tags, 1)
    if tags is not None and vector is not None:
        groups = vector.reshape(num_groups, -1)
        if not (on.owners and isinstance(on.owners[-1], nn.GroupNorm)):
            on.keep(tags, "is normalised in groups by a call that is no module")
        elif weight is None:
            on.keep(tags, "is normalised in groups without parameters")
        elif num_groups == 1:
            on.classes.inexact |= set(vector.tolist())
        else:
            on.classes.merge(groups[:, :1].expand_as(groups), groups)  # whole norm groups: that is exact
    for tensor in (weight, bias):
        on.ride(tensor, vector)
    on.set(out, tags)


def _prelu(on: Follower, _: Any, out: Tensor, input: Tensor, weight: Tensor) -> None:
    tags = on.of(input)
    if weight.numel() > 1:
        rows = None if tags is None else along(tags, 1)
        on.ride(weight, None if rows is None else rows[:, 0])
    on.set(out, tags)


def _attend(on: Follower, _: Any, out: Tensor, query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None,
            dropout_p: float = 0.0, is_causal: bool = False, scale: Any = None, **more: Any) -> None:  # fmt: skip
    q, k, v = (on.of(tensor) for tensor in (query, key, value))
    if q is not None or k is not None:
        zero = torch.zeros((), dtype=torch.int64)
        q, k = (zero.expand(t.shape) if tags is None else tags for t, tags in ((query, q), (key, k)))
        on.classes.merge(q.select(-2, 0), k.select(-2, 0))
        if scale is None:  # 1 / sqrt(width of a head): whole heads only
            for plan in ("free", "within"):
                on.result.kept[plan].append((compact(q)[0], "the width of an attention head sets its scale"))
        on.result.ties["whole"].append((q[..., :1, :1].expand(q[..., :1, :].shape), q[..., :1, :]))
        if v is not None and v.shape[:-2] == q.shape[:-2]:
            first = q[..., :1, :1].expand(v[..., :1, :].shape)
            on.result.ties["whole"].append((first, v[..., :1, :]))
    if isinstance(attn_mask, Tensor):
        on.keep(on.of(attn_mask), "is a mask of attention heads")
    on.set(out, None if v is None else v.narrow(-2, 0, 1).expand(out.shape) if not varies(v, v.dim() - 2) else None)


def _multi_head(on: Follower, _: Any, out: tuple[Tensor, Any], query: Tensor, key: Tensor, value: Tensor, width: int,
                num_heads: int, in_proj_weight: Tensor | None, in_proj_bias: Tensor | None, bias_k: Tensor | None,
                bias_v: Tensor | None, add_zero_attn: bool, dropout_p: float, out_proj_weight: Tensor,
                out_proj_bias: Tensor | None, *rest: Any, **more: Any) -> None:  # fmt: skip
    apart = [more.get(f"{name}_proj_weight") for name in "qkv"]
    if bias_k is not None or bias_v is not None or add_zero_attn or rest:
        return _fixed("is read by attention that adds keys of its own")(on, _, out, query, key, value)
    _heads(on, out, (query, key, value), num_heads, in_proj_weight, apart, in_proj_bias, out_proj_weight, out_proj_bias)


def _pruned_attention(on: Follower, _: Any, out: tuple[Tensor, Any], query: Tensor, key: Tensor, value: Tensor,
                      num_heads: int, fused: Tensor | None, q: Tensor | None, k: Tensor | None, v: Tensor | None,
                      bias: Tensor | None, out_weight: Tensor, out_bias: Tensor | None, *rest: Any,
                      **more: Any) -> None:  # fmt: skip
    _heads(on, out, (query, key, value), num_heads, fused, [q, k, v], bias, out_weight, out_bias)


def _heads(on: Follower, out: tuple[Tensor, Any], read: Sequence[Tensor], num_heads: int, fused: Tensor | None,
           apart: Sequence[Tensor | None], bias: Tensor | None, out_weight: Tensor,
           out_bias: Tensor | None) -> None:  # fmt: skip
    """The layer torch.nn.MultiheadAttention: whatever makes or reads a head goes with the head."""
    weights = [fused] if fused is not None else list(apart)
    if any(w is None or on.names.get(id(w)) is None for w in (*weights, out_weight)):
        return _computed(on, out[0], *read)
    owner = on.owners[-1] if on.owners else None
    if not isinstance(owner, nn.MultiheadAttention) or len(on.owners) == 1:  # another layer cannot be put in its place
        return _fixed("is read by attention that is no part of another module")(on, None, out, *read)
    made = [on.axis(w, 0, "unit") for w in weights if w is not None]
    units = torch.cat([ids for ids in made if ids is not None])  # (3 n D,)
    heads = units.reshape(3, num_heads, -1).transpose(0, 1).flatten(1)  # (n, 3 D)
    on.classes.merge(heads[:, :1].expand_as(heads), heads)
    on.ride(bias, units)
    for number, tensor in enumerate(read):
        weight = weights[min(number, len(weights) - 1)]
        inputs = None if weight is None else on.axis(weight, 1, "input")
        assert inputs is not None
        on.read(inputs, on.of(tensor), tensor.dim() - 1)
    inputs, outputs = on.axis(out_weight, 1, "input"), on.axis(out_weight, 0, "unit")
    assert inputs is not None and outputs is not None
    on.classes.merge(inputs, heads[:, :1].expand(num_heads, len(inputs) // num_heads).reshape(-1))
    on.ride(out_bias, outputs)
    on.set(out, None)
    on.set(out[0], outputs.expand(out[0].shape))


def _fixed(reason: str) -> Callable[..., None]:
    def rule(on: Follower, _: Any, out: Any, *args: Any, **kwargs: Any) -> None:
        for value in tree_flatten((args, kwargs))[0]:
            if isinstance(value, Tensor) and on.names.get(id(value)) is None:
                on.keep(on.of(value), reason)
        on.set(out, None)

    return rule


def _embedding(on: Follower, _: Any, out: Tensor, input: Tensor, weight: Tensor, *rest: Any, **more: Any) -> None:
    units = on.axis(weight, 1, "unit")
    on.set(out, None if units is None else units.expand(out.shape))


_RULES: dict[Any, Callable[..., None]] = {
    F.linear: _linear,
    **dict.fromkeys(_CONVS, _conv),
    **dict.fromkeys(_TRANSPOSED, _conv_transpose),
    F.batch_norm: _batch_norm,
    F.instance_norm: _batch_norm,
    F.layer_norm: _layer_norm,
    F.group_norm: _group_norm,
    F.rms_norm: _rms_norm,
    torch.prelu: _prelu,
    F.scaled_dot_product_attention: _attend,
    F.multi_head_attention_forward: _multi_head,
    pruned_attention: _pruned_attention,
    F.bilinear: _fixed("is read by a bilinear layer"),
    F.embedding: _embedding,
    torch.lstm: _fixed("is read by an LSTM"),
    torch.gru: _fixed("is read by a GRU"),
    torch.rnn_tanh: _fixed("is read by a recurrent layer"),
    torch.rnn_relu: _fixed("is read by a recurrent layer"),
}


def _rule(func: Any) -> Callable[..., None] | None:
    try:
        return _RULES.get(func)
    except TypeError:  # not hashable
        return None
