"""Maximum concept matching: the softmax of image–text cosines."""

from __future__ import annotations

from types import ModuleType

import numpy as np

from oodometer import derived
from oodometer.arrays import Array
from oodometer.bank import Bank
from oodometer.detectors.base import Detector, detector, param
from oodometer.detectors.logits import cooled, max_softmax


@detector(
    "mcm",
    needs={"logits"},
    grid={"tau": (0.01, 1.0, 10.0)},
    cite="ming2022mcm",
    equation="−max_c softmax(s/τ)_c, s_c the cosine between the image and the text of class c",
)
class MCM(Detector):
    """Maximum concept matching (Ming et al., NeurIPS 2022): the logits are image–text cosines."""

    tau: float = param(1.0, "the cosines are divided by it", low=0.0, high=np.inf, open=True)

    def _score(self, bank: Bank, xp: ModuleType) -> Array:
        return -max_softmax(cooled(derived.logits(bank), self.tau), xp)
