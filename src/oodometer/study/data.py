"""The data sets of a study, opened: banks with their classes, hierarchy, sample ids and identity."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oodometer.arrays import Ints, to_numpy
from oodometer.bank import Bank
from oodometer.errors import OodometerError
from oodometer.readers import read_bank
from oodometer.splits import select_ood_classes
from oodometer.study.spec import Draw, Level, Rows, Spec

Column = NDArray[Any]


@dataclass(frozen=True, eq=False)
class DataSet:
    """One set of rows; `identity` is everything that determines what is in them.

    `classes` and `levels` are empty for outliers without labels. In a holdout, rows before `test_from` train.
    `drawn` are the rows of the bank that belong to the set, where those are not all of them.
    """

    name: str
    bank: Bank
    classes: Column | None
    levels: Mapping[str, Column]
    ids: Column
    identity: Mapping[str, Any]
    subjects: Column | None = None
    group: str = ""
    source: str = ""
    test_from: int = 0
    drawn: Column | None = None

    def __len__(self) -> int:
        return len(self.bank)


@dataclass(frozen=True, eq=False)
class StudyData:
    """The ID set, the OOD sets to test, and those that only choose parameters."""

    id: DataSet
    ood: Mapping[str, DataSet]
    ood_val: Mapping[str, DataSet]

    @property
    def fingerprints(self) -> dict[str, Any]:
        """The content of every set's bank, by name."""
        return {one.name: one.identity["bank"] for one in (self.id, *self.ood.values(), *self.ood_val.values())}


def open_data(spec: Spec, *, own_head: bool, device: str | None = None) -> StudyData:
    """Open and check every bank of a study; `own_head` keeps labels as the bank's own classifier numbers them."""
    data = spec.data
    whole = _opened(data.id, data.id.name or _name_of(data.id.bank), (data.id.bank, data.id.test), device)
    if whole.classes is None:
        raise OodometerError(f"data.id: the column {data.id.labels!r} (labels) is needed; {_columns(whole.bank)}")
    whole = replace(whole, subjects=_column(whole.bank, data.id.subjects) if data.id.subjects else None)
    ood = {name: _outliers(rows, name, (rows.train, rows.bank), device) for name, rows in data.ood.items()}
    ood_val = {name: _outliers(rows, name, (None, rows.bank), device) for name, rows in data.ood_val.items()}
    if own_head:
        ood, ood_val = ({name: _with_head_of(whole, one) for name, one in sets.items()} for sets in (ood, ood_val))
    if data.draw is not None:
        _check_may_draw(own_head)
        whole, outside = drawn(whole, data.draw, labels=data.id.labels, seed=spec.seed)
        if outside.name in ood:
            raise OodometerError(f"study: two OOD sets are called {outside.name!r}: give data.draw a name of its own")
        ood = {outside.name: replace(outside, bank=_with_labels(outside, None)), **ood}
    found = StudyData(_numbered(whole, own_head=own_head), ood, ood_val)
    _check_apart(found)
    return found


def _outliers(rows: Any, name: str, banks: tuple[Any, Any], device: str | None) -> DataSet:
    """Outliers have no class of the classifier: their labels only keep rows of one class together."""
    found = _opened(rows, name, banks, device)
    return replace(found, bank=_with_labels(found, None), group=rows.group, source=rows.source or name)


def _with_head_of(inside: DataSet, one: DataSet) -> DataSet:
    """Features come with the ID bank's head where they have none of their own: one network made both."""
    head = inside.bank.head
    if head is None or one.bank.head is not None or "logits" in one.bank or "features" not in one.bank:
        return one
    width = int(head.weight.shape[1])
    if one.bank.row_shape("features") != (width,):
        raise OodometerError(
            f"data {one.name!r}: rows of 'features' have shape {one.bank.row_shape('features')}, the head of the ID "
            f"bank reads {width}: extract both with one network"
        )
    return replace(one, bank=one.bank.with_head(head))


def _with_labels(one: DataSet, labels: Column | None) -> Bank:
    """The bank of a set with these labels, or without any; no column is copied."""
    if labels is None:
        bank = one.bank.select([column for column in one.bank.columns if column != "labels"])
    else:
        full = labels
        if one.drawn is not None:
            full = np.full(len(one.bank), -1)
            full[one.drawn] = labels
        edges = np.cumsum([0, *map(len, one.bank.parts)]).tolist()
        pairs = zip(one.bank.parts, pairwise(edges), strict=True)
        bank = Bank.concat([part.with_columns(labels=full[start:stop]) for part, (start, stop) in pairs])
    return bank if one.drawn is None else ascending_rows(bank, one.drawn)


def ascending_rows(bank: Bank, rows: Ints) -> Bank:
    """Rows in ascending order; those of a joined bank stay views of its parts."""
    edges = np.cumsum([0, *map(len, bank.parts)])
    cuts = np.searchsorted(rows, edges)
    pairs = zip(bank.parts, edges[:-1].tolist(), pairwise(cuts.tolist()), strict=True)
    found = [part.rows(rows[start:stop] - edge) for part, edge, (start, stop) in pairs if stop > start]
    return Bank.concat(found or [bank.rows(slice(0, 0))])


def _opened(rows: Rows, name: str, banks: tuple[Any, Any], device: str | None) -> DataSet:
    """A data set of one bank, or of training rows followed by test rows."""
    parts = [_bank(given) for given in banks if given is not None]
    prints = [part.fingerprint for part in parts]
    bank = _moved(Bank.concat(parts), device)
    classes = _column(bank, rows.labels) if rows.labels in bank.columns else None
    levels = {level if isinstance(level, str) else level.name: _level(bank, level) for level in rows.levels}
    if not levels and classes is not None:
        levels = {rows.labels: classes}
    return DataSet(
        name=name,
        bank=bank,
        classes=classes,
        levels=levels,
        ids=_column(bank, rows.ids) if rows.ids else np.arange(len(bank)),
        identity={"bank": prints[0] if len(prints) == 1 else prints, "labels": rows.labels},
        test_from=len(parts[0]) if len(parts) > 1 else 0,
    )


