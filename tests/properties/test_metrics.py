"""Metrics against their definitions over all thresholds, against scikit-learn, and under maps that change nothing."""

from __future__ import annotations

import itertools
import math
import re

import numpy as np
import pytest
import scipy.integrate
import scipy.stats
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sklearn.metrics import auc, average_precision_score, precision_recall_curve, roc_auc_score, roc_curve

from oodometer import metrics
from oodometer.errors import OodometerError, OodometerWarning

FEW = [-math.inf, -2.5, -0.0, 0.0, 0.25, 1.0, 3.0, math.inf]
"""Values that tie often, in both zeros and both infinities."""
FINITE = [-2.5, -0.0, 0.0, 0.25, 1.0, 3.0]


def lists(elements, smallest=1, largest=25):
    return st.lists(elements, min_size=smallest, max_size=largest)


tied = lists(st.sampled_from(FEW))
tied_finite = lists(st.sampled_from(FINITE))
spread = lists(st.floats(-1e6, 1e6))
typed = st.one_of(
    tied.map(np.array),
    spread.map(np.array),
    lists(st.integers(-3, 3)).map(lambda v: np.array(v, np.int8)),
    lists(st.integers(-(2**40), 2**40)).map(lambda v: np.array(v, np.int64)),
    lists(st.booleans()).map(np.array),
    lists(st.floats(-8, 8, width=16)).map(lambda v: np.array(v, np.float16)),
    lists(st.floats(-8, 8, width=32)).map(lambda v: np.array(v, np.float32)),
)
fractions = st.one_of(st.sampled_from([0.05, 0.07, 0.1, 0.29, 0.3, 0.5, 0.9, 0.95, 1.0]), st.floats(0.001, 1))


def floats(*sides):
    return [np.asarray(side).astype(np.float64) for side in sides]


# --- Definitions, one threshold after the other ------------------------------------------------------------------


def points(negative, positive):
    """(#negatives, #positives) at least as large as each observed score, descending; first nothing at all."""
    every = sorted(set(negative.tolist()) | set(positive.tolist()), reverse=True)
    return [(0, 0), *((int((negative >= t).sum()), int((positive >= t).sum())) for t in every)]


def of_positive(a, o, positive):
    """Negatives, positives, with larger scores for the positive class."""
    return (a, o) if positive == "ood" else (-o, -a)


def slow_fpr_at_tpr(a, o, tpr, positive):
    neg, pos = of_positive(a, o, positive)
    return min(fp for fp, tp in points(neg, pos) if tp / len(pos) >= tpr) / len(neg)


def slow_tpr_at_fpr(a, o, fpr):
    return max(tp for fp, tp in points(a, o) if fp / len(a) <= fpr) / len(o)


def slow_interpolated_tpr(a, o, fpr):
    curve = [(fp / len(a), tp / len(o)) for fp, tp in points(a, o)]
    heights = [y for x, y in curve if x <= fpr]
    for (x0, y0), (x1, y1) in itertools.pairwise(curve):
        if x0 < fpr < x1:
            heights.append(y0 + (y1 - y0) * (fpr - x0) / (x1 - x0))
    return max(heights)


def slow_aupr(a, o, positive, method):
    neg, pos = of_positive(a, o, positive)
    area, recall, precision = 0.0, 0.0, 1.0
    for fp, tp in points(neg, pos)[1:]:
        new_recall, new_precision = tp / len(pos), tp / (tp + fp)
        height = new_precision if method == "average_precision" else (precision + new_precision) / 2
        area += (new_recall - recall) * height
        recall, precision = new_recall, new_precision
    return area


def slow_f1_max(a, o, positive):
    neg, pos = of_positive(a, o, positive)
    return max(2 * tp / (tp + fp + len(pos)) for fp, tp in points(neg, pos))


def slow_accuracy_at_tnr(a, o, tnr):
    t = min(t for t in a.tolist() if (a <= t).sum() / len(a) >= tnr)
    return ((a <= t).sum() + (o > t).sum()) / (len(a) + len(o))


