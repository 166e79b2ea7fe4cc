"""Principal subspaces of the training features, of all rows or of each class, and the projections onto them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from types import ModuleType

import numpy as np
import numpy.typing as npt

from oodometer import derived
from oodometer.arrays import Array, Ints, double, like, norms, psd_eigh, take_rows, to_numpy
from oodometer.bank import Bank, Head
from oodometer.derived import F64, Spectrum
from oodometer.detectors.base import warn
from oodometer.errors import OodometerError


@dataclass(frozen=True)
class Affine:
    """h ↦ Ah + a with a symmetric matrix A: a projection onto one subspace, or the mean of several."""

    matrix: F64
    offset: F64

    def __call__(self, h: Array) -> Array:
        return h @ like(self.matrix, h) + like(self.offset, h)

    def head(self, head: Head) -> Head:
        """The head that gives of h what the given one gives of its projection: W(Ah + a) + b."""
        weight, bias = _double(head)
        return Head(weight @ self.matrix, weight @ self.offset + bias)


def global_projection(train: Bank, variance: float) -> Affine:
    """μ + UUᵀ(h − μ), U the directions that keep this share of the variance of all training features."""
    spectrum = derived.spectrum(train)
    basis = leading(spectrum, variance)
    if not basis.shape[1]:
        raise OodometerError("projected: the training features do not vary: a subspace needs rows that differ")
    matrix = basis @ basis.T
    return Affine(matrix, spectrum.center - matrix @ spectrum.center)


def leading(spectrum: Spectrum, variance: float) -> F64:
    """The first #(cumulative variance ≤ v) + 1 directions, none of them round-off; none if nothing varies."""
    # Rows that are all alike vary by the round-off of their mean.
    noise = (len(spectrum.values) * np.finfo(np.float64).eps) ** 2 * float(np.square(spectrum.center).sum())
    if spectrum.values[0] <= noise:
        return spectrum.vectors[:, :0]
    return spectrum.vectors[:, : min(spectrum.components(variance), spectrum.rank())]


# ---------------------------------------------------------------------------------------------- one a class


@dataclass(frozen=True)
class ClassSubspaces:
    """A mean and an orthonormal basis a class: ĥ_c = μ_c + U_cU_cᵀ(h − μ_c)."""

    means: F64
    bases: tuple[F64, ...]

    def coordinates(self, h: Array, c: int) -> Array:
        """U_cᵀ(h − μ_c)."""
        return (h - like(self.means[c], h)) @ like(self.bases[c], h)

    def project(self, h: Array, c: int) -> Array:
        """ĥ_c of every row."""
        return self.coordinates(h, c) @ like(self.bases[c].T, h) + like(self.means[c], h)

    def predicted(self, h: Array, predictions: Ints, xp: ModuleType) -> Array:
        """ĥ_ŷ: the rows are gathered by predicted class, and every class is projected at once."""
        order = np.argsort(predictions, kind="stable")
        classes, starts = np.unique(predictions[order], return_index=True)
        groups = zip(classes.tolist(), np.split(order, starts[1:]), strict=True)
        pieces = [self.project(take_rows(h, rows), c) for c, rows in groups]
        return take_rows(xp.concat(pieces, axis=0), np.argsort(order))

    def averaged(self) -> Affine:
        """(1/C) Σ_c ĥ_c, one matrix for all classes."""
        matrix, offset = np.zeros((self.means.shape[1],) * 2), np.zeros(self.means.shape[1])
        for mean, basis in zip(self.means, self.bases, strict=True):
            matrix += basis @ basis.T
            offset += mean - basis @ (basis.T @ mean)
        return Affine(matrix / len(self.bases), offset / len(self.bases))

    def head(self, head: Head) -> Head:
        """The head of the class logits w_c·ĥ_c + b_c = (U_cU_cᵀw_c)·h + (w_c·(μ_c − U_cU_cᵀμ_c) + b_c)."""
        weight, bias = _double(head)
        seen = np.stack([basis @ (basis.T @ w) for basis, w in zip(self.bases, weight, strict=True)])
        return Head(seen, np.einsum("cd,cd->c", weight - seen, self.means) + bias)

    def errors(self, h: Array, xp: ModuleType) -> Iterator[Array]:
        """‖h − ĥ_c‖ of every row, one class after the other."""
        return (norms(h - self.project(h, c), xp) for c in range(len(self.bases)))

    def cosines(self, h: Array, weight: F64, xp: ModuleType) -> Iterator[Array]:
        """cos(ĥ_c, w_c) of every row, one class after the other; a zero vector is at a right angle to all."""
        for c, w in enumerate(weight):
            projected = self.project(h, c)
            length = norms(projected, xp) * float(np.linalg.norm(w))
            yield projected @ like(w, h) / xp.where(length > 0, length, xp.ones_like(length))


