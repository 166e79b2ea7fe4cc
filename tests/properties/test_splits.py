"""Splits of random hierarchies: every promise of dual cross-validation, checked by counting."""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from oodometer.errors import OodometerError
from oodometer.splits import DualKFold, HierarchicalDualKFold, Holdout, RepeatedHoldout, select_ood_classes

pytestmark = pytest.mark.filterwarnings("ignore::oodometer.errors.OodometerWarning")
many = settings(max_examples=150, deadline=None)

# --- Random hierarchies ------------------------------------------------------------------------------------------


@st.composite
def hierarchies(draw, smallest=1):
    """Label columns of a random tree, coarsest first: any depth, unbalanced, leaves of 1 to 30 rows, rows shuffled."""
    depth = draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    widest = draw(st.integers(1, 6))
    paths = [()]
    for level in range(depth):
        least = 2 if level == 0 else 1
        paths = [(*path, i) for path in paths for i in range(rng.integers(least, least + widest))]
        paths = [paths[i] for i in sorted(rng.permutation(len(paths))[:60])]
    sizes = rng.integers(smallest, draw(st.sampled_from([smallest + 1, 6, 31])), len(paths))
    leaf = rng.permutation(np.repeat(np.arange(len(paths)), sizes))
    names = [["/".join(map(str, path[: level + 1])) for path in paths] for level in range(depth)]
    return {f"l{level}": np.array(column)[leaf] for level, column in enumerate(names)}


def rows_of(hierarchy, rows):
    return {name: column[rows] for name, column in hierarchy.items()}


@st.composite
def two_sides(draw):
    """A hierarchy divided at random into ID and OOD classes of one level; strata may be all ID or all OOD."""
    hierarchy = draw(hierarchies())
    level = draw(st.sampled_from(list(hierarchy)))
    classes = np.unique(hierarchy[level])
    chosen = draw(st.lists(st.booleans(), min_size=len(classes), max_size=len(classes)))
    is_ood = np.isin(hierarchy[level], classes[np.array(chosen)])
    assume(is_ood.any() and not is_ood.all())
    return level, rows_of(hierarchy, ~is_ood), rows_of(hierarchy, is_ood)


def refused(level, id_side, ood_side, n_splits):
    """Why these folds cannot exist: no row or class for a fold, or an ID class of one row."""
    return (
        len(set(ood_side[level])) < n_splits
        or len(id_side[level]) < n_splits
        or min(Counter(id_side[level].tolist()).values()) < 2
    )


@st.composite
def problems(draw):
    """Two sides and a number of folds that can exist."""
    hierarchy = draw(hierarchies(smallest=2))
    levels = [name for name, column in hierarchy.items() if len(set(column.tolist())) >= 3]
    assume(levels)
    level = draw(st.sampled_from(levels))
    classes = np.unique(hierarchy[level])
    n_ood = draw(st.integers(2, len(classes) - 1))
    drawn = np.random.default_rng(draw(st.integers(0, 2**32 - 1))).permutation(classes)[:n_ood]
    is_ood = np.isin(hierarchy[level], drawn)
    n_splits = draw(st.integers(2, min(6, n_ood, int((~is_ood).sum()))))
    return level, rows_of(hierarchy, ~is_ood), rows_of(hierarchy, is_ood), n_splits


# --- What every split promises -----------------------------------------------------------------------------------


def check_partition(folds, n_id, n_ood):
    for train, test, n in (("id_train", "id_test", n_id), ("ood_train", "ood_test", n_ood)):
        assert sorted(np.concatenate([getattr(fold, test) for fold in folds]).tolist()) == list(range(n))
        for fold in folds:
            assert sorted([*getattr(fold, train), *getattr(fold, test)]) == list(range(n))


def check_exclusive(folds, ood_labels):
    """No OOD class is shown during training and tested; each class is tested in one fold."""
    tested = [set(ood_labels[fold.ood_test].tolist()) for fold in folds]
    for fold, classes in zip(folds, tested, strict=True):
        assert classes
        assert not classes & set(ood_labels[fold.ood_train].tolist())
    assert Counter(c for classes in tested for c in classes) == Counter(set(ood_labels.tolist()))
    assert folds.exclusive


