"""The summary table against each metric on its own, its means against explicit ones, and its refusals."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

from oodometer import metrics
from oodometer.errors import OodometerError, OodometerWarning
from oodometer.results import METRICS

RNG = np.random.default_rng(0)
ID = RNG.standard_normal(400)
CORRECT = RNG.random(400) > 0.2
CALIBRATION = RNG.standard_normal(300)
SETS = {
    "svhn": RNG.standard_normal(250) + 2,
    "dtd": np.round(RNG.standard_normal(150) + 1, 1),
    "tin": RNG.standard_normal(3000) + 0.4,
}


def by_name(table):
    return {row["dataset"]: row for row in table.to_dict("records")}


def test_every_number_is_that_of_its_own_function():
    table = metrics.summary(ID, SETS)
    assert table["dataset"].tolist() == ["svhn", "dtd", "tin", "all"]
    assert table["kind"].tolist() == ["set", "set", "set", "mean"]
    for name, row in list(by_name(table).items())[:3]:
        assert {metric: row[metric] for metric in metrics.ranking(ID, SETS[name])} == metrics.ranking(ID, SETS[name])
        known = metrics.delong(ID, SETS[name])
        assert (row["auroc_low"], row["auroc_high"]) == (known.low, known.high)
        assert (row["n_id"], row["n_ood"]) == (400, len(SETS[name]))


def test_both_polarities_are_different_numbers_under_their_own_names():
    row = by_name(metrics.summary(ID, SETS))["tin"]
    assert row["fpr95_ood"] == metrics.fpr_at_tpr(ID, SETS["tin"], positive="ood")
    assert row["fpr95_id"] == metrics.fpr_at_tpr(ID, SETS["tin"], positive="id")
    assert row["fpr95_ood"] != row["fpr95_id"]
    assert row["aupr_ood"] == metrics.aupr(ID, SETS["tin"], positive="ood")
    assert row["aupr_ood"] > 0.9
    assert row["aupr_id"] < 0.5


def test_groups_are_given_by_group_or_by_data_set():
    by_set = metrics.summary(ID, SETS, groups={"svhn": "far", "dtd": "far", "tin": "near"})
    assert by_set.equals(metrics.summary(ID, SETS, groups={"far": ["svhn", "dtd"], "near": ["tin"]}))


def test_means_are_unweighted_over_data_sets_and_harmonic_within_them():
    table = by_name(metrics.summary(ID, SETS, groups={"far": ["svhn", "dtd"], "near": ["tin"]}))
    assert list(table) == ["svhn", "dtd", "tin", "far", "near", "all"]
    assert [row["group"] for row in table.values()] == ["far", "far", "near", "far", "near", "all"]
    single = {name: metrics.ranking(ID, scores) for name, scores in SETS.items()}
    for metric in ("auroc", "fpr95_id", "aupr_harmonic"):
        assert table["far"][metric] == pytest.approx((single["svhn"][metric] + single["dtd"][metric]) / 2, abs=1e-15)
        assert table["all"][metric] == pytest.approx(np.mean([one[metric] for one in single.values()]), abs=1e-15)
    pooled = metrics.auroc(ID, np.concatenate(list(SETS.values())))
    assert abs(table["all"]["auroc"] - pooled) > 0.05  # the large set would drown the others
    known = metrics.delong_mean(ID, SETS)
    assert (table["all"]["auroc_low"], table["all"]["auroc_high"]) == (known.low, known.high)
    assert table["near"]["auroc_low"] == table["tin"]["auroc_low"]
    assert math.isnan(metrics.summary(ID, SETS)["n_ood"].astype(float).iloc[-1])


def test_one_set_needs_no_name_and_has_no_mean():
    table = metrics.summary(ID.tolist(), SETS["dtd"])
    assert table["dataset"].tolist() == ["ood"]
    assert table["auroc"].iloc[0] == metrics.auroc(ID, SETS["dtd"])


def test_a_group_of_all_sets_is_not_repeated():
    table = metrics.summary(ID, SETS, groups={"every": list(SETS)})
    assert table["dataset"].tolist() == [*SETS, "every"]


def test_failure_metrics_come_with_the_correctness_of_id_rows():
    assert not [name for name in metrics.summary(ID, SETS) if ":" in name or name in ("oscr", "ccr5")]
    row = by_name(metrics.summary(ID, SETS, id_correct=CORRECT))["svhn"]
    for protocol in ("discard_id_errors", "misclassification", "scod"):
        chosen = metrics.failures(ID, CORRECT, SETS["svhn"], protocol=protocol)
        assert row[f"augrc:{protocol}"] == metrics.augrc(*chosen)
        assert row[f"aurc:{protocol}"] == metrics.aurc(*chosen)
    assert row["oscr"] == metrics.oscr(ID, CORRECT, SETS["svhn"])
    assert row["ccr5"] == metrics.ccr_at_fpr(ID, CORRECT, SETS["svhn"], fpr=0.05)


def test_scale_and_thresholds_come_from_calibration_rows_alone():
    full = by_name(metrics.summary(ID, SETS, calibration=CALIBRATION, ood_validation=[0.5, 1.0, 1.5]))
    scale = metrics.fixed_scale(CALIBRATION)
    thresholds = {
        "95tnr": metrics.threshold_at_tnr(CALIBRATION),
        "val": metrics.threshold_equal_error(CALIBRATION, [0.5, 1.0, 1.5]),
    }
    for name, scores in SETS.items():
        row = full[name]
        assert (row["scale_low"], row["scale_high"]) == (scale.low, scale.high)
        for area in ("autc", "aufpr", "aufnr"):
            assert row[area] == getattr(metrics, area)(ID, scores, calibration=CALIBRATION)
        for rule, t in thresholds.items():
            known = metrics.at_one_threshold(ID, {name: scores}, t)
            assert row[f"threshold@{rule}"] == t
            assert (row[f"fpr@{rule}"], row[f"fnr@{rule}"]) == (known.fpr, known.fnr[name])
    # Another OOD set beside it changes nothing.
    alone = by_name(metrics.summary(ID, {"svhn": SETS["svhn"]}, calibration=CALIBRATION))["svhn"]
    assert {name: full["svhn"][name] for name in alone} == alone


def test_names_are_those_of_a_study():
    table = metrics.summary(ID, SETS, id_correct=CORRECT, calibration=CALIBRATION)
    facts = {"kind", "dataset", "group", "n_id", "n_ood", "note", "auroc_low", "auroc_high"}
    fixed = {"scale_low", "scale_high", "threshold@95tnr"}
    assert set(table) - facts - fixed - {"oscr", "ccr5"} <= set(METRICS)


def test_few_rows_are_said():
    with pytest.warns(OodometerWarning, match=r"few rows.*small: 18 OOD rows: one row moves a rate by 5\.6 points"):
        table = by_name(metrics.summary(ID, {"small": ID[:18] + 1, "large": SETS["tin"]}))
    assert table["small"]["note"] == "18 OOD rows: one row moves a rate by 5.6 points"
    assert table["large"]["note"] == ""
    with pytest.warns(OodometerWarning, match="1 OOD rows"):
        one = metrics.summary(ID, {"one": [3.0]})
    assert math.isnan(one["auroc_low"].iloc[0])
    assert one["auroc"].iloc[0] == metrics.auroc(ID, [3.0])


def test_at_thresholds_has_one_threshold_for_all_sets_but_that_of_the_test():
    table = metrics.at_thresholds(ID, SETS, calibration=CALIBRATION, ood_validation=CALIBRATION + 1)
    assert table["rule"].tolist() == ["@95TNR"] * 3 + ["@val"] * 3 + ["@test"] * 3
    distinct = table.groupby("rule")["threshold"].nunique()
    assert (distinct["@95TNR"], distinct["@val"], distinct["@test"]) == (1, 1, 3)
    for row in table.to_dict("records"):
        assert row["fpr"] == (row["threshold"] < ID).mean()
        assert row["fnr"] == (SETS[row["dataset"]] <= row["threshold"]).mean()
    own = table[table["rule"] == "@test"]
    assert (own["fpr"] - own["fnr"]).abs().max() < 0.06  # dtd holds .1 steps: several rows share a score
    assert metrics.at_thresholds(ID, SETS, calibration=CALIBRATION, tnr=0.9)["rule"].iloc[0] == "@90TNR"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"groups": {"near": ["cifar"]}}, "'near' names 'cifar'; the OOD sets are svhn, dtd, tin"),
        ({"groups": {"near": ["tin"], "far": ["tin"]}}, "'tin' is in 'near' and in 'far'"),
        ({"groups": {"near": []}}, "'near' has no data sets"),
        ({"ood_validation": [1.0]}, "ood_validation needs calibration="),
        ({"calibration": [1.0, 1.0]}, "Constant scores"),
        ({"calibration": [1.0, math.inf]}, "finite scores were needed"),
        ({"id_correct": [True]}, "one flag a score (400)"),
        ({"level": 95}, "95 % is .95"),
    ],
)
def test_refusals(options, message):
    with pytest.raises(OodometerError, match=re.escape(message)):
        metrics.summary(ID, SETS, **options)


def test_refused_scores_name_their_set():
    with pytest.raises(OodometerError, match=r"OOD 'svhn' scores: .* nan was found in row 1"):
        metrics.summary(ID, {"svhn": [1.0, math.nan]})
    with pytest.raises(OodometerError, match="at least one set was needed"):
        metrics.summary(ID, {})
    with pytest.raises(OodometerError, match="ID scores: finite scores were needed"):
        metrics.summary([math.inf, 1.0], SETS, calibration=CALIBRATION)
