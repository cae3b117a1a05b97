"""A network as one ONNX file that is checked against torch, and such a file as a classifier.

With latency.py the only files that know onnx and onnxruntime.
"""

import copy
import io
import json
import logging
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from compressnas.errors import InputError, RunFailed
from compressnas.files import whole_file
from compressnas.inputs import Inputs, call, map_tensors
from compressnas.interface import (
    TensorsOnly,
    input_names,
    input_tensors,
    is_batched,
    more_samples,
    output_names,
    take,
)

BATCH_SIZES = (1, 2, 5)  # 1 is where exporters specialise, 2 is what was traced, 5 is neither
RELATIVE_TOLERANCE = 1e-4
_CHUNK = 256  # images that go through ONNX Runtime at once; bounds the memory of a large prediction


@dataclass(frozen=True)
class Check:
    """A file that agrees with its network, and by how much.

    Attributes:
        max_abs_diff: largest |ONNX Runtime - torch| over all batches.
        max_abs_output: largest |output| of torch.
        tolerance: what `max_abs_diff` was allowed to be, 1e-4 `max_abs_output`; where there are several outputs, the
            difference of each was at most 1e-4 of its own largest value.
        opset: version of the ONNX operator set.
        bytes: size of the file.
        by_batch: batch size -> largest |difference| at that batch size.
        nodes: operations in the graph.
    """

    max_abs_diff: float
    max_abs_output: float
    tolerance: float
    opset: int
    bytes: int
    by_batch: Mapping[int, float]
    nodes: int


@dataclass(frozen=True)
class _Face:
    """The names that a file gives to what goes in and comes out, and what the batch is.

    Attributes:
        inputs, outputs: names, in the order of the network.
        batched: of each input, whether its first dimension is the batch.
        one_row: whether every output must have one row a sample.
    """

    inputs: Sequence[str]
    outputs: Sequence[str]
    batched: Sequence[bool]
    one_row: bool = False


CLASSIFIER = _Face(("images",), ("logits",), (True,), one_row=True)


def export_onnx(
    model: nn.Module,
    example_inputs: Inputs,
    path: str | Path,
    metadata: Mapping[str, str] | None = None,
    *,
    threads: int | None = None,
) -> Check:
    """Write `model` to one self-contained ONNX file with a dynamic batch dimension, and verify what was written.

    The batch is the first dimension of every input that has as many rows as the first one. Inputs are named as the
    arguments of `forward`, outputs as the keys that the network returns (`hidden_0` where one holds several), or
    `output`, or `output_0` and so on. Given `metadata`, it is a classifier's file: the input is `images`
    (batch, C, H, W), the output `logits` (batch, classes).

    The file appears under `path` only after it agreed with torch at batch 1, 2 and 5; after a failure there is no
    file under `path`, not even an older one.

    Args:
        model: any device, dtype and mode; a float32 copy in eval mode is exported, `model` is not changed.
        example_inputs: a tensor (B, ...), a tuple of arguments or a mapping of named ones. Below 8 samples, the check
            runs on these and on random ones like them (`more_samples`). For a classifier 5 real images at least,
            normalised as the model wants them: the check runs on these alone.
        path: the file to write.
        metadata: strings that go into a classifier's file, see `onnx_metadata`.
        threads: of ONNX Runtime; None leaves the choice to it.

    Raises:
        InputError: no samples (for a classifier: fewer than 5 images), or `path` cannot be written.
        RunFailed: the network cannot be exported, or the file computes something else.
    """
    path = Path(path)
    if metadata is not None:
        _enough(example_inputs)
    network, given, batched = _copy(model), _plain(example_inputs), is_batched(example_inputs)
    try:
        if metadata is None:
            given = more_samples(given, sum(BATCH_SIZES))
            face = _face(network, given, batched)
        else:
            face = CLASSIFIER
        wrapped = TensorsOnly(network, given)
        with whole_file(path) as part:
            part.write_bytes(_convert(wrapped, _tensors(given, range(2), face), face, metadata or {}))
            return _check(part, wrapped, given, face, threads, name=path)
    except RunFailed:
        path.unlink(missing_ok=True)  # an older file would pass for the result of this run
        raise


