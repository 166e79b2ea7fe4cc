"""k-th nearest neighbour distance."""

from __future__ import annotations

from types import ModuleType

from oodometer import derived
from oodometer.arrays import Array, norms, to_numpy
from oodometer.bank import Bank
from oodometer.detectors.base import Detector, detector, param
from oodometer.errors import OodometerError


@detector(
    "knn",
    needs={"features"},
    grid={"k": (1, 2, 5, 10, 25, 50, 100, 200, 500, 750, 1000)},
    cite="sun2022knn",
    equation="‖ĥ − ĥ_(k)‖², ĥ_(k) the k-th nearest training feature on the unit sphere",
    cost="search",
    variants={
        "openood": {},
        "pytorch-ood": {"squared": False},
        "pytorch-ood-0.2": {"k": 1, "normalise": False},
    },
)
class KNN(Detector):
    """Distance to the k-th nearest training feature (Sun et al., ICML 2022)."""

    rowwise = False
    k: int = param(50, "which neighbour", low=1)
    normalise: bool = param(True, "compare directions (unit vectors) instead of positions", choices=(True, False))
    squared: bool = param(True, "squared distance (same ranks)", choices=(True, False))

    def _fit(self, train: Bank, xp: ModuleType) -> None:
        if self.k > len(train):
            raise OodometerError(
                f"knn: k={self.k} neighbours are needed and the training bank has {len(train)} rows: "
                f"choose k ≤ {len(train)}"
            )
        self.train_ = train

    def _score(self, bank: Bank, xp: ModuleType) -> Array:
        if self.normalise:
            # A zero vector stays zero: its own squared length is not one.
            q = to_numpy(norms(derived.features(bank), xp)) > 0
            d2 = q + 1.0 - 2.0 * to_numpy(derived.similarities(self.train_, bank, self.k)[:, self.k - 1])
        else:
            d2 = derived.distances(self.train_, bank, self.k)[:, self.k - 1]
        d2 = d2.clip(0.0)
        return d2 if self.squared else d2**0.5
