"""What a network can cost, before anything is trained."""

import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

import compressnas as cn


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 20, 3), nn.ReLU(), nn.Conv2d(20, 12, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 5)
    )


EXAMPLE = torch.randn(2, 3, 8, 8)


def test_from_everything_to_the_least() -> None:
    model = network()
    lines = cn.reachable(model, EXAMPLE, steps=4)
    dense = cn.measure(model, EXAMPLE)
    assert [line.asked for line in lines] == [1, 0.75, 0.5, 0.25, 0]
    first, *_, last = lines
    assert (first.channels, first.flops, first.params) == (1, dense.flops, dense.params)
    assert first.flops_kept == first.params_kept == 1
    assert all(a.flops > b.flops and a.params > b.params for a, b in pairwise(lines))
    assert last.channels == 2 / 32  # one channel of each layer
    halved = cn.remove(model, EXAMPLE, cn.decide(model, EXAMPLE, ratio=0.5))[0]
    assert lines[2].flops == cn.measure(halved, EXAMPLE).flops


def test_a_target_at_the_last_line_is_met_and_one_below_is_not() -> None:
    model = network()
    least = cn.reachable(model, EXAMPLE, round_to=4, min_channels=5)[-1]
    for part, met in ((1.0, True), (0.9, False)):
        target = {"flops": least.flops * part}
        slim = cn.decide(model, EXAMPLE, target=target, round_to=4, min_channels=5)
        assert float(slim.origin["reached_flops"]) == least.flops and (least.flops <= target["flops"]) == met


def test_what_is_left_alone_stays() -> None:
    last = cn.reachable(network(), EXAMPLE, ignore=["0"])[-1]
    assert last.channels == 1 / 12


def test_any_metric_of_any_network() -> None:
    """A regression: the root mean square of what is lost, read from networks in eval mode, without gradients."""
    model = network().train()
    images = torch.randn(64, 3, 8, 8)
    wanted = model(images).detach()

    def rms(some: nn.Module) -> torch.Tensor:
        assert not some.training and not torch.is_grad_enabled()
        lost = (some(images) - wanted).square().mean().sqrt()
        for parameter in some.parameters():
            parameter.zero_()  # a copy's
        return lost

    lines = cn.reachable(model, EXAMPLE, steps=4, evaluate=rms)
    metrics = [line.metric for line in lines]
    assert metrics[0] == 0 and all(m is not None and m > 0 for m in metrics[1:])
    assert model.training and bool(model[0].weight.any())
    halved = cn.remove(model, EXAMPLE, cn.decide(model, EXAMPLE, ratio=0.5))[0]
    assert cn.measure(halved, EXAMPLE, evaluate=rms).metric == metrics[2]
    assert cn.measure(model, EXAMPLE).metric is None and cn.reachable(model, EXAMPLE, steps=1)[0].metric is None


@pytest.mark.parametrize("given", [None, "good", "0.5", b"1", 10**400, torch.zeros(2), {"accuracy": 1.0}])
def test_a_metric_that_is_no_number_is_said(given: object) -> None:
    with pytest.raises(cn.InputError, match=f"evaluate: gave {type(given).__name__}; expected a number"):
        cn.measure(network(), EXAMPLE, evaluate=lambda _: given)  # type: ignore[arg-type, return-value]


def test_a_metric_may_be_an_array_of_one() -> None:
    for given in (np.array([0.5]), np.float32(0.5), torch.tensor([[0.5]]), 0.5):
        assert cn.measure(network(), EXAMPLE, evaluate=lambda _, given=given: given).metric == 0.5  # type: ignore[misc]
    with pytest.raises(cn.InputError, match="evaluate: float; expected a function of a network"):
        cn.measure(network(), EXAMPLE, evaluate=0.5)  # type: ignore[arg-type]


def test_nonsense_is_refused() -> None:
    with pytest.raises(cn.InputError, match="steps 0"):
        cn.reachable(network(), EXAMPLE, steps=0)
    with pytest.raises(cn.InputError, match="round_to 0"):
        cn.reachable(network(), EXAMPLE, round_to=0)


def test_the_command_prints_a_table() -> None:
    command = [sys.executable, "-m", "compressnas", "reachable", "lenet5_filterwise", "--steps", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    heads, *lines, note = done.stdout.splitlines()
    assert heads.split()[:2] == ["channels", "FLOPs"] and [line.split()[0] for line in lines][:2] == ["100%", "50%"]
    assert lines[0].split()[1] == "2,293,000" and "cannot be met" in note
