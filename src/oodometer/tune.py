"""Grids of hyperparameters: expand them, score every point, and say which points act."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from oodometer import detectors
from oodometer.bank import Bank
from oodometer.errors import OodometerError

Params = dict[str, Any]
Status = Literal["acts", "inert", "invalid"]


@dataclass(frozen=True)
class Point:
    """One grid point: its parameters, what became of it, and its scores (None when invalid).

    A point is inert when it ranks the rows exactly as an earlier point does, so that no metric can tell them apart;
    it is invalid when the detector refuses it (k larger than the bank, no residual dimension, …).
    """

    params: Params
    status: Status
    scores: npt.NDArray[np.float64] | None
    reason: str = ""


def expand(grid: Mapping[str, Iterable[Any]]) -> list[Params]:
    """All combinations, in fixed order: the last parameter varies fastest."""
    values = [tuple(options) for options in grid.values()]
    return [dict(zip(grid, point, strict=True)) for point in itertools.product(*values)]


def sweep(
    name: str,
    train: Bank,
    rows: Bank,
    *,
    val: Bank | None = None,
    grid: Mapping[str, Iterable[Any]] | None = None,
    **fixed: Any,
) -> list[Point]:
    """Fit and score every point of a grid (the published one by default) on the same rows, in grid order."""
    points = expand(detectors.get(name).card.grid if grid is None else grid)
    # Published grids ascend: from the back, the largest neighbour search and subspace serve all the others.
    outcomes = [_outcome(name, {**fixed, **params}, train, rows, val) for params in reversed(points)][::-1]
    return list(_judged(points, outcomes))


def _outcome(
    name: str, params: Params, train: Bank, rows: Bank, val: Bank | None
) -> npt.NDArray[np.float64] | OodometerError:
    try:
        return detectors.create(name, **params).fit(train, val=val).score(rows)
    except OodometerError as error:
        return error


def _judged(points: Sequence[Params], outcomes: Sequence[npt.NDArray[np.float64] | OodometerError]) -> Iterator[Point]:
    seen: dict[bytes, Params] = {}
    for params, outcome in zip(points, outcomes, strict=True):
        if isinstance(outcome, OodometerError):
            yield Point(params, "invalid", None, str(outcome))
            continue
        ranks = np.unique(outcome, return_inverse=True)[1].tobytes()
        twin = seen.setdefault(ranks, params)
        if twin is params:
            yield Point(params, "acts", outcome)
        else:
            shown = ", ".join(f"{key}={value!r}" for key, value in twin.items())
            yield Point(params, "inert", outcome, f"ranks the rows exactly as {shown} does")
