"""ASH: of each row only the largest activations are kept, and made up for those that are pruned."""

from __future__ import annotations

from types import ModuleType
from typing import Literal

import numpy as np

from oodometer.arrays import Array, namespace
from oodometer.bank import Bank
from oodometer.derived import F64
from oodometer.detectors import quantiles, shaping
from oodometer.detectors.base import Detector, detector, param, warn
from oodometer.detectors.shaping import Where, percentile_param, where_param


@detector(
    "ash",
    needs={"features", "head"},
    grid={"percentile": (65, 70, 75, 80, 85, 90, 95)},
    cite="djurisic2023ash",
    equation="−log Σ_c exp z_c, z = Wh' + b, h' keeps the k = D − round(D·q/100) largest of h: as they are (p), "
    "each as s1/k (b), or times exp(s1/s2) (s), with s1 = Σh and s2 = Σ of the kept",
    cost="head",
    variants={
        "openood": {"variant": "b", "percentile": 90.0},
        "openmibood": {"variant": "s", "percentile": 90.0},
        "pytorch-ood": {"variant": "s", "percentile": 65.0, "where": "map"},
        "original": {"variant": "s", "percentile": 90.0, "where": "map"},
    },
)
class ASH(Detector):
    """Activation shaping: energy of features pruned to their largest entries (Djurisic et al., ICLR 2023).

    Of equal activations the first are kept. Made for activations after a ReLU; `relu=True` applies one to signed
    features. Where the kept activations do not sum to more than zero, variant s has the factor 1; exponents above
    700 are capped. Both are reported.
    """

    rowwise = False
    percentile: float = percentile_param(90.0, "activations below this percentile of their row are pruned")
    variant: Literal["s", "b", "p"] = param(
        "s", "kept activations are scaled by exp(s1/s2), all set to s1/k, or left alone", choices=("s", "b", "p")
    )
    relu: bool = param(False, "negative activations count as zero", choices=(True, False))
    where: Where = where_param()

    @property
    def needs(self) -> frozenset[str]:
        return shaping.needs_of(self.card.needs, self.where)

    def _score(self, bank: Bank, xp: ModuleType) -> Array:
        assert bank.head is not None, "the door has refused a bank without a head"
        shaping.check_map(bank, self.where, "ash")
        scores, sums = [], []
        for block in quantiles.cache_blocks(bank, shaping.column_of(self.where)):
            x = shaping.activations(block, self.where, relu=self.relu)
            shaped, total, kept, k = self._pruned(namespace(x).reshape(x, (x.shape[0], -1)))
            sums.append((total, kept))
            product = shaping.without_bias(namespace(x).reshape(shaped, x.shape), bank.head)
            scores.append(shaping.rescaled_energy(product, self._factor(total, kept, k), bank.head))
        message = shaping.oddities("ash", sums) if self.variant == "s" else ""
        if message:
            warn(message)
        return np.concatenate(scores)

    def _pruned(self, x: Array) -> tuple[Array, F64, F64, int]:
        """The kept activations of each row (b: ones in their places), s1, s2 and k."""
        xp = namespace(x)
        k = shaping.kept_count(x.shape[1], self.percentile, "ash")
        kth, kept = shaping.largest(x, k, xp)
        mask = shaping.top_mask(x, k, kth, xp)
        shaped = xp.astype(mask, x.dtype) if self.variant == "b" else xp.where(mask, x, 0.0)
        return shaped, shaping.row_sums(x, xp), kept, k

    def _factor(self, total: F64, kept: F64, k: int) -> F64:
        if self.variant == "s":
            return shaping.factors(total, kept)
        return total / k if self.variant == "b" else np.ones_like(total)
