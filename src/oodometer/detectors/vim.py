"""Distance from the principal subspace, alone (Residual) and as a virtual logit (ViM)."""

from __future__ import annotations

from types import ModuleType
from typing import Literal

import numpy as np

from oodometer import derived
from oodometer.arrays import Array, logsumexp, norms, to_numpy
from oodometer.bank import Bank
from oodometer.derived import F64
from oodometer.detectors.base import CalibrationRows, Detector, detector, param
from oodometer.errors import OodometerError

Origin = Literal["rank-aware", "float32", "mean"]


def null_space(train: Bank, dim: int | float | str, origin: Origin, name: str) -> tuple[F64, F64]:
    """The centre u and the eigenvectors beyond the first `dim` of the covariance about u (not re-centred)."""
    width = train.row_shape("features")[0]
    if origin == "float32":
        return _null_space_float32(train, principal_dim(dim, width, None, name))
    center = derived.moments(train).mean if origin == "mean" else derived.origin(train)[0]
    spectrum = derived.spectrum_about(train, center, origin)
    return center, spectrum.vectors[:, principal_dim(dim, width, spectrum, name) :]


def _null_space_float32(train: Bank, dim: int) -> tuple[F64, F64]:
    """Peers' arithmetic: float32 pinv with rcond 1e-15, float32 covariance (keeps the spurious singular value)."""
    if train.head is None:
        raise OodometerError("the origin −W⁺b needs a head: Bank(…, head=Head(weight, bias))")
    weight = to_numpy(train.head.weight).astype(np.float32)
    u = -np.linalg.pinv(weight) @ to_numpy(train.head.bias).astype(np.float32)
    x = to_numpy(train.features).astype(np.float32) - u
    _, vectors = np.linalg.eigh((x.T @ x / len(x)).astype(np.float32))
    return u.astype(np.float64), vectors[:, ::-1][:, dim:].astype(np.float64)


def principal_dim(dim: int | float | str, width: int, spectrum: derived.Spectrum | None, name: str) -> int:
    """The size of the principal subspace: a count, a share of the variance, or the ladder of the ViM paper."""
    if dim == "paper":
        return 1000 if width >= 2048 else 512 if width >= 768 else width // 2
    if isinstance(dim, float) and 0 < dim < 1 and spectrum is not None:
        return spectrum.components(dim)
    if not isinstance(dim, int | np.integer) or isinstance(dim, bool) or not 0 < dim < width:
        raise OodometerError(
            f"{name}: dim={dim!r} leaves no residual space of {width} features: choose an integer from 1 to "
            f"{width - 1}, a share of the variance between 0 and 1, or 'paper'"
        )
    return int(dim)


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
        "openmibood": {"dim": 128, "origin": "float32"},
    },
)
class Residual(Detector):
    """Norm of the feature outside the principal subspace (Wang et al., CVPR 2022)."""

    dim: int | float | str = param("paper", DIM)
    origin: Origin = param("rank-aware", ORIGIN, choices=("rank-aware", "float32", "mean"))
    bank: CalibrationRows = param("train", "rows the subspace is fitted on", choices=("train", "val", "auto"))

    def _fit(self, train: Bank, xp: ModuleType) -> None:
        self.center_, self.basis_ = null_space(train, self.dim, self.origin, "residual")

    def _score(self, bank: Bank, xp: ModuleType) -> Array:
        return norms(derived.project(derived.features(bank), self.center_, self.basis_), xp)


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

    dim: int | float | str = param("paper", DIM)
    origin: Origin = param("rank-aware", ORIGIN, choices=("rank-aware", "float32", "mean"))

    def _fit(self, train: Bank, xp: ModuleType) -> None:
        self.center_, self.basis_ = null_space(train, self.dim, self.origin, "vim")
        residual = logit = 0.0
        for block in train.blocks():
            residual += float(xp.sum(self._residual(block, xp), dtype=xp.float64))
            logit += float(xp.sum(xp.max(derived.logits(block), axis=-1), dtype=xp.float64))
        if residual <= 0:
            raise OodometerError(
                f"vim: the training features have no residual beyond dim={self.dim!r} (their rank is lower): "
                "choose a smaller dim"
            )
        self.alpha_ = logit / residual

    def _residual(self, bank: Bank, xp: ModuleType) -> Array:
        return norms(derived.project(derived.features(bank), self.center_, self.basis_), xp)

    def _score(self, bank: Bank, xp: ModuleType) -> Array:
        return self.alpha_ * self._residual(bank, xp) - logsumexp(derived.logits(bank), xp)
