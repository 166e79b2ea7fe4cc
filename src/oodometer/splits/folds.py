"""Folds: index arrays with their sample ids, checked against leaks, printed as a table, saved as JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from oodometer.errors import OodometerError
from oodometer.splits.labels import Index, Labels, Level, as_array, quote, read_labels, read_names

UNUSED, TRAIN, TEST = 0, 1, 2
PARTS = ("id_train", "id_test", "ood_train", "ood_test")
_FORMAT = "oodometer.folds/1"
_SHOWN = 10  # folds printed at either end of a long table


@dataclass(frozen=True, eq=False)
class Side:
    """The rows of one side, ID or OOD: sample ids, labels by level, and each row's role in each fold."""

    names: NDArray[Any]
    levels: Mapping[str, Level]
    roles: NDArray[np.uint8]  # (folds, rows) of UNUSED, TRAIN, TEST

    def rows(self, fold: int, role: int) -> Index:
        index = np.flatnonzero(self.roles[fold] == role)
        index.setflags(write=False)
        return index

    def class_counts(self, level: str, fold: int) -> NDArray[np.intp]:
        """Rows of every class of a level by role: (classes, UNUSED | TRAIN | TEST)."""
        column = self.levels[level]
        cells = column.codes * 3 + self.roles[fold]
        return np.bincount(cells, minlength=3 * len(column.classes)).reshape(-1, 3)

    def in_order(self, names: Labels, what: str) -> Side:
        """The same side for data whose rows stand in another order."""
        rows = len(self.names)
        ids, order = read_names(names, rows, what)
        _, own_order = read_names(self.names, rows, what)
        known = set(self.names.tolist())
        unknown = [name for name in ids.tolist() if name not in known]
        if unknown:
            raise OodometerError(
                f"{what}: needs the sample ids of these folds in any order; found {quote(unknown)}, which they do "
                "not hold. Split the new data again."
            )
        source = np.empty(rows, dtype=np.intp)
        source[order] = own_order
        levels = {name: column.rows(source) for name, column in self.levels.items()}
        return Side(ids, levels, self.roles[:, source])


@dataclass(frozen=True, eq=False, repr=False)
class Fold:
    """Row numbers of one fold's four parts, with the sample ids of both sets.

    `exclusive` says that no OOD class is in both `ood_train` and `ood_test`, so outlier exposure is fair.
    """

    id_train: Index
    id_test: Index
    ood_train: Index
    ood_test: Index
    id_names: NDArray[Any]
    ood_names: NDArray[Any]
    exclusive: bool

    def names(self, part: str) -> NDArray[Any]:
        """The sample ids of a part: 'id_train', 'id_test', 'ood_train' or 'ood_test'."""
        if part not in PARTS:
            raise OodometerError(f"part: needs one of {quote(PARTS)}; found {part!r}.")
        names: NDArray[Any] = (self.id_names if part.startswith("id") else self.ood_names)[getattr(self, part)]
        return names

    def __repr__(self) -> str:
        return f"Fold({', '.join(f'{part}={len(getattr(self, part))} rows' for part in PARTS)})"


