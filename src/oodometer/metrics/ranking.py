"""Metrics of how two sets of scores are ordered: AUROC, FPR@TPR, TPR@FPR, AUPR, F1, detection error."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from oodometer.errors import OodometerError
from oodometer.metrics._counts import (
    Counts,
    Metric,
    Side,
    View,
    blocks,
    check_fraction,
    check_positive,
    largest_count,
    measure,
    smallest_count,
)

Positive = Literal["ood", "id"]
AuprMethod = Literal["trapezoid", "average_precision"]


def auroc(id_scores: ArrayLike, ood_scores: ArrayLike) -> float:
    """The probability that an OOD score exceeds an ID score, ties counted half."""
    return _one(AUROC, id_scores, ood_scores)


def fpr_at_tpr(id_scores: ArrayLike, ood_scores: ArrayLike, *, tpr: float = 0.95, positive: Positive = "ood") -> float:
    """The smallest false positive rate of any threshold whose true positive rate is at least `tpr`.

    `positive="ood"`: ID rows flagged when 95 % of the OOD rows are (OpenOOD, OpenMIBOOD, pytorch-ood).
    `positive="id"`: OOD rows accepted when 95 % of the ID rows are (ODIN, ViM, the original papers).
    """
    check_fraction(tpr, "tpr", open_low=True)
    return _one(_fpr(tpr, check_positive(positive)), id_scores, ood_scores)


def tpr_at_fpr(id_scores: ArrayLike, ood_scores: ArrayLike, *, fpr: float = 0.05, interpolate: bool = False) -> float:
    """The largest share of OOD rows flagged by a threshold that flags at most `fpr` of the ID rows.

    `interpolate=True` reads the piecewise linear ROC curve at `fpr` instead of at an attained threshold.
    """
    check_fraction(fpr, "fpr")
    attained = _one(_tpr(fpr), id_scores, ood_scores)
    return attained + _diagonal_gain(id_scores, ood_scores, fpr) if interpolate else attained


def aupr(
    id_scores: ArrayLike,
    ood_scores: ArrayLike,
    *,
    positive: Positive = "ood",
    method: AuprMethod = "trapezoid",
) -> float:
    """The area under the precision–recall curve with the named positive class.

    It depends on the class ratio: print both sample sizes beside it.
    """
    return _one(_aupr(check_positive(positive), method), id_scores, ood_scores)


def aupr_harmonic(id_scores: ArrayLike, ood_scores: ArrayLike, *, method: AuprMethod = "trapezoid") -> float:
    """The harmonic mean of the AUPR with ID and with OOD positive (OpenMIBOOD, supplement A.5)."""
    both = {"id": _aupr("id", method), "ood": _aupr("ood", method)}
    values = measure(_pieces(id_scores, ood_scores), both)
    return float(harmonic_mean(values["id"], values["ood"]))


def f1_max(id_scores: ArrayLike, ood_scores: ArrayLike, *, positive: Positive = "ood") -> float:
    """The largest F1 over all thresholds: optimistic, because the evaluated rows choose the threshold."""
    return _one(_best_f1(check_positive(positive)), id_scores, ood_scores)


def accuracy_at_tnr(id_scores: ArrayLike, ood_scores: ArrayLike, *, tnr: float = 0.9) -> float:
    """Accuracy of ID against OOD at the smallest threshold that keeps `tnr` of the ID rows (acc_90 at .9)."""
    check_fraction(tnr, "tnr", open_low=True)
    return _one(_accuracy_keeping(tnr), id_scores, ood_scores)


def detection_error(id_scores: ArrayLike, ood_scores: ArrayLike, *, prior: float | Literal["empirical"] = 0.5) -> float:
    """The smallest (1 − prior)·FPR + prior·FNR over all thresholds; `prior` is the probability of OOD.

    "empirical" takes the share of OOD rows as the prior.
    """
    if prior != "empirical":
        check_fraction(prior, "prior")
    return _one(_least_error(prior), id_scores, ood_scores)


def detection_accuracy(
    id_scores: ArrayLike, ood_scores: ArrayLike, *, prior: float | Literal["empirical"] = 0.5
) -> float:
    """The largest accuracy over all thresholds, 1 − `detection_error`."""
    return 1.0 - detection_error(id_scores, ood_scores, prior=prior)


def ranking(id_scores: ArrayLike, ood_scores: ArrayLike) -> dict[str, float]:
    """Every ranking metric under its full name, from one sort of each side."""
    return {name: float(value) for name, value in evaluate(_pieces(id_scores, ood_scores)).items()}


# --- The metrics as parts of counts. Parts reduce the last axis, so a bootstrap runs them on many rows at once.


def _sum(weights: NDArray[Any], values: NDArray[Any]) -> NDArray[Any]:
    return np.asarray(np.einsum("...i,...i->...", weights, values))


def _area_lost(view: View) -> NDArray[Any]:
    """Twice the pairs that are in the wrong order, a tie being half of one, in integers."""
    return np.asarray(_sum(view.at, view.fp) + _sum(view.at, view.fp_before))


# Mann–Whitney's U over n·m
AUROC = Metric("ood", np.add, _area_lost, lambda lost, v: (2 * v.n_pos * v.n_neg - lost) / (2 * v.n_pos * v.n_neg))


def _fpr(tpr: float, positive: str) -> Metric:
    """FPR at the most positive value whose flagged part holds `tpr` of the positives."""

    def part(view: View) -> NDArray[Any]:
        return view.reaching(smallest_count(tpr, view.n_pos))[1]

    return Metric(positive, np.minimum, part, lambda fp, v: fp / v.n_neg)


def _tpr(fpr: float) -> Metric:
    """TPR at the last value that admits at most `fpr` of the negatives; flagging nothing is admitted."""

    def part(view: View) -> NDArray[Any]:
        return view.admitting(largest_count(fpr, view.n_neg))

    return Metric("ood", np.maximum, part, lambda tp, v: tp / v.n_pos)


def _aupr(positive: str, method: str) -> Metric:
    """Σ (R_j − R_{j−1}) P_j, or its trapezoids from (recall 0, precision 1) on."""
    if method == "average_precision":
        return Metric(positive, np.add, lambda v: _sum(v.at, v.precision), lambda area, v: area / v.n_pos)
    if method == "trapezoid":
        return Metric(
            positive,
            np.add,
            lambda v: _sum(v.at, v.precision) + _sum(v.at, v.precision_before),
            lambda area, v: area / (2 * v.n_pos),
        )
    raise OodometerError(f'method: "trapezoid" or "average_precision" was needed, {method!r} was found.')


def _best_f1(positive: str) -> Metric:
    """max 2TP / (2TP + FP + FN); the denominator is the flagged rows plus the positives."""
    return Metric(positive, np.maximum, lambda v: (v.tp / (v.flagged + v.n_pos)).max(-1), lambda half, _: 2 * half)


def _accuracy_keeping(tnr: float) -> Metric:
    """(TN + TP) / all at the smallest ID score with #{ID <= t} / n >= tnr."""

    def part(view: View) -> NDArray[Any]:
        return np.stack(view.reaching(smallest_count(tnr, view.n_pos)))

    return Metric("id", np.minimum, part, lambda x, v: (x[0] + v.n_neg - x[1]) / (v.n_pos + v.n_neg))


