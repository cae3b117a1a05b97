"""Which places of which parameters belong to the same channel: a network runs once on channel numbers.

Beside every tensor of a forward pass goes a tensor of tags, of the same shape: the number of the channel that each
element belongs to, 0 where it belongs to none. What moves elements about (views, concatenation, slices, shuffles) is
run on the tags as it is; arithmetic between two tags makes them one class; whatever is not understood marks its
channels with the reason why they must stay. So an unknown operation costs compression, never correctness.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.weak import WeakIdKeyDictionary

from compressnas.inputs import tensors_of

PLANS = ("free", "within", "whole")  # how channels that a view, a chunk or a grouped layer splits are tied together
OUTPUT = "its units reach the output of the network"
_MOVES = {
    "view", "_unsafe_view", "reshape", "_reshape_alias", "permute", "transpose", "t", "cat", "stack", "split",
    "split_with_sizes", "slice", "select", "expand", "repeat", "roll", "flip", "constant_pad_nd", "pixel_shuffle",
    "pixel_unshuffle", "squeeze", "unsqueeze", "clone", "alias", "detach", "unbind", "unfold", "index", "index_select",
    "channel_shuffle", "diagonal", "tile", "movedim", "narrow", "view_as", "lift_fresh",
}  # fmt: skip
_SAME = {"_to_copy", "contiguous", "dropout", "native_dropout", "zeros_like", "ones_like", "empty_like", "rand_like",
         "randn_like", "full_like"}  # fmt: skip
_REDUCE = {"mean", "sum", "amax", "amin", "var", "std", "var_mean", "linalg_vector_norm", "logsumexp", "max", "min",
           "argmax", "argmin", "prod", "norm", "any", "all"}  # fmt: skip
_ALONG = {"_softmax", "_log_softmax", "softmax", "log_softmax", "cumsum", "sort", "topk", "cumprod"}
_POINTWISE = {"hardswish", "log_sigmoid_forward", "rrelu_with_noise"}  # what torch does not tag as such
_SPATIAL = ("pool", "upsample", "reflection_pad", "replication_pad", "grid_sampler")


@dataclass(frozen=True)
class Slice:
    """One axis of a parameter or buffer, and the channel of each of its places.

    Attributes:
        name: of the parameter or buffer.
        axis: the axis.
        ids: (n,) int64 tags; 0 for a place that stays whatever goes.
        role: `unit` (its weights make the channel), `through` (so do they, and the channel passes through: depthwise),
            `input` (they read the channel), `rider` (biases, norms, bare parameters: they go with the channel).
        plans: under which plans the axis may be cut at all.
    """

    name: str
    axis: int
    ids: Tensor
    role: str
    plans: tuple[str, ...] = PLANS


class Classes:
    """Union-find over tags; each class may carry a reason why its channels must stay."""

    def __init__(self) -> None:
        self.parent: list[int] = [0]
        self.reasons: dict[int, str] = {}
        self.inexact: set[int] = set()  # members: what a norm averages over would change

    def new(self, count: int) -> Tensor:
        first = len(self.parent)
        self.parent += range(first, first + count)
        return torch.arange(first, first + count)

    def find(self, tag: int) -> int:
        while self.parent[tag] != tag:
            self.parent[tag] = self.parent[self.parent[tag]]
            tag = self.parent[tag]
        return tag

    def merge(self, one: Tensor, other: Tensor) -> None:
        """Make one class of each pair of tags, both of one shape. A tag beside a 0 must stay."""
        first, second, base = one.reshape(-1), other.reshape(-1), len(self.parent)
        different = first != second
        for pair in torch.unique(first[different] * base + second[different]).tolist():
            a, b = divmod(pair, base)
            if a == 0 or b == 0:
                self.keep_all(torch.tensor([a or b]), "is read together with channels that cannot go")
                continue
            a, b = self.find(a), self.find(b)
            self.parent[max(a, b)] = min(a, b)

    def keep_all(self, tags: Tensor, reason: str) -> None:
        """The channels must stay."""
        for tag in torch.unique(tags).tolist():
            if tag:
                self.reasons.setdefault(tag, reason)

    def roots(self, tags: Tensor) -> Tensor:
        return torch.tensor([self.find(tag) for tag in tags.reshape(-1).tolist()]).reshape(tags.shape)

    def copy(self) -> "Classes":
        other = Classes()
        other.parent, other.reasons, other.inexact = list(self.parent), dict(self.reasons), set(self.inexact)
        return other


@dataclass
class Trace:
    """What a run on tags found.

    Attributes:
        classes: over all tags, under the plan `free`.
        slices: the axes of parameters and buffers that carry channels, in the order in which they were met.
        ties: plan -> pairs of tags that are one class under it.
        kept: plan -> (tags, reason): channels that must stay under it.
        convs: name of a convolution's weight -> (kind, groups): `plain`, `through` or `grouped`.
    """

    classes: Classes = field(default_factory=Classes)
    slices: list[Slice] = field(default_factory=list)
    ties: dict[str, list[tuple[Tensor, Tensor]]] = field(default_factory=lambda: {plan: [] for plan in PLANS})
    kept: dict[str, list[tuple[Tensor, str]]] = field(default_factory=lambda: {plan: [] for plan in PLANS})
    convs: dict[str, tuple[str, int]] = field(default_factory=dict)

    def differs(self, plan: str) -> bool:
        """Whether the plan says anything that `free` does not."""
        return plan == "free" or bool(self.ties[plan] or self.kept[plan])

    def under(self, plan: str) -> Classes:
        """The classes with the ties of a plan."""
        classes = self.classes.copy()
        for one, other in self.ties[plan]:
            classes.merge(one, other)
        for tags, reason in self.kept[plan]:
            classes.keep_all(tags, reason)
        return classes


# ---------------------------------------------------------------- tensors of tags


def varies(tags: Tensor, dim: int) -> bool:
    """Whether two elements along `dim` have different tags."""
    if tags.shape[dim] <= 1 or tags.stride(dim) == 0:
        return False
    return not torch.equal(tags, tags.narrow(dim, 0, 1).expand_as(tags))


def compact(*operands: Tensor) -> list[Tensor]:
    """The operands, of one shape, without the dimensions along which each of them merely repeats itself."""
    parts = list(operands)
    for dim in range(parts[0].dim()):
        if parts[0].shape[dim] > 1 and all(part.stride(dim) == 0 for part in parts):
            parts = [part.narrow(dim, 0, 1) for part in parts]
    return parts


def along(tags: Tensor, dim: int) -> Tensor:
    """(n, m): the tags along `dim` as rows, everything else as columns, repetitions dropped."""
    count = tags.shape[dim]
    (tags,) = compact(tags)
    return tags.movedim(dim, 0).reshape(tags.shape[dim], -1).expand(count, -1)


class Follower(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Carries the tags through everything that torch computes below the layers that carry parameters."""

    owners: Sequence[nn.Module]

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.result = Trace()
        self.classes = self.result.classes
        self.names: dict[int, str] = {}  # id of a parameter or buffer -> its name
        self.tensors: dict[str, Tensor] = {}
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            self.names[id(tensor)], self.tensors[name] = name, tensor
        self.tags: Any = WeakIdKeyDictionary()
        self.leaves: dict[str, Tensor] = {}  # parameter or buffer -> a tag for each of its elements
        self.axes: dict[tuple[str, int], Tensor] = {}  # weight and axis -> a tag for each of its places
        self.paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        before = self._views(args) if not self.paused and func._schema.is_mutable else []
        out = func(*args, **kwargs)
        if not self.paused:
            self.paused = True
            try:
                self._follow(func, args, kwargs, out)
                for tensor, tags in before:
                    self._changed(tensor, tags)
            finally:
                self.paused = False
        return out

    # ------------------------------------------------------------ tags of tensors

    def of(self, tensor: Tensor) -> Tensor | None:
        """The tags of a tensor, or None where it has none."""
        name = self.names.get(id(tensor))
        if name is not None and tensor.dim() > 0:
            if name not in self.leaves:
                self.leaves[name] = self.classes.new(tensor.numel()).reshape(tensor.shape)
            return self.leaves[name]
        found: Tensor | None = self.tags.get(tensor)
        return found

    def set(self, out: Any, tags: Tensor | None) -> None:
        for tensor in tree_flatten(out)[0]:
            if isinstance(tensor, Tensor):
                if tags is not None and tensor.dim() > 0 and tags.shape == tensor.shape:
                    self.tags[tensor] = tags
                else:
                    self.tags.pop(tensor, None)

    def keep(self, tags: Tensor | None, reason: str) -> None:
        if tags is not None:
            self.classes.keep_all(compact(tags)[0], reason)

    def reaches_output(self, output: Any) -> None:
        for tensor in tensors_of(output):
            if (tags := self.tags.get(tensor)) is not None:
                self.classes.reasons |= dict.fromkeys(torch.unique(compact(tags)[0]).tolist(), OUTPUT)

    def _views(self, args: Any) -> list[tuple[Tensor, Tensor | None]]:
        first = args[0] if args and isinstance(args[0], Tensor) else None
        return [(first, self.tags.get(first))] if first is not None and first._is_view() else []

    def _changed(self, view: Tensor, before: Tensor | None) -> None:
        """Writing through a view changes the tensor that it looks at, whose tags are not told."""
        after = self.tags.get(view)
        if after is not before and not (after is not None and before is not None and torch.equal(after, before)):
            for tags in (after, before, self.tags.get(view._base)):
                self.keep(tags, "is written into a part of another tensor")

    # ------------------------------------------------------------ operations

    def _follow(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        name = func.overloadpacket.__name__
        values = [a for a in tree_flatten((args, kwargs))[0] if isinstance(a, Tensor)]
        if not any(self.of(value) is not None for value in values):
            if func._schema.is_mutable and values:
                self.set(out, None)
            return
        if name in _MOVES:
            self._move(func, name, args, kwargs, out)
        elif name in _SAME or (name in ("as_strided", "as_strided_") and out.shape == values[0].shape):
            self.set(out, self.of(values[0]))  # strided anew: another memory format
        elif name in ("copy_", "copy"):
            source = self.of(values[1])
            self.set(out, None if source is None else source.expand(values[0].shape))
        elif name in _REDUCE:
            self._reduce(name, func, args, kwargs, out)
        elif name in _ALONG:
            self._normalise(name, func, args, kwargs, out)
        elif any(word in name for word in _SPATIAL):
            self._resample(name, values[0], out)
        elif name in ("mm", "bmm", "addmm", "baddbmm"):
            self._contract(name, values, out)
        elif _is_pointwise(func.overloadpacket):
            self._combine(values, out)
        elif name not in ("_local_scalar_dense", "item", "equal", "is_nonzero"):
            for value in values:
                self.keep(self.of(value), f"passes through {name}, which is not followed")
            self.set(out, None)

    def _move(self, func: Any, name: str, args: Any, kwargs: Any, out: Any) -> None:
        def tagged(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            tags = self.of(value)
            return torch.zeros((), dtype=torch.int64).expand(value.shape) if tags is None else tags

        if name in ("index", "index_select"):
            moved = func(tagged(args[0]), *args[1:], **kwargs)
        elif name == "constant_pad_nd":
            moved = func(tagged(args[0]), args[1], 0)
        elif name == "clone":
            moved = tagged(args[0])
        elif name in ("view", "_unsafe_view", "reshape", "_reshape_alias"):
            moved = tagged(args[0]).reshape(out.shape)
            self._split(tagged(args[0]), moved)
        elif name == "cat":
            moved = _concatenated([tagged(part) for part in args[0] if part.numel()], _dim(func, args, kwargs, 0))
        else:
            moved = func(*tree_map(tagged, args), **tree_map(tagged, kwargs))
        pairs = zip(out, moved, strict=True) if isinstance(out, list | tuple) else [(out, moved)]
        outs = [(tensor, tags) for tensor, tags in pairs]
        for tensor, tags in outs:
            self.set(tensor, tags)
        if name in ("split", "split_with_sizes"):
            parts = [tags for _, tags in outs]
            if len({part.shape for part in parts}) == 1:
                self.tie(torch.stack([compact(part)[0] for part in parts]).flatten(1))

    def _split(self, before: Tensor, after: Tensor) -> None:
        """A view that spreads channels over several dimensions keeps their grid only if they go by row or column."""
        (before,), (after,) = compact(before), compact(after)
        if sum(varies(before, d) for d in range(before.dim())) != 1:
            return
        spread = [d for d in range(after.dim()) if varies(after, d)]
        if len(spread) < 2:
            return
        last = after.movedim(spread[-1], -1).reshape(-1, after.shape[spread[-1]])  # (rest, n): columns go together
        self.tie(last)
        middle = after.movedim(spread[-2], -1).reshape(-1, after.shape[spread[-2]])
        self.tie(middle, "whole")

    def tie(self, grid: Tensor, plan: str = "within") -> None:
        """(m, n): under the plan, each column is one class."""
        self.result.ties[plan].append((grid[:1].expand_as(grid)[1:], grid[1:]))

    def _reduce(self, name: str, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        tags = self.of(args[0])
        if tags is None:
            return
        dims = kwargs.get("dim", args[1] if len(args) > 1 and name not in ("linalg_vector_norm", "norm") else None)
        if name in ("linalg_vector_norm", "norm"):
            dims = kwargs.get("dim", args[2] if len(args) > 2 else None)
        if len(args) > 1 and isinstance(args[1], Tensor):
            return self._combine([args[0], args[1]], out)  # max of two tensors
        dims = range(tags.dim()) if dims is None or dims == [] else [dims] if isinstance(dims, int) else dims
        places = sorted({d % tags.dim() for d in dims}, reverse=True)
        if any(varies(tags, d) for d in places):
            self.keep(tags, f"is averaged or compared with other channels by {name}")
            return self.set(out, None)
        for place in places:
            tags = tags.narrow(place, 0, 1)
        for tensor in tensors_of(out):
            self.set(tensor, tags.reshape(tensor.shape) if tensor.numel() == tags.numel() else None)

    def _normalise(self, name: str, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        tags = self.of(args[0])
        if tags is None:
            return
        dim = _dim(func, args, kwargs, -1) % tags.dim()
        if varies(tags, dim):
            self.keep(tags, f"is compared with other channels by {name.removeprefix('_')}")
        if name == "topk" and tags is not None:
            tags = tags.narrow(dim, 0, 1).expand(out[0].shape)
        self.set(out, tags)

    def _resample(self, name: str, value: Tensor, out: Any) -> None:
        tags = self.of(value)
        if tags is None:
            return
        spatial = next((n for n in (1, 2, 3) if f"{n}d" in name), 2)
        if any(varies(tags, dim) for dim in range(tags.dim() - spatial, tags.dim())):  # behind a pixel shuffle
            rows = compact(tags)[0].flatten(-spatial)
            self.classes.merge(rows[..., :1].expand_as(rows), rows)
        for dim in range(tags.dim() - spatial, tags.dim()):
            tags = tags.narrow(dim, 0, 1)
        for tensor in tensors_of(out):
            self.set(tensor, tags.expand(tensor.shape))

    def _contract(self, name: str, values: list[Tensor], out: Tensor) -> None:
        """a (..., n, k) times b (..., k, m): a channel along k must go from both; along n or m it is carried on."""
        bias, (a, b) = (values[:-2], values[-2:])
        left, right = (self.of(v) for v in (a, b))
        none = torch.zeros((), dtype=torch.int64)
        left = none.expand(a.shape) if left is None else left
        right = none.expand(b.shape) if right is None else right
        result = None
        if varies(left, left.dim() - 1) or varies(right, right.dim() - 2):
            for tags, dim in ((left, left.dim() - 2), (right, right.dim() - 1)):
                if varies(tags, dim):
                    self.keep(tags, "is multiplied with other channels")
            self.classes.merge(left.select(-2, 0), right.select(-1, 0))
        else:
            rows, columns = left.narrow(-1, 0, 1).expand(out.shape), right.narrow(-2, 0, 1).expand(out.shape)
            (one, other) = compact(rows, columns)
            if bool(((one != 0) & (other != 0)).any()):
                self.keep(one, "is multiplied with other channels")
                self.keep(other, "is multiplied with other channels")
            else:
                result = torch.where(one != 0, one, other).expand(out.shape)
        self.set(out, result)
        for value in bias:
            self._combine([out, value], out)

    def _combine(self, values: Sequence[Tensor], out: Any) -> None:
        """Element by element: two tags that meet are one class."""
        outs = [tensor for tensor in tensors_of(out) if tensor.dim() > 0]
        if not outs:
            return
        shape = outs[0].shape
        result: Tensor | None = None
        sizes: tuple[int, ...] = ()
        for value in values:
            if value.dim() == 0 or value.numel() == 1 < outs[0].numel():
                self.keep(self.of(value), "scales or moves all channels of another tensor")
                continue
            own_sizes = (1,) * (len(shape) - value.dim()) + tuple(value.shape)
            tags = self.of(value)
            tags = torch.zeros((), dtype=torch.int64).expand(shape) if tags is None else tags.expand(shape)
            result = tags if result is None else self._met(result, sizes, tags, own_sizes)
            sizes = tuple(max(a, b) for a, b in zip(sizes, own_sizes, strict=True)) if sizes else own_sizes
        for tensor in outs:
            self.set(tensor, None if result is None or not bool(compact(result)[0].any()) else result)

    def _met(self, one: Tensor, one_sizes: Sequence[int], other: Tensor, other_sizes: Sequence[int]) -> Tensor:
        shape = one.shape
        one, other = compact(one, other)
        varying = [
            {d for d in range(len(shape)) if varies(tags, d)} if bool(tags.any()) else set() for tags in (one, other)
        ]
        for tags, sizes, across in ((one, one_sizes, varying[1]), (other, other_sizes, varying[0])):
            if bool(tags.any()) and any(sizes[d] == 1 and shape[d] > 1 for d in across):
                self.keep(tags, "is spread over the channels of another tensor")
                return (other if tags is one else one).expand(shape)
        for tags, facing, sizes, along in ((one, other, other_sizes, varying[0]), (other, one, one_sizes, varying[1])):
            alone = tags[(facing == 0) & (tags != 0)]
            if alone.numel() and any(sizes[d] > 1 for d in along):
                self.keep(alone, "meets something whose width is fixed")
        both = (one != 0) & (other != 0)
        self.classes.merge(one[both], other[both])
        return torch.where(one != 0, one, other).expand(shape)

    # ------------------------------------------------------------ layers

    def axis(self, weight: Tensor, axis: int, role: str, plans: tuple[str, ...] = PLANS) -> Tensor | None:
        """The tags of the places along an axis of a parameter; None where the tensor is no parameter."""
        name = self.names.get(id(weight))
        if name is None:
            return None
        if (name, axis) not in self.axes:
            ids = self.classes.new(weight.shape[axis])
            self.axes[name, axis] = ids
            self.result.slices.append(Slice(name, axis, ids, role, plans))
        return self.axes[name, axis]

    def read(self, ids: Tensor, tags: Tensor | None, dim: int) -> None:
        """Places `ids` (n,) of a weight read the n places of `dim` of an input with these tags."""
        if tags is None:
            return self.classes.keep_all(ids, "its inputs are not made by a layer")
        rows = along(tags, dim)  # (n, m)
        self.classes.merge(ids[:, None].expand_as(rows), rows)

    def channels(self, tags: Tensor, dim: int) -> Tensor:
        """(n,) one tag for each place of `dim`; what else stands at a place is one class with it."""
        rows = along(tags, dim)
        self.classes.merge(rows[:, :1].expand_as(rows), rows)
        return rows[:, 0]

    def ride(self, tensor: Tensor | None, tags: Tensor | None) -> None:
        """A bias or norm parameter whose elements belong to the channels `tags`, of its shape."""
        if tensor is None or self.names.get(id(tensor)) is None:
            return
        own = self.of(tensor)
        assert own is not None
        if tags is None:
            self.classes.keep_all(own, "belongs to channels that are not made by a layer")
        else:
            self.classes.merge(own, tags.expand(own.shape))

    def finish(self) -> None:
        """Turn the tags of single elements of biases, norms and bare parameters into slices along their axes."""
        for name, tags in self.leaves.items():
            roots = self.classes.roots(tags)
            varying = [d for d in range(roots.dim()) if varies(roots, d)] or ([0] if roots.numel() == 1 else [])
            if len(varying) == 1:
                axis = varying[0]
                self.result.slices.append(
                    Slice(name, axis, tags.movedim(axis, 0).reshape(tags.shape[axis], -1)[:, 0], "rider")
                )
            else:
                self.classes.keep_all(tags, f"parameter {name} has no axis of its channels")


@cache
def _is_pointwise(operation: Any) -> bool:
    """Whether torch says of any overload, in place or not, that it works element by element."""
    name = operation.__name__.removesuffix("_")
    packets = (operation, getattr(torch.ops.aten, name, operation))
    overloads = [getattr(packet, overload) for packet in packets for overload in packet.overloads()]
    return name in _POINTWISE or any(torch.Tag.pointwise in overload.tags for overload in overloads)


def _dim(func: Any, args: Any, kwargs: Any, default: int) -> int:
    """The argument `dim` of an operation, wherever it stands."""
    if "dim" in kwargs:
        return int(kwargs["dim"])
    place = next((i for i, a in enumerate(func._schema.arguments) if a.name == "dim"), None)
    return int(args[place]) if place is not None and len(args) > place else default


def _concatenated(parts: Sequence[Tensor], dim: int) -> Tensor:
    """torch.cat that keeps repetitions unwritten."""
    dim %= parts[0].dim()
    shape = [sum(part.shape[dim] for part in parts) if d == dim else n for d, n in enumerate(parts[0].shape)]
    for d in range(len(shape)):
        if d != dim and all(part.stride(d) == 0 for part in parts):
            parts = [part.narrow(d, 0, 1) for part in parts]
    return torch.cat(list(parts), dim).expand(shape)
