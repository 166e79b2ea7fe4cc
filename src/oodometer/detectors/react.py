"""ReAct: activations above a threshold are cut before they reach the head."""

from __future__ import annotations

from types import ModuleType

from oodometer.arrays import Array
from oodometer.bank import Bank
from oodometer.detectors import quantiles, shaping
from oodometer.detectors.base import CalibrationRows, Detector, detector, param
from oodometer.detectors.shaping import End, Where, percentile_param, where_param


@detector(
    "react",
    needs={"features", "head"},
    grid={"percentile": (85, 90, 95, 99)},
    cite="sun2021react",
    equation="−log Σ_c exp z_c, z = W·min(h, t) + b, t the percentile of all training activations",
    cost="head",
    variants={
        "paper": {"percentile": 90.0, "bank": "train"},
        "openood": {"percentile": 90.0, "bank": "val"},
        "openmibood": {"percentile": 90.0, "bank": "val"},
        "pytorch-ood": {"where": "map", "bank": "train"},
        "fd-shifts": {"percentile": 99.0, "bank": "train"},
        "fd-shifts-mls": {"percentile": 99.0, "bank": "train", "then": "mls"},
        "fd-shifts-msp": {"percentile": 99.0, "bank": "train", "then": "msp"},
    },
)
class ReAct(Detector):
    """Energy of the logits of clipped features (Sun et al., NeurIPS 2021).

    The paper takes the threshold from training rows, most implementations from validation rows: `bank` chooses.
    """

    percentile: float = percentile_param(90.0, "the threshold is this percentile of all activations of the bank")
    bank: CalibrationRows = param(
        "auto", "rows the threshold is taken from; auto: validation rows when given", choices=("auto", "train", "val")
    )
    then: End = param("energy", "score of the shaped logits", choices=("energy", "msp", "mls"))
    where: Where = where_param()

    @property
    def needs(self) -> frozenset[str]:
        return shaping.needs_of(self.card.needs, self.where)

    def _fit(self, train: Bank, xp: ModuleType) -> None:
        shaping.check_map(train, self.where, "react")
        self.threshold_ = quantiles.percentile(train, shaping.column_of(self.where), self.percentile)

    def _score(self, bank: Bank, xp: ModuleType) -> Array:
        def shape(h: Array, xp: ModuleType) -> Array:
            return xp.clip(h, max=self.threshold_)

        return shaping.scores_of_shaped(bank, self.where, "react", shape, self.then)
