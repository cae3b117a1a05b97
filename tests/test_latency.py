"""Latency is measured side by side, within the time that was given."""

import time
from pathlib import Path

import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch import nn

from compressnas.errors import InputError
from compressnas.latency import Stopwatch, interleaved, random_images

SHAPE = (1, 16, 16)


def chain(path: Path, convs: int) -> Path:
    """A file that runs `convs` 7 x 7 convolutions in a row; made by hand, an export takes seconds."""
    kernel = helper.make_tensor("kernel", TensorProto.FLOAT, [8, 8, 7, 7], [0.001] * 8 * 8 * 49)
    first = helper.make_tensor("first", TensorProto.FLOAT, [8, 1, 7, 7], [0.001] * 8 * 49)
    names = ["images", *[f"map{i}" for i in range(convs)]]
    nodes = [
        helper.make_node("Conv", [names[i], "kernel" if i else "first"], [names[i + 1]], pads=[3] * 4)
        for i in range(convs)
    ]
    inputs = [helper.make_tensor_value_info("images", TensorProto.FLOAT, ["batch", *SHAPE])]
    outputs = [helper.make_tensor_value_info(names[-1], TensorProto.FLOAT, ["batch", 8, 16, 16])]
    graph = helper.make_graph(nodes, "chain", inputs, outputs, [kernel, first])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    return path


def test_more_work_takes_longer(tmp_path: Path) -> None:
    paths = {"long": chain(tmp_path / "long.onnx", 40), "short": chain(tmp_path / "short.onnx", 1)}
    found = interleaved(paths, random_images(SHAPE, 2), runs=40, warmup=3)
    assert list(found) == ["long", "short"]
    assert {latency.runs for latency in found.values()} == {40}
    assert all(0 < latency.p50_ms <= latency.p90_ms for latency in found.values())
    assert found["long"].p50_ms > 2 * found["short"].p50_ms


def test_the_time_is_bounded_but_every_model_gets_its_runs(tmp_path: Path) -> None:
    paths = {"a": chain(tmp_path / "a.onnx", 1), "b": chain(tmp_path / "b.onnx", 2)}
    found = interleaved(paths, random_images(SHAPE), runs=10**9, warmup=10**9, seconds=0.0)
    assert {latency.runs for latency in found.values()} == {20}
    start = time.perf_counter()
    found = interleaved(paths, random_images(SHAPE), runs=10**9, warmup=10**9, seconds=0.5)
    assert 0.5 <= time.perf_counter() - start < 10
    assert found["a"].runs == found["b"].runs > 20
    assert {latency.runs for latency in interleaved(paths, random_images(SHAPE), runs=3, seconds=0.0).values()} == {3}


def test_bad_input(tmp_path: Path) -> None:
    path = chain(tmp_path / "a.onnx", 1)
    with pytest.raises(InputError, match="no such file"):
        interleaved({"a": tmp_path / "b.onnx"}, random_images(SHAPE))
    with pytest.raises(InputError, match=r"a\.onnx: cannot run on images \(1, 1, 9, 9\)"):
        interleaved({"a": path}, random_images((1, 9, 9)))
    for wrong in ({"runs": 0}, {"threads": 0}, {"warmup": -1}):
        with pytest.raises(InputError, match="expected at least 1"):
            interleaved({"a": path}, random_images(SHAPE), **wrong)
    assert interleaved({}, random_images(SHAPE)) == {}


class Two(nn.Module):
    def forward(self, left: torch.Tensor, *, right: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"sum": left @ right}


def test_a_stopwatch_times_any_interface_and_cleans_up() -> None:
    example = {"left": torch.randn(3, 4, 5), "right": torch.randn(3, 5, 6)}
    with Stopwatch(Two(), example, seconds=0.1) as watch:
        own, dense = watch.against_dense(Two())
        folder = Path(watch._folder.name)
        assert own > 0 and dense > 0 and sorted(p.name for p in folder.iterdir()) == ["dense.onnx", "network.onnx"]
    assert not folder.exists()
