"""OpenMax: the probability of an unknown class, from Weibull models of the distances to the mean logits."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Literal

import numpy as np
import numpy.typing as npt
from array_api_compat import device

from oodometer import derived
from oodometer.arrays import (
    Array,
    Ints,
    block_rows,
    double,
    frozen,
    like,
    logsumexp,
    norms,
    slices,
    take_columns,
    take_rows,
    to_numpy,
    top_values,
)
from oodometer.bank import Bank
from oodometer.derived import F64
from oodometer.detectors.base import Detector, detector, param, warn
from oodometer.errors import OodometerError

SHIFT = 1.0
"""The tail is moved so that its smallest distance lies here before a Weibull is fitted, as libmr (0.1.9) does."""
STEP = 1e-12
"""Tails whose logarithms spread less than this are one distance repeated: their CDF is a step there."""
STEPS = 100
"""More than bracketed Newton steps ever take: six or so are usual."""
TINY = float(np.finfo(np.float64).tiny)


@detector(
    "openmax",
    needs={"logits", "labels"},
    cite="bendale2016openmax",
    equation="softmax([z′, Σ_c z_c − z′_c])_unknown, z′_c = z_c(1 − ω_c F_c(‖z − m_c‖)), ω_c = (α + 1 − rank)/α",
    cost="classes",
    variants={
        "openood": {"tail": 20, "alpha": 3},
        "openmibood": {"tail": 20, "alpha": 3},
        "pytorch-ood": {"tail": 25, "alpha": 10, "mav": "all"},
    },
)
class OpenMax(Detector):
    """OpenMax (Bendale & Boult, CVPR 2016): logits pass to an unknown class as their rows leave the class means.

    F_c is the Weibull of the `tail` largest distances of class c from its mean logits. `alpha` beyond the number of
    classes counts as that number, and a tail longer than a class is the whole class. A class with fewer than two
    rows has no distances to model: its logit is never revised. Only the score is revised, predictions are not.
    """

    tail: int = param(20, "how many of a class's largest distances are modelled", low=2)
    alpha: int = param(3, "how many of the largest logits are revised", low=1)
    mav: Literal["correct", "all"] = param(
        "correct", "rows of a class that count: those classified correctly, or all", choices=("correct", "all")
    )

    def _fit(self, train: Bank, xp: ModuleType) -> None:
        by: derived.Grouping = "correct" if self.mav == "correct" else "label"
        counts, means = derived.class_means(train, "logits", by=by)
        self.means_ = frozen(means)
        self._report_small(counts)
        groups = derived.labels(train)
        if self.mav == "correct":
            groups = np.where(derived.correct(train), groups, -1)
        distances = _distances(train, groups, self.means_)
        self.weibulls_ = fit_high(*largest(distances, groups, train.classes, self.tail))

    def _report_small(self, counts: Ints) -> None:
        kind, small = "correctly classified " if self.mav == "correct" else "", np.flatnonzero(counts < 2)
        if len(small) == len(counts):
            raise OodometerError(
                f"openmax: no class has two {kind}training rows: distances to a mean need at least two; "
                "check labels and logits" + (", or choose mav='all'" if self.mav == "correct" else "")
            )
        if len(small):
            listed = ", ".join(map(str, small[:10])) + (", …" if len(small) > 10 else "")
            warn(f"openmax: fewer than two {kind}training rows in class {listed}: its logit is never revised")

    def _score(self, bank: Bank, xp: ModuleType) -> Array:
        z = derived.logits(bank)
        return xp.concat([self._unknown(double(z[rows, ...]), xp) for rows in slices(len(bank), _rows(bank))])

    def _unknown(self, z: Array, xp: ModuleType) -> Array:
        """The softmax probability of the unknown class."""
        means, columns = like(self.means_, z), xp.arange(z.shape[-1], device=device(z))[None, :]
        alpha, left, unknown = min(self.alpha, z.shape[-1]), z, 0 * z[:, 0]
        revised: list[Array] = []
        for place in range(alpha):
            c = xp.argmax(left, axis=-1)
            distance = norms(z - xp.take(means, c, axis=0), xp)
            logit = take_columns(z, c, xp)
            moved = logit * self.weibulls_.cdf(c, distance, xp) * ((alpha - place) / alpha)
            # A revised logit leaves its column and comes back as one at the end.
            left = xp.where(columns == c[:, None], -np.inf, left)
            revised.append(logit - moved)
            unknown = unknown + moved
        whole = xp.concat([left, xp.stack([*revised, unknown], axis=-1)], axis=-1)
        return xp.exp(unknown - logsumexp(whole, xp))


BLOCK_ENTRIES = 1 << 15
"""Logits revised at a time on a CPU: the many small steps stay in cache."""


def _rows(bank: Bank) -> int:
    return max(64, BLOCK_ENTRIES // bank.classes) if bank.on_cpu else block_rows(16 * bank.classes, cpu=False)


def _distances(train: Bank, groups: Ints, means: F64) -> F64:
    """Distance of each row to the mean of its group, in float64 (zero for rows of no group)."""
    found, start = np.zeros(len(train)), 0
    for block in train.blocks(_rows(train)):
        rows = slice(start, start + len(block))
        z = double(derived.logits(block))
        found[rows] = to_numpy(norms(z - take_rows(like(means, z), np.maximum(groups[rows], 0)), block.xp))
        start += len(block)
    return found


def largest(values: F64, groups: Ints, count: int, k: int) -> tuple[F64, npt.NDArray[np.bool_]]:
    """The k largest values of each of `count` groups in descending order, and which of those places are filled."""
    # Small integers are sorted by their digits, in one pass.
    order = np.argsort(groups.astype(np.int16) if count < 1 << 15 else groups, kind="stable")
    edges = np.searchsorted(groups[order], np.arange(count + 1))
    found, filled = np.zeros((count, k)), np.zeros((count, k), bool)
    for c, rows in enumerate(map(slice, edges[:-1], edges[1:])):
        tail = top_values(values[order[rows]], k, np)
        found[c, : len(tail)], filled[c, : len(tail)] = tail, True
    return found, filled


# ---------------------------------------------------------------------------------------------- Weibull models


@dataclass(frozen=True)
class Weibulls:
    """One Weibull CDF a class: 1 − exp(−exp(shape·(log x − log scale))), x = distance − start."""

    start: F64
    shape: F64
    log_scale: F64

    def cdf(self, classes: Array, distance: Array, xp: ModuleType) -> Array:
        """F_c of each row's distance, c its class."""
        start, shape, log_scale = (
            xp.take(like(fitted, distance), classes) for fitted in (self.start, self.shape, self.log_scale)
        )
        # A distance at or below the start has probability zero: so does the smallest float above it.
        x = xp.clip(distance - start, min=TINY)
        # exp(−exp(5)) is zero to double precision: the cap only keeps exp from overflowing.
        return -xp.expm1(-xp.exp(xp.clip(shape * (xp.log(x) - log_scale), max=5.0)))


