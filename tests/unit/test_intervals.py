"""Intervals against golden numbers, sums over all pairs, explicit resampling, and their own promise of coverage."""

from __future__ import annotations

import math
import re
import tracemalloc

import numpy as np
import pytest
import scipy.special
import scipy.stats

from oodometer import metrics
from oodometer.errors import OodometerError, OodometerWarning
from oodometer.metrics._counts import Side
from oodometer.metrics.intervals import redraw

ID = [0.05, 0.10, 0.20, 0.20, 0.30, 0.35, 0.40, 0.60, 0.70, 0.90]
OOD = [0.20, 0.45, 0.50, 0.60, 0.65, 0.80, 0.90, 0.95]
ALL = (*metrics.ranking(ID, OOD),)


def pairs(id_scores, ood_scores):
    """ψ(o_j, a_i) as an n × m matrix."""
    a, o = np.asarray(id_scores, float)[:, None], np.asarray(ood_scores, float)[None, :]
    return (o > a) + 0.5 * (o == a)


def slow_variance(psi):
    return psi.mean(0).var(ddof=1) / psi.shape[1] + psi.mean(1).var(ddof=1) / psi.shape[0]


def sides(ties, n=60, m=45, seed=0):
    rng = np.random.default_rng(seed)
    a, o = rng.standard_normal(n), rng.standard_normal(m) + 0.8
    return (np.round(a, 0), np.round(o, 0)) if ties else (a, o)


# --- DeLong -----------------------------------------------------------------------------------------------------


def test_delong_of_toy_a():
    plain = metrics.delong(ID, OOD, transform="plain")
    assert plain.value == 0.7625
    assert plain.se == pytest.approx(0.11875261066470302, abs=1e-16)
    assert (plain.low, plain.high) == pytest.approx((0.529749160027075, 0.995250839972925), abs=1e-15)
    logit = metrics.delong(ID, OOD)
    reach = 1.959963984540054 * plain.se / (0.7625 * 0.2375)
    expected = scipy.special.expit(scipy.special.logit(0.7625) + np.array([-reach, reach]))
    assert (logit.low, logit.high) == pytest.approx(tuple(expected), abs=1e-14)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("level", [0.5, 0.95])
def test_delong_is_the_sum_over_all_pairs(ties, level):
    a, o = sides(ties)
    psi = pairs(a, o)
    found = metrics.delong(a, o, level=level, transform="plain")
    assert found.value == metrics.auroc(a, o) == pytest.approx(psi.mean(), abs=1e-15)
    assert found.se == pytest.approx(math.sqrt(slow_variance(psi)), rel=1e-12)
    z = scipy.stats.norm.ppf((1 + level) / 2)
    assert found.high - found.low == pytest.approx(2 * z * found.se, rel=1e-12)


def test_the_mean_of_sets_knows_that_they_share_the_id_rows():
    a, o = sides(False)
    rng = np.random.default_rng(5)
    sets = {"x": o, "y": rng.standard_normal(30) + 2, "z": rng.standard_normal(20)}
    matrices = [pairs(a, s) for s in sets.values()]
    shared = np.mean([psi.mean(1) for psi in matrices], axis=0).var(ddof=1) / len(a)
    own = sum(psi.mean(0).var(ddof=1) / psi.shape[1] for psi in matrices) / 9
    found = metrics.delong_mean(a, sets)
    assert found.value == pytest.approx(np.mean([psi.mean() for psi in matrices]), abs=1e-15)
    assert found.se == pytest.approx(math.sqrt(shared + own), rel=1e-12)
    as_if_independent = math.sqrt(sum(slow_variance(psi) for psi in matrices) / 9)
    assert found.se > 1.05 * as_if_independent


@pytest.mark.parametrize(("n", "m"), [(3, 2), (40, 25)])
def test_perfect_separation_gets_a_bound_and_not_a_point(n, m):
    """At an AUROC equal to the bound, k disjoint pairs are all in order with probability 5 %."""
    found = metrics.delong(np.arange(n), n + np.arange(m))
    assert (found.value, found.high, found.se) == (1, 1, 0)
    assert found.low ** min(n, m) == pytest.approx(0.05, abs=1e-12)
    reversed_ = metrics.delong(n + np.arange(m), np.arange(n))
    assert (reversed_.value, reversed_.low) == (0, 0)
    assert reversed_.high == pytest.approx(1 - found.low, abs=1e-15)


