"""Wrong numbers that other tools print, one test for each known defect; a name starts with the defect's number.

Where the wrong rule is short it stands in the test, which shows that the data tell it from the right one.
"""

# ruff: noqa: N802

from __future__ import annotations

import ast
import re
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import scipy.special
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import auc, roc_auc_score, roc_curve

import oodometer
from oodometer import Bank, metrics, stats
from oodometer.cli import main
from oodometer.detectors import create, get, names
from oodometer.errors import OodometerError, OodometerWarning
from oodometer.tables import ScoreTable


def normal_scores(shift=2.0):
    rng = np.random.default_rng(3)
    return rng.standard_normal(1000), rng.standard_normal(800) + shift


def truth_of(a, o):
    return np.r_[np.zeros(len(a)), np.ones(len(o))], np.r_[a, o]


def sigmoid(x):
    return 1 / (1 + np.exp(-np.asarray(x, np.float32)))


# --- Ranking ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("map_", [lambda s: s + 1e6, lambda s: 1e3 * s, lambda s: s + 40], ids=["1e6", "1e3", "40"])
def test_N3_large_scores_are_not_squeezed_by_a_sigmoid(map_):
    """torchmetrics maps scores outside [0, 1] through a sigmoid: above 17 all float32 values become 1."""
    a, o = (map_(np.round(side, 3)) for side in normal_scores())
    expected = roc_auc_score(*truth_of(a, o))
    assert metrics.auroc(a, o) == pytest.approx(expected, abs=1e-13)
    assert metrics.auroc(a, o) > 0.9
    with np.errstate(over="ignore"):
        assert metrics.auroc(sigmoid(a), sigmoid(o)) < expected - 0.01


def test_N11_gen_is_a_sum_and_its_mean_is_another_name():
    """Sum over the m largest probabilities (Liu et al., equation 4); pytorch-ood took the mean of them."""
    rng = np.random.default_rng(0)
    logits = 3 * rng.standard_normal((40, 12))
    p = np.sort(scipy.special.softmax(logits, axis=1), axis=1)[:, -5:]
    terms = p**0.1 * (1 - p) ** 0.1
    bank = Bank(logits=logits)
    np.testing.assert_allclose(create("gen", m=5, gamma=0.1).score(bank), terms.sum(1), rtol=1e-12)
    np.testing.assert_allclose(create("gen", m=5, gamma=0.1, reduction="mean").score(bank), terms.mean(1), rtol=1e-12)


def test_N11_scores_far_from_zero_keep_their_auroc():
    """GEN's sums reach the hundreds on many classes, where a sigmoid makes all of them 1 (AUROC .5)."""
    a, o = normal_scores()
    assert metrics.auroc(a + 300, o + 300) == pytest.approx(metrics.auroc(a, o), abs=1e-4)
    assert metrics.auroc(sigmoid(a + 300), sigmoid(o + 300)) == 0.5


def test_N13_fpr_with_tied_scores_is_that_of_all_thresholds():
    """Dropping collinear points of the ROC curve, as OpenOOD does, reports too large an FPR on tied scores."""
    too_high = 0
    for seed in range(300):
        rng = np.random.default_rng(seed)
        a, o = np.round(rng.standard_normal(30), 0), np.round(rng.standard_normal(30) + 1, 0)
        admissible = [(a >= t).mean() for t in np.r_[a, o] if (o >= t).mean() >= 0.95]
        found = metrics.fpr_at_tpr(a, o)
        assert found == min(admissible)
        fpr, tpr, _ = roc_curve(*truth_of(a, o), drop_intermediate=True)
        too_high += fpr[tpr >= 0.95].min() > found
    assert too_high > 0


def test_N14_auroc_and_fpr_use_every_threshold():
    """Oodeel evaluates every fourth threshold, and reads the FPR where the TPR is just below .95."""
    a, o = (np.round(side, 2) for side in normal_scores(0.7))
    every = np.unique(np.r_[a, o])[::-1]

    def curve(thresholds):
        return [[0, *[(side >= t).mean() for t in thresholds], 1] for side in (a, o)]

    assert metrics.auroc(a, o) == pytest.approx(auc(*curve(every)), abs=1e-13)
    assert abs(auc(*curve(every[::4])) - metrics.auroc(a, o)) > 1e-5
    fpr, tpr = map(np.array, curve(every))
    assert metrics.fpr_at_tpr(a, o) == fpr[tpr >= 0.95].min() > fpr[tpr < 0.95].max()
    for n in range(1, 60):
        scores = np.arange(n)
        t = metrics.threshold_at_tpr(scores)
        assert (scores > t).mean() >= 0.95


