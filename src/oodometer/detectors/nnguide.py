"""Energy guided by the similarity to confident training rows."""

from __future__ import annotations

from types import ModuleType
from typing import Literal

import numpy as np

from oodometer import derived
from oodometer.arrays import Array, Ints, to_numpy
from oodometer.bank import Bank
from oodometer.detectors.base import Detector, detector, param, warn


@detector(
    "nnguide",
    needs={"features", "logits"},
    grid={"k": (1, 2, 5, 10, 50, 100, 200, 500, 750), "alpha": (0.01, 0.1, 0.25, 0.5, 0.75, 1.0)},
    cite="park2023nnguide",
    equation="−lse(z) · mean of the k largest ⟨ĥ, ĥ_t·lse(z_t)⟩ over a share α of the training rows",
    cost="search",
    variants={
        "original": {"k": 10, "alpha": 0.01},
        "openood": {"k": 100, "alpha": 0.01, "subset": "first"},
        "openmibood": {"k": 5, "alpha": 1.0},
        "paper003": {"subset": "per_class", "seed": 12345},
        "pytorch-ood": {"k": 10, "alpha": 1.0},
    },
)
class NNGuide(Detector):
    """Nearest-neighbour guidance (Park et al., ICCV 2023).

    The share α is a seeded random subset. With fewer than k rows in it, the mean is over the rows there are.
    """

    rowwise = False
    k: int = param(10, "how many neighbours guide", low=1)
    alpha: float = param(1.0, "share of the training rows that can guide", low=0.0, high=1.0)
    subset: Literal["random", "per_class", "first"] = param(
        "random", "how the share is drawn: from all rows, from each class alike, or the first rows (a peer's bug)",
        choices=("random", "per_class", "first"),
    )  # fmt: skip
    seed: int = param(0, "of the draw", low=0)

    def _fit(self, train: Bank, xp: ModuleType) -> None:
        picked = self._pick(train)
        self.train_ = train if len(picked) == len(train) else train.rows(picked)
        self.k_ = min(self.k, len(picked))
        if self.k_ < self.k:
            warn(f"nnguide: k={self.k} but the guiding share has {self.k_} rows: averaging over those")

    def _pick(self, train: Bank) -> Ints:
        n, rng = len(train), np.random.default_rng(self.seed)
        if self.alpha >= 1:
            return np.arange(n)
        if self.subset == "first":
            return np.arange(_share(n, self.alpha))
        if self.subset == "random":
            return np.sort(rng.choice(n, _share(n, self.alpha), replace=False))
        groups = derived.labels(train)
        draws = [
            rng.choice(rows, _share(len(rows), self.alpha), replace=False)
            for rows in (np.flatnonzero(groups == c) for c in np.unique(groups))
        ]
        return np.sort(np.concatenate(draws))

    def _score(self, bank: Bank, xp: ModuleType) -> Array:
        guidance = to_numpy(derived.similarities(self.train_, bank, self.k_, guided=True)).mean(axis=1)
        return -derived.energy(bank) * guidance


def _share(n: int, alpha: float) -> int:
    """At least one row, so that small shares of small banks stay usable."""
    return max(1, int(alpha * n))
