"""MDSEns: Mahalanobis distances of all layers, each of the input moved towards that layer's nearest class."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import ClassVar

import numpy as np

from oodometer.arrays import Array, to_numpy
from oodometer.bank import Bank
from oodometer.derived import F64
from oodometer.detectors.base import Detector, detector, param
from oodometer.detectors.mds_layers import SCALE, check_weights, layer_weights
from oodometer.detectors.odin import of_setting

COLUMN = "mdsens"
"""Rows × settings × layers: squared distance to the nearest class of each layer at its x', for each ε."""


@detector(
    "mdsens",
    needs={COLUMN},
    grid={"epsilon": (0.0, 0.0025, 0.0014, 0.005, 0.01, 0.02, 0.04, 0.08)},
    cite="lee2018mahalanobis",
    equation="Σ_l α_l · ½ min_c MD_lc(x'_l), x'_l = x − ε·sign(∇_x ½ min_c MD_lc(x))/σ",
    cost="classes",
    variants={
        "openood": {"weights": "learned"},
        "openmibood": {"weights": "learned", "epsilon": 0.0},
        "broad": {"epsilon": 0.0},
    },
)
class MDSEnsemble(Detector):
    """Mahalanobis distances of all layers, with input perturbation (Lee et al., NeurIPS 2018).

    Extraction fits each layer's classes on training rows and stores the distances for each ε. The weights
    are fitted for the ε at hand: equal, given, or the coefficients of a logistic regression that tells ID from OOD
    validation rows, told apart in `val` by its column `is_ood` (see `mds_layers.with_ood`).
    """

    scored: ClassVar[Mapping[str, str]] = {COLUMN: "columns=[…, 'mdsens:train=BANK,epsilons=(0,0.0014)']"}
    epsilon: float = param(0.0014, "how far the input moves for each layer, in units of σ", low=0.0)
    weights: str | tuple[float, ...] = param(
        "uniform", "of the layers: 'uniform' (1 each), 'learned' from val with its column is_ood, or one number each"
    )
    scale: float = param(0.5, SCALE, low=0.0, open=True)

    def check_params(self) -> None:
        super().check_params()
        check_weights("mdsens", self.weights)

    @property
    def is_fitted_needed(self) -> bool:
        """Only learned weights are fitted."""
        return self.weights == "learned"

    def _fit_on(self, train: Bank, val: Bank | None) -> None:
        if self.weights == "learned":
            self.weights_ = layer_weights("mdsens", self.weights, 0, val, self._scaled)

    def _scaled(self, bank: Bank) -> F64:
        """α's inputs: ½ MD, rows × layers."""
        found = of_setting(bank, COLUMN, ("epsilons",), (float(self.epsilon),))
        return self.scale * to_numpy(found).astype(np.float64)

    def _score(self, bank: Bank, xp: ModuleType) -> Array:
        distances = self._scaled(bank)
        weights = (
            self.weights_
            if self.is_fitted_needed
            else layer_weights("mdsens", self.weights, distances.shape[1], None, self._scaled)
        )
        return distances @ weights