def slow_detection_error(a, o, prior):
    prior = len(o) / (len(a) + len(o)) if prior == "empirical" else prior
    return min((1 - prior) * fp / len(a) + prior * (1 - tp / len(o)) for fp, tp in points(a, o))


@given(typed, typed)
def test_auroc_is_the_share_of_pairs_in_order(a, o):
    wins = sum((x > y) + 0.5 * (x == y) for x in floats(o)[0] for y in floats(a)[0])
    assert metrics.auroc(a, o) == wins / (len(a) * len(o))


@given(typed, typed, fractions, st.sampled_from(["ood", "id"]))
def test_fpr_at_tpr_is_the_smallest_over_all_admissible_thresholds(a, o, tpr, positive):
    found = metrics.fpr_at_tpr(a, o, tpr=tpr, positive=positive)
    assert found == slow_fpr_at_tpr(*floats(a, o), tpr, positive)


@given(typed, typed, st.one_of(st.just(0.0), fractions))
def test_tpr_at_fpr_is_the_largest_over_all_admissible_thresholds(a, o, fpr):
    assert metrics.tpr_at_fpr(a, o, fpr=fpr) == slow_tpr_at_fpr(*floats(a, o), fpr)
    interpolated = metrics.tpr_at_fpr(a, o, fpr=fpr, interpolate=True)
    assert interpolated == pytest.approx(slow_interpolated_tpr(*floats(a, o), fpr), abs=1e-12)


@given(typed, typed, st.sampled_from(["ood", "id"]), st.sampled_from(["trapezoid", "average_precision"]))
def test_aupr_is_the_area_of_its_points(a, o, positive, method):
    found = metrics.aupr(a, o, positive=positive, method=method)
    assert found == pytest.approx(slow_aupr(*floats(a, o), positive, method), abs=1e-12)


@given(typed, typed, fractions)
def test_f1_accuracy_and_error_are_the_best_over_all_thresholds(a, o, share):
    x, y = floats(a, o)
    assert metrics.f1_max(a, o) == pytest.approx(slow_f1_max(x, y, "ood"), abs=1e-14)
    assert metrics.f1_max(a, o, positive="id") == pytest.approx(slow_f1_max(x, y, "id"), abs=1e-14)
    assert metrics.accuracy_at_tnr(a, o, tnr=share) == slow_accuracy_at_tnr(x, y, share)
    for prior in (0.5, share, "empirical"):
        found = metrics.detection_error(a, o, prior=prior)
        assert found == pytest.approx(slow_detection_error(x, y, prior), abs=1e-12)


@given(typed, typed)
def test_the_whole_ranking_gives_the_numbers_of_each_function(a, o):
    each = {
        "auroc": metrics.auroc(a, o),
        "fpr95_ood": metrics.fpr_at_tpr(a, o),
        "fpr95_id": metrics.fpr_at_tpr(a, o, positive="id"),
        "tpr5": metrics.tpr_at_fpr(a, o),
        "aupr_ood": metrics.aupr(a, o),
        "aupr_id": metrics.aupr(a, o, positive="id"),
        "ap_ood": metrics.aupr(a, o, method="average_precision"),
        "ap_id": metrics.aupr(a, o, positive="id", method="average_precision"),
        "aupr_harmonic": metrics.aupr_harmonic(a, o),
        "f1_max_ood": metrics.f1_max(a, o),
        "f1_max_id": metrics.f1_max(a, o, positive="id"),
        "acc90": metrics.accuracy_at_tnr(a, o),
        "detection_error": metrics.detection_error(a, o),
    }
    assert metrics.ranking(a, o) == each


