"""What every threshold does to every set, as whole numbers: the data behind the threshold explorer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from oodometer.errors import OodometerError
from oodometer.metrics import fixed_scale, threshold_conformal, threshold_equal_error
from oodometer.metrics._counts import smallest_count
from oodometer.report.layout import Layout, methods
from oodometer.results import read_table

if TYPE_CHECKING:
    import pandas as pd

    from oodometer.metrics import Scale
    from oodometer.results import Results

Floats: TypeAlias = NDArray[np.float64]
Counts: TypeAlias = NDArray[np.int64]
Key: TypeAlias = tuple[int, int, int, int]
"""(exposure, method, draw, set), as places in the layout."""

STEPS = (*range(0, 801, 20), *range(810, 901, 10), *range(901, 1001))
"""TNRs the slider can ask for, in thousandths: finer where thresholds are set. At 0 every row is flagged."""
ALPHAS = (0.01, 0.05, 0.1)
"""Levels of the conformal thresholds."""
BINS = 48
"""Bars of a histogram over the scale that the calibration rows fix."""
MOST_CURVES = 5000
"""Beyond so many, folds are added up, so that the page stays small."""
_UNIT = 1000


@dataclass(frozen=True)
class Inside:
    """One fitted detector's ID side: sorted test scores, and what its calibration scores fix."""

    test: Floats
    calibration: Floats
    thresholds: Floats
    scale: Scale | None

    @classmethod
    def of(cls, test: Floats, calibration: Floats) -> Inside:
        """Sorted, with a threshold for each step; constant scores have no scale."""
        ordered = np.sort(calibration)
        ranks = [smallest_count(step / 1000, ordered.size) for step in STEPS[1:]]
        thresholds = np.concatenate([[-np.inf], ordered[np.asarray(ranks) - 1]])
        try:
            scale = fixed_scale(ordered)
        except OodometerError:
            scale = None
        return cls(np.sort(test), ordered, thresholds, scale)

    def conformal(self) -> list[float | None]:
        """The conformal threshold at each level; None where there are too few calibration rows."""
        found: list[float | None] = []
        for alpha in ALPHAS:
            try:
                found.append(threshold_conformal(self.calibration, alpha=alpha))
            except OodometerError:
                found.append(None)
        return found


def data(results: Results, layout: Layout) -> dict[str, Any]:
    """Counts at every step and at every named threshold, by (exposure, method, draw, set)."""
    index = _index(results, layout)
    pooled = len(index) > MOST_CURVES
    entries: dict[Key, dict[str, Any]] = {}
    for at, rows in index.groupby(["exposure", "method", "draw"], sort=False):
        exposure, method, draw = map(int, cast("tuple[int, int, int]", at))
        for place, counts in _of_one_draw(results, rows, layout):
            key = (exposure, method, 0 if pooled else draw, place)
            entries[key] = _added(entries[key], counts) if key in entries else counts
    return {
        "steps": STEPS,
        "alphas": ALPHAS,
        "bins": BINS,
        "unit": _UNIT,
        "pooled": pooled,
        "entries": {",".join(map(str, key)): _packed(entry) for key, entry in entries.items()},
    }


def index_of(results: Results) -> pd.DataFrame:
    """Which cells hold the scores of which detector, fold and set."""
    return read_table(results.folder / "cells" / "index.csv")


def _index(results: Results, layout: Layout) -> pd.DataFrame:
    """The table of cells with every axis as a place in the layout."""
    index = index_of(results)
    index["method"] = methods(index, ["repeat", "fold", "ood", "exposure"])
    sets = dict(zip(layout.frame["ood"], layout.frame["set"], strict=True))
    places: dict[str, dict[Any, int]] = {
        "exposure": {name: i for i, name in enumerate(layout.exposures)},
        "method": {name: i for i, name in enumerate(layout.methods)},
        "set": {name: i for i, name in enumerate(layout.sets)},
    }
    index["set"] = index["ood"].map(sets)
    draws = {draw: i for i, draw in enumerate(layout.draws)}
    index["draw"] = [draws.get(draw, -1) for draw in zip(index["repeat"], index["fold"], strict=True)]
    for axis, place in places.items():
        index[axis] = index[axis].map(place).fillna(-1).astype(int)
    # A cell without results is one that failed.
    return index[(index[["exposure", "method", "set", "draw"]] >= 0).all(axis=1)]


