"""Check printed p-values against a printed, rounded table: which signed-rank statistics can its cells have had?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from oodometer.errors import OodometerError
from oodometer.stats.blocks import Floats
from oodometer.stats.paired import normal_signed_rank_pvalue, paired_samples, signed_rank_pvalue

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class RoundedCheck:
    """Whether a printed Wilcoxon p-value can come from two printed columns."""

    printed: float
    reachable: tuple[int, int]
    """The statistics W that the rounded cells allow: all integers between."""
    statistic: int | None
    """The W that prints as the given p-value; None: no reachable one does."""
    pvalue: float | None
    how: str
    """"exact", "one zero difference, normal approximation", or "impossible"."""

    @property
    def explained(self) -> bool:
        """Whether some reachable statistic prints as the given p-value."""
        return self.statistic is not None


def explain_printed(
    x: ArrayLike, y: ArrayLike, printed: float, *, digits: int = 4, bounds: tuple[float, float] = (0.0, 1.0)
) -> RoundedCheck:
    """Whether the signed-rank test of the unrounded columns can have printed this p-value.

    Every cell stands for an interval of half a unit of the last digit to both sides, cut at the bounds of the metric.
    Exact distribution first; then one difference that is truly zero and the normal approximation.
    """
    low, high = _differences(*paired_samples(x, y), digits, bounds)
    n = len(low)
    reachable = _folded(low, high)
    statistic = _that_prints(printed, reachable, digits, lambda w: signed_rank_pvalue(w, n))
    if statistic is not None:
        return RoundedCheck(printed, reachable, statistic, signed_rank_pvalue(statistic, n), "exact")
    for row in np.flatnonzero((low <= 0) & (high >= 0)):
        others = np.arange(n) != row
        fewer = _folded(low[others], high[others])
        statistic = _that_prints(printed, fewer, digits, lambda w: normal_signed_rank_pvalue(w, n - 1))
        if statistic is not None:
            pvalue = normal_signed_rank_pvalue(statistic, n - 1)
            return RoundedCheck(printed, fewer, statistic, pvalue, "one zero difference, normal approximation")
    return RoundedCheck(printed, reachable, None, None, "impossible")


def reachable_statistics(
    x: ArrayLike, y: ArrayLike, *, digits: int = 4, bounds: tuple[float, float] = (0.0, 1.0)
) -> tuple[int, int]:
    """Least and greatest signed-rank W = min(W⁺, W⁻) of unrounded columns that round to x and y."""
    return _folded(*_differences(*paired_samples(x, y), digits, bounds))


def _differences(x: Floats, y: Floats, digits: int, bounds: tuple[float, float]) -> tuple[Ints, Ints]:
    """The open interval of each difference, in integers: halves of the last printed digit."""
    if digits < 1 or not bounds[0] < bounds[1]:
        raise OodometerError(f"rounded: digits ≥ 1 and low < high bounds were needed, {digits}, {bounds} were found.")
    half = 2 * 10**digits
    floor, ceiling = (round(bound * half) for bound in bounds)
    cells = [np.rint(column * 10**digits).astype(np.int64) for column in (x, y)]
    if any((np.abs(column * 10**digits - cell) > 1e-6).any() for column, cell in zip((x, y), cells, strict=True)):
        raise OodometerError(f"rounded: cells with {digits} decimals were needed, longer ones were found.")
    if any(((2 * cell < floor) | (2 * cell > ceiling)).any() for cell in cells):
        raise OodometerError(f"rounded: cells within {bounds} were needed. Pass the metric's own bounds.")
    x_low, y_low = (np.maximum(2 * cell - 1, floor) for cell in cells)
    x_high, y_high = (np.minimum(2 * cell + 1, ceiling) for cell in cells)
    return x_low - y_high, x_high - y_low


def _folded(low: Ints, high: Ints) -> tuple[int, int]:
    """Range of W from that of W⁺, the number of i ≤ j with d_i + d_j > 0 (Tukey's form of the statistic).

    Each such count grows with every d, so its extremes lie at the ends of the intervals; on a path between them
    without coincidences it moves in steps of one, so every integer between is reached.
    """
    upper = np.triu_indices(len(low))
    least = int(((low[:, None] + low[None, :])[upper] >= 0).sum())
    most = int(((high[:, None] + high[None, :])[upper] > 0).sum())
    total = len(upper[0])
    middle = total // 2
    folded = (min(least, total - least), min(most, total - most))
    return min(folded), middle if least <= middle <= most else max(folded)


def _that_prints(printed: float, reachable: tuple[int, int], digits: int, pvalue: Callable[[int], float]) -> int | None:
    """The first reachable statistic whose p-value rounds to the printed one."""
    statistics = range(reachable[0], reachable[1] + 1)
    return next((w for w in statistics if round(pvalue(w), digits) == round(printed, digits)), None)