@pytest.mark.parametrize("values", [8, 50_000, None], ids=["ties", "few ties", "no ties"])
def test_long_scores_equal_scikit_learns(values):
    """Long enough that the counts come in several pieces."""
    rng = np.random.default_rng(0)
    a, o = rng.standard_normal(41_000), rng.standard_normal(23_000) + 0.7
    if values:
        a, o = np.round(a * values / 8) / 8, np.round(o * values / 8) / 8
    truth, scores = np.r_[np.zeros(len(a)), np.ones(len(o))], np.r_[a, o]
    found = metrics.ranking(a, o)
    assert found["auroc"] == pytest.approx(roc_auc_score(truth, scores), abs=1e-13)
    fpr, tpr, _ = roc_curve(truth, scores, drop_intermediate=False)
    assert found["fpr95_ood"] == fpr[tpr >= 0.95].min()
    assert found["tpr5"] == tpr[fpr <= 0.05].max()
    for name, flipped in (("ood", False), ("id", True)):
        labels, ranked = (1 - truth, -scores) if flipped else (truth, scores)
        precision, recall, _ = precision_recall_curve(labels, ranked)
        assert found[f"aupr_{name}"] == pytest.approx(auc(recall, precision), abs=1e-12)
        assert found[f"ap_{name}"] == pytest.approx(average_precision_score(labels, ranked), abs=1e-12)
        with np.errstate(invalid="ignore"):
            f1 = np.nan_to_num(2 * precision * recall / (precision + recall))
        assert found[f"f1_max_{name}"] == pytest.approx(f1.max(), abs=1e-12)
    fpr, tpr, _ = roc_curve(1 - truth, -scores, drop_intermediate=False)
    assert found["fpr95_id"] == fpr[tpr >= 0.95].min()


@given(tied_finite, tied_finite)
def test_scikit_learns_numbers_on_short_scores(a, o):
    truth, scores = np.r_[np.zeros(len(a)), np.ones(len(o))], np.r_[a, o]
    assert metrics.auroc(a, o) == pytest.approx(roc_auc_score(truth, scores), abs=1e-13)
    found = metrics.aupr(a, o, method="average_precision")
    assert found == pytest.approx(average_precision_score(truth, scores), abs=1e-13)
    precision, recall, _ = precision_recall_curve(truth, scores)
    assert metrics.aupr(a, o) == pytest.approx(auc(recall, precision), abs=1e-13)


# --- What must not change the numbers ---------------------------------------------------------------------------


def ranks_of(*sides):
    """The only thing a ranking metric may depend on."""
    ranks = np.unique(np.concatenate(sides), return_inverse=True)[1]
    return np.split(ranks, np.cumsum([len(side) for side in sides])[:-1])


@given(spread, spread)
def test_strictly_monotone_maps_leave_every_bit(a, o):
    a, o = np.array(a) + 0.0, np.array(o) + 0.0
    before = metrics.ranking(a, o)
    assert metrics.ranking(*ranks_of(a, o)) == before
    assert metrics.ranking(a * 2.0**40, o * 2.0**40) == before


@given(typed, typed, st.randoms(use_true_random=False))
def test_order_and_batches_of_rows_do_not_matter(a, o, random):
    a, o = floats(a, o)
    before = metrics.ranking(a, o)
    shuffled = [random.sample(side.tolist(), len(side)) for side in (a, o)]
    assert metrics.ranking(*shuffled) == before
    cut = random.randrange(len(a) + 1)
    assert metrics.ranking(np.concatenate((a[cut:], a[:cut])), o) == before


@given(typed, typed)
def test_negated_scores_turn_the_order_round(a, o):
    a, o = floats(a, o)
    assert metrics.auroc(a, o) + metrics.auroc(-a, -o) == pytest.approx(1, abs=1e-15)
    assert metrics.auroc(a, o) == metrics.auroc(-o, -a)
    for method in ("trapezoid", "average_precision"):
        swapped = metrics.aupr(-o, -a, positive="id", method=method)
        assert metrics.aupr(a, o, method=method) == pytest.approx(swapped, abs=1e-15)
    assert metrics.fpr_at_tpr(a, o) == metrics.fpr_at_tpr(-o, -a, positive="id")
    assert metrics.f1_max(a, o) == metrics.f1_max(-o, -a, positive="id")


@given(tied, tied, st.tuples(fractions, fractions))
def test_fpr_at_tpr_does_not_fall_when_more_is_asked_for(a, o, shares):
    low, high = sorted(shares)
    for positive in ("ood", "id"):
        at_low = metrics.fpr_at_tpr(a, o, tpr=low, positive=positive)
        assert at_low <= metrics.fpr_at_tpr(a, o, tpr=high, positive=positive)