def check_id_counts(folds, labels, n_splits):
    """⌊n/K⌋ or ⌈n/K⌉ rows of every label in every test fold: with n ≥ K rows it is in all of them."""
    for label, n in Counter(labels.tolist()).items():
        counts = [int((labels[fold.id_test] == label).sum()) for fold in folds]
        assert set(counts) <= {n // n_splits, -(-n // n_splits)}
        assert n < n_splits or min(counts) >= 1


def check_ood_node(folds, classes, rows, n_splits):
    """A node with m classes is tested in min(m, K) folds, which differ by its largest class at most."""
    inside = np.flatnonzero(rows)
    loads = [len(np.intersect1d(fold.ood_test, inside)) for fold in folds]
    sizes = Counter(classes[rows].tolist())
    assert sum(load > 0 for load in loads) == min(len(sizes), n_splits)
    assert max(loads) - min(loads) <= max(sizes.values())


def check_hierarchical(folds, level, id_side, ood_side, n_splits):
    check_partition(folds, len(id_side[level]), len(ood_side[level]))
    check_exclusive(folds, ood_side[level])
    for column in id_side.values():
        check_id_counts(folds, column, n_splits)
    check_id_counts(folds, np.zeros(len(id_side[level]), int), n_splits)
    names = list(ood_side)
    for above in names[: names.index(level)]:
        for node in np.unique(ood_side[above]):
            check_ood_node(folds, ood_side[level], ood_side[above] == node, n_splits)
    check_ood_node(folds, ood_side[level], np.full(len(ood_side[level]), True), n_splits)


@many
@given(two_sides(), st.integers(2, 6), st.integers(0, 99))
def test_hierarchical_folds_keep_every_promise(sides, n_splits, seed):
    level, id_side, ood_side = sides
    splitter = HierarchicalDualKFold(n_splits, level=level, seed=seed)
    if refused(level, id_side, ood_side, n_splits):
        with pytest.raises(OodometerError):
            splitter.split(id_side, ood_side)
        return
    check_hierarchical(splitter.split(id_side, ood_side), level, id_side, ood_side, n_splits)


@many
@given(
    hierarchies(smallest=2),
    st.sampled_from([0.2, 0.29, 1 / 3, 0.4, 0.5, 0.9]),
    st.sampled_from(["floor", "ceil1"]),
    st.integers(0, 99),
    st.data(),
)
def test_drawn_classes_then_folds_keep_every_promise(hierarchy, fraction, rule, seed, data):
    """Algorithms 2 and 3 in a row, as they are used."""
    level = data.draw(st.sampled_from(list(hierarchy)))
    chosen = select_ood_classes(hierarchy, level=level, fraction=fraction, seed=seed, rule=rule)
    n_splits = data.draw(st.integers(2, max(2, min(6, len(chosen.ood_classes)))))
    splitter = HierarchicalDualKFold(n_splits, level=level, seed=seed)
    if refused(level, chosen.id_hierarchy, chosen.ood_hierarchy, n_splits):
        with pytest.raises(OodometerError):
            splitter.split(chosen.id_hierarchy, chosen.ood_hierarchy)
        return
    folds = splitter.split(chosen.id_hierarchy, chosen.ood_hierarchy)
    check_hierarchical(folds, level, chosen.id_hierarchy, chosen.ood_hierarchy, n_splits)


@pytest.mark.parametrize("seed", range(5))
def test_supercifar_keeps_every_promise(seed):
    """20 superclasses of 5 classes, p = .2: one OOD class in every stratum, fewer than folds everywhere."""
    rows = np.random.default_rng(seed).permutation(np.repeat(np.arange(100), 7))
    hierarchy = {"super": rows // 5, "class": rows}
    chosen = select_ood_classes(hierarchy, level="class", fraction=0.2, seed=seed)
    assert set(chosen.counts.values()) == {(5, 1)}
    folds = HierarchicalDualKFold(5, level="class", seed=seed).split(chosen.id_hierarchy, chosen.ood_hierarchy)
    check_hierarchical(folds, "class", chosen.id_hierarchy, chosen.ood_hierarchy, 5)
    assert [len(fold.ood_test) for fold in folds] == [28] * 5


@many
@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=12),
    st.lists(st.integers(1, 30), min_size=1, max_size=12),
    st.integers(2, 6),
    st.integers(0, 99),
    st.sampled_from(["stratified", "plain"]),
)
def test_flat_folds_keep_every_promise(id_sizes, ood_sizes, n_splits, seed, kind):
    rng = np.random.default_rng(seed)
    id_labels, ood_labels = (rng.permutation(np.repeat(np.arange(len(s)), s)) for s in (id_sizes, ood_sizes))
    splitter = DualKFold(n_splits, id=kind, seed=seed)
    if len(ood_sizes) < n_splits or len(id_labels) < n_splits or (kind == "stratified" and min(id_sizes) < 2):
        with pytest.raises(OodometerError):
            splitter.split(id_labels, ood_labels)
        return
    try:
        folds = splitter.split(id_labels, ood_labels)
    except OodometerError as error:  # chance may put a whole class into one fold
        assert kind == "plain"
        assert "every tested ID class needs training rows" in str(error)
        return
    check_partition(folds, len(id_labels), len(ood_labels))
    check_exclusive(folds, ood_labels)
    check_ood_node(folds, ood_labels, np.full(len(ood_labels), True), n_splits)
    check_id_counts(folds, id_labels if kind == "stratified" else np.zeros(len(id_labels), int), n_splits)
    check_id_counts(folds, np.zeros(len(id_labels), int), n_splits)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=3, max_size=8), st.integers(2, 3))
