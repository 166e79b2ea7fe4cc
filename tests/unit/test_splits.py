"""Splits: hand-computed folds, the paper's examples, every edge-case rule, and the messages of bad input."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import warnings
from fractions import Fraction
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from sklearn.model_selection import GroupKFold, StratifiedGroupKFold, StratifiedKFold

from oodometer.errors import OodometerError, OodometerWarning
from oodometer.splits import (
    DualKFold,
    Folds,
    HierarchicalDualKFold,
    Holdout,
    RepeatedHoldout,
    StratumCount,
    select_ood_classes,
)


def rows_of(sizes):
    """A label column with `sizes[label]` rows of each label."""
    return np.repeat(np.array(list(sizes)), list(sizes.values()))


def classes_tested(folds, labels):
    return [set(np.asarray(labels)[fold.ood_test].tolist()) for fold in folds]


def tree(*branching, rows=1):
    """A balanced hierarchy: columns l0, l1, … of path labels such as '0/2/1', coarsest first."""
    leaf = np.repeat(np.arange(np.prod(branching)), rows)
    columns, width = {}, int(np.prod(branching))
    for depth, children in enumerate(branching):
        width //= children
        columns[f"l{depth}"] = [f"{depth}:{node:03d}" for node in (leaf // width).tolist()]
    return columns


def split_by(hierarchy, level, ood_classes):
    is_ood = np.isin(hierarchy[level], list(ood_classes))
    return (
        {name: np.asarray(column)[~is_ood] for name, column in hierarchy.items()},
        {name: np.asarray(column)[is_ood] for name, column in hierarchy.items()},
    )


# --- Algorithm 1 -----------------------------------------------------------------------------------------------


def test_group_folds_are_greedy_by_sample_count():
    # 9→0, 7→1, 6→2, then the lightest each time: 5→2 (6), 4→1 (7), 3→0 (9)
    ood = rows_of({"a": 9, "b": 7, "c": 6, "d": 5, "e": 4, "f": 3})
    folds = DualKFold(3).split(["x", "y"] * 6, ood)
    assert classes_tested(folds, ood) == [{"a", "f"}, {"b", "e"}, {"c", "d"}]
    assert [len(fold.ood_test) for fold in folds] == [12, 11, 11]


def test_group_fold_sizes_equal_scikit_learns():
    rng = np.random.default_rng(0)
    ood = np.repeat(np.arange(40), rng.integers(1, 90, 40))
    ours = sorted(len(fold.ood_test) for fold in DualKFold(7).split(np.tile([0, 1], 20), ood))
    theirs = sorted(len(test) for _, test in GroupKFold(7).split(ood, groups=ood))
    assert ours == theirs


def test_stratified_counts_equal_scikit_learns():
    rng = np.random.default_rng(1)
    labels = np.repeat(np.arange(6), [50, 31, 7, 22, 5, 13])[rng.permutation(128)]
    folds = DualKFold(5).split(labels, np.arange(5))
    for label in range(6):
        ours = sorted(np.sum(labels[fold.id_test] == label) for fold in folds)
        theirs = sorted(np.sum(labels[test] == label) for _, test in StratifiedKFold(5).split(labels, labels))
        assert ours == theirs
    assert sorted(len(fold.id_test) for fold in folds) == [25, 25, 26, 26, 26]


def test_plain_folds_differ_by_one_row():
    folds = DualKFold(4, id="plain").split([0, 1] * 11, range(4))
    assert sorted(len(fold.id_test) for fold in folds) == [5, 5, 6, 6]


@pytest.mark.parametrize("ood", ["plain", "stratified"])
def test_ood_folds_of_rows_warn_and_say_that_exposure_is_unfair(ood):
    with pytest.warns(OodometerWarning, match="without outlier exposure"):
        folds = DualKFold(2, ood=ood).split([0, 0, 1, 1], ["a"] * 6 + ["b"] * 6)
    assert not folds.exclusive
    assert not folds[0].exclusive
    assert [len(fold.ood_test) for fold in folds] == [6, 6]
    if ood == "stratified":
        assert [(fold.ood_test < 6).sum() for fold in folds] == [3, 3]


def test_group_folds_are_exclusive():
    assert DualKFold(2).split([0, 0, 1, 1], ["a", "b", "b"])[1].exclusive


def test_seeds_change_both_sides_and_equal_seeds_do_not():
    labels, ood = np.tile(np.arange(5), 20), np.repeat(np.arange(10), 4)
    digests = [DualKFold(5, seed=seed).split(labels, ood) for seed in (0, 0, 1)]
    assert digests[0].digest == digests[1].digest
    assert any((a.id_test != b.id_test).any() for a, b in zip(digests[0], digests[2], strict=True))
    assert classes_tested(digests[0], ood) != classes_tested(digests[2], ood)


def test_folds_are_the_same_on_every_numpy_version():
    """Recorded 2025 with NumPy 2.4: raw PCG64 output and SHA-256 are stable, so these must never change."""
    folds = DualKFold(3, seed=7).split(list("aabbccaabbcc"), [1, 1, 2, 2, 3, 3])
    assert [fold.id_test.tolist() for fold in folds] == [[0, 3, 5, 6], [1, 8, 9, 11], [2, 4, 7, 10]]
    assert [fold.ood_test.tolist() for fold in folds] == [[4, 5], [0, 1], [2, 3]]


def test_names_make_folds_independent_of_row_order():
    rng = np.random.default_rng(2)
    labels, ood = rng.integers(0, 4, 60), rng.integers(0, 8, 50)
    names, ood_names = [f"i{row}" for row in range(60)], [f"o{row}" for row in range(50)]
    order, ood_order = rng.permutation(60), rng.permutation(50)
    splitter = DualKFold(4, seed=3)
    straight = splitter.split(labels, ood, id_names=names, ood_names=ood_names)
    shuffled = splitter.split(
        labels[order],
        ood[ood_order],
        id_names=[names[row] for row in order],
        ood_names=[ood_names[row] for row in ood_order],
    )
    for here, there in zip(straight, shuffled, strict=True):
        for part in ("id_train", "id_test", "ood_train", "ood_test"):
            assert set(here.names(part)) == set(there.names(part))


def test_groups_stay_together_and_stay_stratified():
    rng = np.random.default_rng(3)
    subject = np.repeat(np.arange(60), rng.integers(1, 9, 60))
    label = (subject * 7 % 3).astype(int)
    folds = DualKFold(5, seed=0).split(label, range(5), id_groups=[f"s{s}" for s in subject])
    for fold in folds:
        assert not set(subject[fold.id_train]) & set(subject[fold.id_test])
    ours = np.array([np.bincount(label[fold.id_test], minlength=3) for fold in folds])
    theirs = np.array(
        [
            np.bincount(label[test], minlength=3)
            for _, test in StratifiedGroupKFold(5).split(label, label, groups=subject)
        ]
    )
    share = ours.sum(axis=0)
    assert (ours / share).std(axis=0).mean() <= (theirs / share).std(axis=0).mean() + 0.01


def test_plain_groups_are_balanced_by_rows():
    groups = rows_of({"p": 5, "q": 4, "r": 3, "s": 2})
    folds = DualKFold(2, id="plain").split([0, 1] * 7, [0, 1], id_groups=groups)
    assert [sorted(set(groups[fold.id_test])) for fold in folds] == [["p", "s"], ["q", "r"]]


# --- Algorithm 2 -----------------------------------------------------------------------------------------------


def test_supercifar_takes_one_class_of_each_superclass():
    hierarchy = tree(20, 5)
    chosen = select_ood_classes(hierarchy, level="l1", fraction=0.2, seed=0)
    assert chosen.counts == {f"0:{stratum:03d}": StratumCount(5, 1) for stratum in range(20)}
    assert len(chosen.ood_classes) == 20
    assert len(chosen.id_classes) == 80
    assert sorted([*chosen.id_rows, *chosen.ood_rows]) == list(range(100))
    assert chosen.ood_hierarchy["l1"].tolist() == sorted(chosen.ood_classes)


@pytest.mark.parametrize(
    ("fraction", "n", "k"),
    [
        (0.29, 100, 29),  # .29 · 100 = 28.999999999999996
        ("0.29", 100, 29),
        ("29/100", 100, 29),
        (Fraction(1, 3), 3, 1),
        (1 / 3, 3, 1),
        (0.4, 5, 2),
        (0.39, 5, 1),
        (0.999, 3, 2),
    ],
)
def test_the_number_of_ood_classes_is_the_floor(fraction, n, k):
    chosen = select_ood_classes({"class": list(range(n))}, level="class", fraction=fraction, seed=0)
    assert chosen.counts == {"all classes": (n, k)}
    assert len(chosen.ood_classes) == k


def test_a_stratum_too_small_for_the_fraction_stays_id_with_a_warning():
    hierarchy = {"s": list("aaabbc"), "c": range(6)}
    with pytest.warns(OodometerWarning, match=r"2 of 3 strata give no OOD class at fraction 0.4 .*'b', 'c'"):
        floor = select_ood_classes(hierarchy, level="c", fraction=0.4, seed=0)
    assert floor.counts == {"a": (3, 1), "b": (2, 0), "c": (1, 0)}
    with pytest.warns(OodometerWarning, match="1 of 3 strata"):  # N = 1, p < 1: k = 0 even so
        ceil1 = select_ood_classes(hierarchy, level="c", fraction=0.4, seed=0, rule="ceil1")
    assert ceil1.counts == {"a": (3, 1), "b": (2, 1), "c": (1, 0)}


def test_a_stratum_without_id_classes_needs_intent():
    hierarchy = {"s": list("aab"), "c": [1, 2, 3]}
    with pytest.raises(OodometerError, match=r"makes all classes OOD in 'a', 'b'\. Lower.*whole_strata"):
        select_ood_classes(hierarchy, level="c", fraction=1, seed=0)
    chosen = select_ood_classes(hierarchy, level="c", fraction=1.0, seed=0, whole_strata=True)
    assert chosen.ood_classes == (1, 2, 3)
    assert chosen.id_rows.tolist() == []


def test_selection_ignores_row_order_and_other_strata():
    hierarchy = pd.DataFrame(tree(4, 6, rows=2))
    chosen = select_ood_classes(hierarchy, level="l1", fraction=0.5, seed=5)
    again = select_ood_classes(hierarchy.sample(frac=1, random_state=0), level="l1", fraction=0.5, seed=5)
    part = select_ood_classes(hierarchy[hierarchy["l0"] > "0:001"], level="l1", fraction=0.5, seed=5)
    assert chosen.ood_classes == again.ood_classes
    assert set(part.ood_classes) < set(chosen.ood_classes)
    other = select_ood_classes(hierarchy, level="l1", fraction=0.5, seed=6)
    assert chosen.ood_classes != other.ood_classes


def test_every_class_is_drawn_about_equally_often():
    hits = np.zeros(5)
    for seed in range(2000):
        chosen = select_ood_classes({"c": range(5)}, level="c", fraction=0.4, seed=seed)
        hits[list(chosen.ood_classes)] += 1
    assert np.abs(hits - 800).max() < 5 * np.sqrt(2000 * 0.4 * 0.6)


def test_a_selection_prints_its_strata():
    text = str(select_ood_classes(tree(2, 5), level="l1", fraction=0.4, seed=0))
    assert "6 ID and 4 OOD classes in 2 strata" in text
    assert re.search(r"0:001 +5 +2", text)


# --- Algorithm 3 -----------------------------------------------------------------------------------------------


def test_supercifar_has_four_ood_classes_in_every_fold():
    chosen = select_ood_classes(tree(20, 5, rows=6), level="l1", fraction=0.2, seed=0)
    folds = HierarchicalDualKFold(5, level="l1").split(chosen.id_hierarchy, chosen.ood_hierarchy)
    for fold in folds:
        assert len(set(chosen.ood_hierarchy["l1"][fold.ood_test])) == 4
        assert len(set(chosen.ood_hierarchy["l0"][fold.ood_test])) == 4
        assert len(fold.ood_test) == 24
        assert len(set(chosen.id_hierarchy["l1"][fold.id_test])) == 80
        assert len(fold.id_test) == 96


def test_figure_4_shows_both_superclasses_in_every_fold():
    """2 superclasses × 5 classes × 5 subclasses, 40 % OOD, 4 folds: each class has 2 OOD subclasses < 4 folds."""
    chosen = select_ood_classes(tree(2, 5, 5, rows=8), level="l2", fraction=0.4, seed=1)
    assert set(chosen.counts.values()) == {(5, 2)}
    folds = HierarchicalDualKFold(4, level="l2", seed=1).split(chosen.id_hierarchy, chosen.ood_hierarchy)
    for fold in folds:
        ood = {name: column[fold.ood_test] for name, column in chosen.ood_hierarchy.items()}
        assert len(set(ood["l2"])) == 5
        assert len(set(ood["l1"])) == 5
        assert len(set(ood["l0"])) == 2
        assert {len(set(column[fold.id_test])) for column in chosen.id_hierarchy.values()} == {2, 10, 30}
        assert len(fold.id_test) == 60


def test_strata_are_joined_fullest_to_emptiest():
    # stratum p: 5→0, 4→1; q: 6→0, 1→1. One joins upside down: 5 + 1 and 4 + 6, never 11 and 5.
    ood = {"s": ["p"] * 9 + ["q"] * 7, "c": rows_of({"p5": 5, "p4": 4, "q6": 6, "q1": 1})}
    folds = HierarchicalDualKFold(2, level="c").split({"s": ["p", "p"], "c": ["k", "k"]}, ood)
    assert sorted(sorted(classes) for classes in classes_tested(folds, ood["c"])) == [["p4", "q6"], ["p5", "q1"]]


def test_seeds_change_which_strata_share_a_fold():
    id_side, ood_side = split_by(tree(10, 2, rows=2), "l1", [f"1:{code:03d}" for code in range(0, 20, 2)])
    found = {
        frozenset(
            frozenset(classes)
            for classes in classes_tested(
                HierarchicalDualKFold(2, level="l1", seed=seed).split(id_side, ood_side), ood_side["l1"]
            )
        )
        for seed in range(5)
    }
    assert len(found) > 1


def test_the_hierarchy_may_be_deeper_than_the_classes():
    """Stratified by the deepest level, trained on the middle one."""
    hierarchy = tree(2, 4, 3, rows=5)
    id_side, ood_side = split_by(hierarchy, "l1", {"1:000", "1:001", "1:004", "1:005"})
    folds = HierarchicalDualKFold(4, level="l1").split(id_side, ood_side)
    for fold in folds:
        assert len(set(id_side["l2"][fold.id_test])) == 12
        assert len(set(ood_side["l1"][fold.ood_test])) == 1
        assert len(set(ood_side["l2"][fold.ood_test])) == 3


def test_the_top_level_is_one_stratum():
    id_side, ood_side = split_by(tree(6, 2, rows=3), "l0", {"0:000", "0:002", "0:003"})
    folds = HierarchicalDualKFold(3, level="l0").split(id_side, ood_side)
    assert [len(classes) for classes in classes_tested(folds, ood_side["l0"])] == [1, 1, 1]
    assert folds.level == "l0"


def test_data_frames_and_mappings_give_the_same_folds():
    id_side, ood_side = split_by(tree(2, 4, rows=4), "l1", {"1:000", "1:004"})
    plain = HierarchicalDualKFold(2, level="l1").split(id_side, ood_side)
    frames = HierarchicalDualKFold(2, level="l1").split(pd.DataFrame(id_side), pd.DataFrame(ood_side))
    assert plain.digest == frames.digest


def test_hierarchical_groups_stay_together():
    id_side, ood_side = split_by(tree(2, 3, rows=12), "l1", {"1:000", "1:003"})
    subject = np.arange(48) // 3
    folds = HierarchicalDualKFold(2, level="l1").split(id_side, ood_side, id_groups=subject)
    for fold in folds:
        assert not set(subject[fold.id_train]) & set(subject[fold.id_test])
        assert np.unique(id_side["l1"][fold.id_test], return_counts=True)[1].tolist() == [6, 6, 6, 6]


def test_a_child_with_two_parents_is_named():
    with pytest.raises(OodometerError, match=r"class 'crane' has 2 at level group: 'bird', 'machine'"):
        select_ood_classes(
            {"group": ["bird", "machine", "bird"], "class": ["crane", "crane", "owl"]},
            level="class",
            fraction=0.5,
            seed=0,
        )


def test_a_child_with_one_parent_in_id_and_another_in_ood_is_named():
    with pytest.raises(OodometerError, match=r"leaf 'x' has 2 at level class: 'a', 'b'"):
        HierarchicalDualKFold(2, level="class").split(
            {"class": ["a", "a"], "leaf": ["x", "x"]}, {"class": ["b", "c"], "leaf": ["x", "y"]}
        )


def test_a_class_in_both_splits_is_named():
    with pytest.raises(OodometerError, match=r"level 'c': a class needs to be ID or OOD; 'a' is in both"):
        HierarchicalDualKFold(2, level="c").split({"c": list("aabb")}, {"c": list("ac")})


def test_hierarchies_need_the_same_levels_and_types():
    with pytest.raises(OodometerError, match=r"needs the levels of the ID hierarchy in its order \('s', 'c'\)"):
        HierarchicalDualKFold(2, level="c").split({"s": [1, 1], "c": [1, 2]}, {"c": [3, 4], "s": [1, 1]})
    with pytest.raises(OodometerError, match="must be of one type; found 1 and 'a'"):
        HierarchicalDualKFold(2, level="c").split({"c": [1, 1]}, {"c": ["a", "b"]})


# --- Edge cases of both cross-validations ----------------------------------------------------------------------


def test_fewer_ood_classes_than_folds_is_an_error():
    with pytest.raises(OodometerError, match=r"5 folds need at least 5 OOD classes.*found 3\. Lower n_splits to 3"):
        DualKFold(5).split([0, 1] * 5, [1, 2, 3])
    with pytest.raises(OodometerError, match=r"3 folds need at least 3 OOD classes at level 'c'.*found 2"):
        HierarchicalDualKFold(3, level="c").split(
            {"s": list("aabb"), "c": list("xxyy")}, {"s": ["a", "b"], "c": ["u", "v"]}
        )


def test_a_class_with_fewer_rows_than_folds_warns_and_is_spread():
    labels = np.array([0] * 10 + [1] * 3)
    with pytest.warns(OodometerWarning, match=r"1 ID classes have fewer rows than the 5 folds.*: 1\."):
        folds = DualKFold(5).split(labels, range(5))
    assert sorted((labels[fold.id_test] == 1).sum() for fold in folds) == [0, 0, 1, 1, 1]


def test_fewer_id_rows_than_folds_is_an_error():
    with pytest.raises(OodometerError, match=r"id_hierarchy: 3 folds need at least 3 ID rows.*found 2"):
        HierarchicalDualKFold(3, level="c").split({"c": ["x", "x"]}, {"c": ["u", "v", "w"]})


@pytest.mark.filterwarnings("ignore::oodometer.errors.OodometerWarning")
def test_an_id_class_absent_from_training_is_an_error():
    with pytest.raises(OodometerError, match=r"every tested ID class needs training rows; class 'lone' is in the test"):
        DualKFold(2).split(["a"] * 6 + ["lone"], range(2))
    with pytest.raises(OodometerError, match="every tested ID class needs training rows; class 1"):
        DualKFold(2).split([0, 0, 0, 0, 1, 1], range(2), id_groups=[1, 1, 2, 2, 3, 3])


def test_a_deepest_class_of_one_row_warns_while_its_class_is_trained():
    id_side = {"c": ["a"] * 5 + ["b"] * 4, "leaf": ["a1"] * 4 + ["a2"] + ["b1"] * 4}
    with pytest.warns(OodometerWarning, match=r"fewer rows than the 2 folds.*'a2'"):
        folds = HierarchicalDualKFold(2, level="c").split(id_side, {"c": ["u", "v"], "leaf": ["u1", "v1"]})
    assert sum(4 in fold.id_test for fold in folds) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], [1, 2]), r"id_labels: needs at least one row; found none"),
        (([1, 2], []), r"ood_labels: needs at least one row"),
        (([1.0, float("nan"), 2.0], [1, 2]), r"id_labels: .*found 1 missing .*first in row 1"),
        ((np.array([1.0, np.nan]), [1, 2]), r"id_labels: .*found 1 missing .*first in row 1"),
        ((["a", None, float("nan")], [1, 2]), r"found 2 missing .*first in row 1"),
        ((["a", pd.NA], [1, 2]), r"found 1 missing"),
        ((["a", 1], [1, 2]), r"all ints or all strings; found int, str"),
        (([0.5, 1], [1, 2]), r"found 0.5 in row 0"),
        (([1, float("inf")], [1, 2]), r"found inf in row 1"),
        ((np.array([1 + 2j]), [1, 2]), r"found dtype complex128"),
        ((np.zeros((2, 2), int), [1, 2]), r"found shape \(2, 2\)"),
        (("abc", [1, 2]), r"needs one label a row; found 'abc'"),
        ((None, [1, 2]), r"needs one label a row; found None"),
        (([[1], [2]], [1, 2]), r"all ints or all strings; found list"),
        (([1], [1, 2]), r"2 folds need at least 2 ID rows"),
    ],
)
def test_bad_labels(arguments, message):
    with pytest.raises(OodometerError, match=message):
        DualKFold(2).split(*arguments)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"id_names": ["a", "b", "a", "c"]}, r"id_names: sample ids must be unique; found 'a' more than once"),
        ({"id_names": np.array([3, 1, 3, 2])}, r"id_names: sample ids must be unique; found 3 more than once"),
        ({"ood_names": ["a"]}, r"ood_names: needs one entry a row \(2\); found 1"),
        ({"id_groups": [1, 2]}, r"id_groups: needs one entry a row \(4\); found 2"),
        ({"id_groups": [1, 1, 1, 1]}, r"2 folds need at least 2 groups; found 1"),
        ({"id_groups": [1, 2, None, 1]}, r"id_groups: every row needs a label; found 1 missing"),
    ],
)
def test_bad_names_and_groups(keywords, message):
    with pytest.raises(OodometerError, match=message):
        DualKFold(2).split([0, 0, 1, 1], [1, 2], **keywords)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: DualKFold(1), r"n_splits: needs an integer of at least 2; found 1"),
        (lambda: DualKFold(2.5), r"n_splits: needs an integer"),
        (lambda: DualKFold(True), r"n_splits: needs an integer"),
        (lambda: DualKFold(5, id="group"), r"id: needs one of 'stratified', 'plain'; found 'group'"),
        (lambda: DualKFold(5, ood="classes"), r"ood: needs one of 'group', 'stratified', 'plain'"),
        (lambda: DualKFold(5, seed=None), r"seed: needs an integer; found None"),
        (lambda: HierarchicalDualKFold(0, level="c"), r"n_splits: needs an integer of at least 2"),
        (lambda: RepeatedHoldout(0), r"n_repeats: needs an integer of at least 1"),
        (lambda: RepeatedHoldout(id_test=1.0), r"id_test: needs a fraction above 0 and below 1"),
        (lambda: RepeatedHoldout(ood_test=0), r"ood_test: needs a fraction above 0, up to 1"),
        (lambda: RepeatedHoldout(id_test=float("nan")), r"id_test: needs a fraction"),
    ],
)
def test_bad_parameters(build, message):
    with pytest.raises(OodometerError, match=message):
        build()


@pytest.mark.parametrize("fraction", [-0.1, 1.1, float("nan"), "half", "1/0", None, True])
def test_bad_fractions(fraction):
    with pytest.raises(OodometerError, match="fraction: needs a number from 0 to 1"):
        select_ood_classes({"c": [1, 2]}, level="c", fraction=fraction, seed=0)


@pytest.mark.parametrize(
    ("hierarchy", "level", "message"),
    [
        ({"s": [1, 1], "c": [1, 2]}, "d", r"level: needs one of 's', 'c'; found 'd'"),
        ({"s": [1, 1], "c": [1]}, "c", r"hierarchy\['c'\]: needs one entry a row \(2\); found 1"),
        ({}, "c", r"needs at least one label column"),
        ([1, 2], "c", r"needs a mapping or DataFrame of label columns, coarsest first; found list"),
        ({"s": [1, 1], "c": [1, np.nan]}, "c", r"hierarchy\['c'\]: every row needs a label; found 1 missing"),
    ],
)
def test_bad_hierarchies(hierarchy, level, message):
    with pytest.raises(OodometerError, match=message):
        select_ood_classes(hierarchy, level=level, fraction=0.5, seed=0)


def test_an_unknown_rule():
    with pytest.raises(OodometerError, match="rule: needs 'floor' or 'ceil1'; found 'round'"):
        select_ood_classes({"c": [1, 2]}, level="c", fraction=0.5, seed=0, rule="round")


@pytest.mark.parametrize(
    "labels",
    [
        [3, 1, 3, 1],
        np.array([3, 1, 3, 1], dtype=np.uint8),
        [3.0, 1.0, 3.0, 1.0],
        pd.Series([3, 1, 3, 1], index=[9, 8, 7, 6]),
        pd.Series([3, 1, 3, 1], dtype="Int64"),
        pd.Categorical([3, 1, 3, 1]),
        (np.int64(3), 1, np.int32(3), 1),
    ],
)
def test_any_column_of_the_same_labels_gives_the_same_folds(labels):
    expected = DualKFold(2).split([3, 1, 3, 1], ["a", "b"])
    found = DualKFold(np.int64(2), seed=np.int64(0)).split(labels, pd.Series(["a", "b"], dtype="category"))
    assert found.digest == expected.digest


# --- Benchmark truth, fixed lists, covariate shift -------------------------------------------------------------


def test_repeated_holdout_reserves_exclusive_classes():
    labels, ood = np.repeat(np.arange(4), 25), np.repeat(np.arange(10), 3)
    folds = RepeatedHoldout(20, seed=4).split(labels, ood)
    assert len(folds) == 20
    for fold in folds:
        assert len(fold.id_test) == 20
        assert sorted([*fold.id_train, *fold.id_test]) == list(range(100))
        assert len(set(ood[fold.ood_test])) == 2
        assert len(set(ood[fold.ood_train])) == 8
        assert not set(ood[fold.ood_test]) & set(ood[fold.ood_train])
    assert len({tuple(fold.id_test) for fold in folds}) == 20
    assert folds.exclusive


def test_a_repeat_does_not_depend_on_the_number_of_repeats():
    labels, ood = np.tile([0, 1], 30), range(5)
    few, many = (RepeatedHoldout(n, seed=1).split(labels, ood) for n in (3, 8))
    for a, b in zip(few, many, strict=False):
        assert a.id_test.tolist() == b.id_test.tolist()
        assert a.ood_test.tolist() == b.ood_test.tolist()


def test_stratified_holdout_rounds_every_class_up_or_down():
    labels = rows_of({"a": 31, "b": 14, "c": 5})
    for fold in RepeatedHoldout(30, id="stratified").split(labels, [0, 1]):
        tested = {label: (labels[fold.id_test] == label).sum() for label in "abc"}
        assert tested["a"] in (6, 7)
        assert tested["b"] in (2, 3)
        assert tested["c"] == 1
        assert len(fold.id_test) == 10


def test_plain_holdout_tests_every_row_equally_often():
    hits = np.zeros(40)
    for fold in RepeatedHoldout(1500, id_test=0.25).split([0, 1] * 20, [0, 1]):
        hits[fold.id_test] += 1
    assert np.abs(hits - 375).max() < 5 * np.sqrt(1500 * 0.25 * 0.75)


def test_holdout_groups_stay_together():
    subject = np.repeat(np.arange(20), 3)
    for fold in RepeatedHoldout(10).split([0, 1] * 30, range(3), id_groups=subject):
        assert not set(subject[fold.id_train]) & set(subject[fold.id_test])
        assert len(fold.id_test) == 12
    with pytest.raises(OodometerError, match="id_groups: whole groups are drawn with id='plain'"):
        RepeatedHoldout(2, id="stratified").split([0, 1] * 30, range(3), id_groups=subject)


def test_repeated_holdout_needs_a_class_to_reserve():
    with pytest.raises(OodometerError, match="needs two OOD classes"):
        RepeatedHoldout(2).split([0, 0, 0, 1, 1, 1], [5, 5])
    fold = RepeatedHoldout(1, ood_test=1).split([0] * 9, [5, 5])[0]
    assert fold.ood_test.tolist() == [0, 1]
    assert fold.ood_train.tolist() == []


def test_holdout_takes_rows_or_sample_ids():
    labels, ood = [0, 0, 1, 1, 1], ["x", "x", "y"]
    rows = Holdout(id_train=[0, 2, 4], id_test=np.array([1, 3]), ood_train=[2], ood_test=[0, 1]).split(labels, ood)[0]
    named = Holdout(id_train=["a", "c", "e"], id_test=["d", "b"], ood_test=["p"]).split(
        labels, ood, id_names=list("abcde"), ood_names=list("pqr")
    )[0]
    assert rows.id_train.tolist() == named.id_train.tolist() == [0, 2, 4]
    assert rows.id_test.tolist() == named.id_test.tolist() == [1, 3]
    assert rows.ood_train.tolist() == [2]
    assert rows.ood_test.tolist() == [0, 1]
    assert named.ood_test.tolist() == [0]
    assert named.ood_train.tolist() == []
    assert named.names("id_test").tolist() == ["b", "d"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"id_test": [0, 1]}, r"id_test: a sample may be listed once, in one part; 0 is repeated, or also in id_train"),
        ({"id_test": [1, 1]}, r"id_test: a sample may be listed once"),
        ({"id_test": [9]}, r"id_test: needs row numbers from 0 to 4, .*found 9"),
        ({"id_test": []}, r"needs rows in every part; 'ID test' is empty"),
        ({"ood_test": []}, r"'OOD test' is empty"),
        ({"ood_train": [1]}, r"ood_labels: train and test need to be apart; 'x' is on both sides"),
        ({"id_train": [0], "id_test": [2]}, r"every tested ID class needs training rows; class 1"),
    ],
)
def test_bad_fixed_lists(changes, message):
    lists = {"id_train": [0, 2], "id_test": [1, 3], "ood_test": [0]} | changes
    with pytest.raises(OodometerError, match=message):
        Holdout(**lists).split([0, 0, 1, 1, 1], ["x", "x", "y"])


def test_holdout_refuses_a_group_on_both_sides():
    with pytest.raises(OodometerError, match="id_groups: train and test need to be apart; 'p' is on both sides"):
        Holdout(id_train=[0, 2], id_test=[1], ood_test=[0]).split([0, 0, 0], ["x"], id_groups=["p", "p", "q"])


def test_covariate_shifted_rows_are_tested_with_their_source():
    names = list("abcdefgh")
    folds = DualKFold(2).split([0, 1] * 4, [0, 1], id_names=names)
    sources = ["h", "a", "a", "c"]
    rows = folds.cs_id(sources)
    for fold, tested in zip(folds, rows, strict=True):
        assert [row in tested for row in range(4)] == [source in set(fold.names("id_test")) for source in sources]
    assert sorted(np.concatenate(rows)) == [0, 1, 2, 3]
    with pytest.raises(OodometerError, match=r"sample id of an ID row; found 'z'\. Pass the ids given as id_names"):
        folds.cs_id(["a", "z"])


def test_a_shifted_row_whose_source_is_not_tested_is_left_out():
    folds = Holdout(id_train=[0, 1], id_test=[2, 3], ood_test=[0]).split([0, 1, 0, 1], [0])
    assert [rows.tolist() for rows in folds.cs_id([0, 2, 3, 3])] == [[1, 2, 3]]


# --- Folds as an object ----------------------------------------------------------------------------------------


def small_folds():
    hierarchy = tree(2, 3, rows=4)
    id_side, ood_side = split_by(hierarchy, "l1", {"1:000", "1:003"})
    names = [f"bild-{row:02d}é.png" for row in range(16)]
    return HierarchicalDualKFold(2, level="l1", seed=3).split(id_side, ood_side, id_names=names)


def test_folds_print_rows_and_classes_by_level():
    assert str(small_folds()).splitlines() == [
        "HierarchicalDualKFold(n_splits=2, level='l1', seed=3): 16 ID rows, 8 OOD rows",
        "rows · classes (l0 / l1)",
        "fold   ID train    ID test  OOD train   OOD test",
        "   0  8 · 2 / 4  8 · 2 / 4  4 · 1 / 1  4 · 1 / 1",
        "   1  8 · 2 / 4  8 · 2 / 4  4 · 1 / 1  4 · 1 / 1",
    ]


def test_long_tables_are_cut_in_the_middle():
    lines = str(RepeatedHoldout(30).split([0, 1] * 10, [0, 1])).splitlines()
    assert len(lines) == 3 + 21
    assert [line.split()[0] for line in lines[12:15]] == ["9", "…", "20"]


def test_folds_are_a_sequence_of_read_only_parts():
    folds = small_folds()
    assert len(folds) == 2
    assert len(folds[-1].id_test) == 8
    assert [len(fold.id_train) for fold in folds[:1]] == [8]
    assert repr(folds[0]) == "Fold(id_train=8 rows, id_test=8 rows, ood_train=4 rows, ood_test=4 rows)"
    assert repr(folds).startswith("Folds(2 folds of HierarchicalDualKFold(")
    with pytest.raises(IndexError):
        folds[2]
    with pytest.raises(ValueError, match="read-only"):
        folds[0].id_test[0] = 1
    with pytest.raises(OodometerError, match="part: needs one of 'id_train'"):
        folds[0].names("test")


def test_folds_survive_a_round_trip(tmp_path):
    folds = small_folds()
    folds.save(tmp_path / "new" / "folds.json")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["folds.json"]
    loaded = Folds.load(tmp_path / "new" / "folds.json")
    assert loaded.digest == folds.digest
    assert str(loaded) == str(folds)
    for here, there in zip(folds, loaded, strict=True):
        for part in ("id_train", "id_test", "ood_train", "ood_test"):
            assert getattr(here, part).tolist() == getattr(there, part).tolist()
            assert here.names(part).tolist() == there.names(part).tolist()
    folds.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "new" / "folds.json").read_bytes()


@pytest.mark.parametrize("damage", ["cut", "flip", "format", "empty", "list"])
def test_damaged_files_are_refused(tmp_path, damage):
    path = tmp_path / "folds.json"
    small_folds().save(path)
    text = path.read_text()
    payload = json.loads(text)
    payload["id"]["folds"][0] = payload["id"]["folds"][0][::-1]
    flipped = json.dumps(payload)
    changed = {
        "cut": text[:-20],
        "flip": flipped,
        "format": text.replace("oodometer.folds/1", "other"),
        "empty": "",
        "list": "[]",
    }
    path.write_text(changed[damage])
    with pytest.raises(OodometerError, match=r"folds.json needs to be a oodometer.folds/1 file .*split again"):
        Folds.load(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(OodometerError, match=r"folds: no file at .*none.json"):
        Folds.load(tmp_path / "none.json")


def test_folds_follow_the_sample_ids_into_another_order():
    folds = small_folds()
    order = np.random.default_rng(0).permutation(16)
    moved = folds.align(id_names=folds.id_names[order], ood_names=range(8))
    for here, there in zip(folds, moved, strict=True):
        assert set(here.names("id_test")) == set(there.names("id_test"))
        assert here.ood_test.tolist() == there.ood_test.tolist()
    assert str(moved) == str(folds)
    with pytest.raises(OodometerError, match="needs the sample ids of these folds in any order; found 'else'"):
        folds.align(id_names=["else", *folds.id_names[1:]], ood_names=range(8))
    with pytest.raises(OodometerError, match=r"needs one entry a row \(8\)"):
        folds.align(id_names=folds.id_names, ood_names=range(7))


# --- Cost and documentation ------------------------------------------------------------------------------------


def test_a_million_rows_take_less_than_two_seconds():
    rng = np.random.default_rng(0)
    leaf = rng.integers(0, 1000, 1_000_000)
    hierarchy = {"super": leaf // 100, "class": leaf // 4, "leaf": leaf}
    start = time.perf_counter()
    chosen = select_ood_classes(hierarchy, level="class", fraction=0.2, seed=0)
    folds = HierarchicalDualKFold(5, level="class").split(chosen.id_hierarchy, chosen.ood_hierarchy)
    assert time.perf_counter() - start < 2 * 2  # twice the target: the machine of a test run is shared
    assert sum(len(fold.id_test) for fold in folds) == len(chosen.id_rows)


def test_importing_the_splits_loads_neither_torch_nor_scikit_learn_nor_pandas():
    heavy = "('torch', 'sklearn', 'pandas', 'scipy')"
    code = f"import sys, oodometer.splits; print([m for m in {heavy} if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_the_documented_example_runs(capsys, tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "guide" / "splits.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    scope = {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for block in re.findall(r"```python\n(.*?)```", page, flags=re.S):
            exec(block, scope)
    printed = re.findall(r"```text\n(.*?)```", page, flags=re.S)
    assert capsys.readouterr().out == "".join(printed)
