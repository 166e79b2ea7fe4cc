"""How sure a number is: DeLong's intervals and paired test of AUROC, stratified bootstrap, Wilson's of proportions."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Literal, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from oodometer.errors import OodometerError, OodometerWarning
from oodometer.metrics._counts import Counts, Floats, Side, as_scores, measure, pieces
from oodometer.metrics.ranking import RANKING, harmonic_mean

Transform = Literal["logit", "plain"]

_DRAWN = 1 << 14  # rows drawn at once: their counts stay in a core's cache


@dataclass(frozen=True)
class Interval:
    """A number, where it lies with probability `level`, and its standard error (NaN where the method has none)."""

    value: float
    low: float
    high: float
    level: float
    se: float
    method: str

    def __str__(self) -> str:
        return f"{self.value:.4f} [{self.low:.4f}, {self.high:.4f}] ({100 * self.level:g} %, {self.method})"


@dataclass(frozen=True)
class PairedDeLong:
    """AUROC of a minus AUROC of b on the same rows, its interval, and the test of no difference."""

    auroc_a: float
    auroc_b: float
    difference: float
    low: float
    high: float
    level: float
    se: float
    z: float
    p: float


# --- DeLong -----------------------------------------------------------------------------------------------------


def delong(
    id_scores: ArrayLike, ood_scores: ArrayLike, *, level: float = 0.95, transform: Transform = "logit"
) -> Interval:
    """AUROC with DeLong's interval (Biometrics 1988), from ranks in O(N log N).

    `transform="logit"` keeps the interval inside (0, 1); "plain" is AUROC ± z·SE, cut to [0, 1]. Perfectly separated
    scores have no variance to estimate: they get the bound (1 − level)^(1/k) on one side, k = min(n, m), because k
    disjoint pairs are all in order with probability AUROC^k at most.
    """
    return delong_mean(id_scores, {"": ood_scores}, level=level, transform=transform)


def delong_mean(
    id_scores: ArrayLike,
    ood_scores: Mapping[str, ArrayLike],
    *,
    level: float = 0.95,
    transform: Transform = "logit",
) -> Interval:
    """The unweighted mean of the AUROCs of several OOD sets; they share the ID rows, which the interval respects."""
    if not ood_scores:
        raise OodometerError('ood_scores: at least one set was needed, as in {"textures": scores}.')
    sets = [Side.of(scores, f"OOD {name!r}" if name else "OOD") for name, scores in ood_scores.items()]
    return delong_of(Side.of(id_scores, "ID"), sets, level=level, transform=transform)


def delong_of(id_side: Side, sets: Sequence[Side], *, level: float, transform: Transform) -> Interval:
    """`delong_mean` of scores that are sorted already."""
    check_level(level)
    if transform not in ("logit", "plain"):
        raise OodometerError(f'transform: "logit" or "plain" was needed, {transform!r} was found.')
    smallest = min(id_side.n, *(side.n for side in sets))
    _need_two_rows(smallest)
    values, variances = [], []
    id_part = np.zeros(len(id_side.values))
    for side in sets:
        wins = 2 * side.n - _twice_below(id_side.values, side)  # 2m·V01, in whole numbers
        lost = _twice_below(side.values, id_side)  # 2n·V10
        value = float((id_side.at * wins).sum() / (2 * id_side.n * side.n))
        values.append(value)
        variances.append(_mean_variance(lost / (2 * id_side.n), side.at, side.n))
        id_part += wins / (2 * side.n * len(sets))
    value = float(np.mean(values))
    variance = sum(variances) / len(sets) ** 2 + _mean_variance(id_part, id_side.at, id_side.n)
    if value in (0.0, 1.0):
        return _separated(value, smallest, level)
    if variance <= np.finfo(np.float64).eps ** 2:  # all scores equal, or sets that are perfect in opposite directions
        return _bounded(value, smallest, level)
    return _normal(value, math.sqrt(variance), level, transform)


def paired_delong(
    id_a: ArrayLike, ood_a: ArrayLike, id_b: ArrayLike, ood_b: ArrayLike, *, level: float = 0.95
) -> PairedDeLong:
    """Do two scores of the same rows differ in AUROC? DeLong's test with the covariance of both (two-sided).

    Where the difference has no variance (both separate, or order the rows alike) Hoeffding's inequality replaces the
    normal law: it holds for any number of rows, and is wide for few.
    """
    check_level(level)
    a = [as_scores(id_a, "ID (a)"), as_scores(ood_a, "OOD (a)")]
    b = [as_scores(id_b, "ID (b)"), as_scores(ood_b, "OOD (b)")]
    for side, one, other in zip(("ID", "OOD"), a, b, strict=True):
        if one.size != other.size:
            raise OodometerError(
                f"{side} scores: both detectors must score the same rows in the same order, {one.size} and "
                f"{other.size} rows were found. For different rows compare two delong() intervals."
            )
    n, m = a[0].size, a[1].size
    _need_two_rows(min(n, m))
    wins_a, wins_b = _row_wins(*a), _row_wins(*b)
    auroc_a, auroc_b = (float(wins[1].sum() / (2 * n * m)) for wins in (wins_a, wins_b))
    # 2m·V01 and 2n·V10 of a minus those of b, in whole numbers: equal orders give exact zeros.
    by_id, by_ood = wins_a[0] - wins_b[0], wins_a[1] - wins_b[1]
    difference = float(by_ood.sum() / (2 * n * m))
    if np.ptp(by_id) == np.ptp(by_ood) == 0:
        return _hoeffding_test(auroc_a, auroc_b, difference, min(n, m), level=level)
    se = math.sqrt(by_id.var(ddof=1) / (4 * m**2 * n) + by_ood.var(ddof=1) / (4 * n**2 * m))
    low, high = _cut(difference, _quantile(level) * se)
    z = difference / se
    return PairedDeLong(auroc_a, auroc_b, difference, low, high, level, se, z, math.erfc(abs(z) / math.sqrt(2)))


def _twice_below(values: Floats, side: Side) -> Floats:
    """Twice the scores of a side below each value, a tie being half of one, in whole numbers."""
    below = side.below()
    left = np.searchsorted(side.values, values, side="left")
    # A value that the side has is followed by the next one: everything up to it lies below that.
    tied = side.values.take(left, mode="clip") == values
    return np.asarray(below[left] + below[left + tied])


def _row_wins(id_values: Floats, ood_values: Floats) -> tuple[Floats, Floats]:
    """2m·V01 and 2n·V10 of every row in its own order."""
    id_side, ood_side = Side.of_sorted(np.sort(id_values)), Side.of_sorted(np.sort(ood_values))
    return 2 * ood_side.n - _twice_below(id_values, ood_side), _twice_below(ood_values, id_side)


def _mean_variance(values: Floats, weights: Floats, rows: int) -> float:
    """The variance of the mean of rows that share values."""
    center = (weights * values).sum() / rows
    return float((weights * (values - center) ** 2).sum() / (rows - 1) / rows)


def _normal(value: float, se: float, level: float, transform: str) -> Interval:
    z = _quantile(level)
    if transform == "plain":
        return Interval(value, max(value - z * se, 0.0), min(value + z * se, 1.0), level, se, "DeLong")
    center, reach = math.log(value / (1 - value)), z * se / (value * (1 - value))
    return Interval(value, _logistic(center - reach), _logistic(center + reach), level, se, "DeLong, logit")


def _logistic(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


def _separated(value: float, pairs: int, level: float) -> Interval:
    bound = (1 - level) ** (1 / pairs)
    low, high = (bound, 1.0) if value == 1 else (0.0, 1 - bound)
    return Interval(value, low, high, level, 0.0, "one-sided bound")


def _bounded(value: float, pairs: int, level: float) -> Interval:
    reach = _hoeffding(pairs, level)
    return Interval(value, max(value - reach, 0.0), min(value + reach, 1.0), level, 0.0, "Hoeffding")


def _hoeffding(pairs: int, level: float) -> float:
    """P(|mean − truth| >= t) <= 2 exp(−2kt²) for means over pairs (Hoeffding, JASA 1963, equation 5.7)."""
    return math.sqrt(math.log(2 / (1 - level)) / (2 * pairs))


def _hoeffding_test(auroc_a: float, auroc_b: float, difference: float, pairs: int, *, level: float) -> PairedDeLong:
    if difference:
        warnings.warn(
            "paired DeLong: every row differs by the same amount, so that no variance can be estimated; p and the "
            "interval are Hoeffding's bounds, valid for any number of rows.",
            OodometerWarning,
            stacklevel=3,
        )
    low, high = _cut(difference, 2 * _hoeffding(pairs, level))  # [−1, 1] is twice the range of an AUROC
    z = math.copysign(math.inf, difference) if difference else 0.0
    p = min(1.0, 2 * math.exp(-pairs * difference**2 / 2))
    return PairedDeLong(auroc_a, auroc_b, difference, low, high, level, 0.0, z, p)


def _cut(difference: float, reach: float) -> tuple[float, float]:
    return max(difference - reach, -1.0), min(difference + reach, 1.0)


# --- Bootstrap --------------------------------------------------------------------------------------------------


@overload
def bootstrap(
    id_scores: ArrayLike,
    ood_scores: ArrayLike,
    metric: str = ...,
    *,
    n: int = ...,
    level: float = ...,
    seed: int = ...,
) -> Interval: ...


@overload
def bootstrap(
    id_scores: ArrayLike,
    ood_scores: ArrayLike,
    metric: list[str] | tuple[str, ...] | None,
    *,
    n: int = ...,
    level: float = ...,
    seed: int = ...,
) -> dict[str, Interval]: ...


def bootstrap(
    id_scores: ArrayLike,
    ood_scores: ArrayLike,
    metric: str | list[str] | tuple[str, ...] | None = "auroc",
    *,
    n: int = 1000,
    level: float = 0.95,
    seed: int = 0,
) -> Interval | dict[str, Interval]:
    """Percentile intervals over `n` draws of the rows, ID and OOD each from its own.

    `metric` is a name of `metrics.ranking`, several of them, or None for all at once.
    """
    check_level(level)
    if n < 2:
        raise OodometerError(f"bootstrap: n >= 2 draws were needed, {n} was found.")
    names = _names(metric)
    id_side, ood_side = Side.of(id_scores, "ID"), Side.of(ood_scores, "OOD")
    values = _evaluate([Counts.of(id_side, ood_side)], names)
    draws = redraw(id_side, ood_side, names, n, seed)
    tails = [(1 - level) / 2, (1 + level) / 2]
    found = {}
    for name in names:
        low, high = np.quantile(draws[name], tails).tolist()
        found[name] = Interval(float(values[name]), low, high, level, float(draws[name].std(ddof=1)), "bootstrap")
    return found[metric] if isinstance(metric, str) else found


def redraw(id_side: Side, ood_side: Side, names: Sequence[str], n: int, seed: int) -> dict[str, Floats]:
    """The named metrics of `n` draws. Scores are sorted once: a draw only counts how often each row comes."""
    id_rng, ood_rng = np.random.default_rng(seed).spawn(2)  # a stream a side: results do not depend on block sizes
    at_once = max(1, _DRAWN // (id_side.n + ood_side.n))
    ranges = list(pieces(id_side, ood_side))
    parts: list[dict[str, NDArray[Any]]] = []
    for start in range(0, n, at_once):
        repetitions = min(at_once, n - start)
        id_below, ood_below = (_drawn(s, r, repetitions) for s, r in ((id_side, id_rng), (ood_side, ood_rng)))
        counts = (Counts.placed(id_below[:, p.id], ood_below[:, p.ood], p.merge, id_side.n, ood_side.n) for p in ranges)
        parts.append(_evaluate(counts, names))
    return {name: np.concatenate([part[name] for part in parts]) for name in names}


def _drawn(side: Side, rng: np.random.Generator, repetitions: int) -> Floats:
    """How many drawn rows lie below each distinct value, one line a repetition."""
    rows = rng.integers(0, side.n, (repetitions, side.n))
    rows += side.n * np.arange(repetitions)[:, None]
    times = np.bincount(rows.ravel(), minlength=rows.size).reshape(rows.shape)
    below = np.zeros((repetitions, side.n + 1))
    np.cumsum(times, axis=1, out=below[:, 1:])
    return below if side.starts is None else below[:, side.starts.astype(np.intp)]


def _names(metric: str | Sequence[str] | None) -> tuple[str, ...]:
    known = (*RANKING, "aupr_harmonic")
    names = known if metric is None else (metric,) if isinstance(metric, str) else tuple(metric)
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise OodometerError(f"metric: names among {', '.join(known)} were needed, {unknown or 'none'} was found.")
    return names


def _evaluate(counts: Iterator[Counts] | Sequence[Counts], names: Sequence[str]) -> dict[str, NDArray[Any]]:
    """The named ranking metrics, and nothing that they do not need."""
    needed = {"aupr_ood", "aupr_id"} if "aupr_harmonic" in names else set()
    values = measure(counts, {name: metric for name, metric in RANKING.items() if name in {*names, *needed}})
    if needed:
        values["aupr_harmonic"] = harmonic_mean(values["aupr_ood"], values["aupr_id"])
    return values


# --- Proportions ------------------------------------------------------------------------------------------------


def wilson(k: int, n: int, *, level: float = 0.95) -> Interval:
    """Wilson's interval of a proportion k / n, for instance an FPR at a threshold that was fixed in advance."""
    check_level(level)
    if not (n >= 1 and 0 <= k <= n and k == int(k) and n == int(n)):
        raise OodometerError(f"wilson: whole numbers 0 <= k <= n, n >= 1 were needed, k={k} and n={n} were found.")
    z, share = _quantile(level), k / n
    center = (share + z**2 / (2 * n)) / (1 + z**2 / n)
    reach = z / (1 + z**2 / n) * math.sqrt(share * (1 - share) / n + z**2 / (4 * n**2))
    low, high = (0.0 if k == 0 else center - reach), (1.0 if k == n else center + reach)
    return Interval(share, low, high, level, math.nan, "Wilson")


def check_level(level: float) -> None:
    """Raise unless the level is a probability strictly between 0 and 1."""
    if not 0 < level < 1:
        raise OodometerError(f"level: a probability in (0, 1) was needed (95 % is .95), {level} was found.")


def _quantile(level: float) -> float:
    return NormalDist().inv_cdf((1 + level) / 2)


def _need_two_rows(rows: int) -> None:
    if rows < 2:
        raise OodometerError("DeLong needs at least two ID and two OOD scores to estimate a variance, one was found.")
