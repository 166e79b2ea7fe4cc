"""Failure detection: risk against coverage when the rows with the highest scores are refused first."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from oodometer.errors import OodometerError
from oodometer.metrics._counts import Floats, as_flags, as_numpy, as_scores, check_fraction, smallest_count

AurcConvention = Literal["fd-shifts", "geifman", "torch-uncertainty", "non-linear", "achievable"]
AugrcConvention = Literal["fd-shifts", "torch-uncertainty"]
Protocol = Literal["misclassification", "discard_id_errors", "keep_all", "scod", "ed"]

_AURC = ("fd-shifts", "geifman", "torch-uncertainty", "non-linear", "achievable")
_AUGRC = ("fd-shifts", "torch-uncertainty")
_PROTOCOLS = ("misclassification", "discard_id_errors", "keep_all", "scod", "ed")


# --- Which rows count as failures -------------------------------------------------------------------------------


class FailureRows(NamedTuple):
    """The rows a protocol evaluates: their scores, and which of them are failures. Unpack it into `aurc(*rows)`."""

    scores: Floats
    failures: NDArray[np.bool_]


def failures(
    id_scores: ArrayLike,
    id_correct: ArrayLike | None,
    ood_scores: ArrayLike | None = None,
    *,
    protocol: Protocol = "discard_id_errors",
    ood_correct: ArrayLike | None = None,
) -> FailureRows:
    """Scores and failures of ID and OOD rows as a protocol defines them.

    "misclassification" — ID rows alone; the wrong ones fail;
    "discard_id_errors" — OOD rows fail, wrong ID rows are left out (FD-Shifts' "proposed" mode);
    "keep_all" — OOD rows fail, all ID rows are right, whatever was predicted;
    "scod" — OOD rows and wrong ID rows fail;
    "ed" — wrong OOD rows fail, correct ID rows do not, the others are left out (error detection of BROAD, section 4;
    needs `ood_correct`; of attacks pass the rows that were right before; ID errors alone are "misclassification").
    """
    if protocol not in _PROTOCOLS:
        raise OodometerError(f"protocol: one of {', '.join(_PROTOCOLS)} was needed, {protocol!r} was found.")
    id_values = as_scores(id_scores, "ID")
    wrong = np.zeros(id_values.size, np.bool_)
    if protocol != "keep_all":
        wrong = ~as_flags(_given(id_correct, "id_correct", protocol), "id_correct", id_values.size)
    if protocol == "misclassification":
        return FailureRows(id_values, wrong)
    ood_values = as_scores(_given(ood_scores, "ood_scores", protocol), "OOD")
    if protocol == "ed":
        correct = as_flags(_given(ood_correct, "ood_correct", protocol), "ood_correct", ood_values.size)
        ood_values = ood_values[~correct]
    if protocol in ("discard_id_errors", "ed"):
        id_values, wrong = id_values[~wrong], wrong[~wrong]
    scores = np.concatenate((id_values, ood_values))
    return FailureRows(scores, np.concatenate((wrong, np.ones(ood_values.size, np.bool_))))


def _given(values: ArrayLike | None, name: str, protocol: str) -> ArrayLike:
    if values is None:
        raise OodometerError(f'protocol "{protocol}" needs {name}=; it was not given.')
    return values


# --- The curve --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class RiskCurve:
    """One point for every distinct score, the most confident first: what is accepted when s <= threshold."""

    threshold: Floats
    accepted: Floats  # rows up to this point
    failed: Floats  # sum of their residuals

    @property
    def n(self) -> int:
        """All rows."""
        return int(self.accepted[-1])

    @property
    def coverage(self) -> Floats:
        """The share of rows accepted."""
        return self.accepted / self.n

    @property
    def selective_risk(self) -> Floats:
        """Failures among the accepted rows."""
        return self.failed / self.accepted

    @property
    def generalised_risk(self) -> Floats:
        """Accepted failures among all rows."""
        return self.failed / self.n


def risk_coverage(scores: ArrayLike, failures: ArrayLike) -> RiskCurve:
    """The risk–coverage curve: rows with equal scores are accepted together.

    `failures` is true or 1 where the prediction failed, or a loss in [0, 1].
    """
    values = as_scores(scores, "risk")
    return _curve(values, _residuals(failures, values.size))


def _residuals(failures: ArrayLike, length: int) -> Floats:
    raw = as_numpy(failures)
    if raw.shape != (length,) or raw.dtype.kind not in "biuf":
        raise OodometerError(
            f"failures: one number in [0, 1] a score ({length}) was needed, {raw.dtype} of shape {raw.shape} was found."
        )
    residuals = raw.astype(np.float64)
    outside = ~((residuals >= 0) & (residuals <= 1))
    if outside.any():
        row = int(outside.argmax())
        raise OodometerError(
            f"failures: numbers in [0, 1] were needed, {residuals[row]} was found in row {row} "
            f"({int(outside.sum())} such rows). Pass predictions != labels, or a loss scaled to [0, 1]."
        )
    return residuals


def _order(scores: Floats, residuals: Floats) -> NDArray[np.intp]:
    """Rows by score. Sums of whole numbers do not depend on the order of ties; others do in the last digit."""
    whole = (residuals == np.rint(residuals)).all()
    return np.argsort(scores) if whole else np.lexsort((residuals, scores))


def _last_of_ties(ordered: Floats) -> NDArray[np.intp]:
    return np.flatnonzero(np.append(ordered[1:] != ordered[:-1], True))


def _curve(scores: Floats, residuals: Floats) -> RiskCurve:
    order = _order(scores, residuals)
    ordered = scores[order]
    last = _last_of_ties(ordered)
    accepted: Floats = (last + 1).astype(np.float64)
    return RiskCurve(ordered[last], accepted, np.cumsum(residuals[order])[last])


# --- Areas ------------------------------------------------------------------------------------------------------


def aurc(
    scores: ArrayLike,
    failures: ArrayLike,
    *,
    convention: AurcConvention = "fd-shifts",
    coverage: tuple[float, float] = (0.0, 1.0),
) -> float:
    """The area under selective risk over coverage; the conventions differ on the same data, so name yours.

    "fd-shifts" — trapezoids between distinct scores, the first risk kept down to coverage 0;
    "geifman" — mean of the risks after 1, 2, …, N rows (Geifman et al., ICLR 2019), ties in expectation;
    "torch-uncertainty" — trapezoids of the same risks over [1/N, 1], divided by its length;
    "non-linear" — the exact area when ties are split in proportion; it alone can be cut to a `coverage` range;
    "achievable" — the same on the points that no choice of threshold beats (the ROC curve's convex hull).
    """
    _check_choice("convention", convention, _AURC)
    curve = risk_coverage(scores, failures)
    if convention == "fd-shifts":
        _whole_range(coverage, convention)
        return _trapezoids(curve.coverage, curve.selective_risk, curve.selective_risk[0])
    if convention in ("geifman", "torch-uncertainty"):
        _whole_range(coverage, convention)
        risks = _failed_by_row(curve) / np.arange(1.0, curve.n + 1)
        return float(risks.mean()) if convention == "geifman" else _unit_spacing(risks)
    if convention == "achievable":
        _whole_range(coverage, convention)
        curve = _hull(curve)
    return _exact_area(curve, *_coverage_range(coverage))


def augrc(scores: ArrayLike, failures: ArrayLike, *, convention: AugrcConvention = "fd-shifts") -> float:
    """The area under generalised risk over coverage (Traub et al., NeurIPS 2024, equation 6); lower is better.

    For failures that are 0 or 1 it equals (1 − AUROC_f)·acc·(1 − acc) + (1 − acc)²/2.
    """
    _check_choice("convention", convention, _AUGRC)
    curve = risk_coverage(scores, failures)
    if convention == "torch-uncertainty":
        return _unit_spacing(_failed_by_row(curve) / curve.n)
    # Whole numbers until the last division.
    return _trapezoids(curve.accepted, curve.failed, 0.0) / curve.n**2


def eaurc(scores: ArrayLike, failures: ArrayLike) -> float:
    """AURC minus that of the perfect ranking; ties can make it negative.

    For failures that are 0 or 1 the perfect ranking has err + (1 − err)·ln(1 − err) (Geifman et al., ICLR 2019).
    """
    values = as_scores(scores, "risk")
    residuals = _residuals(failures, values.size)
    if _is_binary(residuals):
        err = float(residuals.mean())
        best = err + (1 - err) * math.log1p(-err) if err < 1 else 1.0
    else:
        best = aurc(np.arange(values.size), np.sort(residuals))
    return aurc(values, residuals) - best


def eaugrc(scores: ArrayLike, failures: ArrayLike) -> float:
    """AUGRC minus that of the perfect ranking, err²/2 for failures that are 0 or 1."""
    values = as_scores(scores, "risk")
    residuals = _residuals(failures, values.size)
    best = float(residuals.mean()) ** 2 / 2
    if not _is_binary(residuals):
        best = augrc(np.arange(values.size), np.sort(residuals))
    return augrc(values, residuals) - best


def aurc_ba(scores: ArrayLike, failures: ArrayLike, labels: ArrayLike) -> float:
    """AURC of the risk averaged over classes; a class without accepted rows adds risk 0 (FD-Shifts)."""
    values = as_scores(scores, "risk")
    residuals = _residuals(failures, values.size)
    classes, codes = _classes(labels, values.size)
    order = _order(values, residuals)
    ordered = values[order]
    last = _last_of_ties(ordered)
    risk = np.cumsum(_class_risk_steps(residuals[order], codes[order]))[last] / classes
    return _trapezoids((last + 1) / values.size, risk, risk[0])


def augrc_ba(scores: ArrayLike, failures: ArrayLike, labels: ArrayLike) -> float:
    """AUGRC with every class weighing the same: residuals times N / (K n_c) (FD-Shifts)."""
    values = as_scores(scores, "risk")
    residuals = _residuals(failures, values.size)
    classes, codes = _classes(labels, values.size)
    curve = _curve(values, residuals * (values.size / (classes * np.bincount(codes)))[codes])
    return _trapezoids(curve.accepted, curve.failed, 0.0) / curve.n**2


# --- Points on the curve ----------------------------------------------------------------------------------------


def risk_at_coverage(scores: ArrayLike, failures: ArrayLike, *, coverage: float) -> float:
    """Selective risk at the first threshold that accepts at least `coverage` of the rows."""
    check_fraction(coverage, "coverage", open_low=True)
    curve = risk_coverage(scores, failures)
    return float(curve.selective_risk[np.searchsorted(curve.accepted, smallest_count(coverage, curve.n))])


def coverage_at_risk(scores: ArrayLike, failures: ArrayLike, *, risk: float) -> float:
    """The largest coverage of a threshold whose selective risk is at most `risk`; 0 if there is none.

    The evaluated rows choose the threshold: for a promise about new rows use `threshold_at_risk`.
    """
    check_fraction(risk, "risk")
    curve = risk_coverage(scores, failures)
    within = np.flatnonzero(curve.selective_risk <= risk)
    return float(curve.coverage[within[-1]]) if within.size else 0.0


class RiskGuarantee(NamedTuple):
    """A threshold with the coverage and risk it had on the validation rows, and the bound on the true risk."""

    threshold: float
    coverage: float
    risk: float
    bound: float


def threshold_at_risk(
    scores: ArrayLike, failures: ArrayLike, *, risk: float = 0.25, delta: float = 0.05
) -> RiskGuarantee:
    """Selection with guaranteed risk: with probability 1 − δ rows with s <= threshold fail at most at rate `risk`.

    Algorithm 1 of Geifman & El-Yaniv (NeurIPS 2017): a binary search over ⌈log₂ N⌉ thresholds, each with the exact
    binomial bound at δ / ⌈log₂ N⌉. Call it with validation rows.
    """
    check_fraction(risk, "risk", open_low=True)
    if not 0 < delta < 1:
        raise OodometerError(f"delta: a probability in (0, 1) was needed, {delta} was found.")
    values = as_scores(scores, "validation")
    flags = as_flags(failures, "failures", values.size)
    curve = _curve(values, flags.astype(np.float64))
    steps = max(1, math.ceil(math.log2(curve.n)))
    best: tuple[int, float] | None = None
    low, high = 1, curve.n
    for _ in range(steps):
        middle = (low + high + 1) // 2
        point = int(np.searchsorted(curve.accepted, middle))  # ties are accepted together
        bound = _binomial_bound(curve.failed[point], curve.accepted[point], delta / steps)
        if bound <= risk:
            best, low = (point, bound), middle
        else:
            high = middle
    if best is None:
        raise OodometerError(
            f"risk = {risk:g} cannot be guaranteed at delta = {delta:g} with these {curve.n} validation rows "
            f"({int(flags.sum())} failures). Allow a larger risk or delta, or bring more rows."
        )
    point, bound = best
    where = (curve.threshold[point], curve.coverage[point], curve.selective_risk[point], bound)
    return RiskGuarantee(*map(float, where))


# --- Parts ------------------------------------------------------------------------------------------------------


def _check_choice(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise OodometerError(f"{name}: one of {', '.join(known)} was needed, {value!r} was found.")


def _whole_range(coverage: tuple[float, float], convention: str) -> None:
    if tuple(coverage) != (0.0, 1.0):
        raise OodometerError(
            f'coverage: a part of [0, 1] needs convention="non-linear", "{convention}" was found (its points do not '
            "say what lies between them)."
        )


def _coverage_range(coverage: tuple[float, float]) -> tuple[float, float]:
    low, high = coverage
    if not 0 <= low < high <= 1:
        raise OodometerError(f"coverage: 0 <= low < high <= 1 was needed, ({low}, {high}) was found.")
    return low, high


def _is_binary(residuals: Floats) -> bool:
    return bool(((residuals == 0) | (residuals == 1)).all())


def _trapezoids(x: Floats, y: Floats, first: float) -> float:
    """The area under the points from (0, first) on."""
    widths = np.diff(x, prepend=0.0)
    before = np.concatenate(([first], y[:-1]))
    return float((widths * (before + y)).sum() / 2)


def _unit_spacing(risks: Floats) -> float:
    """Trapezoids over equally spaced points, divided by the length they span."""
    if risks.size < 2:
        raise OodometerError('convention="torch-uncertainty" needs at least two rows, one was found.')
    return float((risks.sum() - (risks[0] + risks[-1]) / 2) / (risks.size - 1))


def _failed_by_row(curve: RiskCurve) -> Floats:
    """Failures after 1, 2, …, N rows; inside a tie their expectation over all orders, so order is no result."""
    rows = np.arange(1.0, curve.n + 1)
    return np.asarray(np.interp(rows, np.append(0.0, curve.accepted), np.append(0.0, curve.failed)))


def _exact_area(curve: RiskCurve, low: float, high: float) -> float:
    """∫ failed / accepted over a range of coverage, failed being linear between points: a line and a logarithm."""
    k0, e0 = np.append(0.0, curve.accepted[:-1]), np.append(0.0, curve.failed[:-1])
    slope = (curve.failed - e0) / (curve.accepted - k0)
    a = np.clip(k0, low * curve.n, high * curve.n)
    b = np.clip(curve.accepted, low * curve.n, high * curve.n)
    inside = k0 > 0  # the first stretch has no logarithm: its intercept is 0
    log = np.log(np.divide(b, a, out=np.ones_like(a), where=inside))
    return float((slope * (b - a) + (e0 - slope * k0) * log).sum() / curve.n)


def _hull(curve: RiskCurve) -> RiskCurve:
    """The lower convex hull of failed over accepted: the points of the ROC curve's hull."""
    x, y = curve.accepted.tolist(), curve.failed.tolist()
    kept = [(0.0, 0.0, -1)]
    for i, (k, e) in enumerate(zip(x, y, strict=True)):
        while len(kept) > 1 and _no_left_turn(kept[-2], kept[-1], k, e):
            kept.pop()
        kept.append((k, e, i))
    index = np.array([i for *_, i in kept[1:]])
    return RiskCurve(curve.threshold[index], curve.accepted[index], curve.failed[index])


def _no_left_turn(a: tuple[float, float, int], b: tuple[float, float, int], k: float, e: float) -> bool:
    return (b[0] - a[0]) * (e - a[1]) <= (b[1] - a[1]) * (k - a[0])


def _classes(labels: ArrayLike, length: int) -> tuple[int, NDArray[np.intp]]:
    raw = as_numpy(labels)
    if raw.shape != (length,):
        raise OodometerError(f"labels: one class a score ({length}) was needed, shape {raw.shape} was found.")
    names, codes = np.unique(raw, return_inverse=True)
    return len(names), codes


def _class_risk_steps(residuals: Floats, codes: NDArray[Any]) -> Floats:
    """By how much each row, in order of acceptance, changes the selective risk of its own class."""
    by_class = np.argsort(codes, kind="stable")
    sizes = np.bincount(codes)
    first = np.repeat(np.cumsum(sizes) - sizes, sizes)  # where the class of each row starts
    within = np.arange(1.0, codes.size + 1) - first
    sums = np.cumsum(residuals[by_class])
    failed = sums - np.append(0.0, sums)[first]
    risk = failed / within
    before = np.append(0.0, risk[:-1])
    before[within == 1] = 0.0
    steps = np.empty_like(risk)
    steps[by_class] = risk - before
    return np.asarray(steps)


def _binomial_bound(failed: float, rows: float, delta: float) -> float:
    """The largest rate at which so few failures still have probability δ (Clopper–Pearson)."""
    from scipy.special import betaincinv

    return float(betaincinv(failed + 1, rows - failed, 1 - delta)) if failed < rows else 1.0
