"""Open-set recognition: correct classification of known rows against acceptance of unknown ones."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from oodometer.errors import OodometerError
from oodometer.metrics._counts import Counts, Floats, Side, as_flags, as_scores, check_fraction, largest_count


def oscr(
    id_scores: ArrayLike,
    id_correct: ArrayLike,
    ood_scores: ArrayLike,
    *,
    ties: Literal["half", "pessimistic"] = "half",
) -> float:
    """The area under CCR(FPR): how often a correctly classified ID row scores below an OOD row.

    `ties="half"` draws ties as diagonals (pytorch-ood); `ties="pessimistic"` counts them as lost, as in
    Dhamija et al., NeurIPS 2018.
    """
    if ties not in ("half", "pessimistic"):
        raise OodometerError(f'ties: "half" or "pessimistic" was needed, {ties!r} was found.')
    n, right = _correct_scores(id_scores, id_correct)
    ood_side = Side.of(ood_scores, "OOD")
    if right.size == 0:
        return 0.0
    view = Counts.of(Side.of(right, "ID"), ood_side).id
    wins = view.n_neg - view.fp
    if ties == "half":
        wins += (view.fp - view.fp_before) / 2
    return float((view.at * wins).sum() / (n * view.n_neg))


def ccr_at_fpr(id_scores: ArrayLike, id_correct: ArrayLike, ood_scores: ArrayLike, *, fpr: float = 0.05) -> float:
    """The share of ID rows that are accepted and correct while at most `fpr` of the OOD rows are accepted."""
    check_fraction(fpr, "fpr")
    n, right = _correct_scores(id_scores, id_correct)
    ood = as_scores(ood_scores, "OOD")
    allowed = largest_count(fpr, ood.size)
    if allowed == ood.size:
        return right.size / n
    first_refused = np.partition(ood, allowed)[allowed]
    return float((right < first_refused).sum() / n)


def _correct_scores(id_scores: ArrayLike, id_correct: ArrayLike) -> tuple[int, Floats]:
    scores = as_scores(id_scores, "ID")
    return scores.size, scores[as_flags(id_correct, "id_correct", scores.size)]
