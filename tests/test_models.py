"""Networks that a recipe can name: sizes, names of parameters, where they come from, and what is refused."""

import io
import json
import os
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn

from compressnas.cli import main
from compressnas.errors import InputError
from compressnas.export import export_onnx
from compressnas.groups import structure
from compressnas.measure import cost
from compressnas.models import BUILDERS, build_network
from compressnas.recipe import WITH_SHORTCUT, Model
from compressnas.weights import load_weights

Shape = tuple[int, int, int]
LENETS = ("lenet5", "lenet300_100")
CIFAR = tuple(name for name in BUILDERS if name not in LENETS)
COLOUR: Shape = (3, 32, 32)


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def refused(settings: dict[str, Any], shape: Shape = COLOUR, classes: int = 10) -> str:
    """The one line that a model section is refused with when the network is built."""
    with pytest.raises(InputError) as caught:
        build_network(Model.model_validate(settings), shape, classes)
    assert "\n" not in str(caught.value) and caught.value.exit_code == 2
    return str(caught.value)


# ---------------------------------------------------------------- the LeNets


@pytest.mark.parametrize(
    "name, widths, count", [("lenet5", "20-50-800-500", 431_080), ("lenet300_100", "784-300-100", 266_610)]
)
def test_sizes_are_those_of_the_papers(name: str, widths: str, count: int) -> None:
    model = BUILDERS[name]((1, 28, 28), 10)
    assert structure(model) == widths
    assert parameters(model) == count


def test_lenet5_costs_what_the_papers_print() -> None:
    assert cost(BUILDERS["lenet5"]((1, 28, 28), 10), torch.zeros(1, 1, 28, 28)).flops_bias_convention == 2_308_230


@pytest.mark.parametrize("shape", [(1, 15, 28), (1, 28, 15), (3, 8, 8)])
def test_images_too_small_for_two_poolings_are_refused(shape: Shape) -> None:
    message = f"lenet5 needs images of at least 16 x 16 pixels, got {shape[1]} x {shape[2]}"
    with pytest.raises(InputError, match=message):
        BUILDERS["lenet5"](shape, 10)
    BUILDERS["lenet300_100"](shape, 10)


@pytest.mark.parametrize("name", LENETS)
def test_nothing_but_layers_that_the_papers_have(name: str) -> None:
    allowed = nn.Sequential | nn.Conv2d | nn.Linear | nn.ReLU | nn.MaxPool2d | nn.Flatten
    assert all(isinstance(module, allowed) for module in BUILDERS[name]((1, 28, 28), 10).modules())


# ---------------------------------------------------------------- all of ours


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize("shape, classes", [((1, 28, 28), 10), ((3, 32, 32), 100), ((2, 16, 21), 2), ((4, 33, 40), 3)])
def test_any_image_that_is_large_enough(name: str, shape: Shape, classes: int) -> None:
    if name == "vgg16_bn_cifar" and min(shape[1:]) < 32:
        with pytest.raises(InputError, match=f"at least 32 x 32 pixels, got {shape[1]} x {shape[2]}"):
            BUILDERS[name](shape, classes)
        return
    model = BUILDERS[name](shape, classes).eval()
    with torch.no_grad():
        for batch in (1, 2):
            assert model(torch.zeros(batch, *shape)).shape == (batch, classes)


@pytest.mark.parametrize("name", BUILDERS)
def test_the_seed_alone_makes_the_weights(name: str) -> None:
    states = []
    for _ in range(2):
        torch.manual_seed(0)
        states.append(BUILDERS[name](COLOUR, 10).state_dict())
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


# ---------------------------------------------------------------- CIFAR networks


@pytest.mark.parametrize(
    ("name", "options", "count", "layers", "million_flops"),
    [  # parameters and FLOPs of convolutions as their authors print them
        ("resnet20", {}, 269_722, 20, 40.55),
        ("resnet56", {}, 853_018, 56, 125.49),
        ("resnet20", {"shortcut": "B"}, 272_474, 22, 40.81),
        ("resnet18_cifar", {}, 11_173_962, 21, 555.42),
        ("vgg16_bn_cifar", {}, 14_728_266, 14, 313.20),
    ],
)
def test_cifar_networks_have_the_known_sizes(
    name: str, options: dict[str, str], count: int, layers: int, million_flops: float
) -> None:
    model = BUILDERS[name](COLOUR, 10, **options)
    assert parameters(model) == count
    by_layer = cost(model, torch.zeros(1, *COLOUR)).by_layer
    assert len(by_layer) == layers
    assert sum(by_layer.values()) == pytest.approx(million_flops * 1e6, rel=1e-3)