def test_the_fullest_group_fold_is_near_the_best_possible(sizes, n_splits):
    """Largest first is within 4/3 − 1/(3K) of the optimum (Graham 1969), here found by trying every division."""
    labels = np.repeat(np.arange(len(sizes)), sizes)
    folds = DualKFold(n_splits).split(np.zeros(n_splits, int), labels)
    fullest = max(len(fold.ood_test) for fold in folds)
    divisions = product(range(n_splits), repeat=len(sizes))
    best = min(max(np.bincount(d, weights=sizes, minlength=n_splits)) for d in divisions)
    assert best <= fullest <= (Fraction(4, 3) - Fraction(1, 3 * n_splits)) * int(best)


@many
@given(st.lists(st.integers(1, 9), min_size=2, max_size=30), st.integers(2, 5), st.integers(0, 99), st.booleans())
def test_groups_of_rows_stay_together(sizes, n_splits, seed, plain):
    rng = np.random.default_rng(seed)
    assume(len(sizes) >= n_splits)
    order = rng.permutation(sum(sizes))
    groups, labels = np.repeat(np.arange(len(sizes)), sizes)[order], np.zeros(sum(sizes), int)
    folds = DualKFold(n_splits, id="plain" if plain else "stratified", seed=seed).split(
        labels, np.arange(n_splits), id_groups=groups
    )
    check_partition(folds, len(labels), n_splits)
    for fold in folds:
        assert not set(groups[fold.id_test]) & set(groups[fold.id_train])
    loads = [len(fold.id_test) for fold in folds]
    assert max(loads) - min(loads) <= max(sizes)


# --- Order, names and seeds --------------------------------------------------------------------------------------

PARTS = ("id_train", "id_test", "ood_train", "ood_test")


def by_name(folds):
    return [{part: frozenset(fold.names(part).tolist()) for part in PARTS} for fold in folds]


@many
@given(problems(), st.integers(0, 99), st.randoms(use_true_random=False))
def test_permuted_rows_give_the_same_folds_by_sample_id(problem, seed, random):
    level, id_side, ood_side, n_splits = problem
    n_id, n_ood = len(id_side[level]), len(ood_side[level])
    id_names, ood_names = (np.array(random.sample(range(10 * n), n)) for n in (n_id, n_ood))
    if random.random() < 0.5:
        id_names, ood_names = (np.array([f"image-{name}" for name in names]) for names in (id_names, ood_names))
    id_order, ood_order = (np.array(random.sample(range(n), n)) for n in (n_id, n_ood))
    moved_id, moved_ood = rows_of(id_side, id_order), rows_of(ood_side, ood_order)
    here = {"id_names": id_names, "ood_names": ood_names}
    there = {"id_names": id_names[id_order], "ood_names": ood_names[ood_order]}

    tree = HierarchicalDualKFold(n_splits, level=level, seed=seed)
    assert by_name(tree.split(id_side, ood_side, **here)) == by_name(tree.split(moved_id, moved_ood, **there))
    for splitter in (
        DualKFold(n_splits, seed=seed),
        DualKFold(n_splits, ood="plain", seed=seed),
        DualKFold(n_splits, ood="stratified", seed=seed),
        RepeatedHoldout(3, id="stratified", seed=seed),
    ):
        try:
            straight = splitter.split(id_side[level], ood_side[level], **here)
        except OodometerError as error:
            with pytest.raises(OodometerError) as other:
                splitter.split(moved_id[level], moved_ood[level], **there)
            assert str(other.value) == str(error)
            continue
        assert by_name(straight) == by_name(splitter.split(moved_id[level], moved_ood[level], **there))


@many
@given(problems(), st.randoms(use_true_random=False))
def test_ood_classes_keep_their_fold_without_any_sample_ids(problem, random):
    level, id_side, ood_side, n_splits = problem
    splitter = HierarchicalDualKFold(n_splits, level=level)
    order = np.array(random.sample(range(len(ood_side[level])), len(ood_side[level])))
    moved = rows_of(ood_side, order)
    for here, there in zip(splitter.split(id_side, ood_side), splitter.split(id_side, moved), strict=True):
        assert set(ood_side[level][here.ood_test]) == set(moved[level][there.ood_test])


