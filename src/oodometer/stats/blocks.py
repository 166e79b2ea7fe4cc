"""Blocks × methods: the table that every comparison starts from, checked once at the door."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from oodometer.errors import OodometerError, OodometerWarning

if TYPE_CHECKING:
    import pandas as pd

Floats: TypeAlias = NDArray[np.float64]
Missing = Literal["error", "drop"]
Table: TypeAlias = Any
"""A BlockTable, a DataFrame (rows: blocks, columns: methods) or a two-dimensional array."""


@dataclass(frozen=True)
class BlockTable:
    """One number for each block (row) and method (column), complete and finite."""

    values: Floats
    names: tuple[Hashable, ...]
    blocks: tuple[Hashable, ...]
    dropped: tuple[Hashable, ...] = ()

    @property
    def shape(self) -> tuple[int, int]:
        """How many blocks and how many methods."""
        return len(self.blocks), len(self.names)


def block_table(
    X: Table,
    *,
    names: Sequence[Hashable] | None = None,
    blocks: Sequence[Hashable] | None = None,
    missing: Missing = "error",
    correlated: Literal["refuse", "mean-rank"] = "refuse",
    higher_is_better: bool | None = None,
) -> BlockTable:
    """The checked table; a NaN cell is missing, and `missing="drop"` leaves its block out and says so.

    Two blocks of the same data (a repeated label, or several metrics of one run) are no independent evidence: they
    are refused, or `correlated="mean-rank"` makes one block of them, by the mean of the ranks in each.
    """
    if isinstance(X, BlockTable):
        return X
    _one_of("missing", missing, ("error", "drop"))
    _one_of("correlated", correlated, ("refuse", "mean-rank"))
    values = _numbers(X)
    # Only a frame has columns; a list has an `index` too, its method.
    own_names, own_blocks = (X.columns, X.index) if hasattr(X, "columns") else (None, None)
    method_names = _labels(names, own_names, values.shape[1], "names", "method")
    block_names = _labels(blocks, own_blocks, values.shape[0], "blocks", "block")
    if len(set(method_names)) < len(method_names):
        raise OodometerError(f"names: every method needs its own name, {list(method_names)} was found.")
    table = _without_missing(BlockTable(values, method_names, block_names), missing)
    keys = _data_keys(X, table)
    if len(set(keys)) == len(keys):
        _warn_of_copies(table)
        return table
    if correlated == "refuse":
        raise _repeated_data(keys)
    return _mean_ranks(table, keys, _direction(higher_is_better))


def pivot(frame: pd.DataFrame, *, rows: Sequence[str], method: str = "method", value: str = "value") -> pd.DataFrame:
    """A tidy frame as blocks × methods; two values for one cell are an error, an absent cell is NaN."""
    absent = [column for column in (*rows, method, value) if column not in frame.columns]
    if absent:
        raise OodometerError(
            f"table: the columns {[*rows, method, value]} were needed, {absent} are absent from {list(frame.columns)}."
        )
    key = [*rows, method]
    twice = frame.duplicated(key, keep=False)
    if twice.any():
        first = frame.loc[twice, key].iloc[0].to_dict()
        raise OodometerError(
            f"table: one value for each {' × '.join(key)} was needed, several were found for {first}. "
            "Average folds or repetitions first, or name their column among the rows."
        )
    wide = frame.set_index(key)[value].unstack(method)
    return wide.reindex(columns=frame[method].drop_duplicates())


def check_direction(higher_is_better: object) -> bool:
    """The declared direction; it is never guessed from the values."""
    if not isinstance(higher_is_better, bool | np.bool_):
        raise OodometerError(
            f"higher_is_better: True (as for AUROC) or False (as for FPR@95, AURC) was needed, {higher_is_better!r} "
            "was found."
        )
    return bool(higher_is_better)


def _direction(higher_is_better: bool | None) -> bool:
    if higher_is_better is None:
        raise OodometerError('correlated="mean-rank" ranks the methods: say higher_is_better=True or False.')
    return check_direction(higher_is_better)


def _one_of(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise OodometerError(f"{name}: one of {', '.join(map(repr, choices))} was needed, {value!r} was found.")


def read_numbers(values: Any, name: str, what: str = "numbers") -> Floats:
    """A float64 copy; the absent values of pandas become NaN."""
    try:
        # Only pandas knows how to say its own missing value, pd.NA, in floating point.
        array = values.to_numpy(na_value=np.nan) if hasattr(values, "iloc") else np.asarray(values)
        if array.dtype.kind == "c":
            raise TypeError("complex numbers have no order")
        return np.array(array, dtype=np.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise OodometerError(f"{name}: {what} were needed: {str(error).rstrip('.')}.") from error


def check_level(alpha: float) -> float:
    """A significance level."""
    if not isinstance(alpha, int | float | np.number) or not 0 < alpha < 1:
        raise OodometerError(f"alpha: a level between 0 and 1 was needed, {alpha!r} was found.")
    return float(alpha)


def _numbers(X: Table) -> Floats:
    values = read_numbers(X, "table", "numbers (blocks × methods)")
    if values.ndim != 2:
        raise OodometerError(f"table: two dimensions (blocks × methods) were needed, shape {values.shape} was found.")
    if np.isinf(values).any():
        row, column = np.argwhere(np.isinf(values))[0].tolist()
        raise OodometerError(f"table: finite values were needed, {values[row, column]} is in row {row}, {column}.")
    return values


def _labels(given: Sequence[Hashable] | None, own: Any, length: int, name: str, unit: str) -> tuple[Hashable, ...]:
    if given is not None and len(given) != length:
        raise OodometerError(f"{name}: one for each {unit} ({length}) was needed, {len(given)} were found.")
    if given is not None:
        return tuple(given)
    return tuple(range(length)) if own is None else tuple(own.tolist())


def _without_missing(table: BlockTable, missing: Missing) -> BlockTable:
    gaps: NDArray[np.bool_] = np.asarray(np.isnan(table.values).any(axis=1))
    if not gaps.any():
        return table
    dropped = tuple(label for label, gap in zip(table.blocks, gaps, strict=True) if gap)
    if missing == "error":
        row = int(gaps.argmax())
        lacking = [name for name, cell in zip(table.names, table.values[row], strict=True) if np.isnan(cell)]
        raise OodometerError(
            f"table: every method needs a value in every block; block {table.blocks[row]!r} lacks {lacking} "
            f'({int(gaps.sum())} such blocks). Complete it, or say missing="drop" to leave these blocks out.'
        )
    warnings.warn(
        f"{len(dropped)} blocks with missing values left out: {list(dropped)}", OodometerWarning, stacklevel=4
    )
    kept = tuple(label for label, gap in zip(table.blocks, gaps, strict=True) if not gap)
    return BlockTable(table.values[~gaps], table.names, kept, dropped)


def _data_keys(X: Table, table: BlockTable) -> list[Hashable]:
    """The block labels without the name of the metric: blocks that agree in them measure the same rows."""
    levels: list[Any] = list(getattr(getattr(X, "index", None), "names", []))
    labels: list[Any] = list(table.blocks)
    if levels == ["metric"]:
        return [()] * len(labels)
    if "metric" not in levels or not all(isinstance(label, tuple) for label in labels):
        return labels
    place = levels.index("metric")
    keys = [label[:place] + label[place + 1 :] for label in labels]
    return [key[0] for key in keys] if len(levels) == 2 else keys


def _repeated_data(keys: list[Hashable]) -> OodometerError:
    repeated = next(key for key in keys if keys.count(key) > 1)
    return OodometerError(
        f"table: independent blocks were needed, {keys.count(repeated)} blocks measure the same data {repeated!r} "
        "(several metrics, seeds or folds of one run are correlated and make every p-value too small). Analyse one "
        'metric, average first, or pass block_table(…, correlated="mean-rank", higher_is_better=…).'
    )


def _mean_ranks(table: BlockTable, keys: list[Hashable], higher_is_better: bool) -> BlockTable:
    from oodometer.stats.ranks import block_ranks

    ranks = block_ranks(table.values, higher_is_better)
    groups = list(dict.fromkeys(keys))
    place = np.array([groups.index(key) for key in keys])
    means = np.stack([ranks[place == group].mean(axis=0) for group in range(len(groups))])
    warnings.warn(
        f"{len(keys)} correlated blocks became {len(groups)}, one for each data set, by their mean ranks",
        OodometerWarning,
        stacklevel=3,
    )
    # The direction stays the declared one, so that the caller need not turn it.
    values = -means if higher_is_better else means
    return BlockTable(values, table.names, tuple(groups), table.dropped)


def _warn_of_copies(table: BlockTable) -> None:
    """Equal numbers to the last bit in two blocks are one measurement counted twice, unless all methods tie."""
    seen: dict[bytes, Hashable] = {}
    for label, row in zip(table.blocks, table.values, strict=True):
        twin = seen.setdefault(row.tobytes(), label)
        if twin != label and np.ptp(row) > 0:
            warnings.warn(
                f"blocks {twin!r} and {label!r} hold the same numbers; if they are the same measurement, "
                "leave one out: it counts twice",
                OodometerWarning,
                stacklevel=4,
            )
            return
