"""How long ONNX models take on this machine, measured side by side."""

import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from compressnas.errors import InputError
from compressnas.export import export_onnx, open_session
from compressnas.inputs import Inputs
from compressnas.interface import input_names, input_tensors

Feed = Mapping[str, NDArray[Any]]  # input of a file -> what it is called with

_MIN_RUNS = 20
_WARMUP_SHARE = 0.2  # of the time budget


@dataclass(frozen=True)
class Latency:
    """Wall-clock milliseconds of one call of ONNX Runtime: median, 90th percentile, and over how many calls."""

    p50_ms: float
    p90_ms: float
    runs: int


def random_images(shape: tuple[int, int, int], batch_size: int = 1) -> Feed:
    """What a classifier's file is called with: `images` (batch_size, C, H, W), normally distributed."""
    return {"images": np.random.default_rng(0).standard_normal((batch_size, *shape), dtype=np.float32)}


def interleaved(
    paths: Mapping[str, Path],
    feed: Feed,
    *,
    runs: int = 200,
    warmup: int = 20,
    threads: int = 1,
    seconds: float = 10.0,
) -> dict[str, Latency]:
    """Time every model on the same input, taking turns, so that a machine that speeds up or slows down hits all alike.

    Each turn calls every model once; every other turn goes in the reverse order, so that none always follows the same
    neighbour. The time of a call includes what Python adds, a few microseconds.

    Args:
        paths: name -> ONNX file.
        feed: what each of them is called with.
        runs: timed calls a model, if time allows.
        warmup: untimed calls a model before that, at least 1, at most a fifth of `seconds`.
        threads: of ONNX Runtime. Waiting threads sleep, they do not spin.
        seconds: after this time no turn starts, except that every model is timed 20 times (or `runs`, if fewer).

    Returns:
        name -> latency, in the order of `paths`.

    Raises:
        InputError: a file that is missing or cannot be loaded or run on this feed; counts below 1.
    """
    if min(runs, threads) < 1 or warmup < 0:
        raise InputError(f"runs {runs}, warmup {warmup}, threads {threads}: expected at least 1 (warmup 0)")
    calls = [(name, open_session(path, threads, spinning=False), feed) for name, path in paths.items()]
    start = time.perf_counter()
    for _ in range(max(warmup, 1)):
        for name, session, feed in calls:
            try:
                session.run(None, feed)
            except Exception as error:  # ONNX Runtime's exceptions have no class in common
                reason = next(iter(str(error).splitlines()), "")
                shapes = ", ".join(f"{key} {value.shape}" for key, value in feed.items())
                raise InputError(f"{paths[name]}: cannot run on {shapes}: {reason}") from error
        if time.perf_counter() - start > _WARMUP_SHARE * seconds:
            break
    times: dict[str, list[int]] = {name: [] for name in paths}  # ns
    for turn in range(runs):
        if turn >= _MIN_RUNS and time.perf_counter() - start > seconds:
            break
        for name, session, feed in reversed(calls) if turn % 2 else calls:
            before = time.perf_counter_ns()
            session.run(None, feed)
            times[name].append(time.perf_counter_ns() - before)
    return {name: _summary(ns) for name, ns in times.items()}


def _summary(ns: list[int]) -> Latency:
    p50, p90 = np.percentile(np.array(ns) / 1e6, [50, 90])
    return Latency(float(p50), float(p90), len(ns))


class Stopwatch:
    """Times networks against one of them. A context: its ONNX files are gone when it ends."""

    def __init__(self, dense: nn.Module, example: Inputs, threads: int = 1, seconds: float = 5.0) -> None:
        """Export `dense`, for ONNX Runtime with so many threads; each measurement takes about `seconds`.

        Args:
            example: a tensor, a tuple of arguments or a mapping of named ones; its batch is what is timed.

        Raises:
            RunFailed: the network cannot be exported.
        """
        self.example, self.threads, self.seconds = example, threads, seconds
        self._folder = tempfile.TemporaryDirectory()
        self._dense = self._file(dense, "dense")
        self._feed = {
            name: tensor.detach().cpu().numpy()
            for name, tensor in zip(input_names(dense, example), input_tensors(example), strict=True)
        }

    def __enter__(self) -> "Stopwatch":
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()

    def against_dense(self, network: nn.Module) -> tuple[float, float]:
        """Median latency of the network and of the dense one, in microseconds, measured in turns."""
        files = {"network": self._file(network, "network"), "dense": self._dense}
        found = interleaved(files, self._feed, runs=10**6, threads=self.threads, seconds=self.seconds)
        return 1000 * found["network"].p50_ms, 1000 * found["dense"].p50_ms

    def _file(self, network: nn.Module, name: str) -> Path:
        path = Path(self._folder.name) / f"{name}.onnx"
        export_onnx(network, self.example, path, threads=self.threads)
        return path
