"""How long ONNX models take on this machine, measured side by side."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from compressnas.errors import InputError
from compressnas.export import open_session

_MIN_RUNS = 20
_WARMUP_SHARE = 0.2  # of the time budget


@dataclass(frozen=True)
class Latency:
    """Wall-clock milliseconds of one call of ONNX Runtime: median, 90th percentile, and over how many calls."""

    p50_ms: float
    p90_ms: float
    runs: int


def interleaved(
    paths: Mapping[str, Path],
    shape: tuple[int, int, int],
    *,
    batch_size: int = 1,
    runs: int = 200,
    warmup: int = 20,
    threads: int = 1,
    seconds: float = 10.0,
) -> dict[str, Latency]:
    """Time every model on the same input, taking turns, so that a machine that speeds up or slows down hits all alike.

    Each turn calls every model once; every other turn goes in the reverse order, so that none always follows the same
    neighbour. The time of a call includes what Python adds, a few microseconds.

    Args:
        paths: name -> ONNX file with one input (batch, C, H, W) of float32.
        shape: (C, H, W) of one image.
        batch_size: images a call.
        runs: timed calls a model, if time allows.
        warmup: untimed calls a model before that, at least 1, at most a fifth of `seconds`.
        threads: of ONNX Runtime. Waiting threads sleep, they do not spin.
        seconds: after this time no turn starts, except that every model is timed 20 times (or `runs`, if fewer).

    Returns:
        name -> latency, in the order of `paths`.

    Raises:
        InputError: a file that is missing or cannot be loaded or run on this shape; counts below 1.
    """
    if min(batch_size, runs, threads) < 1 or warmup < 0:
        raise InputError(
            f"batch_size {batch_size}, runs {runs}, warmup {warmup}, threads {threads}: expected at least 1 (warmup 0)"
        )
    images = np.random.default_rng(0).standard_normal((batch_size, *shape), dtype=np.float32)  # (B, C, H, W)
    calls = []
    for name, path in paths.items():
        session = open_session(path, threads, spinning=False)
        calls.append((name, session, {session.get_inputs()[0].name: images}))
    start = time.perf_counter()
    for _ in range(max(warmup, 1)):
        for name, session, feed in calls:
            try:
                session.run(None, feed)
            except Exception as error:  # ONNX Runtime's exceptions have no class in common
                reason = next(iter(str(error).splitlines()), "")
                raise InputError(f"{paths[name]}: cannot run on {images.shape}: {reason}") from error
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
