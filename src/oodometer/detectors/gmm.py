"""Density of the feature under a mixture of Gaussians."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Literal

import numpy as np

from oodometer import derived
from oodometer.arrays import Array, double, like, logsumexp, to_numpy
from oodometer.bank import Bank
from oodometer.derived import F64, Whitening
from oodometer.detectors.base import Detector, detector, param, warn
from oodometer.errors import OodometerError


@detector(
    "gmm",
    needs={"features", "labels"},
    cite="lee2018mahalanobis",
    equation="−log Σ_k π_k N(h; m_k, Σ_k)",
    cost="classes",
    variants={"openood": {"components": 50}, "pytorch-ood": {"covariance": "full"}},
)
class GMM(Detector):
    """Negative log-likelihood of the feature under a Gaussian mixture.

    With components="classes" each class is a component with its share, mean and covariance: nothing is random. With a
    number, that many components are fitted without labels by expectation maximisation from a seeded k-means.
    The normaliser is part of the likelihood, and its logarithm never underflows. OpenOOD reduces its last layer
    to 50 principal directions first; pytorch-ood scores by the smallest Mahalanobis term alone.
    """

    components: int | Literal["classes"] = param("classes", "one per class, or how many to fit without labels")
    covariance: Literal["tied", "full"] = param(
        "tied", "one for all components, or one for each", choices=("tied", "full")
    )
    ridge: float = param(1e-6, "added to the diagonal of each covariance", low=0.0)
    seed: int = param(0, "of the fit of a number of components", low=0)

    @property
    def needs(self) -> frozenset[str]:
        return self.card.needs if self.components == "classes" else self.card.needs - {"labels"}

    def check_params(self) -> None:
        """Refuse hyperparameters outside their allowed values."""
        super().check_params()
        count = self.components
        whole = isinstance(count, int | np.integer) and not isinstance(count, bool) and count >= 1
        if not whole and count != "classes":
            raise OodometerError(f"gmm: components must be an integer ≥ 1 or 'classes'; found {count!r}")

    def _fit(self, train: Bank, xp: ModuleType) -> None:
        if self.components == "classes":
            weights, means, covariances = self._by_class(train)
        elif self.components == 1:
            total = derived.moments(train)
            weights, means = np.ones(1), total.mean[None, :]
            covariances = iter([total.scatter / total.count + self.ridge * np.eye(len(total.mean))])
        else:
            weights, means, covariances = self._by_number(train)
        centers = means if self.covariance == "full" else [derived.mean(train)]
        self.whitenings_ = [_whitening(c, center, train) for c, center in zip(covariances, centers, strict=True)]
        self.log_scales_ = [_log_scale(whitening) for whitening in self.whitenings_]
        self.points_ = self.whitenings_[0].points(means)
        self.log_weights_ = np.log(weights)

    def _by_class(self, train: Bank) -> tuple[F64, F64, Iterator[F64]]:
        counts, means = derived.class_means(train)
        present = np.flatnonzero(counts)
        ridge = self.ridge * np.eye(means.shape[1])
        if self.covariance == "tied":
            covariances = iter([derived.within_scatter(train) / len(train) + ridge])
        else:
            covariances = (_class_covariance(train, c, means[c], counts[c]) + ridge for c in present.tolist())
        return counts[present] / len(train), means[present], covariances

    def _by_number(self, train: Bank) -> tuple[F64, F64, Iterator[F64]]:
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.mixture import GaussianMixture

        if len(train) < int(self.components):
            raise OodometerError(
                f"gmm: components={self.components} but the training bank has {len(train)} rows: choose fewer"
            )
        mixture = GaussianMixture(
            int(self.components), covariance_type=self.covariance, reg_covar=self.ridge, random_state=self.seed
        )
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always", ConvergenceWarning)
            try:
                mixture.fit(to_numpy(double(derived.features(train))))
            except ValueError as error:
                raise OodometerError(f"gmm: the fit of {self.components} components failed: {error}") from error
        if said:
            warn(f"gmm: {said[0].message}")
        found = mixture.covariances_
        return mixture.weights_, mixture.means_, iter(found if self.covariance == "full" else [found])

    def _score(self, bank: Bank, xp: ModuleType) -> Array:
        h = double(derived.features(bank))
        if self.covariance == "full":
            columns = [
                _log_density(w(h), scale, xp) for w, scale in zip(self.whitenings_, self.log_scales_, strict=True)
            ]
            return -logsumexp(xp.stack(columns, axis=-1) + like(self.log_weights_, h), xp)
        # log N(h; m_k, Σ) = log N(h; centre, Σ) + x·p_k − ‖p_k‖²/2 in whitened coordinates about a common centre.
        x = self.whitenings_[0](h)
        offsets = self.log_weights_ - 0.5 * np.einsum("ij,ij->i", self.points_, self.points_)
        return -_log_density(x, self.log_scales_[0], xp) - logsumexp(x @ like(self.points_, x).T + like(offsets, x), xp)


def _class_covariance(train: Bank, label: int, mean: F64, count: int) -> F64:
    """Covariance of one class about its mean, divided by its rows; only these rows are read."""
    if count < 2:
        raise OodometerError(
            f"gmm: class {label} has 1 training row, a covariance of its own needs at least 2: "
            "choose covariance='tied', or add rows"
        )
    scatter = np.zeros((len(mean), len(mean)))
    for part in train.parts:
        rows = part.rows(np.flatnonzero(derived.labels(part) == label))
        for block in rows.blocks():
            h = double(derived.features(block))
            gap = h - like(mean, h)
            scatter += to_numpy(gap.T @ gap)
    return scatter / count


def _whitening(covariance: F64, center: F64, train: Bank) -> Whitening:
    whitening = Whitening.of(covariance, center, exact=True, near=train.sample)
    if whitening.rank < len(center):
        raise OodometerError(
            f"gmm: a covariance has rank {whitening.rank} of {len(center)}, so the density is not defined: "
            "raise ridge, choose covariance='tied', or drop constant and repeated features"
        )
    return whitening


def _log_scale(whitening: Whitening) -> float:
    """−½ log det Σ: the columns of the whitening have lengths λ^(−1/2)."""
    return float(np.log(np.linalg.norm(whitening.basis, axis=0)).sum())


def _log_density(x: Array, log_scale: float, xp: ModuleType) -> Array:
    """log N of whitened rows."""
    return -0.5 * xp.sum(x * x, axis=-1) + (log_scale - 0.5 * x.shape[-1] * math.log(2 * math.pi))