def test_resnets_are_named_as_the_checkpoints_are() -> None:
    names = list(BUILDERS["resnet20"](COLOUR, 10).state_dict())
    norm = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    block = [f"{layer}{i}.{p}" for i in (1, 2) for layer, ps in (("conv", norm[:1]), ("bn", norm)) for p in ps]
    expected = ["conv1.weight", *(f"bn1.{p}" for p in norm)]
    expected += [f"layer{layer}.{number}.{name}" for layer in (1, 2, 3) for number in range(3) for name in block]
    assert names == [*expected, "linear.weight", "linear.bias"]
    wide = set(BUILDERS["resnet18_cifar"](COLOUR, 10).state_dict())
    bridged = {name.partition(".shortcut")[0] for name in wide if ".shortcut.0." in name}
    assert bridged == {"layer2.0", "layer3.0", "layer4.0"}
    assert "layer4.0.shortcut.1.running_var" in wide


def slow_resnet20(state: dict[str, Tensor], images: Tensor, shortcut: str) -> Tensor:
    """The network in eval mode, written down from the paper."""

    def norm(x: Tensor, name: str) -> Tensor:
        mean, var, weight, bias = (
            state[f"{name}.{p}"].view(-1, 1, 1) for p in ("running_mean", "running_var", "weight", "bias")
        )
        return (x - mean) / torch.sqrt(var + 1e-5) * weight + bias

    x = norm(F.conv2d(images, state["conv1.weight"], padding=1), "bn1").clamp(min=0)
    for layer in (1, 2, 3):
        for number in range(3):
            name, stride = f"layer{layer}.{number}", 2 if layer > 1 and number == 0 else 1
            y = F.conv2d(x, state[f"{name}.conv1.weight"], stride=stride, padding=1)
            y = norm(y, f"{name}.bn1").clamp(min=0)
            y = norm(F.conv2d(y, state[f"{name}.conv2.weight"], padding=1), f"{name}.bn2")
            if stride == 2 and shortcut == "A":
                quarter = torch.zeros(len(y), y.shape[1] // 4, *y.shape[2:], dtype=y.dtype)
                x = torch.cat([quarter, x[:, :, 0::2, 0::2], quarter], 1)
            elif stride == 2:
                x = norm(F.conv2d(x, state[f"{name}.shortcut.0.weight"], stride=2), f"{name}.shortcut.1")
            x = (x + y).clamp(min=0)
    return x.mean((2, 3)) @ state["linear.weight"].T + state["linear.bias"]


def drawn(model: nn.Module) -> nn.Module:
    """In float64 and eval mode, with statistics that are not those of a new network."""
    generator = torch.Generator().manual_seed(2)
    for name, tensor in model.state_dict().items():
        if ("running" in name or "bn" in name) and tensor.is_floating_point():
            tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)
        if tensor.dim() == 4:
            tensor.mul_(6**0.5)  # as torch draws them, nothing but the means would reach the output
    return model.double().eval()


