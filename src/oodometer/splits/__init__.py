"""Splits that keep OOD classes honest: dual cross-validation (DCV-ROOD), repeated holdout, fixed lists."""

from __future__ import annotations

from oodometer.splits.folds import Fold, Folds
from oodometer.splits.select import ClassSelection, StratumCount, select_ood_classes
from oodometer.splits.splitters import DualKFold, HierarchicalDualKFold, Holdout, RepeatedHoldout

__all__ = [
    "ClassSelection",
    "DualKFold",
    "Fold",
    "Folds",
    "HierarchicalDualKFold",
    "Holdout",
    "RepeatedHoldout",
    "StratumCount",
    "select_ood_classes",
]
