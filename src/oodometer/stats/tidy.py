"""Tidy tables of results as draws × methods, and from there as blocks × methods."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from oodometer.errors import OodometerError
from oodometer.stats.blocks import Floats

if TYPE_CHECKING:
    import pandas as pd

BLOCK = ("id", "ood", "exposure")
"""What is compared: the labels that a benchmark truth and a cross-validation share."""
RUN = ("source", "repeat")
"""One cross-validation: a repeat of one file."""
_DRAW = (*RUN, "fold")


def draws(results: pd.DataFrame, metric: str) -> pd.DataFrame:
    """One metric as (source, repeat, fold, id, ood, exposure) × methods; every method needs every draw.

    An absent label is empty; a detector with several variants counts as several methods.
    """
    absent = [column for column in ("detector", "metric", "value") if column not in results]
    if absent:
        raise OodometerError(f"results: the columns detector, metric and value were needed, {absent} are absent.")
    rows = results.loc[results["metric"] == metric].copy()
    if rows.empty:
        known = ", ".join(sorted(map(str, results["metric"].unique())))
        raise OodometerError(f"metric: {metric!r} is not in the results; known: {known}.")
    keys = [*_DRAW, *BLOCK]
    for key in keys:
        rows[key] = rows[key].astype(object).where(rows[key].notna(), "") if key in rows else ""
    rows["method"] = _methods(rows)
    _check_unique(rows, [*keys, "method"])
    wide = rows.set_index([*keys, "method"])["value"].unstack("method")
    _check_complete(wide, metric)
    return wide[list(dict.fromkeys(rows["method"]))]


def block_means(table: pd.DataFrame) -> pd.DataFrame:
    """The mean over all draws, as blocks × methods."""
    return table.groupby(level=list(BLOCK), sort=False).mean()


def run_means(table: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """The mean over the folds of every run, by its name."""
    parts = table.groupby(level=list(RUN), sort=False)
    return {" ".join(str(part) for part in key if part != ""): block_means(part) for key, part in parts}


def repetitions(table: pd.DataFrame) -> Floats:
    """values[repetition, block, method], in the order of the draws."""
    parts = [part.to_numpy(np.float64) for _, part in table.groupby(level=list(BLOCK), sort=False)]
    sizes = sorted({len(part) for part in parts})
    if len(sizes) > 1:
        raise OodometerError(
            f"truth: the same number of repetitions for every {' × '.join(BLOCK)} was needed, {sizes} were found. "
            "Finish the run."
        )
    return np.stack(parts, axis=1)


def _methods(rows: pd.DataFrame) -> pd.Series[Any]:
    """The detector, with its variant where it has several."""
    detector = rows["detector"].astype(str)
    if "variant" not in rows:
        return detector
    variant = rows["variant"].fillna("").astype(str)
    several = variant.groupby(detector).transform("nunique") > 1
    return detector.where(~several | (variant == ""), detector + ":" + variant)


def _check_unique(rows: pd.DataFrame, keys: list[str]) -> None:
    twice = rows.duplicated(keys, keep=False)
    if twice.any():
        first = ", ".join(
            f"{key} {rows.loc[twice, key].iloc[0]!r}" for key in keys if rows.loc[twice, key].iloc[0] != ""
        )
        raise OodometerError(
            f"results: one value for each {' × '.join(keys)} was needed, {int(twice.sum())} rows share theirs, such as "
            f"those of {first}. Keep one setting of the parameters and one group."
        )


def _check_complete(wide: pd.DataFrame, metric: str) -> None:
    gaps = np.argwhere(wide.isna().to_numpy()).tolist()
    if gaps:
        row, column = gaps[0]
        label: Any = wide.index[row]
        draw = ", ".join(f"{key} {part!r}" for key, part in zip(wide.index.names, label, strict=True) if part != "")
        raise OodometerError(
            f"results: {metric} of every method in every draw was needed; {wide.columns[column]!r} lacks {draw} "
            f"({len(gaps)} such cells). Finish the run, or leave the method out."
        )