def test_both_zeros_are_one_value():
    assert metrics.auroc([-0.0, 0.0], [0.0, -0.0]) == 0.5
    assert metrics.fpr_at_tpr([-0.0], [0.0]) == 1


def test_integers_beyond_float64_are_counted_exactly_or_refused():
    big = 2**53
    assert metrics.auroc(np.array([big]), np.array([big + 2])) == 1
    with pytest.raises(OodometerError, match="could become ties"):
        metrics.auroc(np.array([big]), np.array([big + 1]))


@pytest.mark.torch
def test_tensors_give_the_numbers_of_arrays():
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    a, o = rng.standard_normal(300).astype(np.float32), rng.standard_normal(200).astype(np.float32) + 1
    found = metrics.ranking(torch.from_numpy(a).requires_grad_(), torch.from_numpy(o))
    assert found == metrics.ranking(a, o)
    half = [torch.from_numpy(side).to(torch.bfloat16) for side in (a, o)]
    assert metrics.ranking(*half) == metrics.ranking(*(side.float().numpy() for side in half))
    failed = torch.from_numpy(o > 1)
    assert metrics.aurc(torch.from_numpy(o), failed) == metrics.aurc(o, o > 1)


# --- Thresholds -------------------------------------------------------------------------------------------------


@given(typed, fractions)
def test_threshold_at_tnr_is_the_smallest_that_keeps_enough(a, tnr):
    t, (x,) = metrics.threshold_at_tnr(a, tnr=tnr), floats(a)
    assert (x <= t).mean() >= tnr
    assert t in x
    assert all((x <= smaller).mean() < tnr for smaller in x[x < t])


@given(st.one_of(tied_finite.map(np.array), lists(st.floats(-8, 8, width=16)).map(lambda v: np.array(v, np.float16))))
def test_threshold_at_tpr_is_the_largest_that_flags_enough(o):
    for tpr in (0.05, 0.5, 0.95, 1.0):
        t = metrics.threshold_at_tpr(o, tpr=tpr)
        assert (o > o.dtype.type(t)).mean() >= tpr
        following = np.nextafter(o.dtype.type(t), o.dtype.type(np.inf))
        assert (o > following).mean() < tpr


@given(tied, tied)
def test_equal_error_threshold_is_the_best_observed_score(a, o):
    a, o = floats(a, o)

    def key(t):
        fp, fn = int((a > t).sum()) * len(o), int((o <= t).sum()) * len(a)
        return abs(fp - fn), max(fp, fn), t

    assert metrics.threshold_equal_error(a, o) == min(key(t) for t in np.concatenate((a, o)).tolist())[2]


@given(lists(st.sampled_from(FEW), smallest=2), fractions)
def test_conformal_threshold_keeps_its_promise_for_exchangeable_rows(scores, alpha):
    """Each row in turn is the new one: at most a share alpha of them is flagged."""
    scores = np.array(scores)
    assume(int(alpha * len(scores)) >= 1)
    flagged = [s > metrics.threshold_conformal(np.delete(scores, i), alpha=alpha) for i, s in enumerate(scores)]
    assert np.mean(flagged) <= alpha


def test_conformal_threshold_refuses_what_too_few_rows_cannot_promise():
    assert metrics.threshold_conformal(np.arange(19), alpha=0.05) == 18  # ⌈20 · .95⌉ = 19th
    with pytest.raises(OodometerError, match="at least 19 calibration scores, 18 were found"):
        metrics.threshold_conformal(np.arange(18), alpha=0.05)


@given(tied, st.lists(tied, min_size=1, max_size=3), st.sampled_from(FEW))
def test_one_threshold_for_every_set(a, sets, t):
    found = metrics.at_one_threshold(a, {str(i): o for i, o in enumerate(sets)}, t)
    assert found.fpr == np.mean([s > t for s in a])
    assert list(found.fnr.values()) == [np.mean([s <= t for s in o]) for o in sets]
    assert found.fnr_spread == max(found.fnr.values()) - min(found.fnr.values())
    table = found.to_pandas()
    assert table["fpr"].nunique() == 1
    assert table["n_ood"].tolist() == [len(o) for o in sets]


