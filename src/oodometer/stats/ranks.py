"""Average ranks of methods over blocks, and the omnibus tests on them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from oodometer.errors import OodometerError, OodometerWarning
from oodometer.stats.blocks import BlockTable, Floats, Missing, Table, block_table, check_direction

if TYPE_CHECKING:
    import pandas as pd

FEW_BLOCKS = 5
"""Below this many blocks hardly any difference between methods can be seen."""


def mid_ranks(values: Floats) -> Floats:
    """Ascending ranks from 1; equal values share the mean of their ranks."""
    ordered = np.sort(values)
    below = np.searchsorted(ordered, values, "left")
    upto = np.searchsorted(ordered, values, "right")
    return np.asarray((below + upto + 1) / 2)


def block_ranks(values: Floats, higher_is_better: bool) -> Floats:
    """Mid-ranks within each row, 1 = best."""
    signed = -values if higher_is_better else values
    return np.stack([mid_ranks(row) for row in signed])


@dataclass(frozen=True)
class RankSums:
    """Ranks of k methods in b blocks with the sums all rank tests are made of.

    Twice a mid-rank is an integer, so spread, within and error are exact: whether a variance is zero is decided
    without rounding.
    """

    table: BlockTable
    ranks: Floats

    @cached_property
    def average(self) -> Floats:
        """The average rank of each method."""
        return np.asarray(self.ranks.mean(axis=0))

    @cached_property
    def doubled(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Twice the ranks, in integers."""
        return np.rint(2 * self.ranks).astype(np.int64)

    @cached_property
    def sums(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Twice the rank sum of each method."""
        return np.asarray(self.doubled.sum(axis=0))

    @cached_property
    def spread(self) -> int:
        """4 Σ (R_j − b(k+1)/2)²."""
        b, k = self.table.shape
        return int(((self.sums - b * (k + 1)) ** 2).sum())

    @cached_property
    def within(self) -> int:
        """4 (A − C1), A = Σ r², C1 = b k (k+1)²/4; zero when every block is one tie."""
        b, k = self.table.shape
        return int((self.doubled**2).sum()) - b * k * (k + 1) ** 2

    @property
    def error(self) -> int:
        """4 (b A − Σ R_j²); zero when all blocks rank alike."""
        return self.table.shape[0] * self.within - self.spread


def rank_sums(X: Table, *, higher_is_better: bool, names: Sequence[Hashable] | None, missing: Missing) -> RankSums:
    """Check the table and rank the methods in each block."""
    better = check_direction(higher_is_better)
    table = block_table(X, names=names, missing=missing)
    b, k = table.shape
    if k < 2 or b < 2:
        raise OodometerError(
            f"table: at least 2 methods (columns) and 2 blocks (rows) were needed, {k} and {b} were found"
            + (f" after {len(table.dropped)} blocks with missing values were dropped." if table.dropped else ".")
        )
    if b < FEW_BLOCKS:
        warnings.warn(
            f"only {b} blocks: rank tests see little below {FEW_BLOCKS}; look at the effect sizes, add data sets",
            OodometerWarning,
            stacklevel=4,
        )
    return RankSums(table, block_ranks(table.values, better))


@dataclass(frozen=True)
class Friedman:
    """Whether the methods differ at all: Friedman's test with its tie correction, and its relatives."""

    statistic: float
    """χ², corrected for ties."""
    pvalue: float
    uncorrected: float
    """χ² without the correction (Demšar's form)."""
    tie_factor: float
    df: int
    f_statistic: float
    """Iman and Davenport's F, from the corrected χ²."""
    f_pvalue: float
    f_df: tuple[int, int]
    kendall_w: float
    """Agreement of the blocks, from 0 to 1."""
    average_ranks: Floats
    names: tuple[Hashable, ...]
    n_blocks: int
    dropped: tuple[Hashable, ...]
    omnibus_test: str
    """The test that decides: Iman–Davenport, or Wilcoxon's signed-rank test between two methods."""
    omnibus_pvalue: float

    def rejects(self, alpha: float = 0.05) -> bool:
        """Whether the methods differ at level alpha."""
        return self.omnibus_pvalue < alpha

    def to_pandas(self) -> pd.Series[float]:
        """The average ranks by method, in the order of the table, which that of a matrix of p-values is too."""
        import pandas as pd

        return pd.Series(self.average_ranks, index=list(self.names), name="average rank")

    def __str__(self) -> str:
        return (
            f"Friedman χ²({self.df}) = {self.statistic:.4g} (corrected for ties), p = {self.pvalue:.4g}; "
            f"Iman–Davenport F{self.f_df} = {self.f_statistic:.4g}, p = {self.f_pvalue:.4g}; "
            f"Kendall's W = {self.kendall_w:.3g}; {self.n_blocks} blocks, {len(self.names)} methods"
        )


def friedman(
    X: Table, *, higher_is_better: bool, names: Sequence[Hashable] | None = None, missing: Missing = "error"
) -> Friedman:
    """Friedman's rank test over blocks (rows) and methods (columns)."""
    return friedman_of(rank_sums(X, higher_is_better=higher_is_better, names=names, missing=missing))


def friedman_of(sums: RankSums) -> Friedman:
    """The test from the rank sums."""
    from scipy.special import chdtrc, fdtrc

    b, k = sums.table.shape
    # Conover 1999, §5.8: T1 = (k − 1) Σ (R_j − b(k+1)/2)² / (A − C1), the same as χ0 / Ct
    statistic = (k - 1) * sums.spread / sums.within if sums.within else 0.0
    if not sums.within:
        warnings.warn("all methods tie in every block: p = 1", OodometerWarning, stacklevel=4)
    # Iman & Davenport 1980: F = (b − 1) χ / (b (k − 1) − χ)
    f = (b - 1) * sums.spread / sums.error if sums.error else (math.inf if sums.spread else 0.0)
    f_df = (k - 1, (k - 1) * (b - 1))
    f_pvalue = float(fdtrc(*f_df, f)) if f < math.inf else 0.0
    test, decisive = _decision(sums, f_pvalue)
    return Friedman(
        statistic=statistic,
        pvalue=float(chdtrc(k - 1, statistic)),
        uncorrected=3 * sums.spread / (b * k * (k + 1)),
        tie_factor=3 * sums.within / (b * k * (k * k - 1)),
        df=k - 1,
        f_statistic=f,
        f_pvalue=f_pvalue,
        f_df=f_df,
        kendall_w=statistic / (b * (k - 1)),
        average_ranks=sums.average,
        names=sums.table.names,
        n_blocks=b,
        dropped=sums.table.dropped,
        omnibus_test=test,
        omnibus_pvalue=decisive,
    )


def _decision(sums: RankSums, f_pvalue: float) -> tuple[str, float]:
    """With two methods Friedman's test is the sign test, which ignores how large the differences are."""
    if len(sums.table.names) > 2:
        return "Iman–Davenport", f_pvalue
    from oodometer.stats.paired import wilcoxon

    warnings.warn(
        "two methods: Wilcoxon's signed-rank test decides; Friedman's is the weaker sign test here",
        OodometerWarning,
        stacklevel=5,
    )
    return "Wilcoxon signed-rank", wilcoxon(sums.table.values[:, 0], sums.table.values[:, 1]).pvalue


@dataclass(frozen=True)
class RankBootstrap:
    """How far the average ranks depend on which data sets happened to be in the study."""

    names: tuple[Hashable, ...]
    average_ranks: Floats
    low: Floats
    high: Floats
    best: Floats
    """How often each method has the best average rank, ties shared."""
    confidence: float
    n: int


def bootstrap_ranks(
    X: Table,
    *,
    higher_is_better: bool,
    seed: int,
    n: int = 10_000,
    confidence: float = 0.95,
    names: Sequence[Hashable] | None = None,
    missing: Missing = "error",
) -> RankBootstrap:
    """Percentile intervals of the average ranks when whole blocks are drawn anew."""
    if not 0 < confidence < 1 or n < 1:
        raise OodometerError(f"bootstrap: 0 < confidence < 1 and n ≥ 1 were needed, {confidence} and {n} were found.")
    sums = rank_sums(X, higher_is_better=higher_is_better, names=names, missing=missing)
    b = sums.table.shape[0]
    draws = np.random.default_rng(seed).multinomial(b, np.full(b, 1 / b), size=n)
    # Ranks within a block do not change with the draw; doubled they are integers and ties stay exact.
    totals = draws @ sums.doubled
    winners = totals == totals.min(axis=1, keepdims=True)
    tail = (1 - confidence) / 2
    low, high = np.quantile(totals / (2 * b), [tail, 1 - tail], axis=0)
    best = (winners / winners.sum(axis=1, keepdims=True)).mean(axis=0)
    return RankBootstrap(sums.table.names, sums.average, low, high, best, confidence, n)
