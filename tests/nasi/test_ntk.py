"""The trace norm against dense Jacobians and loops over samples, the mean of its estimate, and the initialisations."""

import math
from collections.abc import Callable

import pytest
import reference
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compressnas.errors import InputError
from compressnas.nasi import ntk

CLASSES = 3


def small() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1, bias=False), nn.BatchNorm2d(3), nn.ReLU(), nn.AvgPool2d(2),
        nn.Conv2d(3, 2, 1), nn.BatchNorm2d(2), nn.Tanh(), nn.Flatten(), nn.Linear(8, CLASSES),
    ).double()  # fmt: skip


def batch(size: int = 5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(size, 2, 4, 4, dtype=torch.float64, generator=generator)
    return images, torch.randint(CLASSES, (size,), generator=generator)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def network() -> nn.Sequential:
    made = small()
    ntk.initialise(made, "standard", seeded())
    return made


SCALES = {"0.weight": 0.25, "8.weight": 3.0}
SCALED = pytest.mark.parametrize("scales", [{}, SCALES], ids=["plain", "scaled"])


def state_of(network: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in network.state_dict().items()}


def same_state(network: nn.Module, before: dict[str, Tensor]) -> bool:
    return all(torch.equal(value, before[name]) for name, value in network.state_dict().items())


# ---------------------------------------------------------------- the trace and its estimates


@SCALED
@pytest.mark.parametrize("size", [1, 5, 17, 33])
def test_exact_trace(network: nn.Sequential, size: int, scales: dict[str, float]) -> None:
    """Also with more samples than are taken at once."""
    images, _ = batch(size)
    ntk.freeze_statistics(network, batch()[0])
    assert ntk.exact_trace(network, images, scales) == pytest.approx(
        reference.dense_trace(network, images, scales), rel=1e-12
    )


@pytest.mark.parametrize("training", [False, True])
@SCALED
def test_hutchinson_is_unbiased(network: nn.Sequential, training: bool, scales: dict[str, float]) -> None:
    images, _ = batch()
    ntk.freeze_statistics(network, images)
    network.train(training)
    exact = reference.dense_trace(network, images, scales)
    generator = seeded()
    draws = torch.tensor([ntk.hutchinson_trace(network, images, 1, generator, scales) for _ in range(600)])
    error = float(draws.std()) / math.sqrt(len(draws))
    assert 0 < error < 0.1 * exact  # so that the next line says something
    assert float(draws.mean()) == pytest.approx(exact, abs=4 * error)


def test_hutchinson_is_the_mean_of_its_draws(network: nn.Sequential) -> None:
    images, _ = batch()
    one, three = seeded(), seeded()
    single = [ntk.hutchinson_trace(network, images, 1, one) for _ in range(3)]
    assert ntk.hutchinson_trace(network, images, 3, three) == pytest.approx(sum(single) / 3, rel=1e-12)


@SCALED
@pytest.mark.parametrize("size", [1, 5, 17])
def test_sample_gradients(network: nn.Sequential, size: int, scales: dict[str, float]) -> None:
    images, labels = batch(size)
    ntk.freeze_statistics(network, batch()[0])
    expected = reference.summed_sample_gradients(network, images, labels, scales)
    assert ntk.sample_gradients(network, images, labels, scales) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("training", [False, True])
@SCALED
def test_batch_gradient(network: nn.Sequential, training: bool, scales: dict[str, float]) -> None:
    images, labels = batch()
    network.train(training)
    expected = reference.squared_batch_gradient(network, images, labels, scales)
    assert ntk.batch_gradient(network, images, labels, scales) == pytest.approx(expected, rel=1e-12)


def test_the_bounds_of_equation_10(network: nn.Sequential) -> None:
    """|| grad L / grad f || <= sqrt(2) for cross-entropy, and the mean's square is at most the mean of squares."""
    images, labels = batch()
    ntk.freeze_statistics(network, images)
    by_sample = ntk.sample_gradients(network, images, labels)
    assert by_sample <= 2 * ntk.exact_trace(network, images)
    assert len(images) * ntk.batch_gradient(network, images, labels) <= by_sample


ESTIMATES: dict[str, Callable[[nn.Module, Tensor, Tensor], float]] = {
    "hutchinson": lambda network, images, labels: ntk.hutchinson_trace(network, images, 2, seeded()),
    "batch": ntk.batch_gradient,
    "exact": lambda network, images, labels: ntk.exact_trace(network.eval(), images),
    "samples": lambda network, images, labels: ntk.sample_gradients(network.eval(), images, labels),
}


@pytest.mark.parametrize("name", ESTIMATES)
def test_the_network_stays_as_it_was(network: nn.Sequential, name: str) -> None:
    """Also its running statistics in training mode, and that they are kept."""
    before = state_of(network.train())
    ESTIMATES[name](network, *batch())
    assert same_state(network, before)
    assert all(p.grad is None for p in network.parameters())
    network.train()(batch()[0])
    assert int(network[1].num_batches_tracked) == 1


def test_statistics_are_kept_again_after_an_error(network: nn.Sequential) -> None:
    with pytest.raises(RuntimeError):
        ntk.batch_gradient(network.train(), batch()[0][:, :1], batch()[1])
    assert all(norm.track_running_stats for norm in (network[1], network[5]))


def test_outputs_without_parameters_have_no_trace() -> None:
    images = torch.randn(3, CLASSES)
    assert ntk.batch_gradient(nn.Flatten(), images, torch.zeros(3, dtype=torch.int64)) == 0


def test_finite() -> None:
    assert ntk.finite(2.5, "search") == 2.5
    for value in (math.nan, math.inf):
        with pytest.raises(InputError, match="search, step 3: the trace norm is"):
            ntk.finite(value, "search, step 3")


# ---------------------------------------------------------------- statistics


def test_freeze_statistics(network: nn.Sequential) -> None:
    images, _ = batch()
    for value in (3.0, 7.0):  # whatever was there before
        network[1].running_mean.fill_(value)
        ntk.freeze_statistics(network, images)
        first = network[0](images)
        torch.testing.assert_close(network[1].running_mean, first.mean((0, 2, 3)))
        torch.testing.assert_close(network[1].running_var, first.transpose(0, 1).flatten(1).var(1))
        second = network[:5].train()(images)
        torch.testing.assert_close(network[5].running_mean, second.mean((0, 2, 3)))
        assert network[1].momentum == network[5].momentum == 0.1
    ntk.freeze_statistics(network, images)
    assert not any(module.training for module in network.modules())


# ---------------------------------------------------------------- initialisations


class Scaled(nn.Module):
    """The NTK parameterisation, written down: a layer that divides by sqrt(fan-in), of weights that are N(0, 1)."""

    def __init__(self, layer: nn.Conv2d | nn.Linear) -> None:
        super().__init__()
        self.fan_in = math.prod(layer.weight.shape[1:])
        self.omega = nn.Parameter(layer.weight.detach() * math.sqrt(self.fan_in))
        self.bias = layer.bias
        self.padding = layer.padding if isinstance(layer, nn.Conv2d) else 0

    def forward(self, values: Tensor) -> Tensor:
        if self.omega.dim() == 2:
            return F.linear(values, self.omega) / math.sqrt(self.fan_in) + self.bias
        result = F.conv2d(values, self.omega, padding=self.padding) / math.sqrt(self.fan_in)
        return result if self.bias is None else result + self.bias[:, None, None]


def test_ntk_parameterisation_is_that_of_layers_that_divide() -> None:
    network = small()
    scales = ntk.initialise(network, "ntk", seeded())
    assert scales == {"0.weight": 1 / 18, "4.weight": 1 / 3, "8.weight": 1 / 8}
    explicit = nn.Sequential(*(Scaled(m) if isinstance(m, nn.Conv2d | nn.Linear) else m for m in network))
    images, labels = batch()
    torch.testing.assert_close(network(images), explicit(images))
    assert ntk.batch_gradient(network, images, labels, scales) == pytest.approx(
        reference.squared_batch_gradient(explicit, images, labels, {}), rel=1e-10
    )
    ntk.freeze_statistics(network, images)
    assert ntk.exact_trace(network, images, scales) == pytest.approx(
        reference.dense_trace(explicit, images, {}), rel=1e-10
    )


def test_ntk_draws() -> None:
    network = nn.Sequential(nn.Conv2d(8, 64, 3), nn.BatchNorm2d(64), nn.Linear(64, 100))
    ntk.initialise(network, "ntk", seeded())
    for layer, fan_in in ((network[0], 72), (network[2], 64)):
        spread = layer.weight.detach() * math.sqrt(fan_in)
        assert float(spread.std()) == pytest.approx(1, abs=0.05) and abs(float(spread.mean())) < 0.05
        assert not layer.bias.any()
    assert bool((network[1].weight == 1).all()) and not network[1].bias.any()


@pytest.mark.parametrize("parameterisation", ["standard", "ntk"])
def test_initialise_goes_by_the_generator(parameterisation: str) -> None:
    first, again, other = small(), small(), small()
    before = torch.get_rng_state()
    ntk.initialise(first, parameterisation, seeded(3))
    assert torch.equal(torch.get_rng_state(), before)
    ntk.initialise(again, parameterisation, seeded(3))
    ntk.initialise(other, parameterisation, seeded(4))
    assert same_state(again, first.state_dict())
    assert not torch.equal(first[0].weight, other[0].weight) and not torch.equal(first[8].weight, other[8].weight)


def test_standard_is_what_layers_draw() -> None:
    network = small().float()
    seed = int(torch.randint(2**31, (1,), generator=seeded(5)))
    assert ntk.initialise(network, "standard", seeded(5)) == {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        drawn = small().float()
    assert same_state(network, drawn.state_dict())
