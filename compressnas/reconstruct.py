"""What the weights that stay become when groups go: each layer is solved anew for what it gave before.

Where some of a layer's inputs are gone, the mean of the Gaussian posterior of its other weights, given that, is
W' = argmin sum_n ||W x_n - W' x'_n||^2 + r ||W' - W||^2, with x_n the inputs that the layer had and x'_n those that it
has now (Hassibi and Stork, Optimal brain surgeon, 1992, equation 5, with the curvature of one layer; He et al., Channel
pruning, arXiv 1707.06168, equation 5, for x'). It takes no labels and no training.
"""

import copy
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from compressnas.bayes.calls import eval_mode, patches
from compressnas.bayes.calls import of_convolution as call_of
from compressnas.errors import InputError
from compressnas.inputs import Inputs, call, map_tensors, tensors_of
from compressnas.interface import samples as samples_of
from compressnas.interface import take
from compressnas.progress import Progress
from compressnas.run_order import NORMS, Step, steps_of
from compressnas.slim import SlimArch
from compressnas.surgery import masked

STAGE = "reconstruct"
SAMPLES = 1024
POSITIONS = 64  # of a sample, drawn for each layer: neighbouring ones say nearly the same
RIDGE = 0.03  # r, as a part of the mean of the diagonal of sum x'x''
ROWS = 4  # for each input of a layer at least; with fewer the fit would follow chance, and the layer is masked only
AT_ONCE = 16  # samples whose patches are in memory


def reconstruct(
    model: nn.Module,
    example_inputs: Inputs,
    slim: SlimArch,
    data: Iterable[Any],
    *,
    samples: int = SAMPLES,
    progress: Progress | None = None,
) -> nn.Module:
    """The network with the groups that go masked, and the other weights fitted to what its layers gave before.

    Convolutions and linear layers are fitted one after the other, in the order in which they run, from the first that
    loses something on; each reads what the fitted ones before it give. Statistics of batch norms move with their input.
    Masked only: layers that run twice, share their weights or hold frozen ones, grouped and transposed convolutions,
    attention and the like, and layers with more inputs than `samples` tell about.

        slim = cn.decide(model, x, target={"flops": 0.5})
        small, proof = cn.remove(cn.reconstruct(model, x, slim, loader), x, slim)

    Args:
        model: the trained network; not changed.
        example_inputs: a tensor (B, ...), a tuple of arguments or a mapping of named ones.
        slim: the decision, of `decide` or of a file.
        data: yields (inputs, targets), inputs like `example_inputs`; targets are not read.
        samples: so many are read, as far as there are.
        progress: the display, in which this is a stage of its own.

    Raises:
        InputError: the decision does not fit the network, the network cannot be traced, or `data` yields something
            else or nothing.
    """
    if samples < 1:
        raise InputError(f"samples {samples}: expected a whole number of at least 1")
    device = next(model.parameters()).device
    batches = list(_some(data, samples, device))
    if not batches:
        raise InputError("data: no batch; expected (inputs, targets)")
    small, left = masked(model, example_inputs, slim), _left(model, example_inputs, slim)
    with eval_mode(model), eval_mode(small), torch.no_grad():
        steps = steps_of(model, batches[0])
        first = next((i for i, step in enumerate(steps) if not _whole(left, step.name)), len(steps))
        with (progress or Progress(quiet=True)).stage(STAGE, len(steps) - first) as done:
            for step in steps[first:]:
                if step.is_norm:
                    _measure(model, small, step.name, batches)
                elif (columns := _columns_left(left, step.name)) is not None:
                    _fit(model, small, step, columns, batches)
                done(1)
        if in_front_of_norms := [step for step in steps[first:] if step.read_by is not None]:
            _rescale_all(model, small, in_front_of_norms, left, batches[0])
    return small


def _some(data: Iterable[Any], samples: int, device: torch.device) -> Iterator[Inputs]:
    """Inputs of the first batches, so many samples in all."""
    for batch in data:
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise InputError(f"data: a batch is {type(batch).__name__}; expected (inputs, targets)")
        inputs = map_tensors(batch[0], lambda t: t.to(device))
        count = samples_of(inputs)
        yield inputs if count <= samples else take(inputs, torch.arange(samples))
        samples -= count
        if samples <= 0:
            return


def _left(model: nn.Module, example: Inputs, slim: SlimArch) -> dict[str, Tensor]:
    """Weight -> bool, shaped like it: which of its elements a mask leaves."""
    ones = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in ones.parameters():
            parameter.fill_(1)
    return {name: parameter.detach() != 0 for name, parameter in masked(ones, example, slim).named_parameters()}


def _whole(left: dict[str, Tensor], name: str) -> bool:
    return f"{name}.weight" not in left or bool(left[f"{name}.weight"].all())