@pytest.mark.parametrize("shortcut", ["A", "B"])
@pytest.mark.parametrize("size", [(32, 32), (9, 14)])
def test_resnet20_computes_what_the_paper_says(shortcut: str, size: tuple[int, int]) -> None:
    torch.manual_seed(1)
    model = drawn(BUILDERS["resnet20"]((3, *size), 10, shortcut=shortcut))
    images = torch.randn(2, 3, *size, dtype=torch.float64)
    with torch.no_grad():
        output, expected = model(images), slow_resnet20(model.state_dict(), images, shortcut)
    assert output.std(0).max() > 1e-3
    assert torch.allclose(output, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name, shortcut", [("resnet20", "A"), ("resnet20", "B")])
def test_resnets_go_through_onnx(name: str, shortcut: str, tmp_path: Path) -> None:
    model = build_network(Model.model_validate({"name": name, "shortcut": shortcut}), (3, 8, 8), 10)
    check = export_onnx(model, torch.randn(5, 3, 8, 8), tmp_path / "model.onnx", {})
    assert check.max_abs_diff <= 1e-4 * check.max_abs_output


@pytest.mark.parametrize("name", WITH_SHORTCUT)
def test_the_shortcut_of_the_recipe_is_built(name: str) -> None:
    counts = {}
    for shortcut in ("A", "B", None):
        model = build_network(Model.model_validate({"name": name, "shortcut": shortcut}), (3, 8, 8), 10)
        counts[shortcut] = parameters(model)
    assert counts["A"] < counts["B"]
    assert counts[None] == counts["B" if name == "resnet18_cifar" else "A"]


CHECKPOINTS = {  # file -> network, least share of images of CIFAR-10-J it classifies well
    "resnet20-12fca82f.th": ("resnet20", 0.72),
    "resnet56-4bfd9763.th": ("resnet56", 0.72),
    "resnet20_jpegft_state.pt": ("resnet20", 0.8),
}


@pytest.mark.skipif("COMPRESSNAS_DATA" not in os.environ, reason="COMPRESSNAS_DATA names no folder with pretrained/")
@pytest.mark.parametrize("file", CHECKPOINTS)
def test_trained_checkpoints_load_and_classify(file: str) -> None:
    root, (name, least) = Path(os.environ["COMPRESSNAS_DATA"]), CHECKPOINTS[file]
    model = build_network(Model.model_validate({"name": name}), COLOUR, 10).eval()
    load_weights(model, root / "pretrained" / file)
    packed = np.load(root / "cifar10_jpeg.npz")
    stream, starts = packed["test_jpeg"].tobytes(), packed["test_off"]
    files = [io.BytesIO(stream[starts[i] : starts[i + 1]]) for i in range(200)]
    images = torch.from_numpy(np.stack([np.asarray(Image.open(f).convert("RGB")) for f in files])).permute(0, 3, 1, 2)
    mean, std = (torch.tensor(x).view(-1, 1, 1) for x in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    with torch.no_grad():
        found = model((images / 255 - mean) / std).argmax(1)
    assert (found == torch.from_numpy(packed["test_y"][:200].astype(np.int64))).float().mean() >= least


# ---------------------------------------------------------------- torchvision


@pytest.mark.parametrize(
    "name, size",
    [("resnet18", 32), ("mobilenet_v2", 32), ("squeezenet1_1", 32), ("googlenet", 32), ("inception_v3", 75)],
)
def test_torchvision_networks_return_one_tensor_in_both_modes(name: str, size: int) -> None:
    model = build_network(Model.model_validate({"torchvision": name}), (3, size, size), 7)
    assert all(module.training for module in model.modules())  # as it was built, after the check
    with torch.no_grad():
        assert model(torch.randn(2, 3, size, size)).shape == (2, 7)


def test_a_torchvision_network_takes_torchvisions_weights(tmp_path: Path) -> None:
    """As for transfer learning: another number of classes, and a last layer that stays as it was drawn."""
    from torchvision import models

    torch.save(models.mobilenet_v2(weights=None).state_dict(), tmp_path / "imagenet.pth")
    model = build_network(Model.model_validate({"torchvision": "mobilenet_v2"}), COLOUR, 5)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(InputError, match=r"classifier.1.weight has shape \(1000, 1280\), expected \(5, 1280\)"):
        load_weights(model, tmp_path / "imagenet.pth")
    load_weights(model, tmp_path / "imagenet.pth", ["classifier.1"])
    moved = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert "features.0.0.weight" in moved and not any(name.startswith("classifier") for name in moved)


def test_torchvision_names_and_channels_are_checked() -> None:
    said = refused({"torchvision": "resnet81"})
    assert said == "model.torchvision: torchvision has no classification model 'resnet81'; did you mean 'resnet18'?"
    assert "'ResNet18'; did you mean 'resnet18'?" in refused({"torchvision": "ResNet18"})
    assert "it has alexnet, convnext_base" in refused({"torchvision": "???"})
    assert "no classification model" in refused({"torchvision": "fasterrcnn_resnet50_fpn"})
    said = refused({"torchvision": "resnet18"}, (1, 32, 32))
    assert said == "model.torchvision: resnet18 reads images of 3 channels, and the data's have 1"
    said = refused({"torchvision": "alexnet"}, (3, 16, 16))
    assert said.startswith("model.torchvision: alexnet cannot read images of shape (3, 16, 16): RuntimeError: ")


# ---------------------------------------------------------------- timm


@pytest.fixture
def fake_timm(monkeypatch: pytest.MonkeyPatch) -> Callable[..., nn.Module]:
    def create_model(name: str, *, pretrained: bool, num_classes: int, in_chans: int) -> nn.Module:
        assert not pretrained
        if name == "broken":
            raise ValueError("no such width\nat all")
        return nn.Sequential(
            nn.Conv2d(in_chans, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, num_classes)
        )

    module = types.ModuleType("timm")
    module.create_model, module.list_models = create_model, lambda: ["tiny", "broken"]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "timm", module)
    return create_model


def test_timm_where_it_is_installed(fake_timm: Callable[..., nn.Module]) -> None:
    for name in ("tiny", "tiny.tagged_in1k"):
        model = build_network(Model.model_validate({"timm": name}), (2, 8, 8), 6)
        assert model(torch.zeros(3, 2, 8, 8)).shape == (3, 6)
    assert refused({"timm": "tinny"}) == "model.timm: timm has no model 'tinny'; did you mean 'tiny'?"
    assert refused({"timm": "broken"}) == "model.timm: broken cannot be built for 3 channels: no such width"


def test_timm_where_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)  # importing it fails, installed or not
    said = refused({"timm": "resnet18"})
    assert said == "model.timm: resnet18 needs timm, which is not installed here: pip install timm"


