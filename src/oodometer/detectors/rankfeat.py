"""RankFeat: energy of the logits that remain when the last maps lose their largest singular component."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import ClassVar

import numpy as np

from oodometer.arrays import Array, double, logsumexp
from oodometer.bank import Bank
from oodometer.detectors.base import Detector, detector, param
from oodometer.errors import OodometerError

EXACT, POWER = "logits.rankfeat", "logits.rankfeat.power"
"""Rows × blocks × classes: for each block the logits after its map has lost its rank-1 part."""


@detector(
    "rankfeat",
    needs={EXACT},
    grid={"accelerate": (False, True), "temperature": (0.1, 1.0, 10.0, 100.0, 1000.0)},
    cite="song2022rankfeat",
    equation="−T·log Σ_c exp(z̄_c/T), z̄ the mean over blocks of the logits of A − σ₁u₁v₁ᵀ",
    variants={"openood": {}, "openood-accelerated": {"accelerate": True}},
)
class RankFeat(Detector):
    """Energy after the rank-1 part of the last feature maps is removed (Song et al., NeurIPS 2022).

    Extraction stores the logits of each block, by exact decomposition or by power iteration (`accelerate`).
    """

    scored: ClassVar[Mapping[str, str]] = {
        EXACT: "columns=[…, 'logits.rankfeat']",
        POWER: "columns=[…, 'logits.rankfeat.power']",
    }
    accelerate: bool = param(False, "read the logits of 20 power iterations", choices=(True, False))
    temperature: float = param(1.0, "the logits are divided by it", low=0.0, high=np.inf, open=True)

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({POWER if self.accelerate else EXACT})

    def _score(self, bank: Bank, xp: ModuleType) -> Array:
        z = double(bank[POWER if self.accelerate else EXACT])
        if z.ndim != 3:
            raise OodometerError(f"rankfeat: its column must be rows × blocks × classes; found {tuple(z.shape)}")
        return -self.temperature * logsumexp(xp.mean(z, axis=1) / self.temperature, xp)
