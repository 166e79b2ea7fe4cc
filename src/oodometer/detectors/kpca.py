"""Reconstruction error from kernel principal components of the unit features."""

from __future__ import annotations

from types import ModuleType
from typing import Literal

import numpy as np

from oodometer import derived
from oodometer.arrays import Array, Ints, double, like, norms, psd_eigh, slices, to_numpy, unit
from oodometer.bank import Bank
from oodometer.derived import F64
from oodometer.detectors.base import Detector, detector, param, warn
from oodometer.errors import OodometerError

VARIANCE = {"nystrom": 0.95, "cop": 0.85, "corp": 0.8}
GAMMA = {"nystrom": 0.2, "cop": 1.0, "corp": 2.0}
SMALLEST_EIGENVALUE = 1e-12
"""Eigenvalues of the landmarks' kernel matrix are raised to this before their inverse root is taken."""
MAP_ROWS = 1024
"""Rows mapped at a time on a CPU (on an accelerator sixteen times as many): thousands of float64 features a row."""


@detector(
    "kpca",
    needs={"features", "logits"},
    grid={"gamma": (0.1, 0.2, 0.5, 1.0), "variance": (0.85, 0.9, 0.95, 0.99)},
    cite="fang2024kpca",
    equation="‖(I − UUᵀ)(φ(ĥ) − mean φ)‖, U the kernel principal directions of the training features",
    cost="subspace",
    variants={
        "paper003": {},
        "cop-cifar10": {"method": "cop", "variance": 0.85},
        "cop-imagenet": {"method": "cop", "variance": 0.99},
        "corp-cifar10": {"method": "corp", "gamma": 2.0, "features": 2048, "variance": 0.8},
        "corp-imagenet": {"method": "corp", "gamma": 3.0, "features": 4096, "variance": 0.5},
    },
)
class KPCA(Detector):
    """Kernel PCA reconstruction error (Fang et al., NeurIPS 2024).

    φ is the identity (cop), random Fourier features of a Gaussian kernel (corp), or the Nyström map through the
    training rows of smallest log Σ exp z (nystrom).
    """

    method: Literal["nystrom", "cop", "corp"] = param(
        "nystrom", "feature map: Nyström, cosine, or cosine and random Fourier", choices=("nystrom", "cop", "corp")
    )
    gamma: float | None = param(None, "exp(−γ‖a − b‖²) (None: .2 nystrom, 2 corp)", low=0.0, open=True)
    variance: float | None = param(
        None, "share of the variance kept (None: .95 nystrom, .85 cop, .8 corp)", low=0.0, high=1.0, open=True
    )
    landmarks: int | None = param(None, "rows of the Nyström map (None: training rows / classes)", low=1)
    features: int = param(2048, "random Fourier features", low=1)
    seed: int = param(0, "of the random Fourier features", low=0)

    @property
    def needs(self) -> frozenset[str]:
        return self.card.needs if self.method == "nystrom" else self.card.needs - {"logits"}

    def _fit(self, train: Bank, xp: ModuleType) -> None:
        if self.method == "nystrom":
            self._choose_landmarks(train)
        elif self.method == "corp":
            self._draw_frequencies(train.row_shape("features")[0])
        found = derived.moments_of(self._map(block, xp) for block in train.blocks(_map_rows(train)))
        spectrum = derived.Spectrum(*psd_eigh(found.scatter / found.count, train.sample), found.mean)
        if spectrum.rank() == 0:
            raise OodometerError("kpca: the training features do not vary: principal components need rows that differ")
        rest = spectrum.vectors[:, spectrum.components(self.variance or VARIANCE[self.method]) :]
        # The Nyström map ends with a product: folded into the last one, it costs nothing to score.
        self.offset_ = found.mean @ rest
        self.rest_ = self.whitener_ @ rest if self.method == "nystrom" else rest

    def _score(self, bank: Bank, xp: ModuleType) -> Array:
        pieces = []
        for rows in slices(len(bank), _map_rows(bank)):
            x = self._kernel(bank.rows(rows), xp)
            pieces.append(norms(x @ like(self.rest_, x) - like(self.offset_, x), xp))
        return xp.concat(pieces)

    def _map(self, block: Bank, xp: ModuleType) -> Array:
        x = self._kernel(block, xp)
        return x @ like(self.whitener_, x) if self.method == "nystrom" else x

    def _kernel(self, block: Bank, xp: ModuleType) -> Array:
        """Unit features, their kernel with the landmarks, or their random Fourier features.

        In float64: the Nyström map multiplies round-off by up to a million.
        """
        x = double(unit(derived.features(block), xp))
        if self.method == "corp":
            return (2 / self.features) ** 0.5 * xp.cos(x @ like(self.frequencies_, x) + like(self.phases_, x))
        return gaussian(x, like(self.points_, x), self._gamma, xp) if self.method == "nystrom" else x

    @property
    def _gamma(self) -> float:
        return self.gamma or GAMMA[self.method]

    def _draw_frequencies(self, width: int) -> None:
        rng = np.random.default_rng(self.seed)
        self.frequencies_ = rng.normal(scale=(2 * self._gamma) ** 0.5, size=(width, self.features))
        self.phases_ = rng.uniform(0, 2 * np.pi, self.features)

    def _choose_landmarks(self, train: Bank) -> None:
        count = self.landmarks or max(1, len(train) // train.classes)
        if count > len(train):
            warn(f"kpca: landmarks={count} but there are {len(train)} training rows: using all of them")
        chosen = smallest(derived.energy(train), min(count, len(train)))
        self.points_: F64 = to_numpy(double(unit(derived.features(train.rows(chosen)), train.xp)))
        values, vectors = psd_eigh(gaussian(self.points_, self.points_, self._gamma, np), train.sample)
        self.whitener_ = (vectors / np.sqrt(np.maximum(values, SMALLEST_EIGENVALUE))) @ vectors.T


def _map_rows(bank: Bank) -> int:
    return MAP_ROWS if bank.on_cpu else 16 * MAP_ROWS


def smallest(values: F64, count: int) -> Ints:
    """Where the smallest values are, in ascending order of place; of equal ones the first count."""
    bound = np.partition(values, count - 1)[count - 1]
    below, level = np.flatnonzero(values < bound), np.flatnonzero(values == bound)
    return np.sort(np.concatenate([below, level[: count - len(below)]]))


def gaussian(a: Array, b: Array, gamma: float, xp: ModuleType) -> Array:
    """exp(−γ‖a_i − b_j‖²) of all pairs."""
    squares = xp.sum(a * a, axis=-1)[:, None] + xp.sum(b * b, axis=-1)[None, :]
    return xp.exp(-gamma * xp.clip(squares - 2 * (a @ b.T), min=0))
