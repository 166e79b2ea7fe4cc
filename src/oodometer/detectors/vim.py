"""Distance from the principal subspace, alone (Residual) and as a virtual logit (ViM)."""

from __future__ import annotations

from types import ModuleType
from typing import Literal

import numpy as np

from oodometer import derived
from oodometer.arrays import Array, Floats, like, logsumexp, norms, psd_eigh, to_numpy
from oodometer.bank import Bank
from oodometer.derived import F64, Spectrum
from oodometer.detectors.base import CalibrationRows, Detector, detector, param, warn
from oodometer.errors import OodometerError

Origin = Literal["rank-aware", "float32", "mean"]
Dim = int | float | str


def null_space(train: Bank, dim: Dim, origin: Origin, name: str) -> tuple[F64, F64]:
    """The centre u and the eigenvectors beyond the first `dim` of the covariance about u (not re-centred)."""
    spectrum, eps = _spectrum(train, origin)
    principal = principal_dim(dim, spectrum, name)
    rank = spectrum.rank(eps)
    if principal > rank:
        raise OodometerError(
            f"{name}: dim={dim!r} asks for {principal} principal directions, the {len(train)} fitting rows span "
            f"{rank}: the others would be arbitrary. Choose dim ≤ {rank}, or fit on more rows"
        )
    return spectrum.center, spectrum.vectors[:, principal:]


def _spectrum(train: Bank, origin: Origin) -> tuple[Spectrum, float]:
    """The spectrum about the chosen origin and the precision it was computed in."""
    if origin == "float32":
        _warn_of_round_off(train)
        found = derived.remember(train, "spectrum_float32", lambda: _spectrum_float32(train))
        return found, float(np.finfo(np.float32).eps)
    center = derived.moments(train).mean if origin == "mean" else derived.origin(train)[0]
    return derived.spectrum_about(train, center, origin), float(np.finfo(np.float64).eps)


def _spectrum_float32(train: Bank) -> Spectrum:
    origin, covariance = float32_moments(train)
    return Spectrum(*psd_eigh(covariance.astype(np.float64)), origin.astype(np.float64))


def float32_moments(train: Bank) -> tuple[Floats, Floats]:
    """Origin and covariance in peers' arithmetic: float32 pinv with its fixed cut-off, all rows in one product."""
    assert train.head is not None, "derived.origin has refused a bank without a head"
    weight = to_numpy(train.head.weight).astype(np.float32)
    origin = -np.linalg.pinv(weight, rcond=1e-15) @ to_numpy(train.head.bias).astype(np.float32)
    x = to_numpy(train.features).astype(np.float32) - origin
    return origin, x.T @ x / len(x)


def _warn_of_round_off(train: Bank) -> None:
    _, rank = derived.origin(train)
    assert train.head is not None
    full = min(train.head.weight.shape)
    if rank < full:
        # The inverse of a singular value that is round-off differs between BLAS kernels (AVX2, AVX-512, …).
        warn(
            f"origin='float32' inverts a head of rank {rank} as if it had rank {full}: its origin, and scores from the "
            "third digit on, depend on this machine's BLAS. Use origin='rank-aware' unless a peer must be matched"
        )


def principal_dim(dim: Dim, spectrum: Spectrum, name: str) -> int:
    """The size of the principal subspace: a count, a share of the variance, or the ladder of the ViM paper."""
    width = len(spectrum.values)
    if dim == "paper" and width > 1:
        return 1000 if width >= 2048 else 512 if width >= 768 else width // 2
    share = isinstance(dim, float | np.floating) and 0 < dim < 1
    count = spectrum.components(float(dim)) if share else dim
    if not isinstance(count, int | np.integer) or isinstance(count, bool) or not 0 < count < width:
        raise OodometerError(
            f"{name}: dim={dim!r} leaves no residual space of {width} features: choose an integer from 1 to "
            f"{width - 1}, a share of the variance between 0 and 1, or 'paper'"
        )
    return int(count)