def test_f1_without_a_hit_is_zero_and_says_so():
    with pytest.warns(OodometerWarning, match="no OOD row is flagged at 5"):
        assert metrics.f1_at([0, 1], [2, 3], threshold=5) == 0
    with pytest.warns(OodometerWarning, match="no ID row is kept at -1"):
        assert metrics.f1_at([0, 1], [2, 3], threshold=-1, positive="id") == 0


# --- Areas on a scale -------------------------------------------------------------------------------------------


@given(tied_finite, tied_finite, st.floats(-5, 2), st.floats(0.1, 5), st.floats(0, 1))
def test_autc_is_the_integral_over_thresholds(a, o, low, width, weight):
    a, o = floats(a, o)
    unit = [np.clip((side - low) / width, 0, 1) for side in (a, o)]
    edges = np.unique(np.concatenate(([0.0, 1.0], *unit)))
    middles, steps = (edges[1:] + edges[:-1]) / 2, np.diff(edges)
    fpr = sum(step * (unit[0] > t).mean() for t, step in zip(middles, steps, strict=True))
    fnr = sum(step * (unit[1] <= t).mean() for t, step in zip(middles, steps, strict=True))
    scale = {"low": low, "high": low + width}
    assert metrics.aufpr(a, o, **scale) == pytest.approx(fpr, abs=1e-9)
    assert metrics.aufnr(a, o, **scale) == pytest.approx(fnr, abs=1e-9)
    assert metrics.autc(a, o, weight=weight, **scale) == pytest.approx(weight * fpr + (1 - weight) * fnr, abs=1e-9)


def test_id_scale_is_one_range_of_the_calibration_scores_and_one_more():
    calibration = np.arange(1001.0)
    assert metrics.fixed_scale(calibration) == metrics.Scale(1, 999 + 998)
    assert metrics.autc([1.0], [1997.0], calibration=calibration) == 0
    assert metrics.autc([999.0], [999.0], calibration=calibration) == 0.5
    with pytest.raises(OodometerError, match="Constant scores"):
        metrics.autc([1.0], [2.0], calibration=[3.0, 3.0])


@given(tied_finite, tied_finite, tied_finite)
def test_ecdf_scale_is_blind_to_monotone_maps(calibration, a, o):
    ranked = ranks_of(*floats(calibration, a, o))
    found = metrics.autc(a, o, scale="id_ecdf", calibration=calibration)
    assert found == metrics.autc(ranked[1], ranked[2], scale="id_ecdf", calibration=ranked[0])


def test_evaluated_scale_is_min_and_max_of_both_sets():
    a, o = np.array([1.0, 2.0, 5.0]), np.array([3.0, 9.0])
    found = metrics.autc(a, o, scale="evaluated")
    assert found == pytest.approx(metrics.autc(a, o, low=1, high=9), abs=1e-15)


# --- Risk and coverage ------------------------------------------------------------------------------------------

failed_rows = lists(st.tuples(st.sampled_from(FEW), st.booleans()), smallest=1, largest=20)
losses = lists(st.tuples(st.sampled_from(FEW), st.floats(0, 1)), smallest=1, largest=20)


def slow_curve(rows):
    """(accepted, failed) for each distinct score, the lowest first."""
    scores = sorted({s for s, _ in rows})
    return [(sum(s <= t for s, _ in rows), math.fsum(r for s, r in rows if s <= t)) for t in scores]


def slow_trapezoid(points):
    return sum((x1 - x0) * (y0 + y1) / 2 for (x0, y0), (x1, y1) in itertools.pairwise(points))