def test_scores_that_are_all_equal_get_hoeffdings_interval():
    found = metrics.delong(np.ones(400), np.ones(900))
    assert found.value == 0.5
    assert found.high - 0.5 == pytest.approx(math.sqrt(math.log(40) / 800), abs=1e-15)
    opposite = metrics.delong_mean(np.arange(400), {"above": 400 + np.arange(400), "below": -1 - np.arange(400)})
    assert (opposite.low, opposite.high) == pytest.approx((found.low, found.high), abs=1e-15)


def test_nearly_perfect_scores_have_an_interval_inside_the_unit_range():
    a, o = np.arange(1000.0), np.append(1000 + np.arange(999.0), 998.5)
    found = metrics.delong(a, o)
    assert 0 < found.low < found.value < found.high < 1
    assert metrics.delong(a, o, transform="plain").high == 1


def test_intervals_cover_the_truth_as_often_as_they_say():
    """500 draws of AUROC Φ(2/√2): 95 % coverage, give or take three standard errors."""
    rng = np.random.default_rng(0)
    truth = scipy.stats.norm.cdf(2 / math.sqrt(2))
    found = [metrics.delong(rng.standard_normal(80), rng.standard_normal(50) + 2) for _ in range(500)]
    assert np.mean([one.low <= truth <= one.high for one in found]) == pytest.approx(0.95, abs=0.03)


# --- Paired -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ties", [False, True])
def test_paired_delong_uses_the_covariance_of_both_scores(ties):
    rng = np.random.default_rng(1)
    a, o = sides(ties)
    b = a + np.round(rng.standard_normal(a.size)), o + np.round(rng.standard_normal(o.size))
    psi = pairs(a, o) - pairs(*b)
    found = metrics.paired_delong(a, o, *b)
    assert (found.auroc_a, found.auroc_b) == (metrics.auroc(a, o), metrics.auroc(*b))
    assert found.difference == pytest.approx(psi.mean(), abs=1e-15)
    assert found.se == pytest.approx(math.sqrt(slow_variance(psi)), rel=1e-12)
    assert found.z == pytest.approx(found.difference / found.se, rel=1e-12)
    assert found.p == pytest.approx(2 * scipy.stats.norm.sf(abs(found.z)), rel=1e-12)
    assert found.high - found.difference == pytest.approx(scipy.stats.norm.ppf(0.975) * found.se, rel=1e-12)
    swapped = metrics.paired_delong(*b, a, o)
    assert (swapped.difference, swapped.p) == (-found.difference, found.p)


def test_scores_with_the_same_order_do_not_differ():
    a, o = sides(False)
    found = metrics.paired_delong(a, o, np.exp(a), np.exp(o))
    assert (found.difference, found.se, found.z, found.p) == (0, 0, 0, 1)


def test_a_difference_without_variance_is_judged_by_hoeffding():
    a, o = np.arange(12), 12 + np.arange(10)
    with pytest.warns(OodometerWarning, match="no variance can be estimated"):
        found = metrics.paired_delong(a, o, -a, -o)
    assert (found.difference, found.z) == (1, math.inf)
    assert found.p == pytest.approx(2 * math.exp(-5), abs=1e-15)
    assert found.low == pytest.approx(1 - 2 * math.sqrt(math.log(40) / 20), abs=1e-15)


def test_the_test_of_no_difference_rejects_as_often_as_it_says():
    rng = np.random.default_rng(2)
    rejected = 0
    for _ in range(400):
        a, o = rng.standard_normal(60), rng.standard_normal(60) + 1
        noisy = [np.stack([side, side]) + rng.standard_normal((2, 60)) for side in (a, o)]
        rejected += metrics.paired_delong(noisy[0][0], noisy[1][0], noisy[0][1], noisy[1][1]).p <= 0.05
    assert rejected / 400 == pytest.approx(0.05, abs=0.033)


# --- Bootstrap --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("n", [45, 9000])
def test_draws_are_the_metrics_of_rows_drawn_one_by_one(ties, n):
    """The same streams, with every resample written out; 9,000 rows are drawn one repetition at a time."""
    a, o = sides(ties, n=n, m=n - 5)
    drawn = redraw(Side.of(a, "ID"), Side.of(o, "OOD"), ALL, 7, seed=3)
    id_rng, ood_rng = np.random.default_rng(3).spawn(2)
    for draw in range(7):
        rows = id_rng.integers(0, a.size, a.size), ood_rng.integers(0, o.size, o.size)
        expected = metrics.ranking(np.sort(a)[rows[0]], np.sort(o)[rows[1]])
        found = {name: values[draw] for name, values in drawn.items()}
        assert found == pytest.approx(expected, abs=1e-12)
        for exact in ("auroc", "fpr95_ood", "fpr95_id", "tpr5", "acc90"):
            assert found[exact] == expected[exact]


