"""Mahalanobis distances to class means, and relative to the whole training set."""

from __future__ import annotations

from types import ModuleType
from typing import Literal, cast

import numpy as np

from oodometer import derived
from oodometer.arrays import Array, frozen, like
from oodometer.bank import Bank
from oodometer.derived import F64, Whitening
from oodometer.detectors.base import Detector, detector, param


@detector(
    "mds",
    needs={"features", "labels"},
    cite="lee2018mahalanobis",
    equation="min_c (h − μ_c)ᵀ S_w⁺ (h − μ_c)",
    cost="classes",
    variants={
        "openood": {},
        "pytorch-ood": {"scale": 0.5, "normalise": False, "ridge": 1e-6},
        "paper003": {"ddof": 1, "rcond": 1e-6},
        "fd-shifts": {"cov": "total", "target": "predicted"},
    },
)
class MDS(Detector):
    """Mahalanobis distance to the nearest class mean, shared covariance (Lee et al., NeurIPS 2018)."""

    scale: float = param(1.0, "factor on the distance (½ in some implementations)", low=0.0, open=True)
    cov: Literal["within", "total"] = param(
        "within", "scatter around the class means, or around the global mean", choices=("within", "total")
    )
    target: Literal["nearest", "predicted"] = param(
        "nearest", "distance to the nearest class or to the predicted one", choices=("nearest", "predicted")
    )
    normalise: bool = param(True, "divide the scatter by the number of rows", choices=(True, False))
    ddof: int = param(0, "subtracted from the number of rows", low=0)
    ridge: float = param(0.0, "added to the diagonal", low=0.0)
    rcond: float | None = param(
        None, "eigenvalues below this share of the largest are dropped (None: by precision)", low=0.0
    )

    def _fit(self, train: Bank, xp: ModuleType) -> None:
        total = derived.moments(train)
        rows = max(len(train) - self.ddof, 1) if self.normalise else 1
        scatter = derived.within_scatter(train) if self.cov == "within" else total.scatter
        self.whitening_ = Whitening.of(
            scatter / rows,
            total.mean,
            total=total.scatter / rows,
            ridge=self.ridge,
            rcond=self.rcond,
            exact=derived.is_small(train),
            near=train.sample,
        )
        self.class_counts_, means = derived.class_means(train)
        self.class_points_ = self.whitening_.points(means)
        self.candidates_ = frozen(self.class_points_[self.class_counts_ > 0])

    def _score(self, bank: Bank, xp: ModuleType) -> Array:
        x = self.whitening_(derived.features(bank))
        if self.target == "predicted":
            gap = x - like(self.class_points_, x)[like(derived.predictions(bank), x), :]
            return self.scale * xp.sum(gap * gap, axis=-1)
        return self.scale * nearest_squared(x, self.candidates_, xp)


def nearest_squared(x: Array, points: Array, xp: ModuleType) -> Array:
    """min over points of ‖x − point‖², one product for all points, never below zero."""
    p = like(points, x)
    # ‖x − p‖² = ‖x‖² + (‖p‖² − 2x·p): the bracket alone decides which point is nearest.
    bracket = x @ (-2 * p).T
    bracket += xp.sum(p * p, axis=-1)[None, :]
    best = xp.min(bracket, axis=-1) + xp.sum(x * x, axis=-1)
    return xp.where(best > 0, best, xp.zeros_like(best))


@detector(
    "rmds",
    needs={"features", "labels"},
    cite="ren2021rmds",
    equation="min_c MD_c(h) − MD_0(h), MD_0 around the global mean with the global covariance",
    cost="classes",
)
class RMDS(Detector):
    """Relative Mahalanobis distance (Ren et al., 2021): both covariances are divided by the same N.

    The total covariance is that within classes plus one of rank C − 1, so that where the features span their space
    ‖h‖ cancels from the difference: it costs 2C directions, not D, and loses no digits to the subtraction.
    """

    def _fit(self, train: Bank, xp: ModuleType) -> None:
        total = derived.moments(train)
        covariance, small, near = total.scatter / total.count, derived.is_small(train), train.sample
        within = derived.within_scatter(train) / total.count
        self.class_whitening_ = Whitening.of(within, total.mean, total=covariance, exact=small, near=near)
        counts, means = derived.class_means(train)
        self.class_points_ = frozen(self.class_whitening_.points(means[counts > 0]))
        self.exact_, self.directions_ = small, cast(F64 | None, None)
        if self.class_whitening_.rank == len(total.mean):
            self._fit_directions(counts[counts > 0] / total.count)
        else:
            self.global_whitening_ = Whitening.of(covariance, total.mean, exact=small, near=near)

    def _fit_directions(self, shares: F64) -> None:
        """T = I + AᵀA in whitened coordinates, A the class points times √share; T⁻¹ = I − Vᵀdiag(s²/(1 + s²))V."""
        points, basis = self.class_points_, self.class_whitening_.basis
        _, s, v = np.linalg.svd(np.sqrt(shares)[:, None] * points, full_matrices=False)
        between = (s / np.sqrt(1 + s * s))[:, None] * v
        self.directions_ = frozen(basis @ np.concatenate([-2 * points, between]).T)
        self.lengths_ = frozen((points * points).sum(1))

    def _score(self, bank: Bank, xp: ModuleType) -> Array:
        h = derived.features(bank)
        if self.directions_ is not None:
            along = derived.project(h, self.class_whitening_.center, self.directions_, exact=self.exact_)
            classes = len(self.lengths_)
            nearest = xp.min(along[:, :classes] + like(self.lengths_, along), axis=-1)
            return nearest + xp.sum(along[:, classes:] ** 2, axis=-1)
        background = self.global_whitening_(h)
        return nearest_squared(self.class_whitening_(h), self.class_points_, xp) - xp.sum(
            background * background, axis=-1
        )