# ---------------------------------------------------------------- the user's own

OWN = """
import torch
from torch import nn
from sys import exit

class Two(nn.Module):
    def forward(self, images):
        return images.mean((1, 2, 3)), images

def build(width=4, classes=10, channels=3):
    pool = nn.AdaptiveAvgPool2d(1), nn.Flatten()
    model = nn.Sequential(nn.Conv2d(channels, width, 3), *pool, nn.Linear(width, classes))
    model[0].eval()
    return model

def lazy():
    import later_nowhere_else
    return build()

class Family:
    small = staticmethod(lambda: build(width=2))

def leaving(): exit(3)
def nothing(): return None
def two(): return Two()
def maps(): return nn.Conv2d(3, 10, 3)
def failing(): raise RuntimeError("first line\\nsecond line")
number = 3
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current directory, with a package of the user's in it."""
    package = tmp_path / "own_package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "networks.py").write_text(OWN)
    (package / "broken.py").write_text("import missing_dependency")
    (package / "faulty.py").write_text("1 / 0")
    (package / "wrong.py").write_text("def (")
    (tmp_path / "later_nowhere_else.py").touch()
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)
    yield tmp_path
    assert sys.path == path
    for name in [n for n in sys.modules if n.split(".")[0] in ("own_package", "later_nowhere_else")]:
        del sys.modules[name]


