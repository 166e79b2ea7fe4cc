"""Turn labels, groups, sample ids and hierarchies, as users pass them, into codes, or say what is wrong."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from oodometer.errors import OodometerError

if TYPE_CHECKING:
    import pandas as pd

Label: TypeAlias = int | str
Labels: TypeAlias = Iterable[Any]
Index: TypeAlias = NDArray[np.intp]
HierarchyLike: TypeAlias = "Mapping[str, Labels] | pd.DataFrame"


@dataclass(frozen=True, eq=False)
class Level:
    """One column of labels: row r carries `classes[codes[r]]`; sorted classes make codes order-free."""

    codes: Index
    classes: tuple[Label, ...]

    def __len__(self) -> int:
        return len(self.codes)

    def rows(self, index: Index) -> Level:
        """The same column for some rows."""
        return Level(self.codes[index], self.classes)

    def named(self, codes: Iterable[int]) -> str:
        """The first few of these classes, for a message."""
        return quote([self.classes[code] for code in codes])

    def values(self) -> NDArray[Any]:
        """The labels themselves, one a row."""
        return as_array(self.classes)[self.codes]


def as_array(labels: Sequence[Label]) -> NDArray[Any]:
    """Ints as int64; strings as objects, because one long path would widen every cell of a fixed width."""
    if labels and all(isinstance(label, int) and abs(label) < 2**63 for label in labels):
        return np.asarray(labels, dtype=np.int64)
    return np.fromiter(labels, dtype=object, count=len(labels))


def quote(labels: Sequence[Label], limit: int = 5) -> str:
    """The first few labels, for a message."""
    shown = ", ".join(repr(label) for label in labels[:limit])
    return shown if len(labels) <= limit else f"{shown} and {len(labels) - limit} more"


def read_labels(values: Labels, what: str) -> Level:
    """One int or string a row; missing values are refused with their row number."""
    cells = _read_cells(values, what)
    if isinstance(cells, np.ndarray):
        classes, codes = np.unique(cells, return_inverse=True)
        return Level(codes.astype(np.intp, copy=False), tuple(classes.tolist()))
    # A set and a dictionary are several times faster here than sorting a million strings.
    ordered = sorted(set(cells))
    code_of = {label: code for code, label in enumerate(ordered)}
    codes = np.fromiter(map(code_of.__getitem__, cells), dtype=np.intp, count=len(cells))
    return Level(codes, tuple(ordered))


def _read_cells(values: Labels, what: str) -> NDArray[Any] | list[Any]:
    """A NumPy array of ints, or a list whose cells are all ints or all strings."""
    array = _column(values, what)
    if array.dtype.kind == "f":
        return _whole_numbers(array, what)
    if array.dtype.kind == "b":
        return array.astype(np.int64)
    if array.dtype.kind in "iu":
        return array
    if array.dtype.kind not in "OUT":
        raise OodometerError(f"{what}: labels are ints or strings; found dtype {array.dtype}. Convert them first.")
    return _plain_cells(array.tolist(), what)


def _column(values: Labels, what: str) -> NDArray[Any]:
    if values is None or isinstance(values, (str, bytes, Mapping)):
        raise OodometerError(f"{what}: needs one label a row; found {values!r}. Pass a list, an array or a column.")
    if hasattr(values, "dtype"):
        array = np.asarray(values)
    else:  # element by element: np.asarray(["a", nan]) would turn the missing value into the class 'nan'
        cells = list(values)
        array = np.fromiter(cells, dtype=object, count=len(cells))
    if array.ndim != 1:
        raise OodometerError(f"{what}: needs one dimension; found shape {array.shape}. Flatten it or pick a column.")
    if not len(array):
        raise OodometerError(f"{what}: needs at least one row; found none. Check the filter that made this set.")
    return array


def _whole_numbers(array: NDArray[Any], what: str) -> NDArray[Any]:
    missing = np.flatnonzero(np.isnan(array))
    if len(missing):
        raise _missing(what, int(missing[0]), len(missing))
    bad = np.flatnonzero((array != np.floor(array)) | (np.abs(array) >= 2**53))
    if len(bad):
        found = f"found {array[bad[0]]} in row {bad[0]}"
        raise OodometerError(f"{what}: labels are ints or strings; {found}. Pass class labels, not measurements.")
    return array.astype(np.int64)


def _plain_cells(cells: list[Any], what: str) -> list[Any]:
    kinds = set(map(type, cells))
    if kinds in ({str}, {int}):
        return cells
    missing = [row for row, cell in enumerate(cells) if _is_missing(cell)]
    if missing:
        raise _missing(what, missing[0], len(missing))
    if all(issubclass(kind, str) for kind in kinds):
        return [str(cell) for cell in cells]
    if all(issubclass(kind, (int, float, np.integer, np.floating, np.bool_)) for kind in kinds):
        return list(_whole_numbers(np.asarray(cells, dtype=np.float64), what).tolist())
    found = ", ".join(sorted(kind.__name__ for kind in kinds))
    raise OodometerError(f"{what}: labels are all ints or all strings; found {found}. Convert them, e.g. with str().")


def _is_missing(cell: Any) -> bool:
    if cell is None or type(cell).__name__ in {"NAType", "NaTType"}:
        return True
    return isinstance(cell, (float, np.floating)) and bool(np.isnan(cell))


def _missing(what: str, row: int, count: int) -> OodometerError:
    return OodometerError(
        f"{what}: every row needs a label; found {count} missing (NaN or None), the first in row {row}. "
        "Drop these rows or give them a class."
    )


def same_length(what: str, found: int, rows: int) -> None:
    """Refuse a column that does not run along the rows."""
    if found != rows:
        raise OodometerError(f"{what}: needs one entry a row ({rows}); found {found}. Pass columns of one length.")


def read_names(names: Labels | None, rows: int, what: str) -> tuple[NDArray[Any], Index]:
    """Sample ids and the row order they define; without names the row number is the id."""
    if names is None:
        return np.arange(rows), np.arange(rows)
    cells = _read_cells(names, what)
    same_length(what, len(cells), rows)
    if isinstance(cells, np.ndarray):
        ids, order = cells, np.argsort(cells, kind="stable")
    else:  # Python sorts strings three times faster than NumPy sorts objects
        ids, order = as_array(cells), np.asarray(sorted(range(rows), key=cells.__getitem__), dtype=np.intp)
    twice = np.flatnonzero(ids[order[1:]] == ids[order[:-1]])
    if len(twice):
        raise OodometerError(
            f"{what}: sample ids must be unique; found {quote(ids[order[twice]].tolist())} more than once. "
            "Add the folder or data set to the id."
        )
    return ids, order


def read_groups(groups: Labels | None, rows: int, n_splits: int, what: str) -> Level | None:
    """Subject ids, enough of them for every fold."""
    if groups is None:
        return None
    level = read_labels(groups, what)
    same_length(what, len(level), rows)
    if len(level.classes) < n_splits:
        raise OodometerError(
            f"{what}: {n_splits} folds need at least {n_splits} groups; found {len(level.classes)}. "
            f"Lower n_splits to {len(level.classes)} or pass finer groups."
        )
    return level


def read_hierarchy(hierarchy: HierarchyLike, what: str) -> dict[str, Level]:
    """Label columns from the coarsest to the deepest level, all of one length."""
    if not isinstance(hierarchy, Mapping) and not hasattr(hierarchy, "columns"):
        raise OodometerError(
            f"{what}: needs a mapping or DataFrame of label columns, coarsest first; "
            f"found {type(hierarchy).__name__}. Pass e.g. {{'superclass': [...], 'class': [...]}}."
        )
    columns = {str(name): read_labels(column, f"{what}[{str(name)!r}]") for name, column in hierarchy.items()}
    if not columns:
        raise OodometerError(f"{what}: needs at least one label column; found none. Pass {{'class': [...]}}.")
    rows = len(next(iter(columns.values())))
    for name, level in columns.items():
        same_length(f"{what}[{name!r}]", len(level), rows)
    return columns


def depth_of(level: str, levels: Mapping[str, Level]) -> int:
    """The position of the classification level, counted from the coarsest."""
    names = list(levels)
    if str(level) not in names:
        raise OodometerError(f"level: needs one of {quote(names, 20)}; found {level!r}. Name one of these columns.")
    return names.index(str(level))


def in_common_codes(
    id_levels: Mapping[str, Level], ood_levels: Mapping[str, Level]
) -> tuple[dict[str, Level], dict[str, Level]]:
    """Two hierarchies of the same levels, with one code a class across both."""
    if list(id_levels) != list(ood_levels):
        raise OodometerError(
            "ood_hierarchy: needs the levels of the ID hierarchy in its order "
            f"({quote(list(id_levels), 20)}); found {quote(list(ood_levels), 20)}. Rename or reorder columns."
        )
    id_side: dict[str, Level] = {}
    ood_side: dict[str, Level] = {}
    for name in id_levels:
        here, there = id_levels[name], ood_levels[name]
        if type(here.classes[0]) is not type(there.classes[0]):
            raise OodometerError(
                f"level {name!r}: ID and OOD labels must be of one type; found {here.classes[0]!r} and "
                f"{there.classes[0]!r}. Convert one of them."
            )
        classes = tuple(sorted({*here.classes, *there.classes}))
        code_of = {label: code for code, label in enumerate(classes)}
        for level, side in ((here, id_side), (there, ood_side)):
            new_code = np.asarray([code_of[label] for label in level.classes], dtype=np.intp)
            side[name] = Level(new_code[level.codes], classes)
    return id_side, ood_side


def parents(levels: Mapping[str, Level]) -> list[Index]:
    """For each level below the coarsest the parent of every class; a class with two parents is an error."""
    found = []
    for (above, coarse), (below, fine) in pairwise(levels.items()):
        parent = np.zeros(len(fine.classes), dtype=np.intp)
        parent[fine.codes] = coarse.codes
        torn = np.flatnonzero(parent[fine.codes] != coarse.codes)
        if len(torn):
            child = fine.codes[torn].min()
            both = np.unique(coarse.codes[fine.codes == child])
            raise OodometerError(
                f"hierarchy: every class needs one parent; {below} {fine.classes[child]!r} has {len(both)} "
                f"at level {above}: {coarse.named(both)}. Correct the labels, or "
                "make names unique by joining them with their parent's ('bird/crane', 'machine/crane')."
            )
        found.append(parent)
    return found


def join_rows(id_levels: Mapping[str, Level], ood_levels: Mapping[str, Level]) -> dict[str, Level]:
    """ID rows followed by OOD rows, for checks that concern the whole hierarchy."""
    return {
        name: Level(np.concatenate([level.codes, ood_levels[name].codes]), level.classes)
        for name, level in id_levels.items()
    }