def _columns_left(left: dict[str, Tensor], name: str) -> Tensor | None:
    """(C * kernel,) bool: the inputs that are read; None where outputs differ in that."""
    flat = left[f"{name}.weight"].flatten(1)
    return flat[0] if bool((flat == flat[:1]).all()) else None


# ---------------------------------------------------------------- doing it


class _Reached(Exception):
    """A network has come as far as it is needed."""


def _inputs_of(model: nn.Module, name: str, batches: Iterable[Inputs]) -> Iterator[Tensor]:
    """What a module reads, batch by batch; nothing after it runs."""
    got: list[Tensor] = []

    def stop(_: nn.Module, inputs: tuple[Any, ...]) -> None:
        got.append(inputs[0])
        raise _Reached

    hook = model.get_submodule(name).register_forward_pre_hook(stop)
    try:
        for inputs in batches:
            try:
                call(model, inputs)
            except _Reached:
                yield got.pop()
    finally:
        hook.remove()


def _fit(model: nn.Module, small: nn.Module, step: Step, columns: Tensor, batches: list[Inputs]) -> None:
    """Solve one layer of `small`, in place."""
    dense, layer = model.get_submodule(step.name), small.get_submodule(step.name)
    assert isinstance(dense.weight, Tensor) and isinstance(layer.weight, Tensor)
    before = dense.weight.flatten(1)  # (N, C * kernel)
    kept, exact = columns.cpu(), torch.promote_types(before.dtype, torch.float32)
    if not kept.any():
        return
    sums = _Moments(int(kept.sum()), len(before))
    generator = torch.Generator().manual_seed(0)
    pairs = zip(_inputs_of(model, step.name, batches), _inputs_of(small, step.name, batches), strict=True)
    for had, has in pairs:
        for some in range(0, len(had), AT_ONCE):
            rows, now = _rows(dense, had[some : some + AT_ONCE]), _rows(layer, has[some : some + AT_ONCE])
            places = torch.randperm(rows.shape[1], generator=generator)[:POSITIONS].to(rows.device)
            given = rows[:, places].flatten(0, 1).to(exact) @ before.T.to(exact)  # (n, N)
            sums.add(now[:, places].flatten(0, 1)[:, columns].to(exact).cpu(), given.cpu())
    if not sums.finite:
        raise InputError(f"data: what layer {step.name} reads or gives for it is not finite")
    if sums.count < ROWS * len(kept):
        return
    bias, dense_bias = layer.bias, dense.bias
    free = step.read_by is not None or (isinstance(bias, Tensor) and bias.requires_grad)
    solved = sums.solve(before[:, columns].cpu().double(), free)
    after = torch.zeros(len(before), len(kept), dtype=torch.float64)
    after[:, kept] = solved
    layer.weight.copy_(after.reshape(layer.weight.shape))
    if isinstance(bias, Tensor) and isinstance(dense_bias, Tensor) and bias.requires_grad:
        shift = sums.mean_given - solved @ sums.mean_now
        bias.copy_(dense_bias.cpu() + shift)


def _rescale_all(
    model: nn.Module, small: nn.Module, steps: Iterable[Step], left: dict[str, Tensor], inputs: Inputs
) -> None:
    """`_rescale` where the network gives the same after it, which a reader without a graph may prevent."""
    some = take(inputs, torch.arange(min(samples_of(inputs), AT_ONCE)))
    given = _floating(call(small, some))
    for step in steps:
        assert step.read_by is not None
        touched = [small.get_submodule(name) for name in (step.name, step.read_by)]
        before = [copy.deepcopy(module.state_dict()) for module in touched]
        _rescale(model, small, step.name, step.read_by, left)
        now = _floating(call(small, some))
        if not all(_close(a, b) for a, b in zip(given, now, strict=True)):
            for module, state in zip(touched, before, strict=True):
                module.load_state_dict(state)


def _floating(outputs: Any) -> list[Tensor]:
    return [t for t in tensors_of(outputs) if t.is_floating_point() and t.numel()]


def _close(one: Tensor, other: Tensor) -> bool:
    """The same but for rounding, in the precision they are in."""
    scale = float(one.abs().nan_to_num(0, 0).max())
    return torch.allclose(other, one, rtol=0, atol=torch.finfo(one.dtype).eps ** 0.5 * scale, equal_nan=True)