def test_a_factory_is_called_with_its_arguments(own: Path) -> None:
    settings = {"factory": "own_package.networks:build", "args": {"width": 6, "channels": 1}}
    torch.manual_seed(0)
    model = build_network(Model.model_validate(settings), (1, 8, 8), 10)
    assert isinstance(model, nn.Sequential) and isinstance(model[0], nn.Conv2d)
    assert (model[0].in_channels, model[0].out_channels) == (1, 6)
    assert not model[0].training and model[3].training  # the check leaves every mode as it was
    torch.manual_seed(0)
    again = build_network(Model.model_validate(settings), (1, 8, 8), 10)
    assert torch.equal(next(model.parameters()), next(again.parameters()))
    for name in ("lazy", "Family.small"):
        build_network(Model.model_validate({"factory": f"own_package.networks:{name}"}), COLOUR, 10)


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("no_such_module:build", "no module no_such_module, neither in "),
        ("own_package.nothing:build", "no module own_package.nothing, neither in "),
        (
            "own_package.broken:build",
            "importing own_package.broken raises ModuleNotFoundError: No module named 'missing_d",
        ),
        ("own_package.faulty:build", "importing own_package.faulty raises ZeroDivisionError: division by zero"),
        ("own_package.wrong:build", "importing own_package.wrong raises SyntaxError: "),
        ("own_package.networks:biuld", "module own_package.networks has no biuld"),
        ("own_package.networks:Family.big", "module own_package.networks has no Family.big"),
        ("own_package.networks:number", "own_package.networks:number is a int; expected something to call"),
        ("own_package.networks:nothing", "own_package.networks:nothing returns a NoneType; expected a torch.nn.Module"),
        ("own_package.networks:failing", "own_package.networks:failing with no args raises RuntimeError: first line"),
        ("own_package.networks:leaving", "own_package.networks:leaving with no args raises SystemExit: 3"),
        ("own_package.networks:two", "own_package.networks:two returns a tuple; expected one tensor (B, classes)"),
        (
            "own_package.networks:maps",
            "own_package.networks:maps makes (2, 10, 30, 30) of 2 images of shape (3, 32, 32)",
        ),
    ],
)
def test_faults_of_a_factory(own: Path, factory: str, message: str) -> None:
    assert refused({"factory": factory}).startswith(f"model.factory: {message}")


def test_a_factory_that_does_not_fit_the_data(own: Path) -> None:
    factory = "own_package.networks:build"
    assert refused({"factory": factory, "args": {"classes": 7}}) == (
        f"model.factory: {factory} makes (2, 7) of 2 images of shape (3, 32, 32); expected (2, 10), since the data have"
        " 10 classes"
    )
    said = refused({"factory": factory}, (1, 32, 32))
    assert said.startswith(f"model.factory: {factory} cannot read images of shape (1, 32, 32): RuntimeError: ")
    said = refused({"factory": factory, "args": {"depth": 2}})
    assert said.startswith(f"model.factory: {factory} with depth=2 raises TypeError: ") and "'depth'" in said


# ---------------------------------------------------------------- from the command line

RECIPE = """
threads: 1
data: {name: synthetic, shape: [3, 8, 8], classes: 3, train: 32, validation: 16, test: 16}
model: {factory: "own_package.networks:stack", args: {width: 6}, weights: start.pt, fresh: "4"}
train: {epochs: 0}
method: {kind: magnitude, target: {flops: 0.6}}
finetune: {epochs: 0}
"""


def test_a_run_of_a_network_of_ones_own(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stack = """
def stack(width, classes=3):
    pool = nn.AdaptiveAvgPool2d(1), nn.Flatten()
    return nn.Sequential(nn.Conv2d(3, width, 3), nn.ReLU(), *pool, nn.Linear(width, classes))
"""
    (own / "own_package" / "networks.py").write_text(OWN + stack)
    (own / "my.yaml").write_text(RECIPE)
    start = {"0.weight": torch.randn(6, 3, 3, 3), "0.bias": torch.randn(6), "4.weight": torch.zeros(9, 6)}
    torch.save({"net": start}, own / "start.pt")
    assert main(["check", "my.yaml"]) == 0
    assert "model own_package.networks:stack, method magnitude" in capsys.readouterr().out
    for setting in ("torchvision=resnet81", "factory=own_package.networks:stuck", "fresh=5", "args.width=7"):
        assert main(["run", "my.yaml", "--out", "out", "--set", f"model.{setting}"]) == 2
        assert capsys.readouterr().err.startswith("error: ") and not (own / "out").exists()
    assert main(["run", "my.yaml", "--out", "out", "--quiet"]) == 0
    assert json.loads((own / "out" / "facts.json").read_text())["recipe"] == "own_package.networks:stack, magnitude"
    dense = load_file(own / "out" / "dense.safetensors")
    assert torch.equal(dense["0.weight"], start["0.weight"]) and dense["4.weight"].shape == (3, 6)
    assert json.loads((own / "out" / "result.json").read_text())["proof"]["verdict"] == "equal"
