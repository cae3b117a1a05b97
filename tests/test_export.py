"""One ONNX file that computes what torch computes, or no file at all."""

import copy
import dataclasses
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compressnas.errors import InputError, RunFailed
from compressnas.export import Check, OnnxModel, export_onnx, load_onnx, onnx_metadata, verify

CLASSES = ("zero", "one", "two")
METADATA = onnx_metadata(CLASSES, (2, 12, 12), (0.25, 0.5), (0.5, 0.25), {"recipe_hash": "ab12", "flops": [9, 3]})


class Slim(nn.Module):
    """What removal leaves behind: cropped maps before convolutions, selected features before a linear layer.

    Leaky, so that every weight shows in the output.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm = nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4)
        self.conv2 = nn.Conv2d(4, 4, 3, padding=1, groups=4)
        self.conv3 = nn.Conv2d(4, 5, (1, 2))
        self.hidden, self.drop, self.head = nn.Linear(6, 7), nn.Dropout(), nn.Linear(7, 3)
        self.register_buffer("kept", torch.tensor([0, 3, 4, 8, 9, 19]))

    def forward(self, x: Tensor) -> Tensor:
        x = F.leaky_relu(self.norm(self.conv1(x[:, :, 1:-1, 1:])))  # (B, 4, 8, 9)
        x = F.avg_pool2d(F.max_pool2d(F.leaky_relu(self.conv2(x)), 2), 1)  # (B, 4, 4, 4)
        x = F.leaky_relu(self.conv3(F.pad(x, (0, -1, -1, -1))))  # (B, 5, 2, 2)
        x = torch.flatten(x, 1).index_select(1, self.get_buffer("kept"))  # (B, 6)
        logits: Tensor = self.head(self.drop(F.leaky_relu(self.hidden(x))))  # (B, 3)
        return logits


class Unpredictable(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3)) + torch.rand_like(x[:, :, 0, 0])


class NotFinite(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3)) / 0.0


class OneBatchSize(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(2, 288)[:, :3]


class TwoRows(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(2, -1)[:, :3]


class Branches(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3)) if bool(x.sum() > 0) else x.amax((2, 3))


def images(number: int = 8) -> Tensor:
    return torch.randn(number, 2, 12, 12, generator=torch.Generator().manual_seed(1))


def files(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


@dataclasses.dataclass
class Exported:
    net: Slim
    before: Slim
    gradients: list[Tensor]
    path: Path
    check: Check


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """A network as a run may hand it over: float64, in training mode, gradients in place."""
    torch.manual_seed(0)
    net = Slim().double()
    net(images().double()).sum().backward()
    before = copy.deepcopy(net)  # without the gradients
    gradients = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    path = tmp_path_factory.mktemp("export") / "model.onnx"
    return Exported(net, before, gradients, path, export_onnx(net, images(), path, METADATA))


@pytest.fixture
def stored(exported: Exported, tmp_path: Path) -> Path:
    """A copy of the exported file, to damage."""
    path = tmp_path / "model.onnx"
    path.write_bytes(exported.path.read_bytes())
    return path


def test_check_says_what_was_compared(exported: Exported) -> None:
    check = exported.check
    assert files(exported.path.parent) == ["model.onnx"] and check.bytes == exported.path.stat().st_size
    assert set(check.by_batch) == {1, 2, 5} and max(check.by_batch.values()) == check.max_abs_diff
    assert 0 < check.max_abs_diff <= check.tolerance == 1e-4 * check.max_abs_output
    proto = onnx.load(exported.path)
    assert (check.opset, check.nodes) == (proto.opset_import[0].version, len(proto.graph.node))
    assert verify(exported.path, exported.net, images(5), threads=1).bytes == check.bytes  # 5 images are enough


@pytest.mark.parametrize("batch", [1, 2, 5, 64])
def test_any_batch_size(exported: Exported, batch: int) -> None:
    session = onnxruntime.InferenceSession(str(exported.path), providers=["CPUExecutionProvider"])
    assert session.get_inputs()[0].shape == ["batch", 2, 12, 12] and session.get_outputs()[0].shape == ["batch", 3]
    (found,) = session.run(["logits"], {"images": images(batch).numpy()})
    with torch.no_grad():
        expected = copy.deepcopy(exported.net).eval()(images(batch).double())
    assert found.shape == (batch, 3)
    np.testing.assert_allclose(found, expected.numpy(), atol=1e-5)


def test_the_given_network_is_left_alone(exported: Exported) -> None:
    state = exported.before.state_dict()
    assert all(m.training for m in exported.net.modules())
    assert all(torch.equal(v, state[k]) and v.dtype == state[k].dtype for k, v in exported.net.state_dict().items())
    for parameter, gradient in zip(exported.net.parameters(), exported.gradients, strict=True):
        assert parameter.requires_grad and parameter.grad is not None and torch.equal(parameter.grad, gradient)


def test_the_graph_is_clean(exported: Exported) -> None:
    content = exported.path.read_bytes()
    graph = onnx.load(exported.path).graph
    read = [name for node in graph.node for name in node.input] + [output.name for output in graph.output]
    assert all(any(name in read for name in node.output) for node in graph.node)
    assert all(tensor.name in read for tensor in graph.initializer)
    values = [(tuple(t.dims), t.data_type, t.raw_data) for t in graph.initializer]
    assert len(set(values)) == len(values)
    assert str(Path(torch.__file__).parent.parent).encode() not in content  # the exporter's stack traces
    weights = sum(p.numel() for p in exported.net.parameters()) * 4
    assert len(content) < weights + 4096


def test_metadata_round_trip(exported: Exported) -> None:
    model = load_onnx(exported.path, threads=1)
    assert (model.classes, model.shape, model.mean, model.std) == (CLASSES, (2, 12, 12), (0.25, 0.5), (0.5, 0.25))
    assert dict(model.metadata) == METADATA
    assert json.loads(model.metadata["flops"]) == [9, 3] and json.loads(model.metadata["recipe_hash"]) == "ab12"


def test_probabilities_are_those_of_torch(exported: Exported) -> None:
    pixels = torch.randint(0, 256, (300, 2, 12, 12), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    net = copy.deepcopy(exported.net).eval()
    mean, std = torch.tensor([0.25, 0.5]).view(2, 1, 1).double(), torch.tensor([0.5, 0.25]).view(2, 1, 1).double()
    with torch.no_grad():
        expected = net((pixels.double() / 255 - mean) / std).softmax(1)
    model: OnnxModel = load_onnx(exported.path)
    found = model.probabilities(pixels.numpy())
    assert found.dtype == np.float64 and found.shape == (300, 3)
    np.testing.assert_allclose(found, expected.numpy(), atol=1e-6)
    np.testing.assert_allclose(found.sum(1), 1, atol=1e-12)
    assert model.probabilities(pixels[:0].numpy()).shape == (0, 3)
    for wrong in (pixels[0].numpy(), pixels[:, :1].numpy(), pixels.float().numpy()):
        with pytest.raises(InputError, match=r"expected uint8 \(B, 2, 12, 12\)"):
            model.probabilities(wrong)


@pytest.mark.parametrize("layer", ["conv1", "conv2", "conv3", "hidden", "head"])
def test_one_corrupted_weight_is_found(exported: Exported, stored: Path, layer: str) -> None:
    proto = onnx.load(stored)
    tensor = next(t for t in proto.graph.initializer if t.name == f"{layer}.weight")
    values = onnx.numpy_helper.to_array(tensor).copy()
    values.flat[0] += 1
    tensor.CopyFrom(onnx.numpy_helper.from_array(values, tensor.name))
    onnx.save(proto, stored)
    with pytest.raises(RunFailed, match=r"model\.onnx: ONNX Runtime and torch differ by .* at batch size"):
        verify(stored, exported.net, images())
    values.flat[0] = math.nan
    tensor.CopyFrom(onnx.numpy_helper.from_array(values, tensor.name))
    onnx.save(proto, stored)
    with pytest.raises(RunFailed, match="not finite"):
        verify(stored, exported.net, images())


def test_another_network_is_no_match(exported: Exported) -> None:
    class Wide(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mean((2, 3))

    with pytest.raises(RunFailed, match=r"torch gives \(1, 2\), ONNX Runtime \(1, 3\)"):
        verify(exported.path, Wide(), images())


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:700])


def overwrite(path: Path) -> None:
    path.write_bytes(b"not an onnx file" * 40)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def unknown_operation(path: Path) -> None:
    proto = onnx.load(path)
    proto.graph.node[0].op_type = "Brew"
    path.write_bytes(proto.SerializeToString())


@pytest.mark.parametrize("damage", [truncate, overwrite, empty, unknown_operation, Path.unlink])
def test_a_damaged_file_is_one_line(
    exported: Exported, stored: Path, damage: Callable[[Path], None], capfd: pytest.CaptureFixture[str]
) -> None:
    damage(stored)
    with pytest.raises(InputError, match=r"model\.onnx: ") as given:
        load_onnx(stored)
    with pytest.raises(RunFailed, match=r"model\.onnx: ") as failed:
        verify(stored, exported.net, images())
    assert "\n" not in f"{given.value}{failed.value}" and capfd.readouterr() == ("", "")


def test_weights_in_a_second_file_are_refused(exported: Exported, stored: Path) -> None:
    onnx.save(onnx.load(stored), stored, save_as_external_data=True, location="weights.bin", size_threshold=0)
    with pytest.raises(RunFailed, match="weights are in a second file"):
        verify(stored, exported.net, images())


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("classes", None, "no classes in its metadata"),
        ("mean", "[0.1", "mean in its metadata is not JSON"),
        ("std", "[0.0, 1.0]", r"expected numbers above 0"),
        ("mean", "[0.1]", r"mean is \[0.1\], expected 2 numbers"),
        ("shape", "[2, 12]", "shape is .* expected three sizes"),
        ("shape", "[2, 12, 13]", "its inputs are .* its metadata says"),
        ("classes", '["a"]', "its outputs are .* its metadata names 1 classes"),
    ],
)
def test_metadata_that_does_not_fit(stored: Path, key: str, value: str | None, message: str) -> None:
    proto = onnx.load(stored)
    metadata = {k: v for k, v in {**METADATA, key: value}.items() if v is not None}
    del proto.metadata_props[:]
    onnx.helper.set_model_props(proto, metadata)
    onnx.save(proto, stored)
    with pytest.raises(InputError, match=message):
        load_onnx(stored)


def test_metadata_is_checked_before_it_is_written() -> None:
    with pytest.raises(InputError, match="std is"):
        onnx_metadata(CLASSES, (1, 2, 2), (0.1,), (0.0,), {})
    with pytest.raises(InputError, match="mean is"):
        onnx_metadata(CLASSES, (1, 2, 2), (math.nan,), (1.0,), {})
    with pytest.raises(InputError, match="'shape'"):
        onnx_metadata(CLASSES, (1, 2, 2), (0.1,), (1.0,), {"shape": 3})


@pytest.mark.parametrize(
    ("net", "message"),
    [
        (Unpredictable(), "differ by"),
        (NotFinite(), "not finite"),
        (OneBatchSize(), "the network itself fails at batch size 1"),
        (TwoRows(), r"gives \(2, 3\) at batch size 1, expected one row an image"),
        (Branches(), "cannot be exported to ONNX: "),
    ],
    ids=lambda value: None if isinstance(value, str) else type(value).__name__,
)
def test_a_failed_export_leaves_no_file(
    net: nn.Module, message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.onnx").write_text("left by an earlier run")
    with pytest.raises(RunFailed, match=message) as failed:
        export_onnx(net, images(), tmp_path / "model.onnx", {})
    assert files(tmp_path) == [] and "\n" not in str(failed.value) and ".part-" not in str(failed.value)
    assert capfd.readouterr() == ("", "")


def test_bad_input(exported: Exported, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"4 images .* expected at least 5"):
        export_onnx(exported.net, images(4), tmp_path / "model.onnx", {})
    with pytest.raises(InputError, match="cannot write"):
        export_onnx(exported.net, images(), tmp_path / "missing" / "model.onnx", {})
    assert files(tmp_path) == []


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="nothing is read-only for this user")
def test_a_read_only_folder(exported: Exported, tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    with pytest.raises(InputError, match="cannot write"):
        export_onnx(exported.net, images(), tmp_path / "model.onnx", {})


def test_a_fresh_process_exports_quietly_and_the_same_bytes(tmp_path: Path) -> None:
    """Imports warn and loggers print the first time only, so this looks at a new interpreter."""
    program = (
        "import torch; from pathlib import Path; from compressnas.export import export_onnx\n"
        "net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3)); state = torch.random.get_rng_state()\n"
        "for name in 'ab': export_onnx(net, torch.ones(8, 1, 2, 2), Path(name + '.onnx'), {'key': 'value'})\n"
        "assert torch.equal(state, torch.random.get_rng_state())"
    )
    root = str(Path(__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (tmp_path / "a.onnx").read_bytes() == (tmp_path / "b.onnx").read_bytes()


# ---------------------------------------------------------------- other networks than classifiers of images


class Pair(nn.Module):
    """Ids, numbers and a table that has no batch dimension; outputs by name, one of them several."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(9, 4), nn.Linear(4, 3), nn.Linear(3, 2)

    def forward(self, ids: Tensor, x: Tensor, table: Tensor, times: float = 1.0) -> dict[str, object]:
        hidden = torch.tanh(self.mix(self.embed(ids).mean(1) + x + table))
        return {"x": hidden * 1e3, "more": (self.head(hidden) * times, ids.sum(1))}


