"""KL matching: the divergence of a row's softmax from the nearest class template."""

from __future__ import annotations

from types import ModuleType
from typing import Literal

import numpy as np

from oodometer import derived
from oodometer.arrays import Array, argmax, double, like, log_softmax, row_sums
from oodometer.bank import Bank
from oodometer.derived import F64
from oodometer.detectors.base import CalibrationRows, Detector, detector, param

TINY = float(np.finfo(np.float64).tiny)
"""Probabilities of a template that underflowed to zero count as this: their divergence stays finite."""


@detector(
    "klm",
    needs={"logits"},
    cite="hendrycks2022scaling",
    equation="min_c KL(p ‖ d_c), d_c the mean softmax of the rows predicted as c",
    cost="classes",
    aliases=("kl_matching",),
    variants={"openood": {"bank": "val", "empty": "onehot"}, "pytorch-ood": {}},
)
class KLM(Detector):
    """KL matching (Hendrycks et al., ICML 2022): divergence from the nearest mean softmax of a predicted class.

    A class that no row is predicted as has no template: it is left out, or (`onehot`) its template is certain of the
    class, at a distance of zero from rows that are as certain and infinitely far from all others.
    """

    bank: CalibrationRows = param("auto", "rows the templates are means of", choices=("auto", "train", "val"))
    empty: Literal["drop", "onehot"] = param(
        "drop", "template of a class never predicted: none, or its corner of the simplex", choices=("drop", "onehot")
    )

    def _fit(self, train: Bank, xp: ModuleType) -> None:
        counts, means = derived.class_means(train, "softmax", by="prediction")
        self.log_templates_: F64 = np.log(np.maximum(means[counts > 0], TINY))
        self.corners_ = np.flatnonzero(counts == 0) if self.empty == "onehot" else np.zeros(0, np.int64)

    def _score(self, bank: Bank, xp: ModuleType) -> Array:
        # In float64: near a template the divergence is the small difference of two entropies.
        logp = log_softmax(double(derived.logits(bank)), xp)
        p = xp.exp(logp)
        # KL(p ‖ d_c) = Σ p log p − Σ p log d_c for all classes in one product; log p is finite, so 0·log 0 is 0.
        nearest = row_sums(p * logp, xp) - xp.max(like(self.log_templates_, p) @ p.T, axis=0)
        nearest = xp.clip(nearest, min=0.0)
        return nearest if not len(self.corners_) else xp.where(self._in_corner(bank, xp), 0.0 * nearest, nearest)

    def _in_corner(self, bank: Bank, xp: ModuleType) -> Array:
        """Rows whose softmax is exactly one, in the precision of their logits, for a class without a template."""
        z = derived.logits(bank)
        predicted = argmax(z, xp)
        others = xp.sum(xp.exp(z - xp.max(z, axis=-1, keepdims=True)) > 0, axis=-1) > 1
        missing = xp.any(predicted[:, None] == like(self.corners_, z)[None, :], axis=-1)
        return missing & ~others