def verify(path: Path, model: nn.Module, images: Tensor, *, threads: int | None = None) -> Check:
    """Compare the ONNX file at `path` with `model` (torch, eval mode, CPU, float32) at batch 1, 2 and 5.

    Args:
        path: the file.
        model: what the file should compute; it is not changed.
        images: (B, C, H, W), B >= 5, normalised; each batch takes other images as far as there are enough (8).
        threads: of ONNX Runtime; None leaves the choice to it.

    Raises:
        InputError: fewer than 5 images.
        RunFailed: the file cannot be loaded, is no valid ONNX, keeps weights in a second file, gives another shape
            or a value that is not finite, or differs by more than 1e-4 max |output|.
    """
    _enough(images)
    given = _plain(images)
    return _check(Path(path), TensorsOnly(_copy(model), given), given, CLASSIFIER, threads, name=Path(path))


def onnx_metadata(
    classes: Sequence[str],
    shape: tuple[int, int, int],
    mean: Sequence[float],
    std: Sequence[float],
    extra: Mapping[str, object],
) -> dict[str, str]:
    """The metadata of an exported file; every value is JSON.

    Args:
        classes: names, in the order of the logits.
        shape: (C, H, W) of one image.
        mean, std: (C,) each; the network takes (pixel / 255 - mean) / std.
        extra: what else a reader of the file may want: recipe hash, FLOPs before and after.

    Raises:
        InputError: values that do not fit together, or an `extra` key that is taken.
    """
    own = {
        "classes": list(classes),
        "shape": [int(n) for n in shape],
        "mean": [float(x) for x in mean],
        "std": [float(x) for x in std],
    }
    if fault := _fault(own):
        raise InputError(f"ONNX metadata: {fault}")
    if taken := sorted(set(own) & set(extra)):
        raise InputError(f"ONNX metadata: the keys {taken} are taken")
    return {key: json.dumps(value) for key, value in {**own, **extra}.items()}


