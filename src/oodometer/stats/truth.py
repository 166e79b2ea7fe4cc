"""The benchmark truth: the mean of many repetitions, its Monte-Carlo error, and when it has converged."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from oodometer.errors import OodometerError
from oodometer.stats.blocks import Floats, read_numbers


@dataclass(frozen=True)
class BenchmarkTruth:
    """Mean over repetitions of every cell (row, method, …), with what is known about its convergence."""

    mean: Floats
    standard_error: Floats
    """Monte-Carlo: standard deviation over repetitions / √n."""
    running_mean: Floats
    """The mean after 1, 2, … repetitions, along the first axis."""
    n: int
    converged_at: int | None
    """The first number of repetitions at which every cell satisfied the stop rule; None: never, or no rule."""
    tol: float | None
    window: int


def benchmark_truth(values: ArrayLike, *, tol: float | None = None, window: int = 10) -> BenchmarkTruth:
    """Summarise values[repetition, …] (DCV-ROOD §5.1, where 100 repetitions are judged by eye).

    Stop rule: the running means of the last `window` repetitions lie within `tol` of the present one, in every cell.
    """
    x = read_numbers(values, "benchmark_truth")
    if x.ndim < 1 or len(x) < 2 or not np.isfinite(x).all():
        raise OodometerError(
            f"benchmark_truth: at least 2 repetitions of finite values were needed, shape {x.shape} was found"
            + ("." if np.isfinite(x).all() else " with NaN or infinity.")
        )
    if window < 1 or (tol is not None and not tol > 0):
        raise OodometerError(f"benchmark_truth: window ≥ 1 and tol > 0 were needed, {window} and {tol} were found.")
    n = len(x)
    running = np.cumsum(x, axis=0) / np.arange(1, n + 1).reshape(-1, *[1] * (x.ndim - 1))
    error = x.std(axis=0, ddof=1) / np.sqrt(n)
    return BenchmarkTruth(running[-1], error, running, n, _converged(running, tol, window), tol, window)


def _converged(running: Floats, tol: float | None, window: int) -> int | None:
    if tol is None:
        return None
    flat = running.reshape(len(running), -1)
    for n in range(window + 1, len(flat) + 1):
        if np.abs(flat[n - 1 - window : n - 1] - flat[n - 1]).max() < tol:
            return n
    return None
