"""Distance to the decision boundaries, relative to the distance from the mean feature."""

from __future__ import annotations

from types import ModuleType
from typing import Literal

import numpy as np

from oodometer import derived
from oodometer.arrays import Array, argmax, double, like, norms, row_products, slices, take_columns, to_numpy
from oodometer.bank import Bank
from oodometer.derived import F64
from oodometer.detectors.base import Detector, detector, param, warn
from oodometer.errors import OodometerError

PAIRS = 4096
"""Pairs of classes whose gap is recomputed at a time."""


@detector(
    "fdbd",
    needs={"features", "logits", "head"},
    grid={"distance_to_mean": (True, False)},
    cite="liu2024fdbd",
    equation="−Σ_{c≠ŷ} (z_ŷ − z_c)/‖w_ŷ − w_c‖ / ‖h − μ‖",
    cost="elementwise",
    variants={"original": {}, "openood": {}, "paper003": {"reduction": "mean"}, "pytorch-ood": {"reduction": "mean"}},
)
class FDBD(Detector):
    """Fast decision boundary detector (Liu & Qin, ICML 2024).

    Classes with equal weights have no boundary between them: such a pair counts nothing. Rows nearer to the mean (or to
    zero) than single precision resolves count as that far.
    """

    distance_to_mean: bool = param(True, "divide by ‖h − μ‖, else by ‖h‖", choices=(True, False))
    reduction: Literal["sum", "mean"] = param("sum", "over the other classes", choices=("sum", "mean"))

    def _fit(self, train: Bank, xp: ModuleType) -> None:
        assert train.head is not None, "the door has seen to the head"
        self.inverse_gaps_ = inverse_gaps(to_numpy(train.head.weight).astype(np.float64))
        if self.reduction == "mean":
            self.inverse_gaps_ /= len(self.inverse_gaps_) - 1
        self.mean_ = derived.mean(train)
        self.exact_ = derived.is_small(train)
        # The limit at the mean is −∞; at this distance from it the direction of h − μ is already round-off.
        self.shortest_ = float(np.finfo(np.float32).eps * np.linalg.norm(self.mean_)) or 1.0

    def _score(self, bank: Bank, xp: ModuleType) -> Array:
        h, z = derived.features(bank), derived.logits(bank)
        if self.exact_:
            h, z = double(h), double(z)
        predicted = argmax(z, xp)
        margins = take_columns(z, predicted, xp)[:, None] - z
        boundaries = row_products(margins, xp.take(like(self.inverse_gaps_, z), predicted, axis=0), xp)
        length = norms(h - like(self.mean_, h), xp) if self.distance_to_mean else norms(h, xp)
        return -boundaries / xp.clip(length, min=self.shortest_)


def inverse_gaps(weight: F64) -> F64:
    """1/‖w_i − w_j‖ for every pair of classes; zero for a class with itself and for equal rows."""
    classes = len(weight)
    squares = np.einsum("ij,ij->i", weight, weight)
    sums = squares[:, None] + squares[None, :]
    gaps = sums - 2 * (weight @ weight.T)
    # Where the Gram form cancels, the gap is taken from the rows themselves.
    rows, columns = np.nonzero(np.triu(gaps < 1e-6 * sums, 1) | np.triu(sums == 0, 1))
    for part in slices(len(rows), PAIRS):
        i, j = rows[part], columns[part]
        difference = weight[i] - weight[j]
        gaps[i, j] = gaps[j, i] = np.einsum("ij,ij->i", difference, difference)
    np.fill_diagonal(gaps, 0.0)
    _check_boundaries(gaps, classes)
    return np.where(gaps > 0, 1 / np.sqrt(np.where(gaps > 0, gaps, 1.0)), 0.0)


def _check_boundaries(gaps: F64, classes: int) -> None:
    equal = np.argwhere(np.triu(gaps == 0, 1))
    if len(equal) == classes * (classes - 1) // 2:
        raise OodometerError(
            f"fdbd: this head of {classes} classes has no decision boundary (one class, or equal weights in all): "
            "distances to boundaries need at least two classes with different weights"
        )
    if len(equal):
        i, j = equal[0].tolist()
        warn(
            f"fdbd: {len(equal)} pairs of classes have equal weights (classes {i} and {j}, …): "
            "they have no boundary between them and count nothing"
        )