def class_subspaces(train: Bank, variance: float) -> ClassSubspaces:
    """Subspaces of the correctly classified rows of each class (of all its rows where none is correct)."""

    def compute() -> ClassSubspaces:
        spectra = (_class_spectrum(train, rows) for rows in class_rows(train))
        found = [(spectrum.center, leading(spectrum, variance)) for spectrum in spectra]
        return ClassSubspaces(np.stack([mean for mean, _ in found]), tuple(basis for _, basis in found))

    subspaces = derived.remember(train, ("class_subspaces", variance), compute)
    points = sum(not basis.shape[1] for basis in subspaces.bases)
    if points:
        warn(f"projected: the rows of {points} classes do not vary: their subspace is the class mean alone")
    return subspaces


def class_rows(train: Bank) -> list[Ints]:
    """The rows that stand for each class: those classified correctly, or all where none is."""
    labels, correct = derived.labels(train), derived.correct(train)
    counts = np.bincount(labels, minlength=train.classes)
    if not counts.all():
        c = int(np.flatnonzero(counts == 0)[0])
        raise OodometerError(
            f"projected: class {c} has no training rows ({int((counts == 0).sum())} of {len(counts)} classes have "
            "none): a class projection needs rows of every class; give them, or choose kind='global'"
        )
    right = np.bincount(labels[correct], minlength=train.classes)
    if not right.all():
        warn(f"projected: {int((right == 0).sum())} classes have no correctly classified rows: using all their rows")
    kept = np.flatnonzero(correct | (right[labels] == 0))
    return np.split(kept[np.argsort(labels[kept], kind="stable")], np.cumsum(np.where(right > 0, right, counts))[:-1])


def rows_bank(train: Bank, rows: Ints) -> Bank:
    """The bank of these (ascending) rows; a bank of several parts is never joined for it."""
    edges = np.cumsum([0, *map(len, train.parts)])
    inside = [rows[(rows >= a) & (rows < b)] - a for a, b in pairwise(edges.tolist())]
    return Bank.concat([part.rows(index) for part, index in zip(train.parts, inside, strict=True) if len(index)])


def _class_spectrum(train: Bank, rows: Ints) -> Spectrum:
    """Principal components of these rows: of their covariance, or (fewer rows than features) of their products."""
    chosen = rows_bank(train, rows)
    if len(rows) > train.row_shape("features")[0]:
        return derived.spectrum(chosen)
    h = to_numpy(double(chosen.features))
    center = h.mean(axis=0)
    centred = h - center
    values, vectors = psd_eigh(centred @ centred.T)
    inside = values > len(values) * np.finfo(np.float64).eps * values[0]
    basis = centred.T @ vectors[:, inside] / np.sqrt(values[inside])
    return Spectrum(np.where(inside, values, 0.0) / len(rows), basis, center)


def _double(head: Head) -> tuple[F64, npt.NDArray[np.float64]]:
    return to_numpy(head.weight).astype(np.float64), to_numpy(head.bias).astype(np.float64)
