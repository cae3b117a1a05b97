"""The public names: found when asked for, functions whatever was imported before; and removal with its proof."""

import importlib
import importlib.util
import json
import subprocess
import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

import compressnas as cn
from compressnas.inputs import Inputs, call

Model = tuple[nn.Module, Inputs]


class TwoInputs(nn.Module):
    """Ids and a picture in, two named outputs: what is called with a mapping or a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.mix, self.head = nn.Linear(14, 12), nn.Linear(12, 4)

    def forward(self, ids: Tensor, picture: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        words = self.embed(ids).mean(1)  # (B, 6)
        seen = torch.relu(self.norm(self.stem(picture))).mean((2, 3))  # (B, 8)
        hidden = torch.relu(self.mix(torch.cat([words, seen], 1)))
        return {"logits": self.head(hidden) * scale, "hidden": hidden}


def two_inputs() -> Model:
    torch.manual_seed(0)
    return TwoInputs(), {"ids": torch.tensor([[1, 2, 3]]), "picture": torch.randn(1, 3, 6, 6), "scale": 2.0}


def plain() -> Model:
    torch.manual_seed(0)
    return (
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 4)),
        torch.randn(1, 3, 6, 6),
    )


def every_second(model: nn.Module, example: Inputs) -> cn.SlimArch:
    found = cn.find_groups(model, example)
    return cn.SlimArch({s.name: tuple(range(0, s.size, 2)) for s in found.sets}, {s.name: s.size for s in found.sets})


def exists(module: str) -> bool:
    return importlib.util.find_spec(f"compressnas.{module}") is not None


@pytest.mark.parametrize("name", cn.__all__)
def test_every_public_name_is_found(name: str) -> None:
    if name == "BayesPruner" and not exists("bayes.pruner"):
        pytest.skip("not written yet")
    value = getattr(cn, name)
    assert callable(value) and not isinstance(value, ModuleType)
    assert name in dir(cn)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'prune'"):
        _ = cn.prune  # type: ignore[attr-defined]


def fresh(program: str) -> list[str]:
    """What a new interpreter prints as JSON."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    found: list[str] = json.loads(done.stdout)
    return found


def test_importing_the_package_imports_no_library() -> None:
    program = "import json, sys, compressnas as cn; cn.InputError, dir(cn); print(json.dumps(sorted(sys.modules)))"
    assert not {name.split(".")[0] for name in fresh(program)} & {"torch", "numpy", "onnx", "fvcore", "pydantic"}


@pytest.mark.parametrize("first", ["", "import compressnas.measure; ", "from compressnas.measure import Cost; "])
def test_a_function_keeps_its_name_when_the_module_of_that_name_is_imported(first: str) -> None:
    program = (
        f"{first}import json, compressnas as cn\nkinds = [type(cn.measure).__name__, type(cn.decide).__name__]\n"
        "import compressnas.measure, compressnas.decide, sys\nfrom compressnas import measure\n"
        "from compressnas.measure import cost; assert measure is cost is cn.measure\n"
        "print(json.dumps([*kinds, type(cn.measure).__name__, type(cn.decide).__name__]))"
    )
    assert fresh(program) == ["function"] * 4


@pytest.mark.parametrize("make", [plain, two_inputs])
def test_remove_proves_on_the_example_and_on_samples_like_it(make: type[Model]) -> None:
    model, example = make()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    small, proof = cn.remove(model, example, every_second(model, example))
    assert proof.verdict == "equal" and proof.max_relative_difference <= 1e-9 and proof.images == 8
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert cn.measure(small, example).params < cn.measure(model, example).params
    call(small, example)


def test_remove_on_given_inputs() -> None:
    model, example = two_inputs()
    inputs = {"ids": torch.randint(0, 11, (3, 3)), "picture": torch.randn(3, 3, 6, 6), "scale": 2.0}
    _, proof = cn.remove(model, example, every_second(model, example), inputs=inputs)
    assert (proof.verdict, proof.images) == ("equal", 3)


def test_remove_refuses_what_does_not_fit() -> None:
    model, example = plain()
    with pytest.raises(cn.InputError, match=r"group set 0\.out has 8 groups here, 9 in the decision"):
        cn.remove(model, example, cn.SlimArch({"0.out": (1,)}, {"0.out": 9}))
    with pytest.raises(cn.InputError, match="expected a tensor of at least one sample"):
        cn.remove(model, torch.zeros(0, 3, 6, 6), every_second(model, example))


def test_the_way_from_a_model_to_a_file(tmp_path: object) -> None:
    importlib.import_module("compressnas.decide")
    model, example = plain()
    slim = cn.decide(model, example, method="magnitude", target={"flops": 0.6})
    small, proof = cn.remove(model, example, slim)
    assert proof.verdict == "equal"
    assert cn.measure(small, example).flops <= 0.6 * cn.measure(model, example).flops
    check = cn.export_onnx(small, example, f"{tmp_path}/model.onnx")
    assert check.max_abs_diff <= check.tolerance and check.opset >= 17 and check.bytes > 0
