"""All ranking metrics of a million scores, in units of one sort, beside scikit-learn and torchmetrics."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from bench.table import Table
from oodometer import metrics

ROWS = 1_000_000
PASSES = 5


def report() -> None:
    """Print the best of several passes, each in turn."""
    rng = np.random.default_rng(0)
    id_scores = rng.standard_normal(ROWS // 2)
    ood_scores = rng.standard_normal(ROWS // 2) + 1
    keys = rng.integers(0, 1 << 63, ROWS, dtype=np.uint64)
    work: dict[str, Callable[[], object]] = {
        "one np.sort of uint64": lambda: np.sort(keys),
        "ours, all ranking metrics": lambda: metrics.ranking(id_scores, ood_scores),
        "scikit-learn, auroc + both AUPR + FPR@95": lambda: _sklearn(id_scores, ood_scores),
    }
    try:
        import torchmetrics  # noqa: F401

        work["torchmetrics, auroc + AUPR"] = lambda: _torchmetrics(id_scores, ood_scores)
    except ImportError:
        pass
    best = dict.fromkeys(work, np.inf)
    for _ in range(PASSES):
        for name, function in work.items():
            start = time.perf_counter()
            function()
            best[name] = min(best[name], time.perf_counter() - start)
    table = Table("1e6 scores", "wall ms", "sorts", "ours is faster by")
    sort, ours = best["one np.sort of uint64"], best["ours, all ranking metrics"]
    for name, seconds in best.items():
        table.row(name, f"{1000 * seconds:.1f}", f"{seconds / sort:.1f}", f"{seconds / ours:.1f}×")


def _sklearn(id_scores: np.ndarray, ood_scores: np.ndarray) -> None:
    from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve

    truth = np.r_[np.zeros(len(id_scores)), np.ones(len(ood_scores))]
    scores = np.r_[id_scores, ood_scores]
    roc_auc_score(truth, scores)
    roc_curve(truth, scores)
    average_precision_score(truth, scores)
    average_precision_score(1 - truth, -scores)


def _torchmetrics(id_scores: np.ndarray, ood_scores: np.ndarray) -> None:
    import torch
    from torchmetrics.functional.classification import binary_auroc, binary_average_precision

    truth = torch.from_numpy(np.r_[np.zeros(len(id_scores), int), np.ones(len(ood_scores), int)])
    scores = torch.from_numpy(np.r_[id_scores, ood_scores])
    binary_auroc(scores, truth)
    binary_average_precision(scores, truth)