class Folds(Sequence[Fold]):
    """The folds of one split, in order; `print` shows them as a table."""

    def __init__(self, id_side: Side, ood_side: Side, *, level: str, splitter: str, parameters: Mapping[str, Any]):
        self.level = level
        self.splitter = splitter
        self.parameters = dict(parameters)
        self._id, self._ood = id_side, ood_side
        self.exclusive = all(_is_exclusive(ood_side, level, fold) for fold in range(len(self)))
        for fold in range(len(self)):
            _check_fold(id_side, ood_side, level, fold)

    @property
    def id_names(self) -> NDArray[Any]:
        """Sample ids of the ID rows, in row order."""
        return self._id.names

    @property
    def ood_names(self) -> NDArray[Any]:
        """Sample ids of the OOD rows, in row order."""
        return self._ood.names

    @property
    def digest(self) -> str:
        """SHA-256 of everything the folds consist of."""
        return _digest(self._payload())

    def __len__(self) -> int:
        return len(self._id.roles)

    @overload
    def __getitem__(self, at: int) -> Fold: ...
    @overload
    def __getitem__(self, at: slice) -> list[Fold]: ...
    def __getitem__(self, at: int | slice) -> Fold | list[Fold]:
        if isinstance(at, slice):
            return [self[fold] for fold in range(len(self))[at]]
        fold = range(len(self))[at]
        return Fold(
            id_train=self._id.rows(fold, TRAIN),
            id_test=self._id.rows(fold, TEST),
            ood_train=self._ood.rows(fold, TRAIN),
            ood_test=self._ood.rows(fold, TEST),
            id_names=self.id_names,
            ood_names=self.ood_names,
            exclusive=self.exclusive,
        )

    def __iter__(self) -> Iterator[Fold]:
        return (self[fold] for fold in range(len(self)))

    def __repr__(self) -> str:
        return f"Folds({len(self)} folds of {self._title()})"

    def __str__(self) -> str:
        """A line a fold: rows · classes at each level, for each part."""
        header = [
            "fold",
            *(part.replace("_", " ").replace("id", "ID").replace("ood", "OOD") for part in PARTS),
        ]
        lines = [header, *([str(fold), *self._cells(fold)] for fold in range(len(self)))]
        if len(self) > 2 * _SHOWN:
            shown = [*range(_SHOWN), *range(len(self) - _SHOWN, len(self))]
            lines = [header, *([str(fold), *self._cells(fold)] for fold in shown)]
            lines.insert(_SHOWN + 1, ["…"] * len(header))
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        table = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
        return "\n".join([self._title(), f"rows · classes ({' / '.join(self._id.levels)})", *table])

    def _title(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.parameters.items())
        return f"{self.splitter}({arguments}): {len(self.id_names)} ID rows, {len(self.ood_names)} OOD rows"

    def _cells(self, fold: int) -> Iterator[str]:
        for side in (self._id, self._ood):
            by_level = [side.class_counts(level, fold) for level in side.levels]
            for role in (TRAIN, TEST):
                found = [np.count_nonzero(counts[:, role]) for counts in by_level]
                yield f"{by_level[0][:, role].sum()} · {' / '.join(map(str, found))}"

    def cs_id(self, sources: Labels) -> list[Index]:
        """The rows of a covariate-shifted ID set to test in each fold, given the ID sample behind each.

        A shifted row is tested with the fold that tests its source and is never a training row.
        """
        made_from = read_labels(sources, "sources")
        place = {name: row for row, name in enumerate(self.id_names.tolist())}
        unknown = [name for name in made_from.classes if name not in place]
        if unknown:
            raise OodometerError(
                f"sources: each needs to be the sample id of an ID row; found {quote(unknown)}. "
                "Pass the ids given as id_names (row numbers when none were given)."
            )
        source = np.asarray([place[name] for name in made_from.classes], dtype=np.intp)[made_from.codes]
        return [np.flatnonzero(roles[source] == TEST) for roles in self._id.roles]

    def align(self, *, id_names: Labels, ood_names: Labels) -> Folds:
        """The same folds for data whose rows stand in another order: matched by sample id."""
        id_side, ood_side = (
            self._id.in_order(id_names, "id_names"),
            self._ood.in_order(ood_names, "ood_names"),
        )
        return Folds(id_side, ood_side, level=self.level, splitter=self.splitter, parameters=self.parameters)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the folds as JSON, whole or not at all."""
        payload = self._payload()
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            draft.write_text(_dump({**payload, "digest": _digest(payload)}), encoding="ascii")
            draft.replace(target)
        finally:
            draft.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Folds:
        """Read folds back; a damaged file is refused."""
        try:
            payload = json.loads(Path(path).read_text(encoding="ascii"))
            digest = payload.pop("digest")
            sound = payload["format"] == _FORMAT and digest == _digest(payload)
        except FileNotFoundError as error:
            raise OodometerError(f"folds: no file at {path}. Write one with folds.save(path).") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise _damaged(path) from error
        if not sound:
            raise _damaged(path)
        sides = [_read_side(payload[name]) for name in ("id", "ood")]
        return cls(
            *sides,
            level=payload["level"],
            splitter=payload["splitter"],
            parameters=dict(payload["parameters"]),
        )

    def _payload(self) -> dict[str, Any]:
        return {
            "format": _FORMAT,
            "roles": {"0": "unused", "1": "train", "2": "test"},
            "splitter": self.splitter,
            "parameters": list(self.parameters.items()),
            "level": self.level,
            "id": _write_side(self._id),
            "ood": _write_side(self._ood),
        }


def _damaged(path: str | os.PathLike[str]) -> OodometerError:
    return OodometerError(
        f"folds: {path} needs to be a {_FORMAT} file whose content matches its digest; it does not. "
        "It was cut short or edited: restore it, or split again with the same seed and save."
    )


def _dump(payload: Mapping[str, Any]) -> str:
    return json.dumps(payload, sort_keys=True, separators=(",", ":"))


def _digest(payload: Mapping[str, Any]) -> str:
    return sha256(_dump(payload).encode("ascii")).hexdigest()


def _write_side(side: Side) -> dict[str, Any]:
    return {
        "names": side.names.tolist(),
        "levels": [[name, level.classes, level.codes.tolist()] for name, level in side.levels.items()],
        "folds": [(roles + ord("0")).tobytes().decode("ascii") for roles in side.roles],
    }


def _read_side(side: Mapping[str, Any]) -> Side:
    levels = {name: Level(np.asarray(codes, dtype=np.intp), tuple(classes)) for name, classes, codes in side["levels"]}
    roles = [np.frombuffer(text.encode("ascii"), dtype=np.uint8) - ord("0") for text in side["folds"]]
    return Side(as_array(side["names"]), levels, np.stack(roles))


def _is_exclusive(ood_side: Side, level: str, fold: int) -> bool:
    counts = ood_side.class_counts(level, fold)
    return not ((counts[:, TRAIN] > 0) & (counts[:, TEST] > 0)).any()


def _check_fold(id_side: Side, ood_side: Side, level: str, fold: int) -> None:
    counts = id_side.class_counts(level, fold)
    parts = {
        "ID train": counts[:, TRAIN].any(),
        "ID test": counts[:, TEST].any(),
        "OOD test": (ood_side.roles[fold] == TEST).any(),
    }
    empty = [part for part, filled in parts.items() if not filled]
    if empty:
        raise OodometerError(
            f"fold {fold}: needs rows in every part; {quote(empty)} is empty. "
            "Use fewer folds, or add rows, classes or groups."
        )
    unseen = np.flatnonzero((counts[:, TEST] > 0) & (counts[:, TRAIN] == 0))
    if len(unseen):
        raise OodometerError(
            f"fold {fold}: every tested ID class needs training rows; {level} "
            f"{id_side.levels[level].named(unseen)} is in the test part only. Give each class at least two rows "
            "(in two groups, if rows are grouped), stratify, try another seed, or drop it."
        )


def build_side(names: Labels | None, levels: Mapping[str, Level], what: str) -> tuple[Side, Index]:
    """A side whose roles are still to be dealt, and the row order its sample ids define."""
    rows = len(next(iter(levels.values())))
    ids, order = read_names(names, rows, what)
    return Side(ids, levels, np.empty((0, rows), dtype=np.uint8)), order


def cross_validation(side: Side, folds: Index, n_splits: int) -> Side:
    """Roles of a k-fold: a row is tested in its own fold and trains in all others."""
    tested = folds == np.arange(n_splits)[:, None]
    return Side(side.names, side.levels, np.where(tested, np.uint8(TEST), np.uint8(TRAIN)))
