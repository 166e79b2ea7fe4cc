"""Where the variation of a result comes from: training seeds or the sampled test data."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from oodometer.errors import OodometerError, OodometerWarning
from oodometer.stats.blocks import read_numbers


@dataclass(frozen=True)
class VarianceSplit:
    """Variance components of one method's metric over seeds × test samples."""

    seed: float
    """Variance that another training seed brings."""
    sampling: float
    """Variance that another test sample (fold) brings."""
    residual: float
    """What neither explains alone."""
    mean: float
    standard_error: float
    """Of the mean, for new seeds and new samples; seeds alone do not average the sampling variance away."""
    n_seeds: int
    n_samples: int

    def __str__(self) -> str:
        parts = {"seed": self.seed, "sampling": self.sampling, "residual": self.residual}
        total = sum(parts.values())
        shares = ", ".join(f"{name} {value / total if total else 0:.0%}" for name, value in parts.items())
        return (
            f"{self.mean:.4g} ± {self.standard_error:.2g} (standard error); variance: {shares}; "
            f"{self.n_seeds} seeds × {self.n_samples} samples"
        )


def variance_split(values: ArrayLike) -> VarianceSplit:
    """Split the variance of values[seed, sample], where every seed was evaluated on the same samples (folds).

    Method of moments in the crossed random-effects model; a negative component is set to zero and said.
    """
    x = read_numbers(values, "variance_split")
    if x.ndim != 2 or min(x.shape) < 2 or not np.isfinite(x).all():
        raise OodometerError(
            f"variance_split: finite values[seed, sample] with at least 2 of each were needed, shape {x.shape} "
            "was found" + ("." if np.isfinite(x).all() else " with NaN or infinity.")
        )
    n_seeds, n_samples = x.shape
    mean = x.mean()
    rows, columns = x.mean(axis=1) - mean, x.mean(axis=0) - mean
    # Expected mean squares (Searle, Casella & McCulloch 1992, §4.4): σ² + n σ²_seed, σ² + m σ²_sample, σ²
    residual = float(((x - mean - rows[:, None] - columns) ** 2).sum() / ((n_seeds - 1) * (n_samples - 1)))
    seed = float((rows**2).sum() / (n_seeds - 1)) - residual / n_samples
    sampling = float((columns**2).sum() / (n_samples - 1)) - residual / n_seeds
    negative = [name for name, value in (("seed", seed), ("sampling", sampling)) if value < 0]
    if negative:
        warnings.warn(f"variance of {' and '.join(negative)} estimated below zero, set to 0", OodometerWarning, 2)
    seed, sampling = max(seed, 0.0), max(sampling, 0.0)
    error = math.sqrt(seed / n_seeds + sampling / n_samples + residual / (n_seeds * n_samples))
    return VarianceSplit(seed, sampling, residual, float(mean), error, n_seeds, n_samples)