def test_N16_scores_that_a_platt_scaling_would_tie_stay_apart():
    a, o = (40 + side for side in normal_scores())
    squeezed = [1 / (1 + np.exp(-side)) for side in (a, o)]
    assert len(np.unique(np.concatenate(squeezed))) < len(a) + len(o)
    assert metrics.auroc(a, o) > metrics.auroc(*squeezed) + 0.1
    ranks = np.split(scipy.stats.rankdata(np.r_[a, o], "dense"), [len(a)])
    assert metrics.ranking(a, o) == metrics.ranking(*ranks)


def test_N31_every_polarity_is_in_the_name():
    """DCV-ROOD declares OOD positive and prints ID-positive F1 and AUPR: the two differ by far."""
    rng = np.random.default_rng(0)
    a, o = rng.standard_normal(20_000), 2 * rng.standard_normal(50_000)
    row = metrics.summary(a, o).iloc[0]
    # P(a > t) where P(o > t) = .95, and P(o <= t) where P(a <= t) = .95
    assert row["fpr95_ood"] == pytest.approx(scipy.stats.norm.sf(2 * scipy.stats.norm.ppf(0.05)), abs=0.005)
    assert row["fpr95_id"] == pytest.approx(scipy.stats.norm.cdf(scipy.stats.norm.ppf(0.95) / 2), abs=0.005)
    assert row["f1_max_ood"] > row["f1_max_id"] + 0.2
    assert row["aupr_ood"] > row["aupr_id"] + 0.2
    assert not {"fpr95", "aupr", "ap", "f1", "f1_max"} & set(row.index)
    for function in (metrics.fpr_at_tpr, metrics.aupr, metrics.f1_max):
        assert function(a, o, positive="id") != function(a, o, positive="ood") == function(a, o)


def test_N31_a_test_is_called_what_it_is():
    """DCV-ROOD's text says Mann–Whitney; its numbers are those of Wilcoxon's signed ranks."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal(20)
    y = x + 0.1 + 0.05 * rng.standard_normal(20)
    paired, unpaired = stats.wilcoxon(x, y), stats.mann_whitney(x, y, method="exact")
    assert (paired.test, unpaired.test) == ("Wilcoxon signed-rank", "Mann–Whitney U")
    assert paired.pvalue == pytest.approx(scipy.stats.wilcoxon(x, y).pvalue, rel=1e-9)
    assert unpaired.pvalue == pytest.approx(scipy.stats.mannwhitneyu(x, y, method="exact").pvalue, rel=1e-9)
    assert paired.pvalue < 0.001
    assert unpaired.pvalue > 0.3


# --- Which rows, which class ------------------------------------------------------------------------------------


def test_N12_the_f1_of_a_shifted_set_is_its_own():
    """OpenMIBOOD prints the ID F1 in the csid row."""
    a, near = normal_scores(0.5)
    far = near + 2
    table = metrics.summary(a, {"csid": near, "far": far}).set_index("dataset")
    for name, scores in (("csid", near), ("far", far)):
        for positive in ("ood", "id"):
            assert table.loc[name, f"f1_max_{positive}"] == metrics.f1_max(a, scores, positive=positive)
    assert table.loc["csid", "f1_max_id"] < table.loc["far", "f1_max_id"] - 0.1


def test_N12_labels_of_ood_rows_enter_no_number(tmp_path):
    """OpenMIBOOD's macro F1 counts label −1, the OOD rows, as one more class."""
    labels = np.random.default_rng(0).integers(0, 3, 200)
    id_rows = [f"{score},id,{label},{score % 3}" for score, label in enumerate(labels)]
    found = []
    for cells in (",", "-1,2", "5,5"):
        ood_rows = [f"{score},ood,{cells}" for score in range(150, 270)]
        path = tmp_path / "s.csv"
        path.write_text("\n".join(["score,dataset,label,prediction", *id_rows, *ood_rows]))
        (one,) = ScoreTable(path).detectors("id")
        found.append(metrics.summary(one.id_scores, one.ood_scores, id_correct=one.id_correct))
    expected = metrics.augrc(*metrics.failures(range(200), labels == np.arange(200) % 3, range(150, 270)))
    assert [table["augrc:discard_id_errors"].iloc[0] for table in found] == [expected] * 3
    assert found[0].equals(found[1])
    assert found[0].equals(found[2])