def _least_error(prior: float | Literal["empirical"]) -> Metric:
    """min of (1 − prior)·FPR + prior·FNR, put together as the gain over flagging nothing (error = prior)."""
    if prior == "empirical":
        return Metric(
            "ood",
            np.minimum,
            lambda v: (v.fp - v.tp).min(-1),
            lambda gain, v: (v.n_pos + np.minimum(gain, 0)) / (v.n_pos + v.n_neg),
        )
    return Metric(
        "ood",
        np.minimum,
        lambda v: ((1 - prior) * v.n_pos * v.fp - prior * v.n_neg * v.tp).min(-1),
        lambda gain, v: (prior * v.n_pos * v.n_neg + np.minimum(gain, 0)) / (v.n_pos * v.n_neg),
    )


def harmonic_mean(a: NDArray[Any], b: NDArray[Any]) -> NDArray[Any]:
    """2ab / (a + b), and 0 where both are 0."""
    total = np.asarray(a + b)
    return np.asarray(np.divide(2 * a * b, total, out=np.zeros(total.shape), where=total > 0))


RANKING = {
    "auroc": AUROC,
    "fpr95_ood": _fpr(0.95, "ood"),
    "fpr95_id": _fpr(0.95, "id"),
    "tpr5": _tpr(0.05),
    "aupr_ood": _aupr("ood", "trapezoid"),
    "aupr_id": _aupr("id", "trapezoid"),
    "ap_ood": _aupr("ood", "average_precision"),
    "ap_id": _aupr("id", "average_precision"),
    "f1_max_ood": _best_f1("ood"),
    "f1_max_id": _best_f1("id"),
    "acc90": _accuracy_keeping(0.9),
    "detection_error": _least_error(0.5),
}
"""What the names of the summary's columns and of the bootstrap stand for."""


def evaluate(pieces: Iterable[Counts]) -> dict[str, NDArray[Any]]:
    """Every ranking metric of one comparison, or of many repetitions of it."""
    values = measure(pieces, RANKING)
    return values | {"aupr_harmonic": harmonic_mean(values["aupr_ood"], values["aupr_id"])}


def _pieces(id_scores: ArrayLike, ood_scores: ArrayLike) -> Iterator[Counts]:
    return blocks(Side.of(id_scores, "ID"), Side.of(ood_scores, "OOD"))


def _one(metric: Metric, id_scores: ArrayLike, ood_scores: ArrayLike) -> float:
    return float(measure(_pieces(id_scores, ood_scores), {"": metric})[""])


def _diagonal_gain(id_scores: ArrayLike, ood_scores: ArrayLike, fpr: float) -> float:
    """What the ROC curve adds between two attained points: only values that both classes share slant it."""
    view = Counts.of(Side.of(id_scores, "ID"), Side.of(ood_scores, "OOD")).ood
    allowed = fpr * view.n_neg
    on_slant = (view.fp_before < allowed) & (view.fp > largest_count(fpr, view.n_neg))
    gain = view.at * (allowed - view.fp_before) / np.maximum(view.fp - view.fp_before, 1)
    return float(gain[on_slant].sum() / view.n_pos)  # one value at most