def test_bootstrap_reads_percentiles_of_the_draws():
    a, o = sides(False)
    draws = redraw(Side.of(a, "ID"), Side.of(o, "OOD"), ("fpr95_id",), 300, seed=0)["fpr95_id"]
    found = metrics.bootstrap(a, o, "fpr95_id", n=300, level=0.9)
    assert found.value == metrics.fpr_at_tpr(a, o, positive="id")
    assert (found.low, found.high) == tuple(np.quantile(draws, [0.05, 0.95]))
    assert found.se == draws.std(ddof=1)


def test_all_metrics_at_once_are_the_metrics_one_by_one():
    a, o = sides(True)
    every = metrics.bootstrap(a, o, None, n=50, seed=4)
    assert tuple(every) == (*metrics.ranking(a, o),)
    for name, found in every.items():
        assert metrics.bootstrap(a, o, name, n=50, seed=4) == found
    assert metrics.bootstrap(a, o, ["tpr5", "auroc"], n=50, seed=4) == {k: every[k] for k in ("tpr5", "auroc")}
    assert metrics.bootstrap(a, o, n=50, seed=5) != every["auroc"]


def test_bootstrap_and_delong_agree_on_many_rows():
    a, o = sides(False, n=4000, m=3000)
    drawn, known = metrics.bootstrap(a, o), metrics.delong(a, o)
    assert drawn.se == pytest.approx(known.se, rel=0.1)
    assert (drawn.low, drawn.high) == pytest.approx((known.low, known.high), abs=0.003)


def test_few_rows_have_a_wide_interval():
    """181 ID against 18 OOD rows at an AUROC near .71: about ±.11."""
    rng = np.random.default_rng(0)
    a, o = rng.standard_normal(181), rng.standard_normal(18) + 0.8
    found = metrics.bootstrap(a, o)
    assert 0.18 < found.high - found.low < 0.32


def test_memory_of_a_bootstrap_does_not_grow_with_the_draws():
    a, o = sides(False, n=20_000, m=20_000)
    tracemalloc.start()
    metrics.bootstrap(a, o, None, n=60)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100 * a.nbytes  # 60 draws written out take 120 of them, each metric many more


# --- Wilson -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("k", "n"), [(0, 10), (1, 10), (5, 10), (10, 10), (37, 1000), (1, 1)])
@pytest.mark.parametrize("level", [0.9, 0.95])
def test_wilson_is_that_of_scipy(k, n, level):
    found = metrics.wilson(k, n, level=level)
    expected = scipy.stats.binomtest(k, n).proportion_ci(level, method="wilson")
    assert found.value == k / n
    assert (found.low, found.high) == pytest.approx(tuple(expected), abs=1e-12)


# --- Bad input --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: metrics.delong([1], [2, 3]), "at least two ID and two OOD scores"),
        (lambda: metrics.delong([1, math.nan], [2, 3]), "nan was found in row 1"),
        (lambda: metrics.delong(ID, OOD, level=95), "95 % is .95"),
        (lambda: metrics.delong(ID, OOD, transform="log"), '"logit" or "plain" was needed'),
        (lambda: metrics.delong_mean(ID, {}), "at least one set was needed"),
        (lambda: metrics.delong_mean(ID, {"svhn": []}), "OOD 'svhn' scores: at least one score was needed"),
        (lambda: metrics.paired_delong(ID, OOD, ID[:9], OOD), "the same rows in the same order, 10 and 9 rows"),
        (lambda: metrics.bootstrap(ID, OOD, "fpr95"), "names among auroc, fpr95_ood"),
        (lambda: metrics.bootstrap(ID, OOD, []), "none was found"),
        (lambda: metrics.bootstrap(ID, OOD, n=1), "n >= 2 draws"),
        (lambda: metrics.wilson(3, 2), "0 <= k <= n"),
        (lambda: metrics.wilson(0, 0), "n >= 1"),
    ],
)
def test_errors_say_what_was_needed(call, message):
    with pytest.raises(OodometerError, match=re.escape(message)):
        call()