def test_N33_flat_predictions_score_higher_than_confident_ones():
    """FD-Shifts hands out predictive entropy without its sign: as a confidence it is upside down."""
    rng = np.random.default_rng(0)
    confident, flat = np.zeros((30, 8, 5)), 0.1 * rng.standard_normal((30, 8, 5))
    confident[..., 0] = 9 + rng.standard_normal((30, 1))
    flat[:, ::2, :] += 4 * np.eye(5)[rng.integers(0, 5, (30, 4))]  # passes that contradict each other
    bank = Bank({"logits": np.r_[confident, flat].mean(1), "logits.mcd": np.r_[confident, flat]})
    plain = [name for name in names() if get(name).card.needs <= {"logits", "logits.mcd"}]
    checked = 0
    for name in plain:
        detector = create(name)
        if detector.is_fitted_needed or name == "mcd_waic":  # WAIC subtracts a variance: no order is promised here
            continue
        scores = detector.score(bank)
        assert scores[30:].min() > scores[:30].max(), name
        checked += 1
    assert checked >= 8


def test_N35_masked_pixels_are_left_out_also_for_void_label_0():
    rng = np.random.default_rng(0)
    scores, labels = rng.random((2, 4, 4)), rng.integers(0, 3, (2, 4, 4))
    void, ood = 0, 2
    kept = labels != void
    found = metrics.auroc(scores[kept & (labels != ood)], scores[kept & (labels == ood)])
    pairs = [t > s for s in scores[labels == 1] for t in scores[labels == ood]]
    assert found == pytest.approx(np.mean(pairs), abs=1e-15)
    with pytest.raises(OodometerError, match=re.escape("scores[labels != void].ravel()")):
        metrics.auroc(scores, scores)


def test_D6_csid_as_shift_and_full_spectrum_are_two_numbers(tmp_path, capsys):
    """OpenOOD pools cs-ID into ID, OpenMIBOOD detects it: neither happens here without being said."""
    rng = np.random.default_rng(0)
    a, csid, o = rng.standard_normal(300), rng.standard_normal(300) + 1, rng.standard_normal(200) + 2
    shift = metrics.summary(a, {"csid": csid, "far": o}).set_index("dataset")
    assert shift.loc["csid", "auroc"] == metrics.auroc(a, csid)
    assert shift.loc["far", "auroc"] == metrics.auroc(a, o)
    full_spectrum = metrics.auroc(np.r_[a, csid], o)
    assert full_spectrum < shift.loc["far", "auroc"] - 0.05
    rows = [(s, name, flag) for name, flag, side in (("id", 0, a), ("csid", 0, csid), ("far", 1, o)) for s in side]
    path = tmp_path / "s.csv"
    pd.DataFrame(rows, columns=["score", "dataset", "is_ood"]).to_csv(path, index=False)
    assert main(["metrics", str(path)]) == 2
    assert main(["metrics", str(path), "--id", "id"]) == 0
    assert "'csid' with is_ood = 0 evaluated as out of distribution" in capsys.readouterr().err


# --- Risk and coverage ------------------------------------------------------------------------------------------


def test_N17_coverage_at_risk_at_the_two_corners():
    """Torch-uncertainty reads a flipped index on an unflipped array: NaN for 1, and 1 for .01."""
    scores = np.arange(100.0)
    assert metrics.coverage_at_risk(scores, np.zeros(100), risk=0.05) == 1
    all_but_first = np.arange(100) > 0
    assert metrics.coverage_at_risk(scores, all_but_first, risk=0.05) == 0.01
    assert metrics.coverage_at_risk(scores, np.arange(100) == 99, risk=0.0) == 0.99
    assert metrics.coverage_at_risk(scores, np.arange(100) == 0, risk=0.01) == 1
    assert metrics.coverage_at_risk(scores, np.ones(100), risk=0.5) == 0


def test_N18_aurc_uses_every_threshold():
    """A grid of 1001 thresholds cannot see scores that differ by less than its steps."""
    scores = np.r_[0.0, 1 + 1e-9 * np.arange(5000), 2.0]
    failed = np.r_[False, np.arange(5000) >= 4000, True]
    expected = np.cumsum(failed) / np.arange(1, 5003)
    found = metrics.aurc(scores, failed, convention="geifman")
    assert found == pytest.approx(expected.mean(), abs=1e-12)
    accepted = np.searchsorted(scores, np.linspace(0, 2, 1001), "right")
    risk = np.cumsum(failed)[accepted - 1] / accepted
    on_a_grid = (np.diff(accepted) * (risk[1:] + risk[:-1]) / 2).sum() / 5002
    assert on_a_grid - found > 0.05
    blurred = metrics.aurc(np.round(scores, 3), failed, convention="geifman")
    assert blurred - found > 0.05


