"""Which pairs of methods differ: rank tests and paired tests over all pairs, with a named adjustment."""

from __future__ import annotations

import math
import warnings
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from oodometer.errors import OodometerError, OodometerWarning
from oodometer.stats.blocks import Floats, Missing, Table, read_numbers
from oodometer.stats.paired import LABELS, named_test
from oodometer.stats.ranks import Friedman, RankSums, friedman_of, rank_sums

if TYPE_CHECKING:
    import pandas as pd

Adjust = Literal["holm", "bonferroni", "none"]


@dataclass(frozen=True)
class Pairwise:
    """A symmetric matrix of p-values between methods, and what they rest on."""

    test: str
    adjust: str
    """How the p-values are adjusted for their number: "holm", "bonferroni", "none" or "studentized range"."""
    names: tuple[Hashable, ...]
    pvalues: Floats
    unadjusted: Floats
    statistics: Floats
    average_ranks: Floats
    mean_differences: Floats
    """Mean of row method − column method, in units of the metric."""
    n_blocks: int
    omnibus: Friedman
    dropped: tuple[Hashable, ...] = ()

    @property
    def rank_differences(self) -> Floats:
        """Average rank of the row method − the column method; negative: the row method is better."""
        return self.average_ranks[:, None] - self.average_ranks[None, :]

    def significant(self, alpha: float = 0.05) -> NDArray[np.bool_]:
        """Which pairs differ at level alpha (p < alpha, so that the others are the edges of the cliques)."""
        return (self.pvalues < alpha) & ~np.eye(len(self.names), dtype=bool)

    def pairs(self) -> Iterator[dict[str, Any]]:
        """Each pair once, with both p-values and the effect sizes."""
        ranks = self.rank_differences
        for i, j in combinations(range(len(self.names)), 2):
            yield {
                "a": self.names[i],
                "b": self.names[j],
                "statistic": float(self.statistics[i, j]),
                "pvalue": float(self.pvalues[i, j]),
                "unadjusted": float(self.unadjusted[i, j]),
                "rank_difference": float(ranks[i, j]),
                "mean_difference": float(self.mean_differences[i, j]),
            }

    def to_pandas(self) -> pd.DataFrame:
        """The matrix of adjusted p-values with the names of the methods."""
        import pandas as pd

        return pd.DataFrame(self.pvalues, index=list(self.names), columns=list(self.names))

    def __getitem__(self, pair: tuple[Hashable, Hashable]) -> float:
        """The adjusted p-value of two methods, by name."""
        try:
            row, column = (self.names.index(name) for name in pair)
        except ValueError as error:
            raise OodometerError(f"methods: two of {list(self.names)} were needed, {pair!r} was found.") from error
        return float(self.pvalues[row, column])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.array(self.pvalues, dtype=dtype, copy=copy)

    def __str__(self) -> str:
        return f"{self.test}, adjustment: {self.adjust}; {len(self.names)} methods, {self.n_blocks} blocks"


# ------------------------------------------------------------------------------------------- rank tests


def conover(
    X: Table,
    *,
    higher_is_better: bool,
    adjust: Adjust = "holm",
    names: Sequence[Hashable] | None = None,
    missing: Missing = "error",
) -> Pairwise:
    """Conover's test after Friedman's: t tests of the rank sums with their common standard error."""
    from scipy.special import stdtr

    sums = rank_sums(X, higher_is_better=higher_is_better, names=names, missing=missing)
    b, k = sums.table.shape
    df = (b - 1) * (k - 1)
    # Conover 1999, §5.8: SE² = 2 (b A − Σ R_j²) / ((b − 1)(k − 1))
    t = _ratios(sums.sums / 2, math.sqrt(2 * sums.error / 4 / df))
    return _of_ranks(sums, "Conover", t, 2 * stdtr(df, -t), adjust)


def siegel(
    X: Table,
    *,
    higher_is_better: bool,
    adjust: Adjust = "holm",
    names: Sequence[Hashable] | None = None,
    missing: Missing = "error",
) -> Pairwise:
    """Siegel and Castellan's test after Friedman's: normal tests of the average ranks."""
    from scipy.special import ndtr

    sums = rank_sums(X, higher_is_better=higher_is_better, names=names, missing=missing)
    z = _ratios(sums.average, _rank_error(*sums.table.shape))
    return _of_ranks(sums, "Siegel", z, 2 * ndtr(-z), adjust)


def nemenyi(
    X: Table, *, higher_is_better: bool, names: Sequence[Hashable] | None = None, missing: Missing = "error"
) -> Pairwise:
    """Nemenyi's test after Friedman's: studentized range of the average ranks, which adjusts for all pairs."""
    sums = rank_sums(X, higher_is_better=higher_is_better, names=names, missing=missing)
    q = _ratios(sums.average, _rank_error(*sums.table.shape)) * math.sqrt(2)
    pvalues = _studentized_range(q, len(sums.table.names))
    return _pairwise(sums, "Nemenyi", q, unadjusted=pvalues, pvalues=pvalues, adjust="studentized range")


def critical_difference(n_methods: int, n_blocks: int, *, alpha: float = 0.05) -> float:
    """The difference of average ranks that Nemenyi's test needs at level alpha."""
    from scipy.stats import studentized_range

    if n_methods < 2 or n_blocks < 1 or not 0 < alpha < 1:
        raise OodometerError(
            "critical difference: at least 2 methods, 1 block and 0 < alpha < 1 were needed, "
            f"{n_methods}, {n_blocks} and {alpha} were found."
        )
    # Demšar 2006, eq. for CD: q_α is the studentized range over √2
    q = float(studentized_range.ppf(1 - alpha, n_methods, np.inf)) / math.sqrt(2)
    return q * _rank_error(n_blocks, n_methods)


