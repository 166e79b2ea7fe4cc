"""Arrays in, floats out: every metric takes (id_scores, ood_scores, …), higher scores being more OOD."""

from __future__ import annotations

from oodometer.metrics.openset import ccr_at_fpr, oscr
from oodometer.metrics.ranking import (
    accuracy_at_tnr,
    aupr,
    aupr_harmonic,
    auroc,
    detection_accuracy,
    detection_error,
    f1_max,
    fpr_at_tpr,
    ranking,
    tpr_at_fpr,
)
from oodometer.metrics.scale import Scale, aufnr, aufpr, autc, fixed_scale
from oodometer.metrics.threshold import (
    accuracy_at,
    at_one_threshold,
    balanced_accuracy_at,
    confusion_at,
    f1_at,
    threshold_at_tnr,
    threshold_at_tpr,
    threshold_conformal,
    threshold_equal_error,
)

__all__ = [
    "Scale",
    "accuracy_at",
    "accuracy_at_tnr",
    "at_one_threshold",
    "aufnr",
    "aufpr",
    "aupr",
    "aupr_harmonic",
    "auroc",
    "autc",
    "balanced_accuracy_at",
    "ccr_at_fpr",
    "confusion_at",
    "detection_accuracy",
    "detection_error",
    "f1_at",
    "f1_max",
    "fixed_scale",
    "fpr_at_tpr",
    "oscr",
    "ranking",
    "threshold_at_tnr",
    "threshold_at_tpr",
    "threshold_conformal",
    "threshold_equal_error",
    "tpr_at_fpr",
]
