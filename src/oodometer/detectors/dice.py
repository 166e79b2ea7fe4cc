"""DICE: only the head's weights that contribute most are kept."""

from __future__ import annotations

from types import ModuleType

import numpy as np

from oodometer import derived
from oodometer.arrays import Array, double, logsumexp, percentile, to_numpy
from oodometer.bank import Bank, Head
from oodometer.detectors.base import Detector, detector
from oodometer.detectors.shaping import percentile_param
from oodometer.errors import OodometerError


@detector(
    "dice",
    needs={"features", "head"},
    grid={"percentile": (60, 65, 70, 75, 80, 85, 90, 95)},
    cite="sun2022dice",
    equation="−log Σ_c exp z_c, z = (W ⊙ M)h + b, M = 1[μ ⊙ W > percentile of its C·D entries]",
    cost="head",
    variants={
        "openood": {"percentile": 90.0},
        "openmibood": {"percentile": 90.0},
        "pytorch-ood": {"percentile": 90.0},
    },
)
class DICE(Detector):
    """Directed sparsification: energy of the logits of the strongest weights (Sun & Li, ECCV 2022)."""

    percentile: float = percentile_param(90.0, "weights with a mean contribution above this percentile are kept")

    def _fit(self, train: Bank, xp: ModuleType) -> None:
        assert train.head is not None, "the door has refused a bank without a head"
        weight = to_numpy(train.head.weight)
        contribution = derived.mean(train) * weight
        kept = contribution > percentile(contribution, self.percentile)
        if not kept.any():
            raise OodometerError(
                f"dice: no mean contribution μ ⊙ W exceeds its percentile {self.percentile:g}, so every row would get "
                "the same score: choose a smaller percentile, or check for features that are all zero"
            )
        # As dense as the head: a sparse product wins only where a percentile leaves a few weights in a hundred.
        self.masked_head_ = Head(np.where(kept, weight, 0), train.head.bias)
        self.exact_ = derived.is_small(train)

    def _score(self, bank: Bank, xp: ModuleType) -> Array:
        h = derived.features(bank)
        return -logsumexp(self.masked_head_(double(h) if self.exact_ else h), xp)
