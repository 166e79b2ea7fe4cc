"""Which rows every fold trains, validates and tests on, in pieces that folds share so that work adds up."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from oodometer.errors import OodometerError, OodometerWarning
from oodometer.splits import DualKFold, Folds, HierarchicalDualKFold, Holdout, RepeatedHoldout
from oodometer.splits.assign import random_keys
from oodometer.splits.labels import Index, quote
from oodometer.study.data import DataSet, StudyData
from oodometer.study.spec import Split


@dataclass(frozen=True, eq=False)
class Piece:
    """Some ID rows that stay together; the same object in every fold that uses them."""

    rows: Index

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, eq=False)
class FoldRows:
    """One fold: pieces of ID rows by role, and the rows of every OOD set."""

    repeat: int
    fold: int
    train: tuple[Piece, ...]
    val: tuple[Piece, ...]
    test: tuple[Piece, ...]
    ood_train: Mapping[str, Index]
    ood_test: Mapping[str, Index]

    def identity(self) -> dict[str, str]:
        """What determines the ID side: rows and pieces of every role."""
        return {role: _digest([piece.rows for piece in getattr(self, role)]) for role in ("train", "val", "test")}

    def ood_identity(self, name: str, role: str) -> str:
        """What determines the OOD rows of a role, 'train' or 'test'."""
        rows = self.ood_train if role == "train" else self.ood_test
        return _digest([rows[name]])


def _digest(pieces: Sequence[Index]) -> str:
    digest = hashlib.sha256()
    for rows in pieces:
        digest.update(f"{len(rows)}:".encode() + np.ascontiguousarray(rows, dtype=np.int64).tobytes())
    return digest.hexdigest()


def joined(pieces: Sequence[Piece]) -> Index:
    """The row numbers of pieces, one after the other."""
    return np.concatenate([piece.rows for piece in pieces])


# ---------------------------------------------------------------------------------------------- splits


def n_repeats(split: Split) -> int:
    """How many cross-validations a study runs (a repeated holdout is one, with a fold a repetition)."""
    return (split.repeats or 1) if split.kind in ("dual", "hierarchical") else 1


def deal(data: StudyData, split: Split, *, labels: str, seed: int, repeat: int) -> dict[str, Folds]:
    """The folds of every OOD set in one repeat; the ID side is the same in all of them."""
    found = {name: _folds(data.id, one, split, labels, seed + repeat) for name, one in data.ood.items()}
    first = next(iter(found.values()))
    for name, folds in found.items():
        same = len(folds) == len(first) and all(
            np.array_equal(a.id_test, b.id_test) for a, b in zip(folds, first, strict=True)
        )
        if not same:
            raise OodometerError(f"study: the ID folds of OOD set {name!r} differ from the others: give all one kind")
    return found


def _folds(inside: DataSet, outside: DataSet, split: Split, labels: str, seed: int) -> Folds:
    classes = _ood_classes(outside, split, labels)
    names = {"id_groups": inside.subjects, "id_names": inside.ids, "ood_names": outside.ids}
    assert inside.classes is not None, "checked when opened"
    if split.kind == "hierarchical":
        made = HierarchicalDualKFold(split.folds, level=labels, seed=seed)
        return made.split(inside.levels, outside.levels, **names)
    if split.kind == "dual":
        dual = DualKFold(split.folds, id=split.id or "stratified", ood=split.ood, seed=seed)
        with warnings.catch_warnings():
            # That classes are on both sides is what ood = 'plain' asks for; exposure is refused with it.
            warnings.filterwarnings("ignore", message="ood='", category=OodometerWarning)
            return dual.split(inside.classes, classes, **names)
    if split.kind == "repeated-holdout":
        repeated = RepeatedHoldout(
            split.repeats or 100, id=split.id or "plain", id_test=split.id_test, ood_test=split.ood_test, seed=seed
        )
        return repeated.split(inside.classes, classes, **names)
    cut, ood_cut = inside.test_from, outside.test_from
    fixed = Holdout(
        id_train=inside.ids[:cut],
        id_test=inside.ids[cut:],
        ood_train=outside.ids[:ood_cut],
        ood_test=outside.ids[ood_cut:],
    )
    return fixed.split(inside.classes, classes, **names)


def _ood_classes(outside: DataSet, split: Split, labels: str) -> NDArray[np.int64]:
    """The classes that stay together; for rows that are dealt one by one none are needed."""
    if outside.classes is not None:
        found: NDArray[np.int64] = outside.classes
        return found
    if split.kind == "holdout":
        return (np.arange(len(outside)) >= outside.test_from).astype(np.int64)
    if split.kind == "dual" and split.ood != "group":
        return np.zeros(len(outside), np.int64)
    raise OodometerError(
        f"data.ood.{outside.name}: folds of OOD classes need the column {labels!r}; the bank has "
        f"{', '.join(outside.bank.columns)}. Add it, or set split.ood = 'plain' (then without exposure)"
    )


# ---------------------------------------------------------------------------------------------- pieces


def rows_of(folds: Mapping[str, Folds], inside: DataSet, split: Split, *, seed: int, repeat: int) -> list[FoldRows]:
    """Every fold of one repeat, with validation rows cut from its ID training rows."""
    first = next(iter(folds.values()))
    sides = list(_shared_pieces(first, inside, split, seed + repeat) if _is_partition(first) else [])
    sides = sides or [_own_pieces(first, fold, inside, split, seed + repeat) for fold in range(len(first))]
    return [
        FoldRows(
            repeat,
            fold,
            *side,
            ood_train={name: found[fold].ood_train for name, found in folds.items()},
            ood_test={name: found[fold].ood_test for name, found in folds.items()},
        )
        for fold, side in enumerate(sides)
    ]


Side = tuple[tuple[Piece, ...], tuple[Piece, ...], tuple[Piece, ...]]


def _is_partition(folds: Folds) -> bool:
    """Whether every ID row is tested once and trained on in all other folds."""
    tested = np.concatenate([fold.id_test for fold in folds])
    rows = len(folds.id_names)
    return len(tested) == rows == len(np.unique(tested)) and all(
        len(fold.id_train) + len(fold.id_test) == rows for fold in folds
    )


def _shared_pieces(folds: Folds, inside: DataSet, split: Split, seed: int) -> Iterator[Side]:
    """Pieces of a cross-validation: fold g's rows are core_g + held_g, and fold f trains on all core_g, g ≠ f.

    So what is summed or searched in a piece serves all the folds that train on it.
    """
    part = np.empty(len(folds.id_names), np.int64)
    for place, fold in enumerate(folds):
        part[fold.id_test] = place
    held = _held_out(inside, part, split, random_keys(len(part), seed, "validation"))
    _keep_every_class(inside, part, held)
    core_pieces = [Piece(np.flatnonzero((part == place) & ~held)) for place in range(len(folds))]
    held_pieces = [Piece(np.flatnonzero((part == place) & held)) for place in range(len(folds))]
    for place in range(len(folds)):
        others = [g for g in range(len(folds)) if g != place]
        yield (
            _filled([core_pieces[g] for g in others], "training", split),
            _filled([held_pieces[g] for g in others], "validation", split),
            _filled([core_pieces[place], held_pieces[place]], "test", split),
        )


def _own_pieces(folds: Folds, place: int, inside: DataSet, split: Split, seed: int) -> Side:
    """Pieces of a fold that shares none with others."""
    fold = folds[place]
    part = np.full(len(folds.id_names), -1, np.int64)
    part[fold.id_train] = 0
    held = _held_out(inside, part, split, random_keys(len(part), seed, "validation", place))
    _keep_every_class(inside, part, held)
    train, val = np.flatnonzero((part == 0) & ~held), np.flatnonzero((part == 0) & held)
    return (
        _filled([Piece(train)], "training", split),
        _filled([Piece(val)], "validation", split),
        (Piece(fold.id_test),),
    )


def _filled(pieces: Sequence[Piece], role: str, split: Split) -> tuple[Piece, ...]:
    found = tuple(piece for piece in pieces if len(piece))
    if not found:
        raise OodometerError(
            f"study: a fold has no {role} rows left at split.validation = {split.validation:g}: "
            f"{'raise' if role == 'validation' else 'lower'} it, or add rows"
        )
    return found


def _held_out(inside: DataSet, part: NDArray[np.int64], split: Split, keys: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Validation rows: the share of every class and part, rounded so that no stretch of them is off by one row.

    Keys belong to sample ids, so that the order of the rows does not matter. Subjects are held out whole.
    """
    by_id = np.empty_like(keys)
    by_id[np.argsort(inside.ids, kind="stable")] = keys
    if inside.subjects is not None:
        return _held_subjects(inside.subjects, part, split.validation, by_id)
    assert inside.classes is not None, "checked when opened"
    share = Fraction(str(split.validation))
    order = np.lexsort((by_id, part, inside.classes))
    order = order[part[order] >= 0]
    start = int(keys[0] % np.uint64(share.denominator)) if len(keys) else 0
    reached = (np.arange(1, len(order) + 1) * share.numerator + start) // share.denominator
    held = np.zeros(len(part), bool)
    held[order] = np.diff(reached, prepend=start // share.denominator) > 0
    return held


def _held_subjects(
    subjects: NDArray[np.int64], part: NDArray[np.int64], share: float, keys: NDArray[np.uint64]
) -> NDArray[np.bool_]:
    """Whole subjects of every part in random order until the share is reached; one at least where there are two."""
    held = np.zeros(len(part), bool)
    for place in np.unique(part[part >= 0]):
        rows = np.flatnonzero(part == place)
        found, first, codes = np.unique(subjects[rows], return_index=True, return_inverse=True)
        if len(found) < 2:
            continue
        drawn = np.argsort(keys[rows][first], kind="stable")
        reached = np.cumsum(np.bincount(codes)[drawn])
        count = max(int(np.searchsorted(reached, share * len(rows), side="right")), 1)
        held[rows[np.isin(codes, drawn[: min(count, len(found) - 1)])]] = True
    return held


def _keep_every_class(inside: DataSet, part: NDArray[np.int64], held: NDArray[np.bool_]) -> None:
    """Give back validation rows of classes that some fold could not be fitted on without them."""
    assert inside.classes is not None, "checked when opened"
    classes, codes = np.unique(inside.classes, return_inverse=True)
    parts = int(part.max()) + 1
    inside_part = part >= 0
    core = np.zeros((len(classes), parts), np.int64)
    every = np.zeros_like(core)
    np.add.at(every, (codes[inside_part], part[inside_part]), 1)
    kept = inside_part & ~held
    np.add.at(core, (codes[kept], part[kept]), 1)
    if parts > 1:  # fold f trains on all parts but its own
        core, every = core.sum(1, keepdims=True) - core, every.sum(1, keepdims=True) - every
    short = np.flatnonzero(((core == 0) & (every > 0)).any(axis=1))
    if len(short):
        held[np.isin(codes, short)] = False
        warnings.warn(
            f"{len(short)} ID classes have too few rows to give any for validation: {quote(classes[short].tolist())}",
            OodometerWarning,
            stacklevel=2,
        )
