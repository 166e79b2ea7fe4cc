"""Regret of the predictive normalised maximum likelihood of the last layer."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Literal

import numpy as np

from oodometer import derived
from oodometer.arrays import Array, double, like, log_softmax, psd_eigh, unit
from oodometer.bank import Bank
from oodometer.derived import F64, Moments
from oodometer.detectors.base import Detector, detector, param, warn
from oodometer.errors import OodometerError

LARGEST_EXPONENT = 700.0
"""exp of more than this overflows; the regret has reached its limit long before."""


@detector(
    "pnml",
    needs={"features", "head"},
    cite="bibas2021pnml",
    equation="log Σ_c q_c/(q_c + (1 − q_c)·q_c^g) / log C, q = softmax(b + Wĥ), g from P = (X̃ᵀX̃)⁺ of rows x̃ = [1, ĥ]",
    cost="subspace",
)
class PNML(Detector):
    """Regret of the single-layer predictive normalised maximum likelihood, in [0, 1] (Bibas et al., NeurIPS 2021).

    s_∥ = x̃ᵀPx̃ measures x̃ inside the span of the training rows, s_⊥ the squared length of what lies outside it. Both
    come from the eigenvectors of X̃ᵀX̃; `rank_` says how many of them the training rows span.
    """

    variant: Literal["max", "theory"] = param(
        "max", "g: the larger of s_⊥ and s_∥/(1 + s_∥), or 1 wherever s_⊥ > 0", choices=("max", "theory")
    )
    tol: float = param(1e-10, "s_⊥ up to this share of ‖x̃‖² is round-off and counts as 0", low=0.0, high=1.0)

    def _fit(self, train: Bank, xp: ModuleType) -> None:
        if train.classes < 2:
            raise OodometerError(
                "pnml: the regret is divided by log C, which is 0 for 1 class: give at least 2 classes"
            )
        values, vectors = psd_eigh(bordered_gram(derived.moments(train, unit=True)), train.sample)
        self.offset_, self.directions_ = vectors[0], vectors[1:]
        # An eigenvalue below this is the round-off of the sums in the largest.
        kept = values > len(values) * np.finfo(np.float64).eps * values[0]
        self.inverses_ = np.where(kept, 1 / np.where(kept, values, 1.0), 0.0)
        self.rank_ = int(kept.sum())
        self.exact_ = derived.is_small(train)
        if self.rank_ < len(values):
            warn(
                f"pnml: the {len(train)} training rows span {self.rank_} of {len(values)} directions (constant, "
                "repeated or silent features, or too few rows): what lies outside them is scored by its length alone"
            )

    def _score(self, bank: Bank, xp: ModuleType) -> Array:
        assert bank.head is not None, "the door has seen to the head"
        h = derived.features(bank)
        h = unit(double(h) if self.exact_ else h, xp)
        log_q = log_softmax(double(bank.head(h)), xp)
        return regret(log_q, double(self._learnability(h, xp))[:, None], xp) / math.log(log_q.shape[-1])

    def _learnability(self, h: Array, xp: ModuleType) -> Array:
        """g: how far one more training row at x̃ could move its own logits."""
        y = h @ like(self.directions_, h) + like(self.offset_, h)
        y *= y
        inside = y @ like(self.inverses_, y)
        outside = xp.sum(y[:, self.rank_ :], axis=-1)
        outside = xp.where(outside > self.tol * xp.sum(y, axis=-1), outside, xp.zeros_like(outside))
        inside = inside / (1 + inside)
        if self.variant == "theory":
            return xp.where(outside > 0, xp.ones_like(outside), inside)
        return xp.where(outside > inside, outside, inside)


def bordered_gram(unit_rows: Moments) -> F64:
    """X̃ᵀX̃ of the rows x̃ = [1, ĥ], from count, mean and scatter of ĥ."""
    sums = unit_rows.count * unit_rows.mean
    gram = unit_rows.about(np.zeros_like(unit_rows.mean))
    return np.block([[np.array([[float(unit_rows.count)]]), sums[None, :]], [sums[:, None], gram]])


def regret(log_q: Array, g: Array, xp: ModuleType) -> Array:
    """log Σ_c q_c/(q_c + (1 − q_c)·q_c^g), without ties among confident rows.

    The sum is one plus Σ_c (1 − q_c)(1 − q_c^g)/(1 + (1 − q_c)·q_c^(g−1)); only the excess over one carries the regret.
    """
    less_one = xp.expm1(log_q)
    power = xp.exp(xp.clip((g - 1) * log_q, max=LARGEST_EXPONENT))
    return xp.log1p(xp.sum(less_one * xp.expm1(g * log_q) / (1 - less_one * power), axis=-1))
