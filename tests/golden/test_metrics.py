"""Golden numbers of the metrics: three toys by hand, accuracies printed by DCV-ROOD, and failures of other tools."""

from __future__ import annotations

import numpy as np
import pytest

from oodometer import metrics

# Toy A ties .20, .60 and .90 across the classes.
ID = [0.05, 0.10, 0.20, 0.20, 0.30, 0.35, 0.40, 0.60, 0.70, 0.90]
OOD = [0.20, 0.45, 0.50, 0.60, 0.65, 0.80, 0.90, 0.95]
ID_CORRECT = [1, 1, 1, 0, 1, 1, 0, 1, 0, 1]

# Toy B ties two pairs of rows, toy C none; scores are negative confidences.
B_SCORES = -np.array([0.9, 0.8, 0.8, 0.7, 0.6, 0.5, 0.5, 0.3, 0.2, 0.1])
B_FAILURES = [0, 0, 1, 0, 1, 0, 1, 1, 0, 1]
B_LABELS = [0, 1, 2, 0, 1, 2, 0, 1, 2, 0]
C_SCORES = -np.array([0.95, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2])
C_FAILURES = [0, 0, 1, 0, 0, 1, 0, 1, 1, 1]


def test_ranking_of_toy_a():
    assert metrics.ranking(ID, OOD) == pytest.approx(
        {
            "auroc": 0.7625,
            "fpr95_ood": 0.8,
            "fpr95_id": 0.875,
            "tpr5": 0.125,
            "aupr_ood": 0.7086538461538461,
            "aupr_id": 0.8234548049989227,
            "ap_ood": 0.696875,
            "ap_id": 0.8063235294117647,
            "aupr_harmonic": 0.7617533054947366,
            "f1_max_ood": 0.7777777777777778,
            "f1_max_id": 0.7777777777777778,
            "acc90": 0.6666666666666666,
            "detection_error": 0.2125,  # t = .40: FPR .3, FNR .125
        },
        abs=1e-15,
    )


def test_each_function_gives_the_number_of_the_whole_ranking():
    assert metrics.auroc(ID, OOD) == 0.7625
    assert metrics.fpr_at_tpr(ID, OOD) == 0.8
    assert metrics.fpr_at_tpr(ID, OOD, positive="id") == 0.875
    assert metrics.fpr_at_tpr(ID, OOD, tpr=0.9, positive="id") == 0.625
    assert metrics.aupr(ID, OOD) == pytest.approx(0.7086538461538461, abs=1e-15)
    assert metrics.aupr(ID, OOD, positive="id") == pytest.approx(0.8234548049989227, abs=1e-15)
    assert metrics.aupr(ID, OOD, method="average_precision") == pytest.approx(0.696875, abs=1e-15)
    id_ap = metrics.aupr(ID, OOD, positive="id", method="average_precision")
    assert id_ap == pytest.approx(0.8063235294117647, abs=1e-15)
    assert metrics.aupr_harmonic(ID, OOD) == pytest.approx(0.7617533054947366, abs=1e-15)
    assert metrics.f1_max(ID, OOD) == pytest.approx(0.7777777777777778, abs=1e-15)
    assert metrics.f1_max(ID, OOD, positive="id") == pytest.approx(0.7777777777777778, abs=1e-15)
    assert metrics.accuracy_at_tnr(ID, OOD) == pytest.approx(0.6666666666666666, abs=1e-15)
    assert metrics.detection_error(ID, OOD) == pytest.approx(0.2125, abs=1e-15)
    assert metrics.detection_accuracy(ID, OOD) == pytest.approx(0.7875, abs=1e-15)


@pytest.mark.parametrize(("fpr", "tpr"), [(0.05, 0.125), (0.10, 0.375), (0.20, 0.5), (0.30, 0.875)])
def test_tpr_at_fpr_of_toy_a(fpr, tpr):
    assert metrics.tpr_at_fpr(ID, OOD, fpr=fpr) == tpr


def test_points_of_toy_a_at_the_thresholds_named_beside_them():
    # Flagging is strict, so ".20 and above" is the threshold one step below .20.
    assert metrics.threshold_at_tpr(OOD, tpr=0.95) == np.nextafter(0.20, -1)
    assert metrics.threshold_at_tnr(ID, tnr=0.95) == 0.90
    assert metrics.threshold_at_tnr(ID, tnr=0.90) == 0.70
    assert metrics.f1_at(ID, OOD, threshold=0.40) == pytest.approx(0.7777777777777778, abs=1e-15)
    assert metrics.f1_at(ID, OOD, threshold=0.40, positive="id") == pytest.approx(0.7777777777777778, abs=1e-15)
    assert metrics.accuracy_at(ID, OOD, threshold=0.70) == pytest.approx(0.6666666666666666, abs=1e-15)
    assert metrics.balanced_accuracy_at(ID, OOD, threshold=0.40) == pytest.approx(0.7875, abs=1e-15)
    assert metrics.confusion_at(ID, OOD, threshold=0.40) == metrics.Confusion(tp=7, fn=1, fp=3, tn=7)


def test_areas_of_toy_a_on_the_unit_scale():
    for scale in ({"low": 0, "high": 1}, {"scale": "probability"}):
        assert metrics.aufpr(ID, OOD, **scale) == pytest.approx(0.38, abs=1e-15)
        assert metrics.aufnr(ID, OOD, **scale) == pytest.approx(0.36875, abs=1e-15)
        assert metrics.autc(ID, OOD, **scale) == pytest.approx(0.374375, abs=1e-15)