@dataclass(frozen=True)
class OnnxModel:
    """An exported file as a classifier that does its own preprocessing.

    Attributes:
        classes: names, in the order of the probabilities.
        shape: (C, H, W) of one image.
        mean, std: (C,) each; the network takes (pixel / 255 - mean) / std.
        metadata: everything the file says about itself, each value JSON.
        session: the file, loaded into ONNX Runtime.
    """

    classes: tuple[str, ...]
    shape: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    metadata: Mapping[str, str]
    session: onnxruntime.InferenceSession

    def probabilities(self, images: NDArray[np.uint8]) -> NDArray[np.float64]:
        """Class probabilities, (B, classes) in float64, of `images` (B, C, H, W) in uint8.

        Raises:
            InputError: another dtype or shape.
        """
        if images.dtype != np.uint8 or images.ndim != 4 or images.shape[1:] != self.shape:
            expected = ", ".join(map(str, self.shape))
            raise InputError(f"images are {images.dtype} {images.shape}, expected uint8 (B, {expected})")
        chunks = [self._logits(images[i : i + _CHUNK]) for i in range(0, len(images), _CHUNK)]
        logits = np.concatenate([np.empty((0, len(self.classes))), *chunks]).astype(np.float64)  # (B, classes)
        odds = np.exp(logits - logits.max(axis=1, keepdims=True, initial=-np.inf))
        return np.asarray(odds / odds.sum(axis=1, keepdims=True))

    def _logits(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        mean = np.array(self.mean, np.float32)[:, None, None]  # (C, 1, 1)
        std = np.array(self.std, np.float32)[:, None, None]
        pixels = (images.astype(np.float32) / 255 - mean) / std
        return np.asarray(self.session.run(["logits"], {"images": pixels})[0])


def load_onnx(path: Path, *, threads: int | None = None) -> OnnxModel:
    """Load a file that `export_onnx` wrote.

    Raises:
        InputError: no such file, no ONNX file, or one without the metadata of `onnx_metadata`.
    """
    session = open_session(path, threads)
    metadata = dict(session.get_modelmeta().custom_metadata_map)
    own: dict[str, Any] = {}
    for key in ("classes", "shape", "mean", "std"):
        if key not in metadata:
            raise InputError(f"{path}: no {key} in its metadata; was it exported by compressnas?")
        try:
            own[key] = json.loads(metadata[key])
        except ValueError as error:
            raise InputError(f"{path}: {key} in its metadata is not JSON: {metadata[key]!r}") from error
    fault = _fault(own) or _interface_fault(session, own)
    if fault:
        raise InputError(f"{path}: {fault}")
    channels, height, width = own["shape"]
    return OnnxModel(
        classes=tuple(own["classes"]),
        shape=(channels, height, width),
        mean=tuple(map(float, own["mean"])),
        std=tuple(map(float, own["std"])),
        metadata=MappingProxyType(metadata),
        session=session,
    )


def open_session(path: Path, threads: int | None, *, spinning: bool = True) -> onnxruntime.InferenceSession:
    """Load an ONNX file into ONNX Runtime on the CPU; idle threads wait busily only with `spinning`.

    Raises:
        InputError: no such file, or one that ONNX Runtime cannot load.
    """
    if not Path(path).is_file():
        raise InputError(f"{path}: no such file")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads or 0
    options.inter_op_num_threads = 1
    options.log_severity_level = 4  # what goes wrong arrives as an exception
    options.add_session_config_entry("session.intra_op.allow_spinning", "1" if spinning else "0")
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime's exceptions have no class in common
        raise InputError(f"{path}: ONNX Runtime cannot load it: {_line(error)}") from error


def _face(network: nn.Module, given: Inputs, batched: Sequence[bool]) -> _Face:
    """Names from the signature of `forward` and from what the network returns for two samples."""
    inputs = input_names(network, given)
    try:
        with torch.no_grad():
            outputs = call(network, take(given, torch.arange(2), batched))
    except Exception as error:  # a network may raise anything
        hint = "; an example of several samples shows which inputs have a batch dimension" if len(batched) > 1 else ""
        raise RunFailed(f"the network itself fails at batch size 2: {_line(error)}{hint}") from error
    names = output_names(outputs, inputs)
    if not names:
        raise RunFailed(f"the network returns {type(outputs).__name__} without a tensor in it: nothing to export")
    return _Face(inputs, names, batched)


def _convert(network: TensorsOnly, tensors: list[Tensor], face: _Face, metadata: Mapping[str, str]) -> bytes:
    """The ONNX file of `network` as bytes. `tensors` hold two samples: one would make the batch size a constant."""
    batch = torch.export.Dim("batch")
    try:
        with _quiet():
            program = torch.onnx.export(
                network,
                tuple(tensors),
                dynamo=True,
                external_data=False,
                input_names=list(face.inputs),
                output_names=list(face.outputs),
                dynamic_shapes=(tuple({0: batch} if dynamic else None for dynamic in face.batched),),
                verbose=False,
            )
            assert program is not None  # only the exporter that dynamo=True replaces returns None
            proto = program.model_proto
        _own_names(proto.graph)
        _strip_notes(proto.graph)
        onnx.helper.set_model_props(proto, dict(metadata))
        content: bytes = proto.SerializeToString(deterministic=True)
        return content
    except Exception as error:  # torch.export lets through whatever the network or a translation raises
        raise RunFailed(f"the network cannot be exported to ONNX: {_line(error.__cause__ or error)}") from error


def _own_names(graph: onnx.GraphProto) -> None:
    """Parameters are called as in the network itself, not as in what wraps it."""
    prefix = "network."
    for item in (*graph.initializer, *graph.value_info, *graph.output):
        item.name = item.name.removeprefix(prefix)
    for node in graph.node:
        for names in (node.input, node.output):
            names[:] = [name.removeprefix(prefix) for name in names]
        for attribute in node.attribute:
            for inner in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                _own_names(inner)


def _strip_notes(graph: onnx.GraphProto) -> None:
    """Remove what the exporter notes beside each node: stack traces that name the exporting machine's folders,
    and 0.8 KB a node, more than the weights of a slim layer."""
    stored = {tensor.name for tensor in graph.initializer}
    shapes = [value for value in graph.value_info if value.name not in stored]  # tensors carry their own shape
    del graph.value_info[:]
    graph.value_info.extend(shapes)
    for item in (graph, *graph.node, *graph.input, *graph.output, *graph.value_info, *graph.initializer):
        del item.metadata_props[:]
        item.ClearField("doc_string")
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                _strip_notes(inner)


def _check(path: Path, network: TensorsOnly, given: Inputs, face: _Face, threads: int | None, name: Path) -> Check:
    """Compare for a network that is already a CPU float32 copy in eval mode; errors call the file `name`."""
    proto = _read(path, name)
    try:
        session = open_session(path, threads)
    except InputError as error:
        raise RunFailed(str(error).replace(str(path), str(name))) from error
    differences: dict[int, list[float]] = {}  # batch size -> of each output
    largest = [0.0] * len(face.outputs)
    start = 0
    for size in BATCH_SIZES:
        tensors = _tensors(given, range(start, start + size), face)
        pairs = _both(network, session, tensors, size, face, name)
        differences[size] = [_most(expected - found) for expected, found in pairs]
        largest = [max(most, _most(expected)) for most, (expected, _) in zip(largest, pairs, strict=True)]
        start += size
    for output, most in enumerate(largest):
        worst = max(differences, key=lambda size: differences[size][output])
        if differences[worst][output] > RELATIVE_TOLERANCE * most:
            of = f" in {face.outputs[output]}" if len(largest) > 1 else ""
            raise RunFailed(
                f"{name}: ONNX Runtime and torch differ by {differences[worst][output]:.3g}{of} at batch size {worst}, "
                f"allowed are {RELATIVE_TOLERANCE * most:.3g} (1e-4 of the largest output)"
            )
    by_batch = {size: max(of_outputs) for size, of_outputs in differences.items()}
    return Check(
        max_abs_diff=max(by_batch.values()),
        max_abs_output=max(largest),
        tolerance=RELATIVE_TOLERANCE * max(largest),
        opset=next(entry.version for entry in proto.opset_import if entry.domain in ("", "ai.onnx")),
        bytes=path.stat().st_size,
        by_batch=MappingProxyType(by_batch),
        nodes=len(proto.graph.node),
    )


def _read(path: Path, name: Path) -> onnx.ModelProto:
    """The checked content of the file."""
    try:
        proto = onnx.load(path, load_external_data=False)
    except OSError as error:
        raise RunFailed(f"{name}: {error.strerror or error}") from error
    except Exception as error:  # what protobuf raises has changed between its versions
        raise RunFailed(f"{name}: not an ONNX file: {_line(error)}") from error
    if any(tensor.data_location == onnx.TensorProto.EXTERNAL for tensor in proto.graph.initializer):
        raise RunFailed(f"{name}: its weights are in a second file, expected one file")
    try:
        onnx.checker.check_model(proto, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise RunFailed(f"{name}: not a valid ONNX file: {_line(error)}") from error
    return proto


def _both(
    network: TensorsOnly,
    session: onnxruntime.InferenceSession,
    tensors: Sequence[Tensor],
    size: int,
    face: _Face,
    name: Path,
) -> list[tuple[Tensor, Tensor]]:
    """Each output of torch and of ONNX Runtime at batch size `size`, in float64 so that the difference is exact."""
    try:
        with torch.no_grad():
            expected = network(*tensors)
    except Exception as error:  # a network may raise anything; most often it is made for one batch size
        raise RunFailed(f"{name}: the network itself fails at batch size {size}: {_line(error)}") from error
    try:
        feed = {key: tensor.numpy() for key, tensor in zip(face.inputs, tensors, strict=True)}
        found = [torch.from_numpy(np.asarray(value)) for value in session.run(list(face.outputs), feed)]
    except Exception as error:  # ONNX Runtime's exceptions have no class in common
        raise RunFailed(f"{name}: ONNX Runtime fails at batch size {size}: {_line(error)}") from error
    if len(expected) != len(found):
        raise RunFailed(f"{name}: torch gives {len(expected)} tensors at batch size {size}, the file {len(found)}")
    for one, other in zip(expected, found, strict=True):
        if one.shape != other.shape:
            shapes = f"torch gives {tuple(one.shape)}, ONNX Runtime {tuple(other.shape)}"
            raise RunFailed(f"{name}: {shapes} at batch size {size}")
        if face.one_row and one.shape[:1] != (size,):
            raise RunFailed(
                f"{name}: the network gives {tuple(one.shape)} at batch size {size}, expected one row an image"
            )
        for who, output in (("torch", one), ("ONNX Runtime", other)):
            if not bool(output.isfinite().all()):
                raise RunFailed(f"{name}: {who} gives values that are not finite at batch size {size}")
    return [(one.double(), other.double()) for one, other in zip(expected, found, strict=True)]


def _most(values: Tensor) -> float:
    return values.abs().max().item() if values.numel() else 0.0


def _tensors(given: Inputs, rows: Iterable[int], face: _Face) -> list[Tensor]:
    """These samples, counted round and round: batches overlap only when there are fewer than 8."""
    size = next(len(t) for t, batched in zip(input_tensors(given), face.batched, strict=True) if batched)
    return input_tensors(take(given, torch.tensor([row % size for row in rows]), face.batched))


def _plain(inputs: Inputs) -> Any:
    """On the CPU, floating-point tensors in float32."""
    return map_tensors(inputs, lambda t: t.detach().to("cpu", torch.float32 if t.is_floating_point() else None))


def _copy(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model).cpu().float().eval().requires_grad_(False)


def _enough(images: Inputs) -> None:
    if not isinstance(images, Tensor):
        raise InputError(f"a classifier's file takes one tensor of images, got {type(images).__name__}")
    if len(images) < max(BATCH_SIZES):
        raise InputError(f"{len(images)} images to check the ONNX file with, expected at least {max(BATCH_SIZES)}")


def _fault(own: Mapping[str, object]) -> str | None:
    """What is wrong with classes, shape, mean and std, or None."""
    classes, shape, mean, std = (own[key] for key in ("classes", "shape", "mean", "std"))
    if not isinstance(classes, list) or not classes or not all(isinstance(name, str) for name in classes):
        return f"classes is {classes!r}, expected a list of names"
    if not isinstance(shape, list) or len(shape) != 3 or not all(isinstance(n, int) and n > 0 for n in shape):
        return f"shape is {shape!r}, expected three sizes (C, H, W)"
    for key, values in (("mean", mean), ("std", std)):
        if not isinstance(values, list) or len(values) != shape[0] or not all(map(_is_finite, values)):
            return f"{key} is {values!r}, expected {shape[0]} numbers, one per channel"
        if key == "std" and min(values) <= 0:
            return f"std is {values!r}, expected numbers above 0"
    return None


def _interface_fault(session: onnxruntime.InferenceSession, own: Mapping[str, Any]) -> str | None:
    """Where the network in the file is not what its metadata says, or None."""
    inputs, outputs = session.get_inputs(), session.get_outputs()
    if [node.name for node in inputs] != ["images"] or list(inputs[0].shape[1:]) != own["shape"]:
        found = {node.name: node.shape for node in inputs}
        return f"its inputs are {found}, its metadata says images of shape {own['shape']}"
    if [node.name for node in outputs] != ["logits"] or list(outputs[0].shape[1:]) != [len(own["classes"])]:
        found = {node.name: node.shape for node in outputs}
        return f"its outputs are {found}, its metadata names {len(own['classes'])} classes"
    return None


def _is_finite(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _line(error: BaseException) -> str:
    """The first line an exception has to say."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


@contextmanager
def _quiet() -> Iterator[None]:
    """The exporter logs its attempts and prints graphs to stderr; what matters arrives as an exception."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with redirect_stderr(io.StringIO()), warnings.catch_warnings():
            # said where two inputs share the batch dimension, which is meant
            warnings.filterwarnings("ignore", message="# The axis name: batch will not be used")
            yield
    finally:
        logging.disable(before)