def _of_one_draw(results: Results, rows: pd.DataFrame, layout: Layout) -> Iterator[tuple[int, dict[str, Any]]]:
    """The counts of every OOD set; a threshold from a validation set needs one fitted detector for all sets."""
    sides = {key: _inside(results, key) for key in rows["id_cell"].unique()}
    outside = {place: _scores(results, key) for place, key in zip(rows["set"], rows["ood_cell"], strict=True)}
    shared = next(iter(sides.values())) if len(sides) == 1 else None
    on_set: list[float | None] = [
        None if shared is None or place not in outside else threshold_equal_error(shared.calibration, outside[place])
        for place in range(len(layout.sets))
    ]
    for place, key in zip(rows["set"], rows["id_cell"], strict=True):
        yield place, counts_of(sides[key], outside[place], on_set)


def _inside(results: Results, key: str) -> Inside:
    cell = _cell(results, key)
    return Inside.of(cell.segment("test"), cell.segment("val"))


def _scores(results: Results, key: str) -> Floats:
    return np.sort(_cell(results, key).segment("test"))


def _cell(results: Results, key: str) -> Any:
    cell = results.store.read(key)
    if cell is None:
        raise OodometerError(f"{results.store.folder / key}.json is missing: run the study again, it will be computed")
    return cell


def counts_of(inside: Inside, outside: Floats, on_set: list[float | None]) -> dict[str, Any]:
    """Rows at or below each threshold (kept): TN of the ID side, FN of the OOD side."""
    at_test = threshold_equal_error(inside.test, outside)
    named = [*inside.conformal(), at_test, *on_set]
    return {
        "n": np.array([inside.test.size, outside.size]),
        "tn": kept(inside.test, inside.thresholds),
        "fn": kept(outside, inside.thresholds),
        "named": [None if t is None else np.array([kept(inside.test, t), kept(outside, t)]) for t in named],
        **_drawn(inside, outside),
    }


def kept(ordered: Floats, thresholds: Any) -> Any:
    """#{s ≤ t} of sorted scores."""
    return np.searchsorted(ordered, thresholds, side="right")


def _drawn(inside: Inside, outside: Floats) -> dict[str, Any]:
    """Histograms over the fixed scale, and where the thresholds lie on it."""
    if inside.scale is None:
        return {"draws": 1, "histogram": None, "place": None, "scale": None}
    edges = np.linspace(0, 1, BINS + 1)
    bars = [np.histogram(inside.scale.apply(side), edges)[0] for side in (inside.test, outside)]
    place = np.rint(_UNIT * inside.scale.apply(np.maximum(inside.thresholds, inside.scale.low)))
    scale = np.array([inside.scale.low, inside.scale.high])
    return {"draws": 1, "histogram": np.stack(bars), "place": place, "scale": scale}


def _added(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """Two folds as one; what only one of them has is left out."""
    return {
        name: [_sum(x, y) for x, y in zip(a[name], b[name], strict=True)] if name == "named" else _sum(a[name], b[name])
        for name in a
    }


def _sum(a: Any, b: Any) -> Any:
    return None if a is None or b is None else a + b


def _packed(entry: dict[str, Any]) -> dict[str, Any]:
    """Plain numbers; curves as steps from one value to the next, which compress well."""
    draws = entry["draws"]
    return {
        "n": entry["n"].tolist(),
        "t": _differences(entry["tn"]),
        "f": _differences(entry["fn"]),
        "x": [None if pair is None else pair.tolist() for pair in entry["named"]],
        "h": None if entry["histogram"] is None else entry["histogram"].tolist(),
        "u": None if entry["place"] is None else _differences(np.rint(entry["place"] / draws)),
        "s": None if entry["scale"] is None else [json.loads(f"{v:.6g}") for v in entry["scale"] / draws],
    }


def _differences(curve: NDArray[Any]) -> list[int]:
    first: list[int] = np.diff(curve, prepend=0).astype(np.int64).tolist()
    return first
