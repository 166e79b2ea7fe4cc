"""Reconstruction error from the principal components of the training features."""

from __future__ import annotations

from types import ModuleType

import numpy as np

from oodometer import derived
from oodometer.arrays import Array, logsumexp, norms, psd_eigh
from oodometer.bank import Bank
from oodometer.derived import F64, Spectrum
from oodometer.detectors.base import Detector, detector, param
from oodometer.errors import OodometerError


def clipped(h: Array, clip: float | None, xp: ModuleType) -> Array:
    """min(h, clip), or h itself."""
    return h if clip is None else xp.clip(h, max=clip)


def clipped_spectrum(train: Bank, clip: float | None) -> Spectrum:
    """Principal components of the (clipped) training features; refuses features that do not vary."""

    def compute() -> Spectrum:
        found = derived.moments_of(clipped(derived.features(block), clip, block.xp) for block in train.blocks())
        return Spectrum(*psd_eigh(found.scatter / found.count, train.sample), found.mean)

    spectrum = derived.spectrum(train) if clip is None else derived.remember(train, ("spectrum_clipped", clip), compute)
    if spectrum.rank() == 0:
        raise OodometerError("pca: the training features do not vary: principal components need rows that differ")
    return spectrum


def relative(error: Array, h: Array, center: F64, xp: ModuleType) -> Array:
    """error/‖h‖; a zero vector counts as one of the centre's round-off length: far out, and still finite."""
    floor = float(np.finfo(np.float32).eps * np.linalg.norm(center)) or 1.0
    length = norms(h, xp)
    return error / xp.where(length > floor, length, xp.full_like(length, floor))


@detector(
    "pca",
    needs={"features"},
    grid={"variance": (0.85, 0.9, 0.95, 0.99)},
    cite="guan2023pca",
    equation="‖(I − UUᵀ)(h − μ)‖/‖h‖, U the first #(cumulative variance ≤ v) + 1 principal directions",
    cost="subspace",
    variants={"paper003": {}, "error": {"regularised": False}, "clipped": {"clip": 1.0}},
)
class PCA(Detector):
    """Reconstruction error of the feature, relative to its length (Guan et al., ICCV 2023).

    Every row, in distribution or not, is clipped alike (published code clips one side only).
    """

    variance: float = param(0.9, "share of the variance that is kept", low=0.0, high=1.0, open=True)
    regularised: bool = param(True, "divide by the length of the feature", choices=(True, False))
    clip: float | None = param(None, "features are clipped at this value first (None: not)", low=0.0, open=True)

    def _fit(self, train: Bank, xp: ModuleType) -> None:
        spectrum = clipped_spectrum(train, self.clip)
        self.center_ = spectrum.center
        self.rest_ = spectrum.vectors[:, spectrum.components(self.variance) :]

    def _score(self, bank: Bank, xp: ModuleType) -> Array:
        h = clipped(derived.features(bank), self.clip, xp)
        error = norms(derived.project(h, self.center_, self.rest_), xp)
        return relative(error, h, self.center_, xp) if self.regularised else error


@detector(
    "pca-fused",
    needs={"features", "head"},
    cite="guan2023pca",
    equation="−lse(W·min(h, 1) + b)·(1 − ‖(I − UUᵀ)(h − μ)‖/‖h‖)",
    cost="subspace",
    aliases=("pca_fused",),
)
class PCAFused(Detector):
    """Energy of the clipped feature, weighed by its reconstruction (Guan et al., ICCV 2023)."""

    dim: int | None = param(None, "principal directions kept (None: D/8, the paper's 256 of 2048)", low=1)
    clip: float = param(1.0, "the energy sees features clipped at this value", low=0.0, open=True)

    def _fit(self, train: Bank, xp: ModuleType) -> None:
        spectrum = clipped_spectrum(train, None)
        width, rank = len(spectrum.values), spectrum.rank()
        dim = self.dim or min(max(width // 8, 1), rank)
        if dim > rank:
            raise OodometerError(
                f"pca-fused: dim={dim} but {len(train)} training rows span {rank} of {width} directions: "
                f"choose dim ≤ {rank}"
            )
        self.center_, self.rest_ = spectrum.center, spectrum.vectors[:, dim:]

    def _score(self, bank: Bank, xp: ModuleType) -> Array:
        h = derived.features(bank)
        assert bank.head is not None, "the door has seen to the head"
        energy = logsumexp(bank.head(clipped(h, self.clip, xp)), xp)
        error = norms(derived.project(h, self.center_, self.rest_), xp)
        return -energy * (1 - relative(error, h, self.center_, xp))
