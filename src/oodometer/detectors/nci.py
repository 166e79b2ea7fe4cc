"""Neural-collapse score: closeness of the centred feature to the predicted class's weight, and the feature's length."""

from __future__ import annotations

from types import ModuleType

import numpy as np

from oodometer import derived
from oodometer.arrays import Array, absolute_sums, like, norms, row_products, to_numpy
from oodometer.bank import Bank
from oodometer.detectors.base import Detector, detector, param


@detector(
    "nci",
    needs={"features", "logits", "head"},
    grid={"alpha": (1e-4, 1e-3, 1e-2, 1e-1)},
    cite="liu2025nci",
    equation="−[⟨w_ŷ, h − μ⟩/‖h − μ‖ + α‖h‖₁]",
    variants={"openood": {}, "pytorch-ood": {"alpha": 0.0}},
)
class NCI(Detector):
    """Detection through the lens of neural collapse (Liu & Qin, CVPR 2025).

    A feature at the mean has no direction: its first term is 0.
    """

    alpha: float = param(1e-4, "weight of the feature's L1 norm", low=0.0)

    def _fit(self, train: Bank, xp: ModuleType) -> None:
        self.mean_ = derived.mean(train)

    def _score(self, bank: Bank, xp: ModuleType) -> Array:
        assert bank.head is not None, "the door has seen to the head"
        h = derived.features(bank)
        gap = h - like(self.mean_, h)
        weight = xp.take(like(to_numpy(bank.head.weight), h), xp.argmax(derived.logits(bank), axis=-1), axis=0)
        length, along = norms(gap, xp), row_products(weight, gap, xp)
        # Nearer to the mean than its round-off, a row has no direction.
        apart = length > float(np.finfo(np.float32).eps * np.linalg.norm(self.mean_))
        closeness = xp.where(apart, along, xp.zeros_like(along)) / xp.where(apart, length, xp.ones_like(length))
        return -(closeness + self.alpha * absolute_sums(h, xp))
