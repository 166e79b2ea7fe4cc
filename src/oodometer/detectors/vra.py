"""VRA: activations are clipped from both sides, or the weak ones silenced, before they reach the head."""

from __future__ import annotations

from types import ModuleType
from typing import Literal

import numpy as np

from oodometer.arrays import Array, like
from oodometer.bank import Bank
from oodometer.detectors import quantiles, shaping
from oodometer.detectors.base import CalibrationRows, Detector, detector, param
from oodometer.detectors.shaping import Where, percentile_param, where_param
from oodometer.errors import OodometerError


@detector(
    "vra",
    needs={"features", "head"},
    grid={"high": (85, 90, 95, 99), "low": (1, 5, 10, 15)},
    cite="xu2023vra",
    equation="−log Σ_c exp z_c, z = W·clip(h, t_low, t_high) + b, or with h < t_low set to 0",
    cost="head",
    variants={
        "paper": {"below": "zero"},
        "openood": {"below": "clip", "bank": "val"},
        "pytorch-ood": {"per_element": True},
    },
)
class VRA(Detector):
    """Variational rectified activation: energy of features clipped from both sides (Xu et al., NeurIPS 2023).

    The paper silences activations below the lower threshold, a widely used implementation raises them to it: `below`
    chooses. After a ReLU low percentiles are often zero, where the two agree and no value of `low` acts.
    """

    high: float = percentile_param(90.0, "larger activations become this percentile")
    low: float = percentile_param(10.0, "activations below this percentile are raised to it, or silenced")
    below: Literal["clip", "zero"] = param(
        "clip", "activations below the lower threshold: raised to it, or set to zero", choices=("clip", "zero")
    )
    per_element: bool = param(False, "percentiles of each activation, not of all together", choices=(True, False))
    bank: CalibrationRows = param(
        "auto", "rows the thresholds are taken from; auto: validation rows when given", choices=("auto", "train", "val")
    )
    where: Where = where_param()

    @property
    def needs(self) -> frozenset[str]:
        return shaping.needs_of(self.card.needs, self.where)

    def _fit(self, train: Bank, xp: ModuleType) -> None:
        if self.low >= self.high:
            raise OodometerError(f"vra: low={self.low!r} must be smaller than high={self.high!r}")
        shaping.check_map(train, self.where, "vra")
        column = shaping.column_of(self.where)
        if self.per_element:
            self.low_, self.high_ = quantiles.percentiles_by_entry(train, column, (float(self.low), float(self.high)))
        else:
            self.low_, self.high_ = (np.asarray(quantiles.percentile(train, column, q)) for q in (self.low, self.high))

    def _score(self, bank: Bank, xp: ModuleType) -> Array:
        def shape(h: Array, xp: ModuleType) -> Array:
            low, high = like(self.low_, h), like(self.high_, h)
            if self.below == "clip":
                return xp.minimum(xp.maximum(h, low), high)
            return xp.minimum(h, high) * (h >= low)

        return shaping.scores_of_shaped(bank, self.where, "vra", shape)
