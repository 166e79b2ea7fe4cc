"""What calibration rows promise: a threshold, conformal p-values, and the law of the alarms of a stream."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from oodometer.derived import F64
from oodometer.errors import OodometerError
from oodometer.metrics import threshold_at_tnr, threshold_conformal, threshold_equal_error
from oodometer.metrics._counts import largest_count, smallest_count

Rule = Literal["conformal", "tnr", "val"]


@dataclass(frozen=True, eq=False)
class Calibration:
    """Sorted calibration scores, the threshold, and how many of the n + 1 ranks of a new row count as its tail.

    A row is flagged iff its score exceeds the threshold. A new ID row, exchangeable with the calibration rows, falls
    on each of the n + 1 ranks alike: its p-value is at most `rate` = tail / (n + 1) with at most that probability.
    Under the rules "conformal" and "tnr" those are the flagged rows.
    """

    scores: F64
    threshold: float
    tail: int

    @property
    def rows(self) -> int:
        """How many calibration rows there are."""
        return len(self.scores)

    @property
    def rate(self) -> float:
        """The share of ID rows in the tail, at most (Vovk, ACML 2012: exactly, without ties)."""
        return self.tail / (self.rows + 1)

    def p_values(self, scores: F64) -> F64:
        """(1 + #{calibration ≥ s}) / (n + 1)."""
        below = np.searchsorted(self.scores, scores, side="left")
        return np.asarray((1 + self.rows - below) / (self.rows + 1))


def calibrate(
    scores: F64, rule: Rule = "conformal", *, alpha: float = 0.05, tnr: float = 0.95, ood_scores: F64 | None = None
) -> Calibration:
    """The threshold a rule chooses on calibration scores (and, for "val", on OOD validation scores)."""
    check_rule(rule, alpha, tnr)
    n = len(scores)
    if rule == "tnr":
        # Ranks are counted, not looked up: scores above the threshold's rank may be tied with it.
        threshold, tail = _at_tnr(scores, tnr), n + 1 - smallest_count(tnr, n)
    else:
        threshold, tail = threshold_conformal(scores, alpha=alpha), largest_count(alpha, n + 1)
    if rule == "val":
        assert ood_scores is not None, "asked for by the rule"
        threshold = threshold_equal_error(scores, ood_scores)
    return Calibration(np.sort(scores), threshold, tail)


def _at_tnr(scores: F64, tnr: float) -> float:
    needed = math.ceil(1 / round(1 - tnr, 12)) - 1
    if len(scores) < needed:
        raise OodometerError(
            f"tnr = {tnr:g} needs at least {needed} calibration scores, {len(scores)} were found: fewer keep none out. "
            "Calibrate on more ID rows, or choose a lower tnr"
        )
    return threshold_at_tnr(scores, tnr=tnr)


def check_rule(rule: str, alpha: float, tnr: float) -> None:
    """Refuse a rule that does not exist, and shares outside (0, 1)."""
    if rule not in ("conformal", "tnr", "val"):
        raise OodometerError(f"guard: rule must be 'conformal', 'tnr' or 'val'; found {rule!r}")
    for name, value in (("alpha", alpha), ("tnr", tnr)):
        if not 0 < value < 1:
            raise OodometerError(f"guard: {name} must be a fraction in (0, 1) (5 % is .05); found {value!r}")
