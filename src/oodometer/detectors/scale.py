"""SCALE: the features are stretched by how much of their sum lies in the largest."""

from __future__ import annotations

from types import ModuleType

import numpy as np

from oodometer import derived
from oodometer.arrays import Array, double, like, namespace, to_numpy
from oodometer.bank import Bank
from oodometer.detectors import quantiles, shaping
from oodometer.detectors.base import Detector, detector, param, warn
from oodometer.detectors.shaping import (
    Where,
    factors,
    percentile_param,
    rescaled_energy,
    where_param,
    without_bias,
)


@detector(
    "scale",
    needs={"features", "logits", "head"},
    grid={"percentile": (65, 70, 75, 80, 85, 90, 95)},
    cite="xu2024scale",
    equation="−log Σ_c exp z_c, z = exp(s1/s2)·Wh + b, s1 = Σh, s2 the sum of the k = D − round(D·q/100) largest",
    cost="head",
    variants={
        "openood": {"percentile": 85.0},
        "pytorch-ood": {"percentile": 65.0, "where": "map"},
    },
)
class Scale(Detector):
    """Energy of features stretched by exp(s1/s2), none of them pruned (Xu et al., ICLR 2024).

    Made for activations after a ReLU; `relu=True` applies one to signed features. Where the largest do not sum to
    more than zero the factor is 1; exponents above 700 are capped. Both are reported.
    """

    rowwise = False
    percentile: float = percentile_param(85.0, "s2 sums the activations above this percentile of their row")
    relu: bool = param(False, "negative activations count as zero", choices=(True, False))
    where: Where = where_param()

    @property
    def needs(self) -> frozenset[str]:
        pooled_logits = shaping.needs_of(self.card.needs, self.where)
        return pooled_logits - {"logits"} if self.relu else pooled_logits

    def _score(self, bank: Bank, xp: ModuleType) -> Array:
        assert bank.head is not None, "the door has refused a bank without a head"
        shaping.check_map(bank, self.where, "scale")
        scores, sums = [], []
        for block in quantiles.cache_blocks(bank, shaping.column_of(self.where)):
            x = shaping.activations(block, self.where, relu=self.relu)
            rows = namespace(x).reshape(x, (x.shape[0], -1))
            k = shaping.kept_count(rows.shape[1], self.percentile, "scale")
            sums.append((shaping.row_sums(rows, namespace(rows)), shaping.largest(rows, k, namespace(rows))[1]))
            product = self._logits_without_bias(block) if "logits" in self.needs else without_bias(x, bank.head)
            scores.append(rescaled_energy(product, factors(*sums[-1]), bank.head))
        message = shaping.oddities("scale", sums)
        if message:
            warn(message)
        return np.concatenate(scores)

    def _logits_without_bias(self, block: Bank) -> Array:
        """W·h from the logits that every detector shares: a factor on h is a factor on them."""
        assert block.head is not None
        z = double(quantiles.on_host(derived.logits(block)))
        return z - like(to_numpy(block.head.bias), z)
