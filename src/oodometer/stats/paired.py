"""Tests between two samples, each with its name, how its p-value was found, and effect sizes beside it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from oodometer.errors import OodometerError
from oodometer.stats.blocks import Floats, read_numbers
from oodometer.stats.ranks import mid_ranks

ZeroMethod = Literal["wilcox", "pratt", "zsplit"]
Method = Literal["auto", "exact", "normal"]
_EXACT_PAIRS, _EXACT_TIED_PAIRS = 50, 13
"""Up to so many pairs `auto` counts the signs: without ties and zeros, and with them (the bounds of SciPy ≥ 1.15)."""
_EXACT_SMALLER, _EXACT_LARGER = 8, 500
"""Sample sizes up to which `auto` counts the arrangements of two samples."""


@dataclass(frozen=True)
class PairedTest:
    """One comparison of two samples; positive effects mean that the first holds the larger values."""

    test: str
    statistic: float
    pvalue: float
    method: str
    """Exact, the normal approximation, or a distribution with its degrees of freedom."""
    n: int
    """Rows that carry evidence; the zero differences that were dropped are not among them."""
    n_zero: int
    mean_difference: float
    rank_biserial: float
    """(W⁺ − W⁻) / (W⁺ + W⁻) of paired samples, Cliff's delta of unpaired ones."""
    cliffs_delta: float
    """P(first > second) − P(first < second)."""

    def __str__(self) -> str:
        return (
            f"{self.test} ({self.method}): statistic {self.statistic:g}, p = {self.pvalue:.4g}, n = {self.n}; "
            f"mean difference {self.mean_difference:+.4g}, rank-biserial {self.rank_biserial:+.3f}, "
            f"Cliff's delta {self.cliffs_delta:+.3f}"
        )


# ------------------------------------------------------------------------------------------------ paired samples


def wilcoxon(x: ArrayLike, y: ArrayLike, *, zero_method: ZeroMethod = "wilcox", method: Method = "auto") -> PairedTest:
    """Wilcoxon's signed-rank test, two-sided.

    `zero_method`: zero differences are removed first ("wilcox"), ranked and then dropped ("pratt"), or ranked and
    split between the signs ("zsplit"). `method="auto"` is exact up to 50 pairs, with ties or zeros up to 13 (then
    given the ties), and otherwise the normal approximation, without continuity correction. Samples that agree
    everywhere have p = 1.
    """
    _one_of("zero_method", zero_method, ("wilcox", "pratt", "zsplit"))
    _one_of("method", method, ("auto", "exact", "normal"))
    x, y = paired_samples(x, y)
    d = x - y
    n_zero = int((d == 0).sum())
    limit = _EXACT_PAIRS if n_zero == 0 and len(np.unique(np.abs(d))) == len(d) else _EXACT_TIED_PAIRS
    exact = method == "exact" or (method == "auto" and len(d) <= limit)
    if zero_method == "wilcox":
        d = d[d != 0]
    plus, minus = _signed_rank_sums(d, zero_method)
    w = min(plus, minus)
    return PairedTest(
        test="Wilcoxon signed-rank",
        statistic=w,
        pvalue=_exact_signed_rank(d) if exact else _normal_signed_rank(w, d, zero_method),
        method=f"{'exact' if exact else 'normal approximation'}, zeros: {zero_method}",
        n=len(d),
        n_zero=n_zero,
        mean_difference=float((x - y).mean()),
        rank_biserial=(plus - minus) / (plus + minus) if plus + minus else 0.0,
        cliffs_delta=cliffs_delta(x, y),
    )


def paired_t(x: ArrayLike, y: ArrayLike) -> PairedTest:
    """Student's t-test of the mean difference; constant differences have p = 0, or 1 if they are zero."""
    from scipy.special import stdtr

    x, y = paired_samples(x, y)
    n = len(x)
    if n < 2:
        raise OodometerError(f"paired t: at least 2 pairs were needed, {n} was found.")
    d = x - y
    mean = float(d.mean())
    error = float(d.std(ddof=1)) / math.sqrt(n) if np.ptp(d) else 0.0
    t = mean / error if error else math.copysign(math.inf, mean) if mean else 0.0
    plus, minus = _signed_rank_sums(d[d != 0], "wilcox")
    return PairedTest(
        test="paired t",
        statistic=t,
        pvalue=float(2 * stdtr(n - 1, -abs(t))) if error else float(mean == 0),
        method=f"t, {n - 1} degrees of freedom",
        n=n,
        n_zero=int((d == 0).sum()),
        mean_difference=mean,
        rank_biserial=(plus - minus) / (plus + minus) if plus + minus else 0.0,
        cliffs_delta=cliffs_delta(x, y),
    )


