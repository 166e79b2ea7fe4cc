"""The splitters: dual cross-validation with and without a hierarchy, repeated holdout, and fixed lists."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from oodometer.errors import OodometerError, OodometerWarning
from oodometer.splits.assign import (
    ROOT,
    Ancestors,
    Deal,
    depth_first,
    group_folds,
    members,
    plain_folds,
    random_keys,
    stratified_folds,
    stratified_group_folds,
    stratum_folds,
)
from oodometer.splits.folds import TEST, TRAIN, UNUSED, Folds, Side, build_side, cross_validation
from oodometer.splits.labels import (
    HierarchyLike,
    Index,
    Label,
    Labels,
    Level,
    depth_of,
    in_common_codes,
    join_rows,
    parents,
    quote,
    read_groups,
    read_hierarchy,
    read_labels,
)
from oodometer.splits.select import read_seed

_CLASS = "class"  # the one level of data without a hierarchy


@dataclass(frozen=True)
class DualKFold:
    """Two cross-validations at once: k-fold over ID rows, group k-fold over OOD classes (Algorithm 1)."""

    n_splits: int = 5
    id: Literal["stratified", "plain"] = field(default="stratified", kw_only=True)
    ood: Literal["group", "stratified", "plain"] = field(default="group", kw_only=True)
    seed: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        _check_count("n_splits", self.n_splits, 2)
        _check_choice("id", self.id, ("stratified", "plain"))
        _check_choice("ood", self.ood, ("group", "stratified", "plain"))
        read_seed(self.seed)

    def split(
        self,
        id_labels: Labels,
        ood_labels: Labels,
        *,
        id_groups: Labels | None = None,
        id_names: Labels | None = None,
        ood_names: Labels | None = None,
    ) -> Folds:
        """Folds over ID and OOD rows; rows of one `id_groups` entry (a subject) stay together."""
        id_level, ood_level = read_labels(id_labels, "id_labels"), read_labels(ood_labels, "ood_labels")
        id_side, id_order = build_side(id_names, {_CLASS: id_level}, "id_names")
        ood_side, ood_order = build_side(ood_names, {_CLASS: ood_level}, "ood_names")
        groups = read_groups(id_groups, len(id_level), self.n_splits, "id_groups")
        rank = np.arange(len(id_level.classes))
        # Algorithm 1, line 3
        deal = Deal(self.n_splits, self.seed, "id")
        id_folds = _id_folds(id_level, rank, id_order, deal, groups=groups, kind=self.id)
        # Algorithm 1, line 4
        ood_folds = self._ood_folds(ood_level, ood_order)
        return _dual(self, _CLASS, (id_side, id_folds), (ood_side, ood_folds))

    def _ood_folds(self, level: Level, order: Index) -> Index:
        deal = Deal(self.n_splits, self.seed, "ood")
        if self.ood == "group":
            _check_enough(len(level.classes), self.n_splits, "ood_labels", "OOD classes")
            return group_folds(level, deal)
        warnings.warn(
            f"ood={self.ood!r} puts rows of one OOD class in both ood_train and ood_test: use these folds "
            "without outlier exposure, or ood='group'.",
            OodometerWarning,
            stacklevel=3,
        )
        return _row_folds(level, np.arange(len(level.classes)), order, deal, kind=self.ood)


@dataclass(frozen=True)
class HierarchicalDualKFold:
    """Dual cross-validation that shows every fold every branch of the class hierarchy (Algorithm 3).

    ID rows are stratified on the deepest level. OOD classes of `level` are grouped inside each class directly
    above it, and the strata are joined so that the folds are balanced at every level.
    """

    n_splits: int = 5
    level: str = field(kw_only=True)
    seed: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        _check_count("n_splits", self.n_splits, 2)
        read_seed(self.seed)

    def split(
        self,
        id_hierarchy: HierarchyLike,
        ood_hierarchy: HierarchyLike,
        *,
        id_groups: Labels | None = None,
        id_names: Labels | None = None,
        ood_names: Labels | None = None,
    ) -> Folds:
        """Folds over two hierarchies: label columns from the coarsest to the deepest level."""
        id_levels = read_hierarchy(id_hierarchy, "id_hierarchy")
        depth = depth_of(self.level, id_levels)
        id_levels, ood_levels = in_common_codes(id_levels, read_hierarchy(ood_hierarchy, "ood_hierarchy"))
        parent_of = parents(join_rows(id_levels, ood_levels))
        level = str(self.level)
        _check_disjoint(id_levels[level], ood_levels[level], level)
        id_side, id_order = build_side(id_names, id_levels, "id_names")
        ood_side, _ = build_side(ood_names, ood_levels, "ood_names")
        deepest = list(id_levels.values())[-1]
        _check_enough(len(deepest), self.n_splits, "id_hierarchy", "ID rows")
        groups = read_groups(id_groups, len(deepest), self.n_splits, "id_groups")
        rank = depth_first(parent_of, len(deepest.classes))
        # Algorithm 3, line 1
        deal = Deal(self.n_splits, self.seed, "id")
        id_folds = _id_folds(deepest, rank, id_order, deal, groups=groups, kind="stratified")
        # Algorithm 3, lines 2-5
        ood_folds = self._ood_folds(ood_levels, parent_of, depth)
        return _dual(self, level, (id_side, id_folds), (ood_side, ood_folds))

    def _ood_folds(self, levels: Mapping[str, Level], parent_of: list[Index], depth: int) -> Index:
        columns = list(levels.values())
        codes = columns[depth].codes
        classes, codes = np.unique(codes, return_inverse=True)
        _check_enough(len(classes), self.n_splits, "ood_hierarchy", f"OOD classes at level {self.level!r}")
        ancestors: Ancestors = []
        node = classes
        for above in reversed(range(depth)):
            node = parent_of[above][node]
            ancestors.append((node, columns[above].classes))
        ancestors.append((np.zeros(len(classes), dtype=np.intp), ROOT))
        return stratum_folds(np.bincount(codes), ancestors, self.n_splits, self.seed)[codes]


@dataclass(frozen=True)
class RepeatedHoldout:
    """The benchmark truth's sampling (§5.1): many independent draws of ID test rows and OOD test classes.

    Each repeat tests a fraction `id_test` of the ID rows and a fraction `ood_test` of the OOD classes; the
    other OOD classes are reserved for exposure (`ood_test=1` reserves none). The defaults match 5 folds.
    """

    n_repeats: int = 100
    id: Literal["plain", "stratified"] = field(default="plain", kw_only=True)
    id_test: float = field(default=0.2, kw_only=True)
    ood_test: float = field(default=0.2, kw_only=True)
    seed: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        _check_count("n_repeats", self.n_repeats, 1)
        _check_choice("id", self.id, ("plain", "stratified"))
        read_seed(self.seed)
        if not (isinstance(self.id_test, (float, np.floating)) and 0 < self.id_test < 1):
            raise OodometerError(f"id_test: needs a fraction above 0 and below 1, e.g. 0.2; found {self.id_test!r}.")
        if not (isinstance(self.ood_test, (int, float, np.number)) and 0 < self.ood_test <= 1):
            raise OodometerError(f"ood_test: needs a fraction above 0, up to 1, e.g. 0.2; found {self.ood_test!r}.")

    def split(
        self,
        id_labels: Labels,
        ood_labels: Labels,
        *,
        id_groups: Labels | None = None,
        id_names: Labels | None = None,
        ood_names: Labels | None = None,
    ) -> Folds:
        """One fold a repeat; repeat r is the same whatever the number of repeats."""
        id_level, ood_level = read_labels(id_labels, "id_labels"), read_labels(ood_labels, "ood_labels")
        id_side, order = build_side(id_names, {_CLASS: id_level}, "id_names")
        ood_side, _ = build_side(ood_names, {_CLASS: ood_level}, "ood_names")
        groups = read_groups(id_groups, len(id_level), 2, "id_groups")
        if groups is not None and self.id == "stratified":
            raise OodometerError(
                "id_groups: whole groups are drawn with id='plain'; found id='stratified'. Change one."
            )
        n_test = min(max(_nearest(self.id_test * len(id_level)), 1), len(id_level) - 1)
        strata = [(ROOT[0], order)] if self.id == "plain" else _rows_by_class(id_level, order)
        id_roles = np.full((self.n_repeats, len(id_level)), TRAIN, dtype=np.uint8)
        ood_roles = np.full((self.n_repeats, len(ood_level)), TRAIN, dtype=np.uint8)
        for repeat in range(self.n_repeats):
            tested = self._test_rows(strata, n_test, repeat) if groups is None else self._groups(groups, n_test, repeat)
            id_roles[repeat, tested] = TEST
            ood_roles[repeat, self._ood_tested(ood_level, repeat)] = TEST
        sides = Side(id_side.names, id_side.levels, id_roles), Side(ood_side.names, ood_side.levels, ood_roles)
        return Folds(*sides, level=_CLASS, splitter=type(self).__name__, parameters=_parameters(self))

    def _test_rows(self, strata: list[tuple[Label, Index]], n_test: int, repeat: int) -> Index:
        """n_test rows, ⌊f·n⌋ or ⌈f·n⌉ of every stratum (systematic sampling along the strata)."""
        ends = np.cumsum([len(rows) for _, rows in strata])
        start = int(random_keys(1, self.seed, "repeat", repeat, "id")[0]) % int(ends[-1])
        quota = np.diff((ends * n_test + start) // ends[-1], prepend=0)
        drawn = [
            rows[_lowest(random_keys(len(rows), self.seed, "repeat", repeat, "id", name), int(count))]
            for (name, rows), count in zip(strata, quota, strict=True)
        ]
        return np.concatenate(drawn)

    def _groups(self, groups: Level, n_test: int, repeat: int) -> NDArray[np.bool_]:
        """Whole groups in random order until another would exceed n_test rows."""
        sizes = np.bincount(groups.codes)
        drawn = np.argsort(random_keys(len(sizes), self.seed, "repeat", repeat, "id"), kind="stable")
        fitting = int(np.searchsorted(np.cumsum(sizes[drawn]), n_test, side="right"))
        tested = np.zeros(len(sizes), dtype=bool)
        tested[drawn[: min(max(fitting, 1), len(sizes) - 1)]] = True
        return tested[groups.codes]

    def _ood_tested(self, level: Level, repeat: int) -> NDArray[np.bool_]:
        n_classes = len(level.classes)
        if self.ood_test < 1 and n_classes < 2:
            raise OodometerError(
                "ood_labels: needs two OOD classes, one to test and one to reserve for exposure; found one. "
                "Pass ood_test=1 to reserve none, or add classes."
            )
        n_test = n_classes if self.ood_test == 1 else min(max(_nearest(self.ood_test * n_classes), 1), n_classes - 1)
        tested = np.zeros(n_classes, dtype=bool)
        tested[_lowest(random_keys(n_classes, self.seed, "repeat", repeat, "ood"), n_test)] = True
        return tested[level.codes]


@dataclass(frozen=True, eq=False)
class Holdout:
    """Fixed lists: row numbers, or sample ids when `split` is given names. Unlisted rows stay unused."""

    id_train: Labels = field(kw_only=True)
    id_test: Labels = field(kw_only=True)
    ood_train: Labels = field(default=(), kw_only=True)
    ood_test: Labels = field(kw_only=True)

    def split(
        self,
        id_labels: Labels,
        ood_labels: Labels,
        *,
        id_groups: Labels | None = None,
        id_names: Labels | None = None,
        ood_names: Labels | None = None,
    ) -> Folds:
        """The one fold, refused if its lists overlap or an OOD class or an ID group is on both sides."""
        id_level, ood_level = read_labels(id_labels, "id_labels"), read_labels(ood_labels, "ood_labels")
        id_side, _ = build_side(id_names, {_CLASS: id_level}, "id_names")
        ood_side, _ = build_side(ood_names, {_CLASS: ood_level}, "ood_names")
        id_side = _fixed(id_side, "id", self.id_train, self.id_test)
        ood_side = _fixed(ood_side, "ood", self.ood_train, self.ood_test)
        groups = read_groups(id_groups, len(id_level), 2, "id_groups")
        if groups is not None:
            _check_apart(id_side, groups, "id_groups", "Move each group to one side.")
        _check_apart(ood_side, ood_level, "ood_labels", "Drop these rows from ood_train, or leave ood_train empty.")
        return Folds(id_side, ood_side, level=_CLASS, splitter=type(self).__name__, parameters={})


def _dual(
    splitter: DualKFold | HierarchicalDualKFold,
    level: str,
    id_part: tuple[Side, Index],
    ood_part: tuple[Side, Index],
) -> Folds:
    sides = (cross_validation(side, folds, splitter.n_splits) for side, folds in (id_part, ood_part))
    return Folds(*sides, level=level, splitter=type(splitter).__name__, parameters=_parameters(splitter))


def _parameters(splitter: DualKFold | HierarchicalDualKFold | RepeatedHoldout) -> dict[str, Any]:
    """The arguments as plain Python numbers and strings, which JSON can hold."""
    return {name: value.item() if isinstance(value, np.generic) else value for name, value in asdict(splitter).items()}


def _id_folds(level: Level, rank: Index, order: Index, deal: Deal, *, groups: Level | None, kind: str) -> Index:
    if groups is None:
        return _row_folds(level, rank, order, deal, kind=kind)
    return group_folds(groups, deal) if kind == "plain" else stratified_group_folds(level, groups, deal)


def _row_folds(level: Level, rank: Index, order: Index, deal: Deal, *, kind: str) -> Index:
    _check_enough(len(level), deal.n_splits, f"{deal.side}_labels", f"{deal.side.upper()} rows")
    if kind == "plain":
        return plain_folds(order, deal)
    sizes = np.bincount(level.codes, minlength=len(level.classes))
    small = np.flatnonzero((sizes > 0) & (sizes < deal.n_splits))
    if len(small):
        warnings.warn(
            f"{len(small)} {deal.side.upper()} classes have fewer rows than the {deal.n_splits} folds, so some "
            f"test folds miss them: {level.named(small)}. Use fewer folds or merge classes if that matters.",
            OodometerWarning,
            stacklevel=4,
        )
    return stratified_folds(level, rank, order, deal)


def _rows_by_class(level: Level, order: Index) -> list[tuple[Label, Index]]:
    return [(level.classes[code], order[at]) for code, at in members(level.codes[order])]


def _fixed(side: Side, name: str, train: Labels, test: Labels) -> Side:
    row_of = {sample: row for row, sample in enumerate(side.names.tolist())}
    roles = np.full((1, len(side.names)), UNUSED, dtype=np.uint8)
    for part, listed, role in ((f"{name}_train", train, TRAIN), (f"{name}_test", test, TEST)):
        samples = list(listed)
        if not samples:
            continue
        level = read_labels(samples, part)
        unknown = [sample for sample in level.classes if sample not in row_of]
        if unknown:
            raise OodometerError(
                f"{part}: needs row numbers from 0 to {len(row_of) - 1}, or sample ids passed to split as "
                f"{name}_names; found {quote(unknown)}. Correct the list."
            )
        rows = np.asarray([row_of[sample] for sample in level.classes], dtype=np.intp)
        twice = [*(np.flatnonzero(np.bincount(level.codes) > 1)), *np.flatnonzero(roles[0, rows])]
        if twice:
            raise OodometerError(
                f"{part}: a sample may be listed once, in one part; {level.named(twice)} "
                f"is repeated, or also in {name}_train. Remove it from one list."
            )
        roles[0, rows] = role
    return Side(side.names, side.levels, roles)


def _check_apart(side: Side, column: Level, what: str, mend: str) -> None:
    shared = np.intersect1d(column.codes[side.roles[0] == TRAIN], column.codes[side.roles[0] == TEST])
    if len(shared):
        both = column.named(shared)
        raise OodometerError(f"{what}: train and test need to be apart; {both} is on both sides. {mend}")


def _check_disjoint(id_level: Level, ood_level: Level, name: str) -> None:
    shared = np.intersect1d(id_level.codes, ood_level.codes)
    if len(shared):
        raise OodometerError(
            f"level {name!r}: a class needs to be ID or OOD; {id_level.named(shared)} is in both hierarchies. "
            "Divide the classes with select_ood_classes, or drop the rows from one side."
        )


def _check_enough(found: int, n_splits: int, what: str, unit: str) -> None:
    if found < n_splits:
        mend = f"Lower n_splits to {found}" if found >= 2 else "Add data"
        raise OodometerError(
            f"{what}: {n_splits} folds need at least {n_splits} {unit}, one for every test fold; found {found}. {mend}."
        )


def _check_count(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise OodometerError(f"{name}: needs an integer of at least {least}; found {value!r}.")


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise OodometerError(f"{name}: needs one of {quote(choices)}; found {value!r}.")


def _nearest(value: float) -> int:
    return math.floor(value + 0.5 + 1e-9)


def _lowest(keys: NDArray[np.uint64], count: int) -> Index:
    return np.argpartition(keys, count - 1)[:count] if count else np.empty(0, dtype=np.intp)
