"""The temperature of a classifier: the T that minimises the likelihood loss of softmax(z/T), found exactly."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType

import numpy as np
import numpy.typing as npt

from oodometer import derived
from oodometer.arrays import Array, Ints, block_rows, double, like, namespace, on_cpu, slices, take_columns, to_numpy
from oodometer.bank import Bank
from oodometer.errors import OodometerError

LOW, HIGH = 0.05, 20.0
"""Temperatures outside these bounds are not looked for: on rows that are all correct the loss falls down to T = 0."""


def nll(logits: Array, labels: npt.ArrayLike, temperature: float = 1.0) -> float:
    """Mean of −log softmax(z/T)_y, in float64, finite for any finite logits."""
    _check_bounds(temperature, temperature)
    labels = _checked(logits, labels)
    total = _total(logits, labels, lambda z, y, xp: _row_losses(z, y, 1 / temperature, xp))
    return max(total / len(labels), 0.0)


def fit_temperature(logits: Array, labels: npt.ArrayLike, *, low: float = LOW, high: float = HIGH) -> float:
    """The T in [low, high] of least mean NLL (Guo et al., ICML 2017), to round-off.

    The loss is convex in β = 1/T, so the root of its slope is the minimum. A result equal to `low` or `high` means
    that the loss still falls there; where it does not depend on T (one class, equal logits, certain rows) T is 1.
    """
    from scipy.optimize import brentq

    _check_bounds(low, high)
    labels = _checked(logits, labels)

    def slope(log_beta: float) -> float:
        return _total(logits, labels, lambda z, y, xp: _row_slopes(z, y, math.exp(log_beta), xp))

    coldest, hottest = -math.log(low), -math.log(high)
    at_low, at_high = slope(coldest), slope(hottest)
    if at_low == 0 and at_high == 0:
        return min(max(1.0, low), high)
    if at_low <= 0:
        return low
    if at_high >= 0:
        return high
    # On a log scale the slope is far from saturation, and the steps fall towards the root.
    eps = float(np.finfo(np.float64).eps)
    return min(max(math.exp(-brentq(slope, hottest, coldest, xtol=eps, rtol=4 * eps)), low), high)


def bank_temperature(bank: Bank, *, low: float = LOW, high: float = HIGH) -> float:
    """The temperature of a bank's logits and labels, fitted once a bank."""

    def compute() -> float:
        return fit_temperature(derived.logits(bank), derived.labels(bank), low=low, high=high)

    return derived.remember(bank, ("temperature", low, high), compute)


# ---------------------------------------------------------------------------------------------- rows


def _row_losses(z: Array, y: Array, beta: float, xp: ModuleType) -> Array:
    """log Σ_c exp(β z_c) − β z_y with z shifted to a maximum of zero."""
    return xp.log(xp.sum(xp.exp(beta * z), axis=-1)) - beta * take_columns(z, y, xp)


def _row_slopes(z: Array, y: Array, beta: float, xp: ModuleType) -> Array:
    """d/dβ of the loss: Σ_c p_c z_c − z_y."""
    e = xp.exp(beta * z)
    return xp.sum(e * z, axis=-1) / xp.sum(e, axis=-1) - take_columns(z, y, xp)


def _total(logits: Array, labels: Ints, rows: Callable[[Array, Array, ModuleType], Array]) -> float:
    total, xp = 0.0, namespace(logits)
    for block in slices(len(labels), block_rows(8 * logits.shape[1], cpu=on_cpu(logits))):
        z = double(logits[block, ...])
        z = z - xp.max(z, axis=-1, keepdims=True)
        total += float(xp.sum(rows(z, like(labels[block], z), xp)))
    return total


def _checked(logits: Array, labels: npt.ArrayLike) -> Ints:
    """Labels as integers, one a row of logits and none outside its columns."""
    found = to_numpy(labels).astype(np.int64)
    if logits.ndim != 2 or not len(found) or found.shape != (logits.shape[0],):
        raise OodometerError(
            f"a temperature needs logits (rows, classes) and one label a row; found logits {tuple(logits.shape)} "
            f"and labels {found.shape}"
        )
    if found.min() < 0 or found.max() >= logits.shape[1]:
        raise OodometerError(
            f"labels must be 0 … {logits.shape[1] - 1}, one of the {logits.shape[1]} logits; found "
            f"{int(found.min())} … {int(found.max())}: drop such rows or renumber the classes"
        )
    return found


def _check_bounds(low: float, high: float) -> None:
    if not 0 < low <= high < math.inf:
        raise OodometerError(f"temperatures must be positive and finite, low ≤ high; found low={low}, high={high}")
