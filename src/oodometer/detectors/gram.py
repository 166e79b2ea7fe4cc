"""Deviations of the layers' Gram matrices from the range they keep in training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import numpy.typing as npt

from oodometer import derived
from oodometer.arrays import Array, Ints, double, like, namespace, to_numpy
from oodometer.bank import Bank
from oodometer.derived import F64
from oodometer.detectors.base import Detector, detector, param, warn
from oodometer.detectors.logits import max_softmax
from oodometer.errors import OodometerError

Mask = npt.NDArray[np.bool_]


def gram_sums(maps: Array, powers: tuple[int, ...], xp: ModuleType) -> Iterator[Array]:
    """For each power p the row sums of the Gram matrix (a^p)(a^p)ᵀ, to the power 1/p: one number a channel.

    Σ_j Σ_t a_it^p a_jt^p = Σ_t a_it^p (Σ_j a_jt^p): the channels × channels matrix itself is never needed.
    """
    # Tenth powers leave float32 at a few thousand.
    a = double(xp.reshape(maps, (maps.shape[0], maps.shape[1], -1)))
    raised = a
    for p in range(1, max(powers) + 1):
        raised = a if p == 1 else raised * a
        if p in powers:
            sums = (raised @ xp.sum(raised, axis=1)[:, :, None])[:, :, 0]
            yield xp.sign(sums) * xp.abs(sums) ** (1 / p)


@dataclass(frozen=True)
class Bounds:
    """Smallest and largest Gram sums of one layer: powers × classes × channels."""

    low: F64
    high: F64

    @classmethod
    def empty(cls, powers: int, classes: int, channels: int) -> Bounds:
        return cls(np.full((powers, classes, channels), np.inf), np.full((powers, classes, channels), -np.inf))

    def widen(self, place: int, sums: F64, groups: Ints) -> None:
        """Take in the Gram sums of one power for rows of these classes."""
        order = np.argsort(groups, kind="stable")
        present, starts = np.unique(groups[order], return_index=True)
        for bound, extreme in ((self.low, np.minimum), (self.high, np.maximum)):
            bound[place, present] = extreme(bound[place, present], extreme.reduceat(sums[order], starts, axis=0))

    def with_all_classes_for(self, absent: Ints) -> Bounds:
        """Classes without rows get the range over all classes."""
        low, high = self.low.copy(), self.high.copy()
        low[:, absent], high[:, absent] = low.min(axis=1, keepdims=True), high.max(axis=1, keepdims=True)
        return Bounds(low, high)

    def deviation(self, maps: Array, powers: tuple[int, ...], groups: Ints) -> F64:
        """δ = Σ relu(min − g)/|min + 10⁻⁶| + relu(g − max)/|max + 10⁻⁶|, over powers and channels."""
        xp, total = namespace(maps), np.zeros(maps.shape[0])
        for place, sums in enumerate(gram_sums(maps, powers, xp)):
            low, high = like(self.low[place, groups], sums), like(self.high[place, groups], sums)
            below, above = xp.clip(low - sums, min=0.0), xp.clip(sums - high, min=0.0)
            total += to_numpy(xp.sum(below / xp.abs(low + 1e-6) + above / xp.abs(high + 1e-6), axis=-1))
        return total


def split_rows(labels: Ints, share: float, seed: int) -> Mask:
    """Which rows are held out: of each class a seeded share, at least one where it has two rows or more."""
    rng, held = np.random.default_rng(seed), np.zeros(len(labels), bool)
    for c in np.unique(labels):
        rows = np.flatnonzero(labels == c)
        count = max(int(share * len(rows)), 1) if len(rows) > 1 else 0
        held[rng.choice(rows, count, replace=False)] = True
    return held


def _picked_blocks(bank: Bank, column: str, wanted: Mask) -> Iterator[tuple[Array, Ints]]:
    """The wanted rows of a column, a block at a time, and their places."""
    start = 0
    for block in derived.column_blocks(bank, column):
        places = start + np.flatnonzero(wanted[start : start + len(block)])
        if len(places):
            yield block.rows(places - start)[column], places
        start += len(block)


@detector(
    "gram",
    needs={"layers.*", "logits", "labels"},
    cite="sastry2020gram",
    equation="Σ_l δ_l/E[δ_l] / max_c p_c, δ_l how far the Gram sums leave the range of the predicted class",
    cost="classes",
)
class Gram(Detector):
    """Gram-matrix deviations (Sastry & Oore, ICML 2020).

    The range of each layer, power, channel and class comes from most of the training rows, the expected deviation of
    each layer from the held-out rest. Layers whose held-out rows never leave their range tell nothing and are skipped
    (`skipped_`). A column without positions counts as one position.
    """

    rowwise = False
    powers: tuple[int, ...] = param((1, 2, 3, 4, 5), "of the activations in the Gram matrices")
    held_out: float = param(0.1, "share of each class that gives the expected deviations", low=0.0, high=1.0, open=True)
    divide_by_msp: bool = param(True, "divide by the largest softmax probability", choices=(True, False))
    seed: int = param(0, "of the held-out rows", low=0)

    def check_params(self) -> None:
        super().check_params()
        whole = all(isinstance(p, int | np.integer) and not isinstance(p, bool) and p > 0 for p in self.powers)
        if not whole or not self.powers or list(self.powers) != sorted(set(self.powers)):
            raise OodometerError(f"gram: powers must be rising integers ≥ 1, e.g. (1, 2, 3); found {self.powers!r}")

    def _fit_on(self, train: Bank, val: Bank | None) -> None:
        labels, powers = derived.labels(train), tuple(self.powers)
        held = split_rows(labels, self.held_out, self.seed)
        if not held.any():
            raise OodometerError(
                f"gram: {len(train)} training rows of {len(np.unique(labels))} classes leave none to hold out: "
                "at least one class needs two rows"
            )
        counts = np.bincount(labels, minlength=train.classes)
        self._report_small(counts)
        found, skipped = {}, []
        for name in train.layers:
            bounds = _bounds(train, name, powers, labels, ~held).with_all_classes_for(np.flatnonzero(counts == 0))
            expected = _expected(train, name, powers, bounds, labels, held=held)
            if expected > _round_off(bounds):
                found[name] = (bounds, expected)
            else:
                skipped.append(name)
        self._report_skipped(skipped, bool(found))
        self.bounds_ = {name: bounds for name, (bounds, _) in found.items()}
        self.expected_ = {name: expected for name, (_, expected) in found.items()}
        self.skipped_ = tuple(skipped)

    def _report_small(self, counts: Ints) -> None:
        few = np.flatnonzero((counts > 0) & (counts * self.held_out < 1))
        if len(few):
            warn(f"gram: {len(few)} classes are too small for held_out={self.held_out}: one row of each is held out")
        absent = np.flatnonzero(counts == 0)
        if len(absent):
            warn(f"gram: no training rows of classes {absent[:5].tolist()}: rows predicted so are held to all classes")

    def _report_skipped(self, skipped: list[str], any_left: bool) -> None:
        if not any_left:
            raise OodometerError(
                f"gram: the held-out rows never leave the training range in any layer ({', '.join(skipped)}), so "
                "deviations have no unit: hold out more rows (held_out=…), or give layers that vary"
            )
        if skipped:
            warn(f"gram: the held-out rows never leave the training range in {', '.join(skipped)}: skipped")

    def _score(self, bank: Bank, xp: ModuleType) -> Array:
        groups, everything = derived.predictions(bank), np.ones(len(bank), bool)
        total = np.zeros(len(bank))
        for name, bounds in self.bounds_.items():
            for maps, places in _picked_blocks(bank, name, everything):
                total[places] += bounds.deviation(maps, tuple(self.powers), groups[places]) / self.expected_[name]
        return total / _confidence(bank) if self.divide_by_msp else total


def _bounds(train: Bank, name: str, powers: tuple[int, ...], labels: Ints, fitted: Mask) -> Bounds:
    shape = train.row_shape(name)
    if not shape:
        raise OodometerError(f"gram: column {name!r} has one number a row: a layer is rows × channels (× positions)")
    bounds = Bounds.empty(len(powers), train.classes, shape[0])
    for maps, places in _picked_blocks(train, name, fitted):
        for place, sums in enumerate(gram_sums(maps, powers, namespace(maps))):
            bounds.widen(place, to_numpy(sums), labels[places])
    return bounds


def _expected(train: Bank, name: str, powers: tuple[int, ...], bounds: Bounds, labels: Ints, *, held: Mask) -> float:
    """E[δ] of one layer over the held-out rows, each against the range of its own class."""
    total = 0.0
    for maps, places in _picked_blocks(train, name, held):
        total += float(bounds.deviation(maps, powers, labels[places]).sum())
    return total / int(held.sum())


def _round_off(bounds: Bounds) -> float:
    """The deviation that round-off alone can make: equal rows may differ in the last bits from block to block."""
    terms = int(bounds.low[:, 0].size)
    return 64 * float(np.finfo(np.float64).eps) * terms


def _confidence(bank: Bank) -> F64:
    pieces = []
    for block in bank.blocks():
        z = double(derived.logits(block))
        pieces.append(to_numpy(max_softmax(z, namespace(z))))
    return np.concatenate(pieces)