@given(st.one_of(failed_rows, losses))
def test_aurc_and_augrc_are_trapezoids_between_distinct_scores(rows):
    scores, failed = zip(*rows, strict=True)
    n, curve = len(rows), slow_curve(rows)
    selective = [(k / n, e / k) for k, e in curve]
    assert metrics.aurc(scores, failed) == pytest.approx(slow_trapezoid([(0, selective[0][1]), *selective]), abs=1e-12)
    generalised = [(0, 0), *((k / n, e / n) for k, e in curve)]
    assert metrics.augrc(scores, failed) == pytest.approx(slow_trapezoid(generalised), abs=1e-12)


@given(failed_rows)
def test_augrc_equals_its_closed_form(rows):
    scores, failed = map(np.array, zip(*rows, strict=True))
    accuracy = 1 - failed.mean()
    wrong_order = 0.0 if failed.all() or not failed.any() else 1 - metrics.auroc(scores[~failed], scores[failed])
    closed = wrong_order * accuracy * (1 - accuracy) + (1 - accuracy) ** 2 / 2
    assert metrics.augrc(scores, failed) == pytest.approx(closed, abs=1e-12)


@settings(max_examples=40)
@given(lists(st.tuples(st.integers(0, 2), st.booleans()), smallest=2, largest=6))
def test_risks_by_row_are_means_over_all_orders_of_ties(rows):
    orders = [p for p in itertools.permutations(rows) if all(x[0] <= y[0] for x, y in itertools.pairwise(p))]
    n = len(rows)
    risks = np.mean([[sum(r for _, r in order[:k]) / k for k in range(1, n + 1)] for order in orders], axis=0)
    scores, failed = zip(*rows, strict=True)
    assert metrics.aurc(scores, failed, convention="geifman") == pytest.approx(risks.mean(), abs=1e-12)
    unit = slow_trapezoid(list(zip(np.linspace(0, 1, n), risks, strict=True)))
    assert metrics.aurc(scores, failed, convention="torch-uncertainty") == pytest.approx(unit, abs=1e-12)
    generalised = risks * np.arange(1, n + 1) / n
    unit = slow_trapezoid(list(zip(np.linspace(0, 1, n), generalised, strict=True)))
    assert metrics.augrc(scores, failed, convention="torch-uncertainty") == pytest.approx(unit, abs=1e-12)


def integral(heights, low, high, n):
    """∫ failed(c) / accepted(c) dc by quadrature, failed being linear between the points (accepted, failed)."""
    xs, ys = zip(*heights, strict=True)
    cuts = [low, *(x / n for x in xs if low < x / n < high), high]
    return sum(
        scipy.integrate.quad(lambda c: np.interp(c * n, xs, ys) / (c * n), x, y)[0]
        for x, y in itertools.pairwise(cuts)
        if y > x
    )


@settings(max_examples=40, deadline=None)
@given(failed_rows, st.tuples(st.floats(0, 1), st.floats(0, 1)))
def test_non_linear_aurc_is_the_integral_of_the_risk(rows, cut):
    scores, failed = zip(*rows, strict=True)
    curve = [(0, 0), *slow_curve(rows)]
    low, high = sorted(cut)
    assume(high - low > 1e-3)
    found = metrics.aurc(scores, failed, convention="non-linear")
    assert found == pytest.approx(integral(curve, 0, 1, len(rows)), abs=1e-7)
    part = metrics.aurc(scores, failed, convention="non-linear", coverage=(low, high))
    assert part == pytest.approx(integral(curve, low, high, len(rows)), abs=1e-7)


@settings(max_examples=40, deadline=None)
@given(failed_rows)
def test_achievable_aurc_runs_on_the_points_that_no_mixture_beats(rows):
    scores, failed = zip(*rows, strict=True)
    curve = [(0, 0), *slow_curve(rows)]
    lowest = [
        (k, min(y0 + (y1 - y0) * (k - x0) / (x1 - x0) for x0, y0 in curve for x1, y1 in curve if x0 <= k <= x1 > x0))
        for k, _ in curve[1:]
    ]
    found = metrics.aurc(scores, failed, convention="achievable")
    assert found == pytest.approx(integral([(0, 0), *lowest], 0, 1, len(rows)), abs=1e-7)
    assert found <= metrics.aurc(scores, failed, convention="non-linear") + 1e-12


