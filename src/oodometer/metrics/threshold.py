"""Thresholds chosen without the evaluated OOD set, and what one of them does; a row is flagged iff s > t."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import ArrayLike

from oodometer.errors import OodometerError, OodometerWarning
from oodometer.metrics._counts import (
    Counts,
    Side,
    as_numpy,
    as_scores,
    check_fraction,
    check_positive,
    largest_count,
    smallest_count,
)

if TYPE_CHECKING:
    from pandas import DataFrame


def threshold_at_tnr(id_calibration: ArrayLike, *, tnr: float = 0.95) -> float:
    """The smallest calibration score that keeps at least `tnr` of the calibration rows ("@95TNR")."""
    check_fraction(tnr, "tnr", open_low=True)
    scores = as_scores(id_calibration, "ID calibration")
    rank = smallest_count(tnr, scores.size)
    return float(np.partition(scores, rank - 1)[rank - 1])


def threshold_at_tpr(ood_validation: ArrayLike, *, tpr: float = 0.95) -> float:
    """The largest threshold that flags at least `tpr` of the validation OOD rows.

    It lies one step, in the scores' own precision, below the last score that has to be flagged.
    """
    check_fraction(tpr, "tpr", open_low=True)
    scores = as_scores(ood_validation, "OOD validation")
    rank = scores.size - smallest_count(tpr, scores.size)
    last = np.partition(scores, rank)[rank]
    own = as_numpy(ood_validation).dtype
    precision = own.type if own.kind == "f" else np.float64
    return float(np.nextafter(precision(last), precision(-np.inf)))


def threshold_equal_error(id_scores: ArrayLike, ood_scores: ArrayLike) -> float:
    """The observed score at which FPR and FNR are closest; ties: the smaller error, then the smaller score.

    On a separate OOD validation set this is "@val". On the evaluated set it is "@test": a reference only,
    because no one has that set when the threshold is chosen (Beyond AUROC, section 4.2).
    """
    id_side, ood_side = Side.of(id_scores, "ID"), Side.of(ood_scores, "OOD")
    counts = Counts.of(id_side, ood_side)
    values = np.concatenate((id_side.values, ood_side.values))
    n, m = id_side.n, ood_side.n
    fpr = np.concatenate((n - counts.id.tp, counts.ood.fp_before)) * m  # over n·m, in whole numbers
    fnr = np.concatenate((counts.id.fp, m - counts.ood.tp_before)) * n
    best = np.lexsort((values, np.maximum(fpr, fnr), np.abs(fpr - fnr)))[0]
    return float(values[best])


def threshold_conformal(id_calibration: ArrayLike, *, alpha: float = 0.05) -> float:
    """The ⌈(n + 1)(1 − α)⌉-th smallest calibration score: a new ID row is flagged with probability <= α."""
    check_fraction(alpha, "alpha", open_low=True)
    scores = as_scores(id_calibration, "ID calibration")
    above = largest_count(alpha, scores.size + 1)
    if above < 1:
        raise OodometerError(
            f"alpha = {alpha:g} needs at least {math.ceil(1 / alpha) - 1} calibration scores, {scores.size} "
            f"were found. Calibrate on more ID rows, or choose alpha >= {1 / (scores.size + 1):.3g}."
        )
    rank = min(scores.size + 1 - above, scores.size)
    return float(np.partition(scores, rank - 1)[rank - 1]) if rank else -math.inf


@dataclass(frozen=True)
class AtThreshold:
    """What one threshold does to the ID rows and to every OOD set."""

    threshold: float
    fpr: float
    fnr: dict[str, float]
    n_id: int
    n_ood: dict[str, int]

    @property
    def fnr_spread(self) -> float:
        """Largest minus smallest FNR: how much the error depends on which OOD set arrives."""
        return max(self.fnr.values()) - min(self.fnr.values())

    def to_pandas(self) -> DataFrame:
        """One row an OOD set."""
        import pandas as pd

        rows = [
            {"dataset": name, "threshold": self.threshold, "fpr": self.fpr, "fnr": fnr}
            | {"n_id": self.n_id, "n_ood": self.n_ood[name]}
            for name, fnr in self.fnr.items()
        ]
        return pd.DataFrame(rows)


def at_one_threshold(id_scores: ArrayLike, ood_scores: Mapping[str, ArrayLike], threshold: float) -> AtThreshold:
    """FPR on the ID rows and FNR on every OOD set, all at the same threshold."""
    if not ood_scores:
        raise OodometerError('ood_scores: at least one set was needed, as in {"textures": scores}.')
    _check_threshold(threshold)
    id_values = as_scores(id_scores, "ID")
    sets = {name: as_scores(scores, f"OOD {name!r}") for name, scores in ood_scores.items()}
    return AtThreshold(
        threshold=float(threshold),
        fpr=float((id_values > threshold).mean()),
        fnr={name: float((scores <= threshold).mean()) for name, scores in sets.items()},
        n_id=id_values.size,
        n_ood={name: scores.size for name, scores in sets.items()},
    )


def at_thresholds(
    id_scores: ArrayLike,
    ood_scores: Mapping[str, ArrayLike],
    *,
    calibration: ArrayLike,
    ood_validation: ArrayLike | None = None,
    tnr: float = 0.95,
) -> DataFrame:
    """FPR and FNR of every OOD set under each rule of Beyond AUROC (sections 4.2 and 5), one row a rule and set.

    "@95TNR" — the threshold that keeps 95 % of the ID `calibration` rows, one for all sets;
    "@val" — where FPR = FNR on calibration and `ood_validation` rows, one for all sets;
    "@test" — where FPR = FNR on the evaluated set itself, another for each: a reference that no one can attain.
    """
    import pandas as pd

    one_for_all = {f"@{100 * tnr:g}TNR": threshold_at_tnr(calibration, tnr=tnr)}
    if ood_validation is not None:
        one_for_all["@val"] = threshold_equal_error(calibration, ood_validation)
    found = [(rule, at_one_threshold(id_scores, ood_scores, t)) for rule, t in one_for_all.items()]
    for name, scores in ood_scores.items():
        own = threshold_equal_error(id_scores, scores)
        found.append(("@test", at_one_threshold(id_scores, {name: scores}, own)))
    return pd.concat([at.to_pandas().assign(rule=rule) for rule, at in found], ignore_index=True)[
        ["rule", "dataset", "threshold", "fpr", "fnr", "n_id", "n_ood"]
    ]


@dataclass(frozen=True)
class Confusion:
    """Counts at one threshold, OOD being the positive class."""

    tp: int
    fn: int
    fp: int
    tn: int


def confusion_at(id_scores: ArrayLike, ood_scores: ArrayLike, *, threshold: float) -> Confusion:
    """TP = #{ood > t}, FN = #{ood <= t}, FP = #{id > t}, TN = #{id <= t}."""
    _check_threshold(threshold)
    id_values, ood_values = as_scores(id_scores, "ID"), as_scores(ood_scores, "OOD")
    fp, tp = int((id_values > threshold).sum()), int((ood_values > threshold).sum())
    return Confusion(tp=tp, fn=ood_values.size - tp, fp=fp, tn=id_values.size - fp)


