"""Optimizers go on after a removal as if nothing had gone."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import compressnas as cn

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "plain": lambda p: torch.optim.SGD(p, 0.1),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.1),
}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(96, 5)
    ).double()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(7, 3, 8, 8, generator=generator, dtype=torch.float64)
    targets = torch.randint(5, (7,), generator=generator)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model.eval()(images), targets).backward()  # type: ignore[no-untyped-call]
    optimizer.step()


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_the_next_step_is_the_masked_networks(name: str) -> None:
    model = network()
    scale = nn.Parameter(torch.ones(2, dtype=torch.float64))  # of a loss
    groups = [
        {"params": [p for n, p in model.named_parameters() if n.endswith("weight")]},
        {"params": [scale, *(p for n, p in model.named_parameters() if n.endswith("bias"))], "lr": 0.02},
    ]
    optimizer = OPTIMIZERS[name](groups)
    for number in range(3):
        scale.grad = torch.ones_like(scale)
        step(model, optimizer, number)
    example = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    slim = cn.decide(model, example, ratio=0.5)
    small, proof = cn.remove(model, example, slim)
    assert proof.verdict == "equal"
    before = copy.deepcopy(optimizer.state_dict())
    carried = cn.carry_optimizer(optimizer, model, example, slim, small)
    assert type(carried) is type(optimizer) and [g["lr"] for g in carried.param_groups] == [
        g["lr"] for g in optimizer.param_groups
    ]
    torch.testing.assert_close(optimizer.state_dict()["state"], before["state"], rtol=0, atol=0)

    masked = dict(model.named_parameters())
    keep = {n: set(k) for n, k in slim.kept.items()}
    with torch.no_grad():  # the masked network, in place: the optimizer goes on with it
        for unit in set(range(8)) - keep["0.out"]:
            for parameter in ("0.weight", "0.bias", "1.weight", "1.bias"):
                masked[parameter][unit] = 0
            masked["3.weight"][:, unit] = 0
        for unit in set(range(6)) - keep["3.out"]:
            masked["3.weight"][unit] = masked["3.bias"][unit] = 0
            masked["6.weight"].view(5, 6, 16)[:, unit] = 0
    step(model, optimizer, 9)
    step(small, carried, 9)
    first, second = sorted(keep["0.out"]), sorted(keep["3.out"])
    left = dict(small.named_parameters())
    torch.testing.assert_close(left["0.weight"], masked["0.weight"][first])
    torch.testing.assert_close(left["1.bias"], masked["1.bias"][first])
    torch.testing.assert_close(left["3.weight"], masked["3.weight"][second][:, first])
    torch.testing.assert_close(left["6.weight"], masked["6.weight"].view(5, 6, 16)[:, second].flatten(1))
    assert any(p is scale for p in carried.param_groups[1]["params"])


def test_another_network_is_refused() -> None:
    model, example = network(), torch.randn(2, 3, 8, 8, dtype=torch.float64)
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    slim = cn.decide(model, example, ratio=0.5)
    small, _ = cn.remove(model, example, cn.decide(model, example, ratio=0.3))
    with pytest.raises(cn.InputError, match=r"not what removing slim from model leaves: 0.weight has shape"):
        cn.carry_optimizer(optimizer, model, example, slim, small)