@given(failed_rows, st.lists(st.integers(0, 2), min_size=20, max_size=20))
def test_class_averaged_areas_are_those_of_explicit_loops(rows, labels):
    scores, failed = zip(*rows, strict=True)
    labels = labels[: len(rows)]
    n, classes = len(rows), sorted(set(labels))
    every = sorted(set(scores))
    selective, generalised = [], [(0, 0)]
    for t in every:
        accepted = [(r, c) for (s, r), c in zip(rows, labels, strict=True) if s <= t]
        by_class = [[r for r, c in accepted if c == wanted] for wanted in classes]
        selective.append((len(accepted) / n, sum(np.mean(part) if part else 0 for part in by_class) / len(classes)))
        shares = [sum(part) / labels.count(c) for part, c in zip(by_class, classes, strict=True)]
        generalised.append((len(accepted) / n, sum(shares) / len(classes)))
    expected = slow_trapezoid([(0, selective[0][1]), *selective])
    assert metrics.aurc_ba(scores, failed, labels) == pytest.approx(expected, abs=1e-12)
    assert metrics.augrc_ba(scores, failed, labels) == pytest.approx(slow_trapezoid(generalised), abs=1e-12)


@given(losses)
def test_excess_areas_vanish_for_the_best_order_of_losses(rows):
    _, failed = zip(*rows, strict=True)
    assert metrics.eaugrc(np.argsort(np.argsort(failed)), failed) == pytest.approx(0, abs=1e-12)
    if not set(failed) <= {0, 1}:
        assert metrics.eaurc(np.argsort(np.argsort(failed)), failed) == pytest.approx(0, abs=1e-12)


@given(failed_rows, fractions)
def test_points_of_the_curve(rows, share):
    scores, failed = zip(*rows, strict=True)
    n, curve = len(rows), slow_curve(rows)
    expected = next(e / k for k, e in curve if k / n >= share)
    assert metrics.risk_at_coverage(scores, failed, coverage=share) == expected
    covered = [k / n for k, e in curve if e / k <= share]
    assert metrics.coverage_at_risk(scores, failed, risk=share) == max(covered, default=0)
    found = metrics.risk_coverage(scores, failed)
    np.testing.assert_array_equal(found.threshold, sorted(set(scores)))
    np.testing.assert_array_equal(found.accepted, [k for k, _ in curve])
    np.testing.assert_array_equal(found.generalised_risk, [e / n for _, e in curve])


def test_guaranteed_risk_is_the_exact_binomial_bound():
    rng = np.random.default_rng(0)
    scores = rng.random(500)
    failed = rng.random(500) < scores / 2
    found = metrics.threshold_at_risk(scores, failed, risk=0.2, delta=0.05)
    accepted = scores <= found.threshold
    assert found.coverage == accepted.mean()
    assert found.risk == failed[accepted].mean()
    level = scipy.stats.binom.cdf(failed[accepted].sum(), accepted.sum(), found.bound)
    assert level == pytest.approx(0.05 / math.ceil(math.log2(500)), rel=1e-9)
    assert found.risk < found.bound <= 0.2
    with pytest.raises(OodometerError, match="cannot be guaranteed"):
        metrics.threshold_at_risk(scores[:5], failed[:5], risk=0.01)


def test_protocols_choose_rows_and_failures():
    a, correct, o = [1, 2, 3], [True, False, True], [4, 5]
    expected = {
        "misclassification": ([1, 2, 3], [0, 1, 0]),
        "discard_id_errors": ([1, 3, 4, 5], [0, 0, 1, 1]),
        "keep_all": ([1, 2, 3, 4, 5], [0, 0, 0, 1, 1]),
        "scod": ([1, 2, 3, 4, 5], [0, 1, 0, 1, 1]),
    }
    for protocol, (scores, failed) in expected.items():
        found = metrics.failures(a, correct, o, protocol=protocol)
        assert found.scores.tolist() == scores, protocol
        assert found.failures.tolist() == failed, protocol
    found = metrics.failures(a, correct, o, protocol="ed", ood_correct=[True, False])
    assert (found.scores.tolist(), found.failures.tolist()) == ([1, 3, 5], [0, 0, 1])
    with pytest.raises(OodometerError, match="needs id_correct="):
        metrics.failures(a, None, o, protocol="scod")