def f1_at(
    id_scores: ArrayLike, ood_scores: ArrayLike, *, threshold: float, positive: Literal["ood", "id"] = "ood"
) -> float:
    """F1 of flagging (OOD positive) or of keeping (ID positive) at a threshold that was chosen elsewhere."""
    check_positive(positive)
    c = confusion_at(id_scores, ood_scores, threshold=threshold)
    hits = c.tp if positive == "ood" else c.tn
    if hits == 0:
        verb = "flagged" if positive == "ood" else "kept"
        warnings.warn(f"F1 is 0: no {positive.upper()} row is {verb} at {threshold:g}.", OodometerWarning, stacklevel=2)
    return 2 * hits / (2 * hits + c.fp + c.fn) if hits else 0.0


def accuracy_at(id_scores: ArrayLike, ood_scores: ArrayLike, *, threshold: float) -> float:
    """(TP + TN) / all; it depends on the class ratio."""
    c = confusion_at(id_scores, ood_scores, threshold=threshold)
    return (c.tp + c.tn) / (c.tp + c.tn + c.fp + c.fn)


def balanced_accuracy_at(id_scores: ArrayLike, ood_scores: ArrayLike, *, threshold: float) -> float:
    """½ (TPR + TNR)."""
    c = confusion_at(id_scores, ood_scores, threshold=threshold)
    return (c.tp / (c.tp + c.fn) + c.tn / (c.tn + c.fp)) / 2


def _check_threshold(threshold: float) -> None:
    if math.isnan(threshold):
        raise OodometerError(
            "threshold: a number was needed, NaN was found. Choose one with threshold_at_tnr(id_calibration)."
        )
