"""The axes of a run (detectors, OOD sets, groups, exposures, folds) and its tidy table labelled along them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from oodometer.errors import OodometerError
from oodometer.results import METRICS, higher_is_better

if TYPE_CHECKING:
    import pandas as pd

    from oodometer.results import Results

Floats: TypeAlias = NDArray[np.float64]

LABELS = {
    "auroc": "AUROC",
    "aupr_ood": "AUPR (OOD positive)",
    "aupr_id": "AUPR (ID positive)",
    "aupr_harmonic": "AUPR (harmonic)",
    "ap_ood": "average precision (OOD positive)",
    "ap_id": "average precision (ID positive)",
    "fpr95_ood": "FPR@95 (OOD positive)",
    "fpr95_id": "FPR@95 (ID positive)",
    "tpr5": "TPR at FPR 5 %",
    "f1_max_id": "largest F1 (ID positive)",
    "f1_max_ood": "largest F1 (OOD positive)",
    "acc90": "accuracy at TNR 90 %",
    "detection_error": "detection error",
    "autc": "AUTC",
    "aufpr": "AUFPR",
    "aufnr": "AUFNR",
    "fpr@95tnr": "FPR at @95TNR",
    "fnr@95tnr": "FNR at @95TNR",
}
"""Metrics as readers know them."""


def label_of(metric: str) -> str:
    """The metric as readers know it."""
    area, _, protocol = metric.partition(":")
    return LABELS.get(metric, f"{area.upper()} ({protocol.replace('_', ' ')})" if protocol else metric)


def arrow(metric: str) -> str:
    """Which way is better."""
    return "↑" if higher_is_better(metric) else "↓"


@dataclass(frozen=True)
class Layout:
    """What a run is made of, each axis in the order of the study."""

    frame: pd.DataFrame
    """The tidy table with the columns `method` and `set` added."""
    study: str
    ids: tuple[str, ...]
    methods: tuple[str, ...]
    sets: tuple[str, ...]
    groups: dict[str, str]
    """The group of each OOD set; empty where the study names none."""
    exposures: tuple[str, ...]
    draws: tuple[tuple[int, int], ...]
    """(repeat, fold)."""
    metrics: tuple[str, ...]
    origins: dict[str, tuple[str, str]]
    """The detector and the variant behind each method."""
    test_to_train: float
    """Test rows for each training row of a fold; the variance of a mean over folds needs it."""

    @classmethod
    def of(cls, results: Results) -> Layout:
        """The axes of a run."""
        frame = results.to_pandas()
        if frame.empty:
            raise OodometerError(
                f"{results.folder}: a report needs results, and results.csv holds none "
                f"({len(results.failed)} cells failed); mend the causes listed in run.json and run the study again"
            )
        several = frame["id"].nunique() > 1
        frame["set"] = frame["id"] + " → " + frame["ood"] if several else frame["ood"]
        frame["method"] = methods(frame, [*("study", "repeat", "fold", "id", "ood", "group", "exposure", "metric")])
        known = [metric for metric in _seen(frame["metric"]) if metric in METRICS]
        if not known:
            listed = ", ".join(_seen(frame["metric"]))
            raise OodometerError(f"{results.folder}: a metric of this version was needed, {listed} was found.")
        return cls(
            frame=frame,
            study=" + ".join(_seen(frame["study"])),
            ids=_seen(frame["id"]),
            methods=_seen(frame["method"]),
            sets=_seen(frame["set"]),
            groups={name: group for name, group in zip(frame["set"], frame["group"], strict=True) if group},
            exposures=_seen(frame["exposure"]),
            draws=tuple(sorted({*zip(frame["repeat"].tolist(), frame["fold"].tolist(), strict=True)})),
            metrics=tuple(known),
            origins=dict(zip(frame["method"], zip(frame["detector"], frame["variant"], strict=True), strict=True)),
            test_to_train=float(results.facts["test_to_train"]),
        )

    def metric(self, wanted: str | None) -> str:
        """The metric to decide by: the one asked for, else AUROC, else the first of the study."""
        if wanted is None:
            return "auroc" if "auroc" in self.metrics else self.metrics[0]
        if wanted not in self.metrics:
            raise OodometerError(f"metric: one of {', '.join(self.metrics)} was needed, {wanted!r} was found.")
        return wanted

    def cells(self, metric: str) -> pd.DataFrame:
        """(set, exposure, method) with the mean over folds and repeats and half its 95 % interval.

        Both are NaN where a fold is missing: a mean over fewer folds than the others have would compare other data.
        """
        rows = self.frame[self.frame["metric"] == metric]
        found = rows.groupby(["set", "exposure", "method"], sort=False)["value"].agg(["mean", "std", "count"])
        count = found["count"].to_numpy(np.float64)
        found["half"] = interval_half(found["std"].to_numpy(np.float64), count, self.test_to_train)
        whole = found["count"] == found.groupby(level=["set", "exposure"])["count"].transform("max")
        return found[["mean", "half"]].where(whole)

    def means(self, metric: str) -> pd.DataFrame:
        """The means over folds and repeats as (set, exposure) × methods."""
        return self.cells(metric)["mean"].unstack("method").reindex(columns=list(self.methods))

    def by_group(self) -> dict[str, list[str]]:
        """The sets of each group, in order; one group without a name where the study has none."""
        found: dict[str, list[str]] = {}
        for name in self.sets:
            found.setdefault(self.groups.get(name, ""), []).append(name)
        return found


def interval_half(std: Floats, n: Floats, test_to_train: float) -> Floats:
    """Half the 95 % interval of means over n folds, as `Results.summary` has it: NaN for a single fold.

    s²(1/n + n_test/n_train) with Student's t: Nadeau and Bengio, Machine Learning 2003, equation 9.
    """
    from scipy.special import stdtrit

    with np.errstate(divide="ignore", invalid="ignore"):
        spread = std * np.sqrt(1 / n + test_to_train)
    return np.asarray(spread * stdtrit(np.maximum(n - 1, 1), 0.975))


def methods(frame: pd.DataFrame, draw: Sequence[str]) -> pd.Series[Any]:
    """The detector, with its variant where it has several, with its parameters where one draw has several."""
    name = frame["detector"].astype(str)
    variant = frame["variant"].astype(str)
    several = variant.groupby(name).transform("nunique") > 1
    name = name.where(~several | (variant == ""), name + ":" + variant)
    settings = frame.assign(method=name).groupby([*draw, "method"])["params"].transform("nunique")
    repeated = settings.groupby(name).transform("max") > 1
    return name.where(~repeated, name + " " + frame["params"].astype(str))


def _seen(values: pd.Series[Any]) -> tuple[Any, ...]:
    ordered: dict[Hashable, None] = dict.fromkeys(values.tolist())
    return tuple(ordered)