@given(
    st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0, 2.0]), st.booleans()), min_size=1, max_size=20),
    st.randoms(use_true_random=False),
)
def test_N19_the_order_of_tied_rows_changes_no_area(rows, random):
    """Torch-uncertainty sorts once and takes tied rows as they come."""
    mixed = random.sample(rows, len(rows))
    for convention in ("fd-shifts", "geifman", "non-linear", "achievable"):
        before = metrics.aurc(*zip(*rows, strict=True), convention=convention)
        assert metrics.aurc(*zip(*mixed, strict=True), convention=convention) == before
    assert metrics.augrc(*zip(*rows, strict=True)) == metrics.augrc(*zip(*mixed, strict=True))


def test_N19_a_plateau_has_one_area_where_sorting_alone_has_two():
    scores, failed = np.zeros(10), np.arange(10) < 5
    by_order = [np.mean(np.cumsum(r) / np.arange(1, 11)) for r in (failed, failed[::-1])]
    assert by_order[0] - by_order[1] > 0.5
    for r in (failed, failed[::-1]):
        assert metrics.aurc(scores, r, convention="geifman") == pytest.approx(0.5, abs=1e-15)


# --- Scales, intervals, blocks ----------------------------------------------------------------------------------


def test_N20_the_scale_of_autc_does_not_depend_on_the_ood_set():
    """pytorch-ood scales by the smallest and largest evaluated score: one outlier changes everything."""
    rng = np.random.default_rng(0)
    calibration, a, o = rng.standard_normal(500), rng.standard_normal(400), rng.standard_normal(300) + 2
    with_outlier = np.append(o, 1e6)
    fixed = [metrics.aufpr(a, ood, calibration=calibration) for ood in (o, with_outlier)]
    assert fixed[0] == fixed[1]
    evaluated = [metrics.aufpr(a, ood, scale="evaluated") for ood in (o, with_outlier)]
    assert evaluated[1] < 1e-4 < evaluated[0]
    with pytest.raises(OodometerError, match="needs calibration="):
        metrics.autc(a, o)
    assert metrics.summary(a, {"plain": o, "outlier": with_outlier}, calibration=calibration)["aufpr"].nunique() == 1


def test_C17_a_thousand_draws_cost_less_than_twenty_of_a_loop():
    """FD-Shifts resamples in Python; one of its draws takes longer than fifty of these."""
    rng = np.random.default_rng(0)
    a, o = rng.standard_normal(200), rng.standard_normal(200) + 1
    truth, scores = truth_of(a, o)

    def loop():
        for _ in range(20):
            rows = np.r_[rng.integers(0, 200, 200), 200 + rng.integers(0, 200, 200)]
            roc_auc_score(truth[rows], scores[rows])

    def seconds(function):
        start = time.perf_counter()
        function()
        return time.perf_counter() - start

    ours = min(seconds(lambda: metrics.bootstrap(a, o, n=1000)) for _ in range(5))
    assert ours < min(seconds(loop) for _ in range(5))


def test_D9_several_metrics_of_one_run_are_one_block():
    """AURC and AUGRC of the same rows entered one Friedman test as if they were independent."""
    rng = np.random.default_rng(0)
    aurc = rng.random((6, 4))
    both = np.stack([aurc, aurc + 1e-3 * rng.random((6, 4))], axis=1).reshape(12, 4)
    index = pd.MultiIndex.from_product([[f"data{i}" for i in range(6)], ["aurc", "augrc"]], names=["dataset", "metric"])
    frame = pd.DataFrame(both, index=index, columns=list("abcd"))
    with pytest.raises(OodometerError, match=r"independent blocks were needed, 2 blocks measure the same data"):
        stats.friedman(frame, higher_is_better=False)
    with pytest.warns(OodometerWarning, match="12 correlated blocks became 6"):
        table = stats.block_table(frame, correlated="mean-rank", higher_is_better=False)
    assert table.shape == (6, 4)


# --- NumPy ------------------------------------------------------------------------------------------------------

REMOVED = {"float", "int", "bool", "object", "str", "float_", "complex_", "infty", "Inf", "NaN", "NINF", "PINF"} | {
    *("trapz", "in1d", "product", "cumproduct", "alltrue", "sometrue", "row_stack", "msort", "round_", "unicode_")
}
ADDED_IN_2 = {"trapezoid", "concat", "astype", "unique_values", "unique_counts", "unique_inverse", "permute_dims"} | {
    *("vecdot", "matvec", "vecmat", "matrix_transpose", "isdtype", "pow", "acos", "asin", "atan", "cumulative_sum")
}


def test_N36_only_names_that_numpy_1_and_2_share():
    """`np.float`, `np.infty` and `np.float_` stop two peers under a current NumPy."""
    used: dict[str, str] = {}
    for path in Path(oodometer.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "np":
                used[node.attr] = path.name
    assert "float64" in used
    assert not {name: where for name, where in used.items() if name in REMOVED | ADDED_IN_2}
    assert not {name: where for name, where in used.items() if not hasattr(np, name)}