def _bank(given: Any) -> Bank:
    if isinstance(given, Bank):
        return given
    if isinstance(given, list | tuple) and given:
        return Bank.concat([_bank(one) for one in given])
    if isinstance(given, str | Path):
        return read_bank(given)
    raise OodometerError(f"bank: a path, a Bank or a list of them is needed; found {given!r}")


def _name_of(given: Any) -> str:
    first = given[0] if isinstance(given, list | tuple) and given else given
    return Path(first).resolve().stem if isinstance(first, str | Path) else "id"


def _moved(bank: Bank, device: str | None) -> Bank:
    if device is None:
        return bank
    try:
        return bank.to(device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().split("\n", 1)[0]
        raise OodometerError(f"device {device!r}: {reason}. `oodometer doctor` shows what there is") from None


def _columns(bank: Bank) -> str:
    return f"the bank has {', '.join(bank.columns)}"


def _column(bank: Bank, name: str) -> Column:
    """One whole number a row."""
    if name not in bank.columns:
        raise OodometerError(f"study: a bank with the column {name!r} is needed; {_columns(bank)}")
    found = to_numpy(bank[name])
    if found.ndim != 1 or found.dtype.kind not in "iub":
        raise OodometerError(
            f"study: the column {name!r} needs one whole number a row; found shape {found.shape}, dtype {found.dtype}"
        )
    return np.asarray(found, dtype=np.int64)


def _level(bank: Bank, level: str | Level) -> Column:
    if isinstance(level, str):
        return _column(bank, level)
    finer = _column(bank, level.of)
    parents: Column = np.full(len(finer), "", dtype=object)
    for parent, members in level.classes.items():
        parents[np.isin(finer, members)] = parent
    orphans = np.unique(finer[parents == ""]).tolist()
    if orphans:
        raise OodometerError(f"study: level {level.name!r} has no class for {level.of!r} = {orphans[:5]}: list them")
    return parents


# ---------------------------------------------------------------------------------------------- classes


def _check_may_draw(own_head: bool) -> None:
    if own_head:
        raise OodometerError(
            "study: [data.draw] makes OOD classes of classes that the bank's own classifier knows: choose a trainer "
            "that fits a classifier on the other classes, e.g. trainer = 'probe'"
        )


def drawn(whole: DataSet, draw: Draw, *, labels: str, seed: int) -> tuple[DataSet, DataSet]:
    """The ID set without the drawn classes, and the drawn classes (Algorithm 2)."""
    chosen = select_ood_classes(whole.levels, level=labels, fraction=draw.fraction, seed=seed, rule=draw.rule)
    inside, outside = _part(whole, chosen.id_rows), _part(whole, chosen.ood_rows)
    name = draw.name or f"{whole.name}-ood"
    return inside, replace(outside, name=name, subjects=None, group=draw.group, source=name)


def _part(whole: DataSet, index: Column) -> DataSet:
    """Some rows of a set, known by their content."""
    return replace(
        whole,
        drawn=index,
        classes=None if whole.classes is None else whole.classes[index],
        levels={name: column[index] for name, column in whole.levels.items()},
        ids=whole.ids[index],
        subjects=None if whole.subjects is None else whole.subjects[index],
        identity={**whole.identity, "rows": hashlib.sha256(index.astype(np.int64).tobytes()).hexdigest()},
    )


def _numbered(whole: DataSet, *, own_head: bool) -> DataSet:
    """The ID set with labels 0 … C−1, or with those of the bank's own classifier."""
    assert whole.classes is not None, "checked when opened"
    labels = whole.classes if own_head else np.unique(whole.classes, return_inverse=True)[1]
    _check_classes(whole, labels, own_head=own_head)
    return replace(whole, bank=_with_labels(whole, labels), identity={**whole.identity, "numbered": not own_head})


def _check_classes(whole: DataSet, labels: Column, *, own_head: bool) -> None:
    if own_head and "logits" not in whole.bank:
        raise OodometerError(
            f"data {whole.name!r}: trainer 'frozen' needs logits, or features and a head; {_columns(whole.bank)}: "
            "choose trainer = 'probe', which fits a classifier on the features"
        )
    if len(np.unique(labels)) < 2:
        raise OodometerError(f"data {whole.name!r}: at least two ID classes are needed; found {len(np.unique(labels))}")
    if own_head and (labels.min() < 0 or labels.max() >= whole.bank.classes):
        raise OodometerError(
            f"data {whole.name!r}: labels {int(labels.min())} … {int(labels.max())} do not number the "
            f"{whole.bank.classes} classes of the bank's classifier: renumber them, or choose trainer = 'probe'"
        )


def _check_apart(found: StudyData) -> None:
    """No bank may stand on two sides."""
    seen: dict[str, str] = {}
    everything = [("the ID set", found.id)]
    everything += [(f"OOD set {name!r}", one) for name, one in found.ood.items() if "rows" not in one.identity]
    everything += [(f"OOD validation set {name!r}", one) for name, one in found.ood_val.items()]
    for what, one in everything:
        prints = one.identity["bank"]
        for mark in [prints] if isinstance(prints, str) else prints:
            other = seen.setdefault(mark, what)
            if other != what or (isinstance(prints, list) and prints.count(mark) > 1):
                raise OodometerError(
                    f"study: {what} and {other} hold the same bank: rows that are tested may neither be fitted nor "
                    "tuned on, and one set cannot be both ID and OOD"
                )