@many
@given(problems(), st.integers(0, 99))
def test_equal_seeds_give_equal_bytes(problem, seed):
    level, id_side, ood_side, n_splits = problem
    one, other = (HierarchicalDualKFold(n_splits, level=level, seed=seed).split(id_side, ood_side) for _ in range(2))
    assert one.digest == other.digest


# --- Classes drawn ----------------------------------------------------------------------------------------------


@many
@given(
    hierarchies(),
    st.integers(0, 100),
    st.sampled_from(["floor", "ceil1"]),
    st.integers(0, 99),
    st.data(),
    st.randoms(use_true_random=False),
)
def test_drawn_classes_follow_the_rule_in_every_stratum(hierarchy, percent, rule, seed, data, random):
    level = data.draw(st.sampled_from(list(hierarchy)))
    names = list(hierarchy)
    above = None if level == names[0] else names[names.index(level) - 1]
    draw = {"level": level, "fraction": percent / 100, "seed": seed, "rule": rule, "whole_strata": True}
    chosen = select_ood_classes(hierarchy, **draw)

    assert set(chosen.id_classes) | set(chosen.ood_classes) == set(hierarchy[level].tolist())
    assert not set(chosen.id_classes) & set(chosen.ood_classes)
    assert sorted([*chosen.id_rows, *chosen.ood_rows]) == list(range(len(hierarchy[level])))
    assert set(hierarchy[level][chosen.ood_rows].tolist()) == set(chosen.ood_classes)
    strata = np.full(len(hierarchy[level]), "all classes") if above is None else hierarchy[above]
    for stratum in np.unique(strata):
        classes = set(hierarchy[level][strata == stratum].tolist())
        k = math.floor(Fraction(percent, 100) * len(classes))
        expected = max(k, 1) if rule == "ceil1" and len(classes) >= 2 else k
        assert len(classes & set(chosen.ood_classes)) == expected
        assert chosen.counts[stratum] == (len(classes), expected)

    rows = np.array(random.sample(range(len(strata)), len(strata)))
    assert select_ood_classes(rows_of(hierarchy, rows), **draw).ood_classes == chosen.ood_classes
    if above is not None:  # what other strata hold changes nothing here
        kept = strata == strata[0]
        alone = select_ood_classes(rows_of(hierarchy, kept), **draw)
        assert set(alone.ood_classes) == set(chosen.ood_classes) & set(hierarchy[level][kept].tolist())


# --- The benchmark truth ----------------------------------------------------------------------------------------


@many
@given(
    st.lists(st.integers(2, 20), min_size=1, max_size=6),
    st.integers(2, 8),
    st.sampled_from([0.1, 0.2, 0.25, 0.5]),
    st.sampled_from(["plain", "stratified"]),
    st.integers(0, 99),
)
def test_every_repeat_is_a_fair_division(sizes, n_ood, share, kind, seed):
    labels, ood = np.repeat(np.arange(len(sizes)), sizes), np.repeat(np.arange(n_ood), 2)
    splitter = RepeatedHoldout(4, id=kind, id_test=share, ood_test=share, seed=seed)
    try:
        folds = splitter.split(labels, ood)
    except OodometerError as error:
        assert "every tested ID class needs training rows" in str(error)
        assert kind == "plain" or min(sizes) * share < 2
        return
    for fold in folds:
        assert sorted([*fold.id_train, *fold.id_test]) == list(range(len(labels)))
        assert sorted([*fold.ood_train, *fold.ood_test]) == list(range(len(ood)))
        assert not set(ood[fold.ood_train]) & set(ood[fold.ood_test])
        assert len(fold.id_test) == max(1, math.floor(share * len(labels) + 0.5))
        assert len(set(ood[fold.ood_test])) == max(1, math.floor(share * n_ood + 0.5))
        if kind == "stratified":
            total = len(fold.id_test) / len(labels)
            counts = np.bincount(labels[fold.id_test], minlength=len(sizes))
            assert (np.abs(counts - total * np.array(sizes)) < 1).all()


@many
@given(problems(), st.integers(0, 99))
def test_a_fold_written_as_lists_is_the_same_holdout(problem, seed):
    level, id_side, ood_side, n_splits = problem
    for fold in DualKFold(n_splits, seed=seed).split(id_side[level], ood_side[level]):
        lists = {part: getattr(fold, part).tolist() for part in PARTS}
        (again,) = Holdout(**lists).split(id_side[level], ood_side[level])
        assert {part: getattr(again, part).tolist() for part in PARTS} == lists