def normality_route(x: ArrayLike, y: ArrayLike, *, alpha: float = 0.05) -> PairedTest:
    """The route of DCV-ROOD §5.2: t-test where both samples pass a test of normality, Wilcoxon otherwise.

    The paper does not name its normality test; this is Shapiro and Wilk's at `alpha`.
    """
    from dataclasses import replace

    x, y = paired_samples(x, y)
    normal = looks_normal(x, alpha=alpha) and looks_normal(y, alpha=alpha)
    found = paired_t(x, y) if normal else wilcoxon(x, y)
    why = "both samples normal" if normal else "not both samples normal"
    return replace(found, method=f"{found.method}; {why} by Shapiro–Wilk at {alpha:g}")


def looks_normal(x: ArrayLike, *, alpha: float = 0.05) -> bool:
    """Whether Shapiro and Wilk's test keeps normality; a constant sample is not normal."""
    from scipy.stats import shapiro

    sample = _sample(x, "sample")
    if len(sample) < 3:
        raise OodometerError(f"normality: at least 3 values were needed, {len(sample)} were found. Name the test.")
    return bool(np.ptp(sample) > 0 and shapiro(sample).pvalue >= alpha)


def signed_rank_pvalue(w: float, n: int) -> float:
    """2·P(W ≤ w) for n differences without ties and zeros, at most 1."""
    return float(min(1.0, 2 * _signs_cdf(tuple(range(1, n + 1)))[math.floor(w)]))


def normal_signed_rank_pvalue(w: float, n: int) -> float:
    """The same by the normal approximation, without continuity correction."""
    return _two_sided(w - n * (n + 1) / 4, n * (n + 1) * (2 * n + 1) / 24)


@lru_cache(maxsize=64)
def _signs_cdf(ranks: tuple[int, ...]) -> Floats:
    """P(W⁺ ≤ w): the share of the subsets of the ranks whose sum is at most w, adding one rank at a time."""
    mass = np.zeros(sum(ranks) + 1)
    mass[0] = 1.0
    for rank in ranks:
        mass *= 0.5
        mass[rank:] += mass[:-rank].copy()
    return np.cumsum(mass)


def _exact_signed_rank(d: Floats) -> float:
    """2·P(W ≤ w) over all signs of the differences, their ranks as they are; doubled mid-ranks are integers."""
    doubled = np.rint(2 * mid_ranks(np.abs(d))).astype(np.int64)
    w = min(doubled[d > 0].sum(), doubled[d < 0].sum())
    return float(min(1.0, 2 * _signs_cdf(tuple(sorted(doubled[d != 0].tolist())))[w]))


def _signed_rank_sums(d: Floats, zero_method: ZeroMethod) -> tuple[float, float]:
    ranks = mid_ranks(np.abs(d))
    plus, minus = float(ranks[d > 0].sum()), float(ranks[d < 0].sum())
    half = float(ranks[d == 0].sum()) / 2 if zero_method == "zsplit" else 0.0
    return plus + half, minus + half


def _normal_signed_rank(w: float, d: Floats, zero_method: ZeroMethod) -> float:
    """Mean and variance given the ties; Cureton 1967 for zeros that were ranked and dropped."""
    n, zeros = len(d), int((d == 0).sum())
    mean = n * (n + 1) / 4
    variance = n * (n + 1) * (2 * n + 1)
    tied = np.abs(d)
    if zero_method == "pratt":
        mean -= zeros * (zeros + 1) / 4
        variance -= zeros * (zeros + 1) * (2 * zeros + 1)
        tied = tied[tied > 0]
    return _two_sided(w - mean, (variance - _tie_term(tied) / 2) / 24)


# ---------------------------------------------------------------------------------------------- unpaired samples


def mann_whitney(x: ArrayLike, y: ArrayLike, *, method: Method = "auto") -> PairedTest:
    """The Mann–Whitney U test, two-sided; the normal approximation is corrected for ties and continuity."""
    _one_of("method", method, ("auto", "exact", "normal"))
    x, y = _sample(x, "first sample"), _sample(y, "second sample")
    n, m = len(x), len(y)
    both = np.concatenate([x, y])
    u = float(mid_ranks(both)[:n].sum()) - n * (n + 1) / 2
    distinct = len(np.unique(both)) == n + m
    if method == "exact" and not distinct:
        raise OodometerError("mann_whitney: the exact distribution needs values without ties; use method='normal'.")
    small = min(n, m) <= _EXACT_SMALLER and max(n, m) <= _EXACT_LARGER
    exact = method == "exact" or (method == "auto" and distinct and small)
    larger = max(u, n * m - u)
    return PairedTest(
        test="Mann–Whitney U",
        statistic=u,
        pvalue=_exact_u(n * m - larger, n, m) if exact else _normal_u(larger, n, m, both),
        method="exact" if exact else "normal approximation with continuity correction",
        n=n + m,
        n_zero=0,
        mean_difference=float(x.mean() - y.mean()),
        rank_biserial=2 * u / (n * m) - 1,
        cliffs_delta=2 * u / (n * m) - 1,
    )


