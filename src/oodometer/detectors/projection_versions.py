"""Projected versions that are more than a detector on projected rows: reconstruction errors and class cosines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from types import ModuleType
from typing import Any, Literal, Protocol, TypeAlias, cast

import numpy as np

from oodometer import derived
from oodometer.arrays import Array, double, like, norms, slices, to_numpy
from oodometer.bank import Bank
from oodometer.derived import F64
from oodometer.detectors.base import Detector
from oodometer.detectors.kpca import KPCA, MAP_ROWS
from oodometer.detectors.pca import PCA, clipped, relative
from oodometer.detectors.subspaces import (
    Affine,
    ClassSubspaces,
    class_rows,
    class_subspaces,
    global_projection,
    rows_bank,
)
from oodometer.errors import OodometerError

Kind = Literal["global", "class", "class_pred", "class_avg"]
KINDS: tuple[Kind, ...] = ("global", "class", "class_pred", "class_avg")
Projection: TypeAlias = Affine | ClassSubspaces


class Version(Protocol):
    """A fitted score of a block of rows."""

    def score(self, bank: Bank, xp: ModuleType) -> Array: ...


def fit_projection(train: Bank, kind: Kind, variance: float) -> Projection:
    """One affine map for all rows, or (class, class_pred) the subspaces of the classes."""
    if kind == "global":
        return global_projection(train, variance)
    subspaces = class_subspaces(train, variance)
    return subspaces.averaged() if kind == "class_avg" else subspaces


def project(projection: Projection, h: Array, bank: Bank, xp: ModuleType) -> Array:
    """ĥ of every row: of the predicted class where there is a subspace a class."""
    if isinstance(projection, Affine):
        return projection(h)
    return projection.predicted(h, derived.predictions(bank), xp)


# ---------------------------------------------------------------------------------------------- pca


@dataclass(frozen=True)
class PCAError:
    """‖h − ĥ‖ (/‖h‖): of the global, predicted or averaged projection, or of the best class."""

    detector: PCA
    kind: Kind
    projection: Projection
    center: F64
    exact: bool

    def score(self, bank: Bank, xp: ModuleType) -> Array:
        h = derived.features(bank)
        h = clipped(double(h) if self.exact else h, self.detector.clip, xp)
        if self.kind == "class":
            error = reduce(xp.minimum, cast(ClassSubspaces, self.projection).errors(h, xp))
        else:
            error = norms(h - project(self.projection, h, bank, xp), xp)
        return relative(error, h, self.center, xp) if self.detector.regularised else error


def fit_pca_error(detector: Detector, kind: Kind, variance: float, train: Bank) -> PCAError:
    """The projection of the (clipped) training features."""
    pca = cast(PCA, detector)
    rows = train
    if pca.clip is not None:
        # The head made its logits from features that are not clipped: here it would be compared with those that are.
        columns = {"features": clipped(derived.features(train), pca.clip, train.xp)}
        if kind != "global":
            columns["logits"] = derived.logits(train)
        rows = train.with_head(None).with_columns(**columns)
    return PCAError(pca, kind, fit_projection(rows, kind, variance), derived.mean(rows), derived.is_small(train))


# ---------------------------------------------------------------------------------------------- kpca


@dataclass(frozen=True)
class KPCAError:
    """The error of one kernel PCA of all rows, or of one a class: the best, the predicted one's, or their mean's."""

    kind: Kind
    fitted: tuple[KPCA, ...]

    def score(self, bank: Bank, xp: ModuleType) -> Array:
        if self.kind == "class_pred":
            return self._of_predicted(bank)
        if self.kind == "class_avg":
            return np.concatenate([self._of_mean(bank.rows(rows), xp) for rows in slices(len(bank), MAP_ROWS)])
        return reduce(np.minimum, [one._score_all(bank) for one in self.fitted])

    def _of_predicted(self, bank: Bank) -> F64:
        predictions, found = derived.predictions(bank), np.zeros(len(bank))
        for c in np.unique(predictions).tolist():
            rows = np.flatnonzero(predictions == c)
            found[rows] = self.fitted[c]._score_all(bank.rows(rows))
        return found

    def _of_mean(self, bank: Bank, xp: ModuleType) -> F64:
        """‖(1/C) Σ_c (I − U_cU_cᵀ)(φ_c − μ_c)‖, in the coordinates of the classes' maps."""
        total: Any = 0.0
        for one in self.fitted:
            x = one._kernel(bank, xp)
            residual = x @ like(one.rest_, x) - like(one.offset_, x)
            total = total + residual @ like(directions(one), x).T
        return to_numpy(norms(total, xp)) / len(self.fitted)


def directions(kpca: KPCA) -> F64:
    """The orthonormal directions beyond a kernel PCA's subspace (its Nyström map is folded into `rest_`)."""
    rest: F64 = kpca.rest_
    return np.asarray(np.linalg.solve(kpca.whitener_, rest)) if kpca.method == "nystrom" else rest


def fit_kpca_error(detector: Detector, kind: Kind, variance: float, train: Bank) -> KPCAError:
    """One kernel PCA, or one a class, with at most N/C landmarks (all classes alike where their maps are averaged)."""
    kpca = cast(KPCA, detector)
    if kind == "global":
        return KPCAError(kind, (kpca.clone().set_params(variance=variance).fit(train),))
    groups = class_rows(train)
    most = kpca.landmarks or max(1, len(train) // train.classes)
    landmarks = [min(most, len(rows)) for rows in groups]
    if kind == "class_avg":
        landmarks = [min(landmarks)] * len(groups)
    fitted = []
    for c, (rows, count) in enumerate(zip(groups, landmarks, strict=True)):
        one = kpca.clone().set_params(variance=variance, landmarks=count)
        try:
            fitted.append(one.fit(rows_bank(train, rows)))
        except OodometerError as error:
            raise OodometerError(f"projected: class {c} with {len(rows)} training rows: {error}") from None
    return KPCAError(kind, tuple(fitted))


# ---------------------------------------------------------------------------------------------- ctm


@dataclass(frozen=True)
class ClassCosine:
    """−max_c cos(ĥ_c, w_c)."""

    subspaces: ClassSubspaces
    weight: F64
    exact: bool

    def score(self, bank: Bank, xp: ModuleType) -> Array:
        h = derived.features(bank)
        h = double(h) if self.exact else h
        return -reduce(xp.maximum, self.subspaces.cosines(h, self.weight, xp))


def fit_class_cosine(detector: Detector, kind: Kind, variance: float, train: Bank) -> ClassCosine:
    """The class subspaces, and the head's weight."""
    assert train.head is not None, "the door has seen to the head"
    weight = to_numpy(train.head.weight).astype(np.float64)
    return ClassCosine(class_subspaces(train, variance), weight, derived.is_small(train))


Fit: TypeAlias = Callable[[Detector, Kind, float, Bank], Version]
OWN: dict[str, tuple[tuple[Kind, ...], Fit]] = {
    "pca": (KINDS, fit_pca_error),
    "kpca": (KINDS, fit_kpca_error),
    "ctm": (("class",), fit_class_cosine),
}
"""Detectors with versions of their own, of which kinds, and how they are fitted."""
ERRORS = ("pca", "kpca")
"""Those of them whose own subspace is the projection's, its variance included."""