def _rank_error(b: int, k: int) -> float:
    """Standard error of a difference of average ranks when no method differs."""
    return math.sqrt(k * (k + 1) / (6 * b))


def _ratios(values: Floats, error: float) -> Floats:
    """|difference| / error; blocks that all agree (error 0) separate any two unequal values beyond doubt."""
    gaps = np.abs(values[:, None] - values[None, :])
    return gaps / error if error else np.where(gaps > 0, np.inf, 0.0)


def _studentized_range(q: Floats, k: int) -> Floats:
    from scipy.stats import studentized_range

    distinct, place = np.unique(q, return_inverse=True)
    return np.clip(studentized_range.sf(distinct, k, np.inf), 0.0, 1.0)[place].reshape(q.shape)


def _of_ranks(sums: RankSums, test: str, statistics: Floats, pvalues: Floats, adjust: Adjust) -> Pairwise:
    return _pairwise(sums, test, statistics, unadjusted=pvalues, pvalues=adjusted(pvalues, adjust), adjust=adjust)


def _pairwise(
    sums: RankSums, test: str, statistics: Floats, *, unadjusted: Floats, pvalues: Floats, adjust: str
) -> Pairwise:
    means = sums.table.values.mean(axis=0)
    return Pairwise(
        test=test,
        adjust=adjust,
        names=sums.table.names,
        pvalues=_unit_diagonal(pvalues),
        unadjusted=_unit_diagonal(unadjusted),
        statistics=statistics,
        average_ranks=sums.average,
        mean_differences=means[:, None] - means[None, :],
        n_blocks=sums.table.shape[0],
        omnibus=friedman_of(sums),
        dropped=sums.table.dropped,
    )


def _unit_diagonal(pvalues: Floats) -> Floats:
    filled = np.minimum(pvalues, 1.0)
    np.fill_diagonal(filled, 1.0)
    return filled


# ------------------------------------------------------------------------------------------ paired tests


def pairwise(
    X: Table,
    *,
    higher_is_better: bool,
    test: str = "wilcoxon",
    adjust: Adjust = "holm",
    names: Sequence[Hashable] | None = None,
    missing: Missing = "error",
) -> Pairwise:
    """One test for each pair of methods: "wilcoxon", "mannwhitney", "t", "route" or "dcv-rood"."""
    sums = rank_sums(X, higher_is_better=higher_is_better, names=names, missing=missing)
    statistics, pvalues = test_pairs(sums.table.values, test)
    if test in ("wilcoxon", "dcv-rood"):
        _warn_if_hopeless(*sums.table.shape, adjust)
    return _of_ranks(sums, LABELS[test], statistics, pvalues, adjust)


def test_pairs(values: Floats, test: str) -> tuple[Floats, Floats]:
    """Statistics and unadjusted p-values of all pairs of columns."""
    compare = named_test(test)
    k = values.shape[1]
    statistics, pvalues = np.zeros((k, k)), np.ones((k, k))
    for i, j in combinations(range(k), 2):
        found = compare(values[:, i], values[:, j])
        statistics[i, j] = statistics[j, i] = found.statistic
        pvalues[i, j] = pvalues[j, i] = found.pvalue
    return statistics, pvalues


def _warn_if_hopeless(b: int, k: int, adjust: Adjust) -> None:
    """With too few blocks even unanimous ones stay above .05 after the adjustment."""
    smallest = 2.0 ** (1 - b) * (1 if adjust == "none" else k * (k - 1) // 2)
    if smallest > 0.05:
        warnings.warn(
            f"{b} blocks and {k} methods: no pair can reach p ≤ .05 (smallest possible: {min(smallest, 1):.2g}); "
            "add data sets, compare fewer methods, or use conover",
            OodometerWarning,
            stacklevel=3,
        )


# ------------------------------------------------------------------------------------------- adjustments


def holm(pvalues: ArrayLike) -> Floats:
    """Holm 1979: adj_(i) = max over j ≤ i of min(1, (m − j + 1) p_(j))."""
    p = _pvalues(pvalues)
    order = np.argsort(p, kind="stable")
    stepped = np.maximum.accumulate(np.minimum(1.0, np.arange(len(p), 0, -1) * p[order]))
    result = np.empty_like(p)
    result[order] = stepped
    return result


def bonferroni(pvalues: ArrayLike) -> Floats:
    """min(1, m p)."""
    p = _pvalues(pvalues)
    return np.minimum(1.0, len(p) * p)


def adjusted(matrix: Floats, adjust: Adjust) -> Floats:
    """A symmetric matrix with each pair adjusted once for all pairs."""
    procedures = {"holm": holm, "bonferroni": bonferroni}
    if adjust == "none":
        return matrix
    if adjust not in procedures:
        raise OodometerError(f"adjust: 'holm', 'bonferroni' or 'none' was needed, {adjust!r} was found.")
    pairs = np.triu_indices(len(matrix), 1)
    result = np.ones_like(matrix)
    result[pairs] = procedures[adjust](np.minimum(matrix[pairs], 1.0))
    return np.minimum(result, result.T)


def _pvalues(pvalues: ArrayLike) -> Floats:
    p = read_numbers(pvalues, "p-values")
    if p.ndim != 1 or not ((p >= 0) & (p <= 1)).all():
        raise OodometerError("p-values: numbers from 0 to 1 in one dimension were needed. NaN has no place in a rank.")
    return p