# --- Open set ---------------------------------------------------------------------------------------------------


@given(lists(st.tuples(st.sampled_from(FEW), st.booleans())), tied)
def test_oscr_is_the_area_under_its_curve(rows, ood):
    scores, correct = zip(*rows, strict=True)
    every = sorted(set(scores) | set(ood))
    n, m = len(rows), len(ood)
    half = [(0, 0), *((sum(s <= t for s in ood) / m, sum(c for s, c in rows if s <= t) / n) for t in every)]
    assert metrics.oscr(scores, correct, ood) == pytest.approx(slow_trapezoid(half), abs=1e-12)
    lost = sum(sum(c for s, c in rows if s < t) for t in ood) / (n * m)
    assert metrics.oscr(scores, correct, ood, ties="pessimistic") == pytest.approx(lost, abs=1e-12)


@given(lists(st.tuples(st.sampled_from(FEW), st.booleans())), tied, st.one_of(st.just(0.0), fractions))
def test_ccr_at_fpr_is_the_largest_over_all_thresholds(rows, ood, fpr):
    scores, correct = zip(*rows, strict=True)
    accepted = [
        sum(c for s, c in rows if s <= t) / len(rows) for t in scores if sum(s <= t for s in ood) / len(ood) <= fpr
    ]
    assert metrics.ccr_at_fpr(scores, correct, ood, fpr=fpr) == max(accepted, default=0)


# --- Bad input --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("a", "o", "message"),
    [
        ([1.0, math.nan], [1.0], "ID scores: scores that can be ordered were needed, nan was found in row 1"),
        ([1.0], [], "OOD scores: at least one score was needed"),
        ([[1.0]], [1.0], "ID scores: one number a row was needed, an array of shape (1, 1)"),
        (["a"], [1.0], "ID scores: real numbers were needed"),
        ([1.0], [1j], "OOD scores: real numbers were needed"),
    ],
)
def test_scores_that_are_none(a, o, message):
    with pytest.raises(OodometerError, match=re.escape(message)):
        metrics.ranking(a, o)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: metrics.fpr_at_tpr([1], [2], tpr=95), "95 % is .95"),
        (lambda: metrics.tpr_at_fpr([1], [2], fpr=-1), "a fraction in [0, 1]"),
        (lambda: metrics.aupr([1], [2], positive="OOD"), '"ood" or "id" was needed'),
        (lambda: metrics.aupr([1], [2], method="ap"), '"trapezoid" or "average_precision" was needed'),
        (lambda: metrics.autc([1], [2]), "needs calibration="),
        (lambda: metrics.autc([1], [2], low=1), "together"),
        (lambda: metrics.autc([1], [math.inf], low=0, high=1), "finite scores were needed, inf was found in row 0"),
        (lambda: metrics.autc([1], [2], scale="probability"), 'scale="probability" needs scores in [0, 1]'),
        (lambda: metrics.aurc([1, 2], [0, 3]), "numbers in [0, 1] were needed, 3.0 was found in row 1"),
        (lambda: metrics.aurc([1, 2], [0]), "one number in [0, 1] a score (2) was needed"),
        (lambda: metrics.aurc([1, 2], [0, 1], convention="fd"), "one of fd-shifts, geifman"),
        (lambda: metrics.aurc([1, 2], [0, 1], coverage=(0.5, 1)), 'needs convention="non-linear"'),
        (lambda: metrics.oscr([1, 2], [3, 4], [1]), "pass predictions == labels"),
        (lambda: metrics.failures([1], [True], [2], protocol="all"), "one of misclassification"),
        (lambda: metrics.at_one_threshold([1], {}, 0.5), "at least one set was needed"),
        (lambda: metrics.confusion_at([1], [2], threshold=math.nan), "NaN was found"),
    ],
)
def test_errors_say_what_was_needed(call, message):
    with pytest.raises(OodometerError, match=re.escape(message)):
        call()
