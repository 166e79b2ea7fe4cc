"""Areas under the threshold curves (AUTC, AUFPR, AUFNR) in closed form on a scale that is fixed beforehand."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import ArrayLike

from oodometer.errors import OodometerError
from oodometer.metrics._counts import Floats, as_scores, check_fraction

ScaleName = Literal["id", "probability", "id_ecdf", "evaluated"]


class _Unit(Protocol):
    def apply(self, scores: Floats, side: str) -> Floats: ...


@dataclass(frozen=True)
class Scale:
    """The score range [low, high] that becomes [0, 1]; it is part of an AUTC and has to be stored with it."""

    low: float
    high: float
    clip: bool = True

    def __post_init__(self) -> None:
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise OodometerError(
                f"scale: finite low < high was needed, [{self.low}, {self.high}] was found. Constant scores "
                "have no scale; otherwise pass low= and high= yourself."
            )

    def apply(self, scores: Floats, side: str = "") -> Floats:
        """(s − low) / (high − low), clipped to [0, 1]."""
        if not self.clip and not ((scores >= self.low) & (scores <= self.high)).all():
            raise OodometerError(
                f'{side} scores: scale="probability" needs scores in [0, 1], [{scores.min():g}, '
                f'{scores.max():g}] was found. Pass low= and high=, or scale="id" with calibration=.'
            )
        # Halves keep high − low finite for any pair of float64.
        unit = (scores / 2 - self.low / 2) / (self.high / 2 - self.low / 2)
        return np.asarray(np.clip(unit, 0.0, 1.0))


@dataclass(frozen=True)
class _Ecdf:
    """The share of calibration scores that do not exceed a score: blind to monotone maps."""

    ordered: Floats

    def apply(self, scores: Floats, side: str) -> Floats:
        return np.searchsorted(self.ordered, scores, side="right") / self.ordered.size


def fixed_scale(calibration: ArrayLike, *, scale: Literal["id"] = "id") -> Scale:
    """The scale that ID calibration scores fix before any OOD score is seen.

    [q.001, q.999] of the calibration scores, extended by one such range to the OOD side.
    """
    if scale != "id":
        raise OodometerError(f'scale: fixed_scale knows "id", {scale!r} was found.')
    low, top = np.quantile(as_scores(calibration, "ID calibration", finite=True), [0.001, 0.999])
    return Scale(float(low), float(top + (top - low)))


def aufpr(
    id_scores: ArrayLike,
    ood_scores: ArrayLike,
    *,
    low: float | None = None,
    high: float | None = None,
    scale: ScaleName = "id",
    calibration: ArrayLike | None = None,
) -> float:
    """The area under FPR(t): how far the ID scores reach up the scale. On a fixed scale it needs ID only."""
    return _areas(id_scores, ood_scores, low=low, high=high, scale=scale, calibration=calibration)[0]


def aufnr(
    id_scores: ArrayLike,
    ood_scores: ArrayLike,
    *,
    low: float | None = None,
    high: float | None = None,
    scale: ScaleName = "id",
    calibration: ArrayLike | None = None,
) -> float:
    """The area under FNR(t): how far the OOD scores stay from the top of the scale."""
    return _areas(id_scores, ood_scores, low=low, high=high, scale=scale, calibration=calibration)[1]


def autc(
    id_scores: ArrayLike,
    ood_scores: ArrayLike,
    *,
    low: float | None = None,
    high: float | None = None,
    scale: ScaleName = "id",
    calibration: ArrayLike | None = None,
    weight: float = 0.5,
) -> float:
    """weight · AUFPR + (1 − weight) · AUFNR: 0 is full separation, ½ none (Beyond AUROC, section 4.1).

    The scale is `low`, `high`, or what `scale` says:
    "id" — fixed by the ID `calibration` scores (see `fixed_scale`);
    "probability" — [0, 1], for scores that are probabilities;
    "id_ecdf" — ranks among the ID `calibration` scores;
    "evaluated" — minimum and maximum of the evaluated scores: pytorch-ood's, and a leak.
    """
    check_fraction(weight, "weight")
    fpr, fnr = _areas(id_scores, ood_scores, low=low, high=high, scale=scale, calibration=calibration)
    return weight * fpr + (1 - weight) * fnr


def _areas(
    id_scores: ArrayLike,
    ood_scores: ArrayLike,
    *,
    low: float | None,
    high: float | None,
    scale: str,
    calibration: ArrayLike | None,
) -> tuple[float, float]:
    id_values, ood_values = as_scores(id_scores, "ID", finite=True), as_scores(ood_scores, "OOD", finite=True)
    unit = _unit(id_values, ood_values, low=low, high=high, scale=scale, calibration=calibration)
    # ∫ 1[x > t] dt over [0, 1] is x, so the areas are means (Beyond AUROC, section 4.1). fsum-like: sorted.
    id_unit, ood_unit = np.sort(unit.apply(id_values, "ID")), np.sort(unit.apply(ood_values, "OOD"))
    return float(id_unit.mean()), float(1 - ood_unit.mean())


def _unit(
    id_values: Floats,
    ood_values: Floats,
    *,
    low: float | None,
    high: float | None,
    scale: str,
    calibration: ArrayLike | None,
) -> _Unit:
    if low is not None and high is not None:
        return Scale(float(low), float(high))
    if low is not None or high is not None:
        raise OodometerError("AUTC: low= and high= were needed together, one was found.")
    if scale == "probability":
        return Scale(0.0, 1.0, clip=False)
    if scale == "evaluated":
        pooled = np.concatenate((id_values, ood_values))
        return Scale(float(pooled.min()), float(pooled.max()))
    if scale not in ("id", "id_ecdf"):
        raise OodometerError(f'scale: "id", "probability", "id_ecdf" or "evaluated" was needed, {scale!r} was found.')
    if calibration is None:
        raise OodometerError(
            f'AUTC: scale="{scale}" needs calibration=, ID scores that are not the evaluated ones. Or pass '
            'low= and high=, or scale="probability" for scores in [0, 1].'
        )
    if scale == "id":
        return fixed_scale(calibration)
    return _Ecdf(np.sort(as_scores(calibration, "ID calibration", finite=True)))