def fit_high(tails: F64, filled: npt.NDArray[np.bool_]) -> Weibulls:
    """Weibull models of tails moved to begin at SHIFT, as libmr's fit_high does; F = 0 for tails of fewer than two."""
    modelled = filled.sum(axis=1) >= 2
    start = np.where(filled, tails, np.inf).min(axis=1) - SHIFT
    start[~modelled] = 0.0
    shape, log_scale = fit_weibull(np.log(np.maximum(tails - start[:, None], TINY)), filled & modelled[:, None])
    return Weibulls(*map(frozen, (start, shape, np.where(modelled, log_scale, np.inf))))


def fit_weibull(logs: F64, filled: npt.NDArray[np.bool_]) -> tuple[F64, F64]:
    """Maximum-likelihood shape and log scale of two-parameter Weibulls, one a row of logarithms, all at once.

    Logarithms that do not differ have no finite shape: theirs is as steep as doubles can tell.
    """
    n = np.maximum(filled.sum(axis=1), 1)
    top = np.where(filled.any(axis=1), np.where(filled, logs, -np.inf).max(axis=1), 0.0)
    y = np.where(filled, logs - top[:, None], 0.0)
    mean = y.sum(axis=1) / n
    spread = np.sqrt(np.where(filled, (y - mean[:, None]) ** 2, 0.0).sum(axis=1) / n)
    differ = spread > STEP
    u = np.where(differ[:, None], y, 0.0) / np.where(differ, spread, STEP)[:, None]
    k = np.where(differ, _shapes(u, filled, n), 1.0)
    weights = np.where(filled, np.exp(k[:, None] * u), 0.0).sum(axis=1) / n
    spread = np.where(differ, spread, STEP)
    return k / spread, top + np.log(np.where(weights > 0, weights, 1.0)) * spread / k


def _shapes(u: F64, filled: npt.NDArray[np.bool_], n: Ints) -> F64:
    """The root k of Σ u e^{ku} / Σ e^{ku} − mean u − 1/k, which increases in k, by bracketed Newton steps."""
    mean, low, high = u.sum(axis=1) / n, np.zeros(len(u)), np.full(len(u), np.inf)
    k = np.full(len(u), np.pi / 6**0.5)  # of the log of a Weibull variable with standard deviation one
    for _ in range(STEPS):
        e = np.where(filled, np.exp(k[:, None] * u), 0.0)
        total = np.where(e.any(axis=1), e.sum(axis=1), 1.0)
        weighted = (e * u).sum(axis=1) / total
        value = weighted - mean - 1 / k
        slope = (e * u * u).sum(axis=1) / total - weighted**2 + 1 / k**2
        low, high = np.where(value < 0, k, low), np.where(value > 0, k, high)
        step = k - value / slope
        between = np.where(np.isfinite(high), (low + high) / 2, 2 * k)
        step = np.where((step > low) & (step < high), step, between)
        done = np.abs(step - k) <= 4 * np.finfo(np.float64).eps * k
        k = step
        if done.all():
            break
    return k
