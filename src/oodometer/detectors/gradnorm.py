"""Norm of the gradient of the last layer's weight, which factorises into feature and softmax."""

from __future__ import annotations

from types import ModuleType

import numpy as np

from oodometer import derived
from oodometer.arrays import Array, absolute_sums, double, softmax
from oodometer.bank import Bank
from oodometer.detectors.base import Detector, detector, param
from oodometer.detectors.logits import cooled


@detector(
    "gradnorm",
    needs={"features", "logits"},
    cite="huang2021gradnorm",
    equation="−(1/T)·‖h‖₁·Σ_c |C·p_c − 1|, p = softmax(z/T)",
    variants={"openood": {}, "paper003": {}},
)
class GradNorm(Detector):
    """L1 norm of the last layer's gradient (Huang et al., NeurIPS 2021).

    The gradient of Σ_c −log p_c by the weight is (C·p − 1)hᵀ/T: its L1 norm is a product of two sums, and no
    gradient is ever taken. The divergence from the uniform distribution divides it by C, which does not reorder.
    """

    temperature: float = param(1.0, "the logits are divided by it", low=0.0, high=np.inf, open=True)

    def _fit_on(self, train: Bank, val: Bank | None) -> None:
        # |C·p − 1| magnifies the round-off of logits; where they are computed here, float64 costs little.
        self.exact_ = "logits" not in self.shapes_ and derived.is_small(train)

    @property
    def is_fitted_needed(self) -> bool:
        """Nothing is learnt but the precision to compute in."""
        return False

    def _score(self, bank: Bank, xp: ModuleType) -> Array:
        h, z = derived.features(bank), derived.logits(bank)
        if getattr(self, "exact_", False) and bank.head is not None:
            h = double(h)
            z = bank.head(h)
        classes, p = z.shape[-1], softmax(cooled(double(z), self.temperature), xp)
        # Σ_c |C·p_c − 1| = C·Σ_c |p_c − 1/C|.
        return -absolute_sums(h, xp) * (classes / self.temperature) * absolute_sums(p - 1 / classes, xp)