def _rescale(model: nn.Module, small: nn.Module, name: str, norm_name: str, left: dict[str, Tensor]) -> None:
    """Filters in front of a batch norm get back the length they had without the fit; `small` gives what it gave.

    What a batch norm reads may have any length, but the longer a filter is, the less a step at a given learning rate
    turns it (van Laarhoven, L2 regularization versus batch and weight normalization, arXiv 1706.05350). Fitted filters
    are up to three times as long, so that they would ask for another rate than the network was trained with.
    """
    layer, norm, dense = small.get_submodule(name), small.get_submodule(norm_name), model.get_submodule(name)
    assert isinstance(layer.weight, Tensor) and isinstance(dense.weight, Tensor)
    scale = norm._parameters.get("weight")
    own = sum(p is scale for module in small.modules() for p in module._parameters.values()) == 1
    if type(norm) not in NORMS or scale is None or not own or norm.running_mean is None:
        return
    if not all(p.requires_grad for p in (scale, layer.bias) if isinstance(p, Tensor)):
        return
    assert isinstance(norm, nn.modules.batchnorm._BatchNorm) and norm.running_var is not None
    before, now = ((w * left[f"{name}.weight"]).flatten(1).norm(dim=1) for w in (dense.weight, layer.weight))
    factor = torch.where((before > 0) & (now > 0), before / now, 1.0)  # (N,)
    layer.weight.mul_(factor.reshape(-1, *[1] * (layer.weight.dim() - 1)))
    if isinstance(layer.bias, Tensor):
        layer.bias.mul_(factor)
    variance = norm.running_var * factor.square()
    scale.mul_(((variance + norm.eps) / (norm.running_var + norm.eps)).sqrt() / factor)
    norm.running_mean.mul_(factor)
    norm.running_var.copy_(variance)


def _rows(layer: nn.Module, inputs: Tensor) -> Tensor:
    """(B, positions, C * kernel): what the layer multiplies its weights with."""
    if isinstance(layer, nn.Linear):
        return inputs.reshape(len(inputs), -1, inputs.shape[-1])
    one, positions = call_of(layer, inputs)
    return patches(one, inputs, positions).movedim(1, 2)


class _Moments:
    """Sums over rows of what a layer reads now, x' (K,), and what it gave, y (N,), in float64 on the CPU."""

    def __init__(self, inputs: int, outputs: int) -> None:
        self.count = 0
        self._now, self._given = (torch.zeros(n, dtype=torch.float64) for n in (inputs, outputs))
        self._square = torch.zeros(inputs, inputs, dtype=torch.float64)
        self._cross = torch.zeros(inputs, outputs, dtype=torch.float64)

    def add(self, now: Tensor, given: Tensor) -> None:
        """(n, K) and (n, N)."""
        self.count += len(now)
        self._now += now.sum(0)
        self._given += given.sum(0)
        self._square += now.T @ now
        self._cross += now.T @ given

    @property
    def finite(self) -> bool:
        return bool(self._square.isfinite().all() and self._cross.isfinite().all())

    @property
    def mean_now(self) -> Tensor:
        return self._now / self.count

    @property
    def mean_given(self) -> Tensor:
        return self._given / self.count

    def solve(self, before: Tensor, free: bool) -> Tensor:
        """(N, K): the weights `before` (N, K) fitted; with `free` a constant in what the layer makes is not counted."""
        square, cross = self._square, self._cross
        if free:
            square = square - self.count * self.mean_now[:, None] * self.mean_now
            cross = cross - self.count * self.mean_now[:, None] * self.mean_given
        ridge = RIDGE * float(square.diagonal().mean()) or 1.0
        eye = torch.eye(len(square), dtype=torch.float64)
        solved: Tensor = torch.linalg.solve(square + ridge * eye, cross + ridge * before.T).T
        return solved


def _measure(model: nn.Module, small: nn.Module, name: str, batches: list[Inputs]) -> None:
    """The statistics of a batch norm, in place: those it has, moved as far as what it reads has moved.

    They come from augmented data and from weights that were still moving, so that to measure them would change the
    network even where nothing is gone.
    """
    norm: Any = small.get_submodule(name)
    if norm.running_mean is None:
        return
    mean, variance = _mean_and_variance(_inputs_of(model, name, batches))
    mean_now, variance_now = _mean_and_variance(_inputs_of(small, name, batches))
    norm.running_mean.add_((mean_now - mean).to(norm.running_mean))
    grown = torch.where(variance > 0, variance_now / variance.clamp(min=torch.finfo(torch.float64).tiny), 1.0)
    norm.running_var.mul_(grown.to(norm.running_var))


def _mean_and_variance(batches: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    """Of each channel, (C,) float64."""
    count, total, squares = 0, torch.zeros(1), torch.zeros(1)
    for inputs in batches:
        values = inputs.movedim(1, -1).flatten(0, -2).cpu().double()  # (n, C)
        count, total, squares = count + len(values), total + values.sum(0), squares + values.square().sum(0)
    mean = total / count
    return mean, (squares / count - mean.square()).clamp(min=0)