def session_of(path: Path) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("rows", [1, 2, 9])
@pytest.mark.parametrize("named", [True, False])
def test_several_inputs_and_outputs(rows: int, named: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = Pair().double()
    values = {"ids": torch.randint(0, 9, (rows, 5)), "x": torch.randn(rows, 4), "table": torch.randn(4), "times": 2.5}
    path = tmp_path / "model.onnx"
    check = export_onnx(net, values if named else tuple(values.values()), str(path))
    session = session_of(path)
    assert {node.name: node.shape for node in session.get_inputs()} == {
        "ids": ["batch", 5], "x": ["batch", 4], "table": [4]
    }  # fmt: skip
    assert [node.name for node in session.get_outputs()] == ["x_out", "more_0", "more_1"]
    assert set(check.by_batch) == {1, 2, 5} and check.max_abs_output > 100 and check.max_abs_diff <= check.tolerance
    assert {t.name for t in onnx.load(path).graph.initializer} >= {"embed.weight", "head.weight"}
    feed = {"ids": torch.randint(0, 9, (7, 5)), "x": torch.randn(7, 4), "table": torch.randn(4)}
    found = session.run(None, {name: tensor.numpy() for name, tensor in feed.items()})
    with torch.no_grad():
        expected = net.float()(**feed, times=2.5)
    for one, other in zip(found, (expected["x"], *expected["more"]), strict=True):
        np.testing.assert_allclose(one, other.numpy(), rtol=1e-4, atol=1e-5)


def test_each_output_is_held_to_its_own_size(tmp_path: Path) -> None:
    """A fault in a small output does not hide behind a large one."""

    class Net(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x * 1e4, x + torch.rand_like(x) / 100

    with pytest.raises(RunFailed, match=r"differ by .* in output_1 at batch size"):
        export_onnx(Net(), torch.randn(3, 2), tmp_path / "model.onnx")
    assert files(tmp_path) == []


@pytest.mark.parametrize("example", [torch.zeros(1, 2, 12, 12), torch.randn(1, 2, 12, 12), torch.randn(3, 2, 12, 12)])
def test_few_samples_are_enough_without_metadata(example: Tensor, tmp_path: Path) -> None:
    torch.manual_seed(0)
    path = tmp_path / "model.onnx"
    check = export_onnx(Slim(), example, path)
    assert session_of(path).get_inputs()[0].shape == ["batch", 2, 12, 12]
    assert [node.name for node in (*session_of(path).get_inputs(), *session_of(path).get_outputs())] == ["x", "output"]
    assert len(set(check.by_batch.values())) > 1  # the batches hold different samples


def test_attention(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    path = tmp_path / "model.onnx"
    export_onnx(net, {"src": torch.randn(1, 5, 8)}, path)
    assert session_of(path).get_inputs()[0].shape == ["batch", 5, 8]


class Scaled(nn.Module):
    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return x * scale  # (B, 3) * (1,), which is no batch


class Nothing(nn.Module):
    def forward(self, x: Tensor) -> str:
        return "nothing"


def test_networks_that_cannot_be_exported_as_they_are_given(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    with pytest.raises(RunFailed, match=r"fails at batch size 2: .* an example of several samples shows which inputs"):
        export_onnx(Scaled(), (torch.ones(1, 3), torch.ones(1)), path)
    export_onnx(Scaled(), (torch.ones(2, 3), torch.ones(1)), path)
    with pytest.raises(RunFailed, match="returns str without a tensor in it"):
        export_onnx(Nothing(), torch.ones(1, 3), path)
    assert files(tmp_path) == []
    with pytest.raises(InputError, match="one tensor of images, got tuple"):
        export_onnx(Scaled(), (torch.ones(5, 3), torch.ones(1)), path, METADATA)
    with pytest.raises(InputError, match="expected a tensor of at least one sample"):
        export_onnx(Slim(), torch.zeros(0, 2, 12, 12), path)
