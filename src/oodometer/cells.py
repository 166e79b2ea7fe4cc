"""One cell of a study: a detector fitted on training rows and scored on others, written whole or with its error."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oodometer import derived
from oodometer.arrays import Ints
from oodometer.bank import Bank
from oodometer.detectors import Detector, create
from oodometer.errors import OodometerError
from oodometer.results import Cell, DamagedCellError, Store, params_text
from oodometer.tune import Train, Validation

Segments = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Test:
    """Rows that are scored, and that nothing is fitted, tuned or calibrated on; `order` sorts them by row number."""

    bank: Bank
    order: Ints


@dataclass(frozen=True)
class Setting:
    """A detector with the parameters it was given or that were chosen for it."""

    name: str
    params: Mapping[str, Any]

    @property
    def text(self) -> str:
        """The parameters as results show them."""
        return params_text(self.params)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Every parameter, the defaults too: what determines the scores."""
        return {"detector": self.name, "params": json.loads(params_text(create(self.name, **self.params).get_params()))}

    @property
    def size(self) -> tuple[float, ...]:
        """Sorts larger neighbour searches and subspaces first: they serve the smaller ones."""
        return tuple(-value for value in self.params.values() if isinstance(value, int | float))


def fitted(setting: Setting, train: Train, val: Validation) -> Detector:
    """The detector, fitted on rows that say they are for it."""
    check_role(train, Train)
    check_role(val, Validation)
    return create(setting.name, **setting.params).fit(train.bank, val=val.bank)


def id_segments(detector: Detector, test: Test, val: Validation, val_order: Ints) -> Segments:
    """Scores of the ID test rows, and of the ID validation rows that scales and thresholds come from."""
    return {**ood_segments(detector, test), "val": detector.score(val.bank)[val_order]}


def ood_segments(detector: Detector, test: Test) -> Segments:
    """Scores of the test rows, in the order of their row numbers."""
    check_role(test, Test)
    return {"test": detector.score(test.bank)[test.order]}


def classifier_segments(test: Test, val: Validation, val_order: Ints) -> Segments:
    """Which ID rows the classifier gets right."""
    return {"test": derived.correct(test.bank)[test.order], "val": derived.correct(val.bank)[val_order]}


def check_role(rows: Any, role: type[Any]) -> None:
    """Refuse rows that were not dealt for this use."""
    if not isinstance(rows, role):
        raise OodometerError(f"{role.__name__} rows are needed here; found {type(rows).__name__}")


def finished(store: Store, key: str) -> Cell | None:
    """The cell if it is there, sound and without error."""
    try:
        cell = store.read(key)
    except DamagedCellError:
        return None
    return cell if cell is not None and not cell.error else None


def write_cell(
    store: Store,
    key: str,
    facts: Mapping[str, Any],
    compute: Callable[[], tuple[Mapping[str, Any], Segments | None]],
) -> Cell:
    """Compute a cell (further facts, values) and write it; one that fails is written with its error."""
    try:
        more, segments = compute()
    except OSError:
        raise  # a full disk or a lost file stops every cell alike
    except Exception as error:
        return store.write(key, facts, error=message(error))
    return store.write(key, {**facts, **more}, segments)


def message(error: Exception) -> str:
    """Why a cell failed; the kind of error is named when nobody foresaw it."""
    return str(error) if isinstance(error, OodometerError) else f"unexpected {type(error).__name__}: {error}"


def order_of(rows: Ints) -> Ints:
    """Sorts values of joined pieces by row number."""
    return np.argsort(rows, kind="stable")