def test_open_set_curve_of_toy_a():
    assert metrics.oscr(ID, ID_CORRECT, OOD) == pytest.approx(0.54375, abs=1e-15)
    assert metrics.oscr(ID, ID_CORRECT, OOD, ties="pessimistic") == pytest.approx(0.525, abs=1e-15)


def test_failures_of_toy_b():
    found = {
        "aurc": metrics.aurc(B_SCORES, B_FAILURES),
        "augrc": metrics.augrc(B_SCORES, B_FAILURES),
        "eaurc": metrics.eaurc(B_SCORES, B_FAILURES),
        "eaugrc": metrics.eaugrc(B_SCORES, B_FAILURES),
        "non-linear": metrics.aurc(B_SCORES, B_FAILURES, convention="non-linear"),
        "achievable": metrics.aurc(B_SCORES, B_FAILURES, convention="achievable"),
        "aurc_ba": metrics.aurc_ba(B_SCORES, B_FAILURES, B_LABELS),
        "augrc_ba": metrics.augrc_ba(B_SCORES, B_FAILURES, B_LABELS),
    }
    assert {name: 1000 * area for name, area in found.items()} == pytest.approx(
        {
            "aurc": 318.7301587302,
            "augrc": 205.0,
            "eaurc": 165.3037490101,
            "eaugrc": 80.0,
            "non-linear": 331.0913149703,
            "achievable": 287.5796998635,
            "aurc_ba": 344.4444444444,
            "augrc_ba": 215.2777777778,
        },
        abs=6e-11,
    )
    assert 1000 * (found["aurc"] - found["eaurc"]) == pytest.approx(153.4264097200, abs=6e-11)


def test_failures_of_toy_c():
    found = {
        "aurc": metrics.aurc(C_SCORES, C_FAILURES),
        "augrc": metrics.augrc(C_SCORES, C_FAILURES),
        "eaurc": metrics.eaurc(C_SCORES, C_FAILURES),
        "eaugrc": metrics.eaugrc(C_SCORES, C_FAILURES),
        "non-linear": metrics.aurc(C_SCORES, C_FAILURES, convention="non-linear"),
        "achievable": metrics.aurc(C_SCORES, C_FAILURES, convention="achievable"),
        "geifman": metrics.aurc(C_SCORES, C_FAILURES, convention="geifman"),
        "torch-uncertainty": metrics.aurc(C_SCORES, C_FAILURES, convention="torch-uncertainty"),
        "torch-uncertainty augrc": metrics.augrc(C_SCORES, C_FAILURES, convention="torch-uncertainty"),
    }
    assert {name: 1000 * area for name, area in found.items()} == pytest.approx(
        {
            "aurc": 247.1825396825,
            "augrc": 165.0,
            "eaurc": 93.7561299625,
            "eaugrc": 40.0,
            "non-linear": 249.5535820335,
            "achievable": 210.1056437458,
            "geifman": 272.1825397,
            "torch-uncertainty": 274.6472663,
            "torch-uncertainty augrc": 183.3333333,
        },
        abs=6e-8,
    )
    ten_digits = ("aurc", 247.1825396825), ("eaurc", 93.7561299625), ("non-linear", 249.5535820335)
    for name, expected in (*ten_digits, ("achievable", 210.1056437458)):
        assert 1000 * found[name] == pytest.approx(expected, abs=6e-11)


@pytest.mark.parametrize(
    ("scores", "failed", "expected"), [(B_SCORES, B_FAILURES, 0.68), (C_SCORES, C_FAILURES, 0.84)], ids="BC"
)
def test_auroc_of_failures(scores, failed, expected):
    failed = np.array(failed, bool)
    assert metrics.auroc(scores[~failed], scores[failed]) == pytest.approx(expected, abs=1e-15)


# --- DCV-ROOD ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n_ood", "keeps_90", "catches_90", "printed"),
    [
        (14_000, 0.9538, 0.9462, (0.9537, 0.9542)),  # MNIST
        (33_600, 0.9737, 0.9263, (0.9728, 0.9739)),  # Letters
        (800, 0.9063, 0.9937, (0.9057, 0.9068)),  # DTD
    ],
)
def test_printed_accuracy_keeps_90_percent_of_the_id_rows(n_ood, keeps_90, catches_90, printed):
    """12,000 separated ID rows: only one reading of acc_90 lies in the range that DCV-ROOD prints."""
    id_scores, ood_scores = np.arange(12_000), 12_000 + np.arange(n_ood)
    found = metrics.accuracy_at_tnr(id_scores, ood_scores, tnr=0.9)
    assert found == pytest.approx(keeps_90, abs=5.1e-5)
    assert printed[0] <= found <= printed[1]
    t = metrics.threshold_at_tpr(ood_scores, tpr=0.9)
    other = metrics.accuracy_at(id_scores, ood_scores, threshold=t)
    assert other == pytest.approx(catches_90, abs=5.1e-5)
    assert not printed[0] <= other <= printed[1]


def test_f1_of_flagging_everything_bounds_ood_positive_f1_on_letters():
    """Printed F1 between .4702 and .8867 on Letters cannot be OOD positive, which starts at .848."""
    rng = np.random.default_rng(0)
    id_scores, ood_scores = rng.random(12_000), rng.random(33_600) - 0.5
    assert metrics.f1_max(id_scores, ood_scores) >= 2 * 33_600 / (2 * 33_600 + 12_000) > 0.848
    assert metrics.f1_max(id_scores, ood_scores, positive="id") < 0.848