def cliffs_delta(x: ArrayLike, y: ArrayLike) -> float:
    """P(x > y) − P(x < y) over all pairs of one value of each sample."""
    x, y = _sample(x, "first sample"), np.sort(_sample(y, "second sample"))
    above = np.searchsorted(y, x, "left").sum()
    below = (len(y) - np.searchsorted(y, x, "right")).sum()
    return float((above - below) / (len(x) * len(y)))


def _exact_u(u: float, n: int, m: int) -> float:
    return float(min(1.0, 2 * _u_cdf(min(n, m), max(n, m))[math.floor(u)]))


@lru_cache(maxsize=64)
def _u_cdf(n: int, m: int) -> Floats:
    """P(U ≤ u): the share of the n-subsets of n + m places by how many of the others stand below them."""
    ways = np.zeros((n + 1, n * m + 1))
    ways[0, 0] = 1.0
    for place in range(n + m):
        for taken in range(min(n, place + 1), 0, -1):
            others = place - (taken - 1)  # of the other sample, below this place
            if others <= m:
                ways[taken, others:] += ways[taken - 1, : n * m + 1 - others]
    return np.cumsum(ways[n]) / math.comb(n + m, n)


def _normal_u(larger: float, n: int, m: int, both: Floats) -> float:
    total = n + m
    variance = n * m / 12 * (total + 1 - _tie_term(both) / (total * (total - 1)))
    return _two_sided(larger - n * m / 2, variance, continuity=0.5)


# ------------------------------------------------------------------------------------------------ shared parts


def _tie_term(values: Floats) -> float:
    """Σ (t³ − t) over the groups of equal values."""
    counts = np.unique(values, return_counts=True)[1].astype(np.float64)
    return float((counts**3 - counts).sum())


def _two_sided(deviation: float, variance: float, *, continuity: float = 0.0) -> float:
    from scipy.special import ndtr

    if variance <= 0:
        return 1.0
    return float(min(1.0, 2 * ndtr(-(abs(deviation) - continuity) / math.sqrt(variance))))


def paired_samples(x: ArrayLike, y: ArrayLike) -> tuple[Floats, Floats]:
    """Two samples row by row, of equal length, finite."""
    first, second = _sample(x, "first sample"), _sample(y, "second sample")
    if len(first) != len(second):
        raise OodometerError(
            f"paired samples: equal lengths were needed, {len(first)} and {len(second)} were found. "
            "Samples that are not paired belong into mann_whitney."
        )
    return first, second


def _sample(values: ArrayLike, name: str) -> Floats:
    sample = read_numbers(values, name)
    if sample.ndim != 1 or sample.size == 0 or not np.isfinite(sample).all():
        found = f"shape {sample.shape}" if sample.ndim != 1 or sample.size == 0 else "NaN or infinity"
        raise OodometerError(f"{name}: at least one finite number in one dimension was needed, {found} was found.")
    return sample


def _one_of(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise OodometerError(f"{name}: one of {', '.join(map(repr, choices))} was needed, {value!r} was found.")


# --------------------------------------------------------------------------------------------- tests by name

TESTS: Mapping[str, Callable[[ArrayLike, ArrayLike], PairedTest]] = MappingProxyType(
    {"wilcoxon": wilcoxon, "mannwhitney": mann_whitney, "t": paired_t, "route": normality_route}
)
LABELS: Mapping[str, str] = MappingProxyType(
    {
        "wilcoxon": "Wilcoxon signed-rank (paired)",
        "mannwhitney": "Mann–Whitney U (unpaired)",
        "t": "Student's t (paired)",
        "route": "Student's t where both samples are normal, Wilcoxon signed-rank otherwise (DCV-ROOD §5.2)",
        "dcv-rood": "Wilcoxon signed-rank, as DCV-ROOD's printed p-values are (its text says Mann–Whitney)",
    }
)


def named_test(name: str) -> Callable[[ArrayLike, ArrayLike], PairedTest]:
    """The test of that name; "dcv-rood" is the one that reproduces the paper's tables."""
    _one_of("test", name, tuple(LABELS))
    return TESTS["wilcoxon" if name == "dcv-rood" else name]
