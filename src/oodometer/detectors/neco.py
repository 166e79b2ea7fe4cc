"""Neural collapse: the share of a feature's length that lies in the principal subspace."""

from __future__ import annotations

from types import ModuleType
from typing import Literal

import numpy as np

from oodometer import derived
from oodometer.arrays import Array, like, norms, psd_eigh
from oodometer.bank import Bank
from oodometer.derived import F64, Moments, Spectrum
from oodometer.detectors.base import Detector, detector, param, warn
from oodometer.errors import OodometerError


@detector(
    "neco",
    needs={"features", "logits"},
    cite="ammar2024neco",
    equation="−‖V_kᵀ(x − μ_x)‖/‖x‖ · max_c z_c, x the scaled feature, V_k its first k principal directions",
    cost="subspace",
    variants={
        "original": {},
        "paper003": {"scaler": "center"},
        "paper003-resnet": {"scaler": "center", "use_maxlogit": False},
        "paper003-vit": {"scaler": "none"},
    },
)
class NECO(Detector):
    """Neural-collapse ratio of the feature, times the largest logit (Ammar et al., ICLR 2024).

    A feature of length zero has no share in the subspace: its ratio is 0. `k` beyond the rank of the training
    features is shortened to it, since further directions would be arbitrary.
    """

    k: int = param(100, "principal directions", low=1)
    scaler: Literal["standard", "center", "none"] = param(
        "standard", "x: the feature standardised, centred, or as it is", choices=("standard", "center", "none")
    )
    use_maxlogit: bool = param(True, "multiply by the largest logit", choices=(True, False))

    @property
    def needs(self) -> frozenset[str]:
        return self.card.needs if self.use_maxlogit else self.card.needs - {"logits"}

    def _fit(self, train: Bank, xp: ModuleType) -> None:
        found = derived.moments(train)
        self.center_ = found.mean
        self.scale_ = _scales(found) if self.scaler == "standard" else np.ones_like(found.mean)
        spectrum = _standardised(train, self.scale_) if self.scaler == "standard" else derived.spectrum(train)
        self.k_ = min(self.k, spectrum.rank())
        if self.k_ == 0:
            raise OodometerError("neco: the training features do not vary: principal directions need rows that differ")
        if self.k_ < self.k:
            warn(f"neco: k={self.k} but {len(train)} training rows span {self.k_} directions: using k={self.k_}")
        self.basis_ = spectrum.vectors[:, : self.k_]

    def _score(self, bank: Bank, xp: ModuleType) -> Array:
        h = derived.features(bank)
        x = (h - like(self.center_, h)) / like(self.scale_, h)
        inside, length = norms(x @ like(self.basis_, x), xp), norms(h if self.scaler == "none" else x, xp)
        ratio = xp.where(length > 0, inside, xp.zeros_like(inside)) / xp.where(length > 0, length, xp.ones_like(length))
        return -ratio * xp.max(derived.logits(bank), axis=-1) if self.use_maxlogit else -ratio


def _scales(found: Moments) -> F64:
    """Standard deviations, one for constant columns (scikit-learn's StandardScaler and its bound for round-off)."""
    variance, n, eps = found.scatter.diagonal() / found.count, found.count, np.finfo(np.float64).eps
    constant = variance <= n * eps * variance + (n * found.mean * eps) ** 2
    return np.where(constant, 1.0, np.sqrt(np.maximum(variance, 0.0)))


def _standardised(train: Bank, scale: F64) -> Spectrum:
    """Principal components of the standardised features: the correlation matrix needs no second pass."""

    def compute() -> Spectrum:
        found = derived.moments(train)
        return Spectrum(*psd_eigh(found.scatter / found.count / np.outer(scale, scale), train.sample), found.mean)

    return derived.remember(train, "spectrum_standardised", compute)