DIM = "principal dimensions: a count, a share of the variance in (0, 1), or 'paper' (1000, 512 or D/2 by width)"
ORIGIN = "centre: −W⁺b with a rank-aware pseudo-inverse, in peers' float32 arithmetic, or the feature mean"


@detector(
    "residual",
    needs={"features", "head"},
    grid={"dim": (32, 64, 128, 256, 512, 1024)},
    cite="wang2022vim",
    equation="‖Nᵀ(h − u)‖, N the eigenvectors beyond `dim`, u = −W⁺b",
    cost="subspace",
    variants={
        "openood": {"dim": 512, "origin": "float32", "bank": "val"},
        "openmibood": {"dim": 128, "origin": "float32", "bank": "val"},
    },
)
class Residual(Detector):
    """Norm of the feature outside the principal subspace (Wang et al., CVPR 2022)."""

    dim: Dim = param("paper", DIM)
    origin: Origin = param("rank-aware", ORIGIN, choices=("rank-aware", "float32", "mean"))
    bank: CalibrationRows = param("train", "rows the subspace is fitted on", choices=("train", "val", "auto"))

    def _fit(self, train: Bank, xp: ModuleType) -> None:
        self.center_, self.basis_ = null_space(train, self.dim, self.origin, "residual")
        self.exact_ = derived.is_small(train)

    def _score(self, bank: Bank, xp: ModuleType) -> Array:
        return norms(derived.project(derived.features(bank), self.center_, self.basis_, exact=self.exact_), xp)


@detector(
    "vim",
    needs={"features", "logits", "head"},
    grid={"dim": (1, 16, 32, 64, 128, 256)},
    cite="wang2022vim",
    equation="α‖Nᵀ(h − u)‖ − log Σ_c exp z_c, α matches the mean residual to the mean largest logit",
    cost="subspace",
    variants={
        "openood": {"dim": 256, "origin": "float32"},
        "openmibood": {"dim": 128, "origin": "float32"},
        "fd-shifts": {"origin": "mean"},
        "oodeel": {"dim": 0.99, "origin": "mean"},
    },
)
class ViM(Detector):
    """Virtual-logit matching: residual norm scaled to the logits, minus the energy (Wang et al., CVPR 2022)."""

    dim: Dim = param("paper", DIM)
    origin: Origin = param("rank-aware", ORIGIN, choices=("rank-aware", "float32", "mean"))

    def _fit(self, train: Bank, xp: ModuleType) -> None:
        self.center_, self.basis_ = null_space(train, self.dim, self.origin, "vim")
        self.exact_ = derived.is_small(train)
        residual = logit = length = 0.0
        for block in train.blocks():
            h = derived.features(block)
            residual += float(xp.sum(self._residual(block, xp), dtype=xp.float64))
            length += float(xp.sum(norms(h - like(self.center_, h), xp), dtype=xp.float64))
            logit += float(xp.sum(xp.max(derived.logits(block), axis=-1), dtype=xp.float64))
        # Beyond the rank of the training rows only round-off is left, and α would blow it up to the logits.
        if residual <= float(np.finfo(np.float32).eps) * length:
            raise OodometerError(
                f"vim: the training features have no residual beyond dim={self.dim!r} (their rank is lower): "
                "choose a smaller dim"
            )
        self.alpha_ = logit / residual
        if self.alpha_ <= 0:
            warn(
                f"vim: the largest training logit is {logit / len(train):.3g} on average; not being positive it makes "
                "α ≤ 0, and a longer residual counts as more in distribution. Check the head's bias"
            )

    def _residual(self, bank: Bank, xp: ModuleType) -> Array:
        return norms(derived.project(derived.features(bank), self.center_, self.basis_, exact=self.exact_), xp)

    def _score(self, bank: Bank, xp: ModuleType) -> Array:
        return self.alpha_ * self._residual(bank, xp) - logsumexp(derived.logits(bank), xp)
